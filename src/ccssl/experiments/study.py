"""A study: runs with stable names, of which those that are missing are made.

A study is a mapping from names to jobs (``engines``); the run of a name lives in the folder of that name below the
study's. A run is finished if its folder holds ``result.json``, which is the last file that a run writes. So whatever
ended the call before, the next one makes what is missing: finished runs are skipped, begun ones go on from their
checkpoint, broken ones are tried again. Within a call a run that breaks is tried once more, then listed.

The folder is locked while the study runs. The estimate of what is left takes each missing run to need as long as the
finished ones of its kind (``kind_of``), or as the finished ones at all, if there is none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from ccssl.errors import InputError, did_you_mean
from ccssl.experiments import folder as run_folder
from ccssl.experiments.engines import ENGINES, Asked, Job

TRIES = 2

__all__ = ["Job", "Outcome", "StudyStopped", "is_finished", "run_study"]


class StudyStopped(KeyboardInterrupt):
    """A signal asked the study to end; the checkpoints of its runs are kept."""

    def __init__(self, number: int) -> None:
        super().__init__("stopped; what was done is kept, and the same command goes on with the rest")
        self.number = number


@dataclass
class Outcome:
    """What a call of a study has come to."""

    skipped: int = 0  # finished before
    made: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)  # why

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(self.skipped + other.skipped, self.made + other.made, self.broken | other.broken)


def run_study(
    jobs: Mapping[str, Job],
    folder: Path,
    *,
    workers: int = 1,
    threads: int | None = None,
    engine: str = "processes",
) -> Outcome:
    """Make the runs that are missing in a folder; return which were made and which are broken.

    So many ``workers`` make runs at once, with so many ``threads`` each: by default they share this machine's cores.
    """
    if engine not in ENGINES:
        raise InputError(f"engine must be {' or '.join(ENGINES)}, got {engine!r}.{did_you_mean(engine, ENGINES)}")
    for name, number in (("workers", workers), ("threads", threads)):
        if number is not None and number < 1:
            raise InputError(f"{name} must be at least 1, got {number}.")
    threads = threads or max(1, cores() // workers)
    with _alone(folder), _signals() as asked:
        missing = [name for name in jobs if not is_finished(folder / name)]
        outcome = Outcome(skipped=len(jobs) - len(missing))
        if not missing:
            return outcome
        queue, tries = deque(missing), dict.fromkeys(missing, 0)
        with (
            _Progress(jobs, folder, workers) as progress,
            closing(ENGINES[engine](queue, jobs, folder, workers, threads, asked)) as endings,
        ):
            for name, error in endings:
                tries[name] += 1
                if error is None:
                    outcome.made.append(name)
                    progress.made(name)
                elif tries[name] < TRIES:
                    progress.tell(f"{name} broke and is tried again: {error}")
                    queue.append(name)
                else:
                    outcome.broken[name] = error
                    progress.tell(f"{name} is broken: {error}")
        if asked():
            raise StudyStopped(asked())
        return outcome


def is_finished(folder: Path) -> bool:
    """Tell whether the run of a folder came to its end."""
    return (folder / run_folder.RESULT).exists()


def cores() -> int:
    """Return how many cores this process may use."""
    with contextlib.suppress(AttributeError):  # macOS lets nobody ask
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def kind_of(job: Job) -> tuple[object, ...]:
    """Return what decides about how long a run takes."""
    names = ("dataset", "model", "method", "steps", "batch", "mu", "epochs", "split")
    return tuple(getattr(job.config, name, None) for name in names)


def duration(seconds: float) -> str:
    """Say how long something takes.

    >>> duration(42), duration(600), duration(9000)
    ('42 s', '10 min', '2 h 30 min')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the study's folder, which is made; refuse it while another study writes it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise InputError(f"a study cannot be kept in {folder} ({error.strerror}): name another folder.") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise InputError(
                f"another study is being run in {folder} (process {file.read().strip() or 'unknown'}): wait for it, "
                "or name another folder."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def _signals() -> Iterator[Asked]:
    """Yield a function that tells which signal asked to stop, 0 if none; a second one stops at once."""
    asked = 0

    def note(number: int, _: object) -> None:
        nonlocal asked
        if asked:
            raise StudyStopped(number)
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


class _Progress:
    """How far a study is: a bar on a terminal, a line for each event elsewhere."""

    def __init__(self, jobs: Mapping[str, Job], folder: Path, workers: int) -> None:
        self.jobs, self.folder, self.workers = jobs, folder, workers
        self.seconds: dict[tuple[object, ...], list[float]] = {}  # of finished runs, by kind
        self.missing = set(jobs)
        self.bar: Any = None
        for name in jobs:
            if is_finished(folder / name):
                self._count(name)

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn())
            self.bar = Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True))
            self.bar.add_task("", total=len(self.jobs), completed=self._done())
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def made(self, name: str) -> None:
        """Tell of a run that is finished, and of what is left."""
        seconds = self._count(name)
        left = f"about {duration(self.left())} left" if self.missing else "all are made"
        self.tell(f"[{self._done()}/{len(self.jobs)}] {name}, {duration(seconds)}; {left}")
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self._done(), description=left)

    def tell(self, text: str) -> None:
        """Tell of an event."""
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def left(self) -> float:
        """Return how many seconds the missing runs may need."""
        known = {kind: mean(seconds) for kind, seconds in self.seconds.items()}
        usual = mean(s for seconds in self.seconds.values() for s in seconds)
        total = sum(known.get(kind_of(self.jobs[name]), usual) for name in self.missing)
        return total / min(self.workers, len(self.missing))

    def _done(self) -> int:
        return len(self.jobs) - len(self.missing)

    def _count(self, name: str) -> float:
        self.missing.discard(name)
        seconds = float(run_folder.read_json(self.folder / name / run_folder.RESULT)["cost"]["seconds"])
        self.seconds.setdefault(kind_of(self.jobs[name]), []).append(seconds)
        return seconds
