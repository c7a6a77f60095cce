"""Workers of a search that only pretend to train: threads in place of processes, curves in place of networks.

``PretendWorker`` takes the place of ``ccssl.experiments.tune.Worker``. What it reports is told by ``curve``, a function
of configuration and step; ``before`` is called before each report and may raise ``Death``, upon which the worker ends
as a killed process does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any


class Death(Exception):
    """The worker is killed."""


class PretendWorker:
    """A worker, and what all workers of a test have done."""

    curve: Callable[[Mapping[str, Any], int], float]
    before: Callable[[Mapping[str, Any], Path, int], None]
    begun: list[tuple[str, Mapping[str, Any]]]  # name of the trial's folder, configuration
    reported: list[tuple[str, int]]  # name of the trial's folder, step

    def __init__(self, index: int, workers: int) -> None:
        self.index = index
        self.pipe, self.theirs = Pipe()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def run(self, config: Mapping[str, Any], folder: Path) -> None:
        self.pipe.send((dict(config), str(folder)))

    def answer(self, over: bool) -> None:
        self.pipe.send(over)

    def end_of(self) -> str:
        self.thread.join(10)
        return "killed by SIGKILL"

    def stop(self) -> None:
        self.pipe.close()

    def wait(self, seconds: float) -> None:
        self.thread.join(max(0.1, seconds))

    def _work(self) -> None:
        try:
            while True:
                config, folder = self.theirs.recv()
                type(self).begun.append((Path(folder).name, config))
                self.theirs.send(self._trial(config, Path(folder)))
        except (EOFError, OSError, Death):
            self.theirs.close()

    def _trial(self, config: Mapping[str, Any], folder: Path) -> tuple[Any, ...]:
        every, steps = config["eval_every"], config["steps"]
        for step in sorted({*range(every, steps, every), steps}):
            type(self).before(config, folder, step)
            accuracy = type(self).curve(config, step)
            type(self).reported.append((folder.name, step))
            self.theirs.send(("report", step, accuracy))
            if self.theirs.recv():
                return "ended", None, None
        return "ended", type(self).curve(config, steps), None


def pretending(
    curve: Callable[[Mapping[str, Any], int], float],
    before: Callable[[Mapping[str, Any], Path, int], None] = lambda config, folder, step: None,
) -> type[PretendWorker]:
    """Return a kind of worker with this curve, and with lists of its own."""
    members = {"curve": staticmethod(curve), "before": staticmethod(before), "begun": [], "reported": []}
    return type("Kind", (PretendWorker,), members)
