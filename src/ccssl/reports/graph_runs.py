"""Finished runs of link prediction, read back from their folders: which belong together, how to repeat them.

They are told in the terms of runs on images (``runs``); a configuration is that of a link predictor (``config_of``).
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ccssl.errors import InputError
from ccssl.experiments import folder as run_folder
from ccssl.experiments.graph_run import COMMAND, FREE_ON_RESUME, read_result, read_run
from ccssl.graphs.config import GraphConfig, shares_of
from ccssl.reports.runs import BASELINE, FinishedRun, Group

FIELDS = {f.name: f for f in dataclasses.fields(GraphConfig) if f.name != "options"}
# A reader should see these even where they are the defaults, which another version may change.
ALWAYS_TOLD = ("dataset", "split", "split_mode", "method", "model", "epochs", "seed")
_APART = ("seed", *FREE_ON_RESUME)  # what may differ within a group


def config_of(run: FinishedRun | Group) -> GraphConfig:
    """Return the configuration of a run, or of a group's first one."""
    config: Any = run.config
    return config


def read_finished(folder: Path) -> FinishedRun:
    """Read a run that came to its end; another one is refused."""
    if not folder.is_dir():
        raise InputError(f"RUN must be the folder of a run, but there is no folder {folder}.")
    config: Any = read_run(folder)
    result = read_result(folder)
    if not result.get("test"):
        raise InputError(f"{folder} was run on a graph without test facts: there is nothing to report.")
    written = yaml.safe_load((folder / run_folder.CONFIG).read_text(encoding="utf-8"))
    made_with = {str(name): str(value) for name, value in (written.get("made_with") or {}).items()}
    return FinishedRun(folder, config, result, tuple(run_folder.records(folder)), made_with)


def read_all(folders: Sequence[Path]) -> list[FinishedRun]:
    """Read runs that can stand on one page: those on one graph, each once."""
    if not folders:
        raise InputError("there is no run to report: name one or more folders of runs.")
    once: dict[Path, Path] = {}
    for folder in folders:
        once.setdefault(folder.resolve(), folder)
    runs = [read_finished(folder) for folder in once.values()]
    known: dict[str, FinishedRun] = {}
    for run in runs:
        same = known.setdefault(repr((_settings(run.config), run.config.seed)), run)
        if same is not run:
            raise InputError(
                f"{same.folder} and {run.folder} are one run made twice, with equal settings and seed: name one of "
                "them."
            )
    first, checksum = runs[0], _checksum(runs[0])
    for run in runs[1:]:
        if run.config.dataset != first.config.dataset or _checksum(run) != checksum:
            raise InputError(
                f"runs on different graphs cannot be compared: {first.folder} is of {first.config.dataset}, "
                f"{run.folder} of {run.config.dataset}, with other triples. Make a page for each."
            )
    return runs


def _checksum(run: FinishedRun) -> str:
    return run_folder.read_json(run.folder / run_folder.SPLIT)["checksum"]


def groups(runs: Sequence[FinishedRun]) -> list[Group]:
    """Put runs together that differ in nothing but their seed, in the order in which they were named."""
    shared: dict[str, list[FinishedRun]] = {}
    for run in runs:
        shared.setdefault(repr(_settings(run.config)), []).append(run)
    firsts: list[Any] = [members[0].config for members in shared.values()]
    differing = [
        name
        for name in FIELDS
        if name not in ("method", *_APART) and len({repr(getattr(config, name)) for config in firsts}) > 1
    ]
    return [
        Group(_name(members[0].config, differing, firsts), tuple(sorted(members, key=lambda run: run.config.seed)))
        for members in shared.values()
    ]


def _settings(config: Any) -> dict[str, Any]:
    """Return what sets groups apart: an option at its default is the same whether it was given or not."""
    settings = {name: value for name, value in config.to_dict().items() if name not in _APART}
    return {**settings, "options": vars(config.method_config())}


def _name(config: Any, differing: list[str], firsts: list[Any]) -> str:
    told = [f"{name.replace('_', ' ')} {getattr(config, name)}" for name in differing]
    kin = [vars(other.method_config()) for other in firsts if other.method == config.method]
    for name, value in vars(config.method_config()).items():
        if len({repr(options[name]) for options in kin}) > 1:
            told.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join([config.method, *told])


def baseline_of(group: Group, among: Sequence[Group]) -> Group | None:
    """Return the supervised-only runs of the same model on as many labeled facts, divided alike, if any."""
    config = config_of(group)
    if config.method == BASELINE:
        return None

    def suits(other: Group) -> bool:
        theirs = config_of(other)
        return (
            theirs.method == BASELINE
            and (theirs.model, theirs.split_mode) == (config.model, config.split_mode)
            and math.isclose(shares_of(theirs.split)[0], shares_of(config.split)[0])
        )

    return next(filter(suits, among), None)


def command(config: GraphConfig, out: Path) -> str:
    """Return the command line that runs a configuration: every field that is not at its default.

    >>> command(GraphConfig(method="supervised", epochs=5, lr=0.5), Path("runs/a"))  # doctest: +ELLIPSIS
    'ccssl graph train --dataset umls --split 40:40:20 ... --method supervised ... --epochs 5 --lr 0.5 ... --out runs/a'
    """
    default, words = GraphConfig(), COMMAND.split()
    for name in FIELDS:
        value = getattr(config, name)
        if name in ALWAYS_TOLD or value != getattr(default, name):
            words += _flag(name, value)
    usual = config.method_config().__class__()
    for name, value in config.options.items():
        if value != getattr(usual, name):
            words += _flag(name, value)
    return shlex.join([*words, "--out", str(out)])


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]
