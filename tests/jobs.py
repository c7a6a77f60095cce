"""Runs for tests of studies: they take no time, and go wrong where they are told to."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ccssl.errors import InputError
from ccssl.experiments import folder as run_folder


@dataclass(frozen=True)
class Task:
    """What a run does: succeed, or go wrong in some way."""

    end: str = "well"  # well, raise, refuse, die, slow; or one of these with " once"
    method: str = "toy"


def run(task: Task, folder: Path, resume: bool, quiet: bool) -> None:
    """Make a run as ``train`` does; what it does is told by its task."""
    assert resume
    assert quiet
    folder.mkdir(parents=True, exist_ok=True)
    tries = folder / "tries"
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    (folder / "process").write_text(str(os.getpid()))
    end, _, once = task.end.partition(" ")
    if once and len(tries.read_text()) > 1:
        end = "well"
    if end == "raise":
        raise ZeroDivisionError("planted")
    if end == "refuse":
        raise InputError("lr must be smaller, got 7.")
    if end == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "slow":
        _wait_for_a_signal(folder)
    result: dict[str, Any] = {"threads": torch.get_num_threads(), "cost": {"seconds": 3.0}}
    run_folder.write_json(folder / run_folder.RESULT, result)


def _wait_for_a_signal(folder: Path) -> None:
    asked = []
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    try:
        while not asked:
            time.sleep(0.02)
    finally:
        signal.signal(signal.SIGTERM, before)
    (folder / "checkpoint").touch()
    raise KeyboardInterrupt
