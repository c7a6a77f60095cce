"""Where the runs of a study are computed: in processes on this machine, or as tasks of Ray.

An engine is a generator. It takes names from the front of a queue, runs the jobs of these names, several at once, and
yields each name when its job has ended, with what went wrong, if anything did. Names may be put back into the queue
at any time. When it is asked to stop it tells the jobs, waits until each has kept its checkpoint, and ends; the
generator's ``close`` ends them at once.

Every job runs with the same number of threads, in a process that has run others before (starting one costs seconds,
which a short run should not pay) and leaves nothing behind: so it does not matter to a result which engine ran it,
where, or after which other. A process that dies takes its own job with it, no other.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

from ccssl.errors import InputError

ERROR = "error.txt"  # in a run's folder: where a mistake in the program happened
_POLL = 0.2  # seconds between two looks at whether to stop


class Job(NamedTuple):
    """A run: ``train(config, folder, resume=True, quiet=True)`` makes it, or goes on with it."""

    train: Callable[..., Any]  # a function of a module, so that other processes find it
    config: Any


class Ended(NamedTuple):
    """A job that has come to its end."""

    name: str
    error: str | None


Asked = Callable[[], int]
Engine = Callable[[deque[str], Mapping[str, Job], Path, int, int, Asked], Generator[Ended, None, None]]


def processes(
    queue: deque[str], jobs: Mapping[str, Job], folder: Path, workers: int, threads: int, asked: Asked
) -> Generator[Ended, None, None]:
    """Run jobs in processes of this machine."""
    staff: list[_Worker] = []
    try:
        while not asked() and (queue or any(worker.name for worker in staff)):
            while queue and (worker := _free(staff, workers, threads)):
                name = queue.popleft()
                worker.begin(name, jobs[name], folder / name)
            for ready in connection.wait([worker.line for worker in staff if worker.name], timeout=_POLL):
                worker = next(worker for worker in staff if worker.line is ready)
                yield worker.end()
        for worker in staff:
            if worker.name:
                worker.process.terminate()  # training takes it as the wish to stop
        for worker in staff:
            worker.line.close()
            worker.process.join()
    finally:
        for worker in staff:
            worker.process.kill()
            worker.process.join()


@dataclass
class _Worker:
    """A process, and the line to it; ``name`` is the run it is at."""

    process: SpawnProcess
    line: Connection
    name: str | None = None

    def begin(self, name: str, job: Job, folder: Path) -> None:
        """Give the process a run; if it is gone, ``end`` tells."""
        self.name = name
        with contextlib.suppress(OSError):
            self.line.send((job, folder))

    def end(self) -> Ended:
        """Return how the run ended; the process may be gone."""
        assert self.name is not None
        try:
            error = self.line.recv()
        except (EOFError, OSError):
            self.process.join()
            error = _death(self.process.exitcode)
        ended, self.name = Ended(self.name, error), None
        return ended


def _free(staff: list[_Worker], workers: int, threads: int) -> _Worker | None:
    """Return a worker without a run, hiring one where there are too few."""
    staff[:] = [worker for worker in staff if worker.name or worker.process.is_alive()]
    for worker in staff:
        if worker.name is None:
            return worker
    if len(staff) == workers:
        return None
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, threads), daemon=True)
    process.start()
    theirs.close()  # so that the line ends when the process does
    staff.append(_Worker(process, ours))
    return staff[-1]


def _work(line: Connection, threads: int) -> None:
    """Run what comes along the line, until it ends or a run is stopped."""
    os.setsid()  # Ctrl-C at the terminal reaches the study, which tells its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _set_threads(threads)
    try:
        while True:
            job, folder = line.recv()
            line.send(attempt(job, folder))
    except (EOFError, OSError, KeyboardInterrupt):
        return  # the study is over, or has said that it stops


def _end_with_parent() -> None:
    """Stop when the study is gone without having said so: a run nobody waits for would hold its folder."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _set_threads(threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch is loaded, where it is not yet
    import torch

    torch.set_num_threads(threads)


def attempt(job: Job, folder: Path) -> str | None:
    """Run a job; return what went wrong, or None."""
    try:
        job.train(job.config, folder, resume=True, quiet=True)
    except InputError as error:
        return str(error)
    except Exception as error:
        try:
            (folder / ERROR).write_text(traceback.format_exc(), encoding="utf-8")
        except OSError:
            return f"{type(error).__name__}: {error}"
        return f"{type(error).__name__}: {error} ({folder / ERROR} tells where)"
    (folder / ERROR).unlink(missing_ok=True)
    return None


def _death(code: int | None) -> str:
    if code is None or code >= 0:
        return f"its process ended with code {code}"
    name = signal.Signals(-code).name
    hint = "; if the system did so for want of memory, take fewer --workers" if -code == signal.SIGKILL else ""
    return f"its process was ended by {name}{hint}"


def ray_tasks(
    queue: deque[str], jobs: Mapping[str, Job], folder: Path, workers: int, threads: int, asked: Asked
) -> Generator[Ended, None, None]:
    """Run jobs as tasks of a Ray that is started on this machine for this purpose."""
    if importlib.util.find_spec("ray") is None:
        raise InputError("engine ray needs the package ray: install it by pip install 'ccssl[ray]'.")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # tasks share the accelerators, and see all of them
    ray: Any = importlib.import_module("ray")
    with tempfile.TemporaryDirectory(prefix="ccssl-ray-", ignore_cleanup_errors=True) as temporary:
        terminate = signal.getsignal(signal.SIGTERM)
        ray.init(
            address="local",
            num_cpus=workers,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=temporary,
        )
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminate)  # Ray has put its own in its place
        task = ray.remote(num_cpus=1, max_retries=0)(_attempt_with)
        running: dict[Any, str] = {}
        try:
            while not asked() and (queue or running):
                while queue and len(running) < workers:
                    name = queue.popleft()
                    running[task.remote(jobs[name], (folder / name).absolute(), threads)] = name
                done, _ = ray.wait(list(running), timeout=_POLL)
                for reference in done:
                    name = running.pop(reference)
                    try:
                        error = ray.get(reference)
                    except ray.exceptions.RayError as lost:
                        # What went wrong before the run began, such as a module that is missing there, is its cause.
                        cause = getattr(lost, "cause", None) or lost
                        error = f"Ray lost it: {str(cause).strip().splitlines()[0]}"
                    yield Ended(name, error)
            for reference in running:
                ray.cancel(reference)  # training takes it as the wish to stop
            if running:
                ray.wait(list(running), num_returns=len(running))
        finally:
            ray.shutdown()


def _attempt_with(job: Job, folder: Path, threads: int) -> str | None:
    _set_threads(threads)
    return attempt(job, folder)


ENGINES: dict[str, Engine] = {"processes": processes, "ray": ray_tasks}
