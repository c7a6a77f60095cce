"""A run's folder: the whole truth about it, written by one process at a time.

::

    config.yaml       everything needed to run it again, with versions and git commit
    split.json        ids of labeled, calibration, unlabeled, validation and test items
    metrics.jsonl     one JSON object a line: step, phase, figures
    checkpoint/       atomic, resumable, no pickle
    tensorboard/      event files
    result.json       the final figures

Metrics are appended; on resuming, lines after the checkpoint's step, and a line that a crash left unfinished, are
dropped, since the run will write them again.
"""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ccssl.errors import InputError
from ccssl.training.checkpoint import told_if_full, write_text

CONFIG, SPLIT, METRICS, CHECKPOINT, TENSORBOARD, RESULT = (
    "config.yaml",
    "split.json",
    "metrics.jsonl",
    "checkpoint",
    "tensorboard",
    "result.json",
)

Record = dict[str, Any]


@contextmanager
def opened(folder: Path, resume: bool) -> Iterator[None]:
    """Hold a run's folder: make it, or with ``resume`` take what is there; refuse it while another process has it."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"a run is a folder, but {folder} is a file: name another one.")
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"{folder} is in use by another process: wait for it, or name another folder."
            ) from None
        if not resume and any(path.name != ".lock" for path in folder.iterdir()):
            raise InputError(
                f"{folder} is not empty: go on with what is there by --resume, or name another folder."
            )
        try:
            yield
        finally:
            if made and [path.name for path in folder.iterdir()] == [".lock"]:  # refused before it began
                (folder / ".lock").unlink()
                folder.rmdir()


def append(folder: Path, records: list[Record]) -> None:
    """Add lines to the metrics."""
    path = folder / METRICS
    with told_if_full(path), path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in records)


def records(folder: Path) -> list[Record]:
    """Return the lines of the metrics up to the first that is not whole; say so where a finished run has one."""
    path = folder / METRICS
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(json.loads(line.decode()))
        except ValueError:  # a crash cut it, and whatever came after a cut line would be out of order
            if (folder / RESULT).exists():
                print(f"note: {path}, line {number} is damaged: it and all after it are left out.", file=sys.stderr)
            break
    return found


def keep_until(folder: Path, step: int) -> None:
    """Drop the lines of the metrics after a step; with -1 all of them."""
    kept = [record for record in records(folder) if record["step"] <= step]
    write_text(folder / METRICS, "".join(json.dumps(record) + "\n" for record in kept))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def no_checkpoint(folder: Path, command: str) -> InputError:
    """Return what to say of a run without a checkpoint."""
    if (folder / RESULT).exists():
        return InputError(f"{folder} is finished, but its {CHECKPOINT} is gone: restore it, or make the run anew.")
    return InputError(f"{folder} has no checkpoint yet: finish the run with {command} --resume --out {folder}.")


def read_json(path: Path) -> dict[str, Any]:
    """Return what a JSON file of a run holds."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path.parent} is not a whole run: {path.name} is missing.") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is damaged ({error}): restore it from a copy, or run anew.") from None
