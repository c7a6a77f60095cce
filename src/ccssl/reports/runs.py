"""Finished runs, read back from their folders: what they did, which of them belong together, how to repeat them."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from ccssl.errors import InputError
from ccssl.experiments import folder as run_folder
from ccssl.experiments.config import RunConfig, read_config
from ccssl.experiments.flags import FIELDS
from ccssl.experiments.run import FREE_ON_RESUME, read_result, read_run

# A reader should see these even where they are the defaults, which another version may change.
ALWAYS_TOLD = ("dataset", "labels", "method", "steps", "seed")

BASELINE = "supervised"  # the method that learns from labels alone
_APART = ("seed", *FREE_ON_RESUME)  # what may differ within a group


@dataclass(frozen=True)
class FinishedRun:
    """What the folder of a run says when the run is over."""

    folder: Path
    config: RunConfig
    result: dict[str, Any]
    records: tuple[dict[str, Any], ...]  # the lines of its metrics
    made_with: dict[str, str]  # versions, and the commit of the code

    def over_time(self, phase: str, figure: str) -> tuple[list[int], list[float]]:
        """Return the steps at which a figure was taken on a part of the data, and what it was."""
        found = [record for record in self.records if record["phase"] == phase and figure in record]
        return [record["step"] for record in found], [record[figure] for record in found]


def read_finished(folder: Path) -> FinishedRun:
    """Read a run that came to its end; another one is refused."""
    if not folder.is_dir():
        raise InputError(f"RUN must be the folder of a run, but there is no folder {folder}.")
    if (folder / run_folder.CONFIG).exists() and "split_mode" in read_config(folder / run_folder.CONFIG):
        raise InputError(f"{folder} is a run on a graph: ccssl graph report shows it.")
    config, result = read_run(folder), read_result(folder)
    if "test" not in result:
        raise InputError(
            f"{folder} was run without test images, as the trials of a search are: there is nothing to report."
        )
    if result.get("reported") == "best":  # the network that is asked again on the page is the best on validation
        result = {**result, **{phase: found for phase, found in result["best"].items() if isinstance(found, dict)}}
    written = yaml.safe_load((folder / run_folder.CONFIG).read_text(encoding="utf-8"))
    made_with = {str(name): str(value) for name, value in (written.get("made_with") or {}).items()}
    return FinishedRun(folder, config, result, tuple(run_folder.records(folder)), made_with)


def read_all(folders: Sequence[Path]) -> list[FinishedRun]:
    """Read runs that can stand on one page: those of one data set, each once."""
    if not folders:
        raise InputError("there is no run to report: name one or more folders of runs.")
    once: dict[Path, Path] = {}
    for folder in folders:
        once.setdefault(folder.resolve(), folder)
    runs = [read_finished(folder) for folder in once.values()]
    first = runs[0]
    known: dict[str, FinishedRun] = {}
    for run in runs:
        same = known.setdefault(repr((_settings(run.config), run.config.seed)), run)
        if same is not run:
            raise InputError(
                f"{same.folder} and {run.folder} are one run made twice, with equal settings and seed: name one of "
                "them."
            )
    for run in runs[1:]:
        if run.config.dataset != first.config.dataset:
            raise InputError(
                f"runs of different data sets cannot be compared: {first.folder} is of {first.config.dataset}, "
                f"{run.folder} of {run.config.dataset}. Make a page for each."
            )
        if run.result["split"]["test"] != first.result["split"]["test"]:
            raise InputError(
                f"the test images of these runs differ: {first.folder} has {first.result['split']['test']:,}, "
                f"{run.folder} has {run.result['split']['test']:,}. The data have changed: run one of them anew."
            )
    return runs


@dataclass(frozen=True)
class Figure:
    """A figure over the runs of a group."""

    mean: float
    deviation: float | None  # None for a single run


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed."""

    name: str  # the method, and what sets the group apart from others
    runs: tuple[FinishedRun, ...]

    @property
    def config(self) -> RunConfig:
        """The configuration of the first run."""
        return self.runs[0].config

    def figure(self, phase: str, name: str) -> Figure | None:
        """Return mean and deviation of a final figure, or None where it was not taken."""
        values = [run.result[phase][name] for run in self.runs if name in run.result.get(phase, {})]
        if not values:
            return None
        return Figure(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)

    def over_time(self, phase: str, figure: str) -> tuple[list[int], list[float], list[float], list[float]]:
        """Return steps, and at each the mean, the least and the largest value over the runs."""
        found: dict[int, list[float]] = {}
        for run in self.runs:
            for step, value in zip(*run.over_time(phase, figure), strict=True):
                found.setdefault(step, []).append(value)
        steps = sorted(found)
        values = [found[step] for step in steps]
        return steps, [statistics.fmean(v) for v in values], [min(v) for v in values], [max(v) for v in values]


