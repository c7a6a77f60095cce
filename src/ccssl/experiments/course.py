"""What every run has on its way, whatever it learns: signals that stop it, a bar, event files, and what it costs."""

from __future__ import annotations

import os
import platform
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from ccssl import collective
from ccssl.experiments import folder as run_folder
from ccssl.training.checkpoint import told_if_full


class Stopped(KeyboardInterrupt):
    """A signal asked the run to end; its checkpoint is kept."""

    def __init__(self, number: int, where: Path, command: str = "ccssl train") -> None:
        super().__init__(f"stopped; go on with: {command} --resume --out {where}")
        self.number = number


@contextmanager
def signals() -> Iterator[Callable[[], int]]:
    """Yield a function that tells which signal asked to stop, 0 if none; a second one stops at once."""
    asked = 0

    def note(number: int, _: object) -> None:
        nonlocal asked
        if asked and collective.world() == 1:  # several processes are told several times, by terminal and launcher
            raise KeyboardInterrupt
        asked = number

    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        before = {number: signal.signal(number, note) for number in numbers}
    except ValueError:  # not in the main thread, where signals never arrive
        before = {}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def progress(title: str, total: int, completed: int, quiet: bool) -> Iterator[Callable[[int], object]]:
    """Yield what shows how far the run is: a line on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=120) as bar:
        task = bar.add_task(title, total=total, completed=completed)
        yield lambda done: bar.update(task, completed=done)


class Events:
    """Writes TensorBoard events into a file of a run, in the thread that calls.

    TensorboardX's own ``SummaryWriter`` writes in a thread, which dies of a full disk; then the run waits for it for
    ever. Here it is heard of at once.
    """

    def __init__(self, folder: Path, completed: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from tensorboardX import summary
            from tensorboardX.proto import event_pb2
            from tensorboardX.record_writer import RecordWriter
        self._scalar: Callable[[str, float], Any] = summary.scalar
        self._pb: Any = event_pb2
        folder.mkdir(parents=True, exist_ok=True)
        # Hours after the last file, or less than a second: the step tells them apart.
        self.path = folder / f"events.out.tfevents.{int(time.time())}.{platform.node()}.{completed}"
        with told_if_full(self.path):
            self._file = RecordWriter(str(self.path))
        self._write(file_version="brain.Event:2")
        self._write(step=completed + 1, session_log=self._pb.SessionLog(status=self._pb.SessionLog.START))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Note a figure."""
        self._write(step=step, summary=self._scalar(name, value))

    def flush(self) -> None:
        """Bring what was noted to the disk."""
        with told_if_full(self.path):
            self._file.flush()

    def close(self) -> None:
        """Do so for the last time."""
        with told_if_full(self.path):
            self._file.close()

    def _write(self, **content: Any) -> None:
        with told_if_full(self.path):
            self._file.write(self._pb.Event(wall_time=time.time(), **content).SerializeToString())


@contextmanager
def events(out: Path, completed: int) -> Iterator[Events]:
    """Yield a writer of TensorBoard events; what was written after the step ``completed`` counts no more."""
    with closing(Events(out / run_folder.TENSORBOARD, completed)) as writer:
        yield writer


def cost(device: torch.device, seconds: float) -> dict[str, Any]:
    """Return what a run has cost, on what."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {
        "seconds": round(seconds, 3),
        "peak_memory_bytes": kilobytes * (1 if sys.platform == "darwin" else 1024),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "processes": collective.world(),
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores",
    }
    if device.type == "cuda":
        found["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    return found
