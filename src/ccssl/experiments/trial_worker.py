"""A process that runs trials, one after the other, and the end of the line at which they are handed out.

The coordinator sends a configuration and a folder. The worker trains, tells the validation accuracy after each
evaluation, and is told each time whether to go on. What it says is one of ::

    report STEP ACCURACY      answered by whether the trial is over
    ended ACCURACY            the accuracy after the last step; None if the trial was stopped, or its loss diverged
    refused SENTENCE          what the user has to change
    broken TRACEBACK          a mistake in the program

A worker has no test images: they are cut off before anything else sees the data. A killed worker leaves a checkpoint,
from which another one goes on bit for bit. When the coordinator dies, its workers notice, write a checkpoint and end.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import signal
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Message = tuple[str, Any, Any]


class Worker:
    """A worker's process, as the coordinator sees it."""

    def __init__(self, index: int, workers: int) -> None:
        context = multiprocessing.get_context("spawn")  # a forked child could not use CUDA
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, index, workers), name=f"trial-worker-{index}")
        self._process.start()
        theirs.close()  # then the pipe ends with the worker
        self.index = index

    def run(self, config: Mapping[str, Any], folder: Path) -> None:
        """Hand out a trial."""
        self._send((dict(config), str(folder)))

    def answer(self, over: bool) -> None:
        """Say whether the trial that was reported on is over."""
        self._send(over)

    def end_of(self) -> str:
        """Return how the process ended."""
        self.wait(10)
        code = self._process.exitcode or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        """Ask for a checkpoint and the end."""
        self.pipe.close()
        self._process.terminate()

    def wait(self, seconds: float) -> None:
        """Wait for the end, and bring it about if it does not come."""
        self._process.join(timeout=max(0.0, seconds))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _send(self, words: object) -> None:
        with suppress(OSError):  # it has died, which the coordinator will notice when it listens
            self.pipe.send(words)


class _Over(Exception):
    """The coordinator has ended the trial."""


class _Gone(Exception):
    """The coordinator has ended."""


def work(pipe: Connection, index: int, workers: int) -> None:
    """Run the trials that come through a pipe, until it ends."""
    os.setpgid(0, 0)  # Ctrl-C is for the coordinator, which tells its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        import torch

        torch.set_num_threads(max(1, torch.get_num_threads() // workers))
        data = None
        while True:
            values, folder = _hear(pipe)
            try:
                from ccssl.experiments.config import config_from
                from ccssl.images.sources import load

                config = config_from(values)
                if data is None:
                    data = load(config.dataset)
                    data = replace(data, test_images=data.test_images[:0], test_labels=data.test_labels[:0])
                config = replace(config, device=_device(config.device, index))
                message = _run(pipe, config, Path(folder), data)
            except _Gone:
                raise
            except OSError as error:
                message = ("refused", f"{error.filename or 'the system'}: {error.strerror or error}", None)
            except Exception:
                message = ("broken", traceback.format_exc(), None)
            _say(pipe, message)
    except (KeyboardInterrupt, _Gone):
        pass  # asked to end, or nobody is there to listen


def _run(pipe: Connection, config: Any, folder: Path, data: Any) -> Message:
    import torch

    from ccssl.errors import InputError
    from ccssl.experiments.folder import CHECKPOINT
    from ccssl.experiments.run import train
    from ccssl.training.loop import NonFiniteLoss

    def watch(step: int, figures: Mapping[str, Mapping[str, float]]) -> None:
        _say(pipe, ("report", step, figures["validation"]["accuracy"]))
        if _hear(pipe):
            raise _Over

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a worker of a coordinator that died may still be writing its checkpoint
    accuracy: float | None = None
    try:
        result = train(config, folder, resume=True, data=data, quiet=True, watch=watch)
        accuracy = result["validation"]["accuracy"]
    except _Over:
        pass
    except InputError as error:
        if not isinstance(error.__context__, NonFiniteLoss):  # which only means that these parameters are bad ones
            return "refused", str(error), None
    except torch.OutOfMemoryError:
        return "refused", f"it did not fit into the memory of {config.device}", None
    shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)  # nobody will go on with it, and networks are large
    return "ended", accuracy, None


def _say(pipe: Connection, words: Message) -> None:
    try:
        pipe.send(words)
    except OSError:
        raise _Gone from None


def _hear(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        raise _Gone from None


def _device(name: str, index: int) -> str:
    """Return the device of a worker: where there are several of CUDA's and none was named, they take turns."""
    import torch

    several = torch.cuda.device_count()
    return f"cuda:{index % several}" if name in ("auto", "cuda") and several > 1 else name


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