def groups(runs: Sequence[FinishedRun]) -> list[Group]:
    """Put runs together that differ in nothing but their seed, in the order in which they were named."""
    shared: dict[str, list[FinishedRun]] = {}
    for run in runs:
        shared.setdefault(repr(_settings(run.config)), []).append(run)
    firsts = [members[0].config for members in shared.values()]
    differing = [
        name
        for name in FIELDS
        if name not in ("method", *_APART) and len({repr(getattr(config, name)) for config in firsts}) > 1
    ]
    return [
        Group(_name(members[0].config, differing, firsts), tuple(sorted(members, key=lambda run: run.config.seed)))
        for members in shared.values()
    ]


def _settings(config: RunConfig) -> dict[str, Any]:
    """Return what sets groups apart: an option at its default is the same whether it was given or not."""
    settings = {name: value for name, value in config.to_dict().items() if name not in _APART}
    return {**settings, "options": vars(config.method_config())}


def _name(config: RunConfig, differing: list[str], firsts: list[RunConfig]) -> str:
    told = [f"{name.replace('_', ' ')} {getattr(config, name)}" for name in differing]
    kin = [vars(other.method_config()) for other in firsts if other.method == config.method]
    for name, value in vars(config.method_config()).items():
        if len({repr(options[name]) for options in kin}) > 1:
            told.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join([config.method, *told])


def baseline_of(group: Group, among: Sequence[Group]) -> Group | None:
    """Return the supervised-only runs with the same labels, the same network and the same test images, if any."""
    if group.config.method == BASELINE:
        return None
    same = ("labels", "label_sampling", "fold", "model")

    def suits(other: Group) -> bool:
        return other.config.method == BASELINE and all(
            getattr(other.config, name) == getattr(group.config, name) for name in same
        )

    return next(filter(suits, among), None)


@dataclass(frozen=True)
class Difference:
    """What a method adds to the accuracy of supervised-only training, with a 95% interval."""

    mean: float
    low: float
    high: float
    over: str  # what the interval ranges over

    @property
    def sure(self) -> bool:
        """Whether chance alone would rarely give it."""
        return self.low > 0 or self.high < 0


def over_seeds(differences: Sequence[float]) -> Difference:
    """Return the mean difference within seeds, with Student's interval; ``differences`` are two or more.

    >>> found = over_seeds([0.05, 0.07, 0.09])
    >>> round(found.mean, 3), round(found.low, 3), round(found.high, 3), found.over
    (0.07, 0.02, 0.12, '3 draws of labels')
    """
    from scipy.stats import t

    n, mean = len(differences), statistics.fmean(differences)
    half = float(t.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    return Difference(mean, mean - half, mean + half, f"{n} draws of labels")


def over_items(only_method: int, only_baseline: int, items: int) -> Difference:
    """Return the difference of two accuracies on the same test items, with its normal interval.

    ``only_method`` items are right for the method alone, ``only_baseline`` for supervised-only alone; the other
    items say nothing about the difference.

    >>> found = over_items(only_method=40, only_baseline=10, items=500)
    >>> round(found.mean, 3), round(found.low, 3), round(found.high, 3), found.over
    (0.06, 0.033, 0.087, 'the 500 test images')
    """
    mean = (only_method - only_baseline) / items
    variance = ((only_method + only_baseline) / items - mean**2) / items
    half = 1.959964 * math.sqrt(variance)
    return Difference(mean, mean - half, mean + half, f"the {items:,} test images")


def command(config: RunConfig, out: Path) -> str:
    """Return the command line that runs a configuration: every field that is not at its default.

    >>> command(RunConfig(method="supervised", steps=100, lr=0.1), Path("runs/a"))
    'ccssl train --steps 100 --lr 0.1 --seed 0 --dataset digits --labels 40 --method supervised --out runs/a'
    """
    default = RunConfig()
    words = ["ccssl", "train"]
    for name in FIELDS:
        value = getattr(config, name)
        if name in ALWAYS_TOLD or value != getattr(default, name):
            words += _flag(name, value)
    usual = config.method_config().__class__()
    for option in fields(usual):
        if option.name in config.options and config.options[option.name] != getattr(usual, option.name):
            words += _flag(option.name, config.options[option.name])
    return shlex.join([*words, "--out", str(out)])


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]
