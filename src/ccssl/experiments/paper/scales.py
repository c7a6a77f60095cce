"""At which size the paper is repeated: in seconds, in hours on two cores, or as it was.

A scale is what it changes about the settings of the paper, and which of its runs it keeps. ``configuration`` puts it
all together; a later line of this list wins over an earlier one:

1. the settings of the paper, of the data set, of the row and of the column (``artifacts``);
2. hyperparameters that were searched for (only at the scale of the paper, and only where the paper searched);
3. the settings of the scale, then those of the scale for this data set.

Link predictors have a scale of their own in each (``GraphScale``), for they take seconds; ``links`` puts it together.

*Runs have names*, made of what everybody asks for first, and of a checksum of everything else that is not at its
default: ``cifar10-250-ccssl-prop-seed0-1b2c3d``. The name does not depend on other seeds, on the device, or on the
folder that the data lie in, nor on whether a value was given or is the default. Equal names are equal runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ccssl.experiments.config import RunConfig, config_from
from ccssl.experiments.paper.artifacts import DATASETS, GRID, SEEDS, SETTINGS, Settings
from ccssl.experiments.run import FREE_ON_RESUME
from ccssl.graphs.config import GraphConfig
from ccssl.methods import METHODS

ALL = ("supervised", "uda", "fixmatch", "fixmatch-da", "flexmatch", "cssl", "ccssl-diff", "ccssl-prop")
CREDAL = ("supervised", "cssl", "ccssl-diff", "ccssl-prop")


@dataclass(frozen=True)
class GraphScale:
    """What a scale changes about link predictors, and the grid of which each takes the best setting."""

    title: str
    settings: Settings = field(default_factory=dict)
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: GRID)
    stand_in: str | None = None  # the graph in place of all others


@dataclass(frozen=True)
class Scale:
    """What a scale changes, and what it keeps."""

    title: str
    graphs: GraphScale
    seeds: int = SEEDS
    settings: Settings = field(default_factory=dict)
    by_dataset: Mapping[str, Settings] = field(default_factory=dict)
    keeps: Mapping[tuple[str, int], tuple[str, ...]] | None = None  # data set and labels: methods; None: everything
    stand_in: str | None = None  # the data set in place of all others
    most_labels: int | None = None
    tuned: bool = False  # hyperparameters that were searched for are used


SCALES: dict[str, Scale] = {
    "smoke": Scale(
        "20 steps of a small network on the embedded 8x8 digits in place of every data set, at most 1,000 labels",
        GraphScale(
            "2 epochs on the embedded graph Nations in place of both, 8 parameters a vector, learning rate 0.1 or 0.01",
            {"dim": 8},
            {"lr": (0.1, 0.01), "batch": (1024,), "epochs": (2,)},
            stand_in="nations",
        ),
        seeds=2,
        settings={
            "model": "small",
            "steps": 20,
            "batch": 8,
            "mu": 2,
            "eval_every": 5,
            "eval_unlabeled": 200,
            "precision": "fp32",
        },
        stand_in="digits",
        most_labels=1000,
    ),
    "reduced": Scale(
        "1,000 steps of a small network on the data at hand (STL-10 with mu 3, its labels drawn at random), learning "
        "rate 0.03, not tuned",
        GraphScale(
            "10 epochs with batches of 512, learning rate 0.01, 0.1 or 0.001",
            grid={"lr": GRID["lr"], "batch": (512,), "epochs": (10,)},
        ),
        settings={"model": "small", "steps": 1000, "batch": 32, "mu": 7, "lr": 0.03, "eval_every": 100},
        # The part of STL-10 at hand has 1,000 labels, of some classes fewer than 100: all are taken, as they are.
        by_dataset={"stl10": {"mu": 3, "label_sampling": "iid"}},
        keeps={
            ("emnist-byclass", 250): ALL,
            ("emnist-byclass", 500): ALL,
            ("svhn", 250): ALL,
            ("cifar10", 250): CREDAL,
            ("cifar100", 400): CREDAL,
            ("stl10", 1000): CREDAL,
        },
    ),
    "paper": Scale(
        "2^18 steps of Wide ResNets as printed (EMNIST-ByClass 2^15)",
        GraphScale("learning rate 0.01, 0.1 or 0.001, batches of 512 or 1024, 5 or 50 epochs, as printed"),
        tuned=True,
    ),
}


def merged(*settings: Settings) -> dict[str, Any]:
    """Return settings over settings, options over options."""
    found: dict[str, Any] = {}
    for some in settings:
        options = {**found.get("options", {}), **some.get("options", {})}
        found = {**found, **some, **({"options": options} if options else {})}
    return found


def keeps(scale: Scale, settings: Settings) -> bool:
    """Tell whether a scale has these runs."""
    if scale.keeps is None:
        return True
    return settings["method"] in scale.keeps.get((settings["dataset"], settings["labels"]), ())


def configuration(scale: Scale, settings: Settings, tuned: Settings | None = None, seed: int = 0) -> RunConfig:
    """Return the configuration of a cell's settings at a scale."""
    dataset = settings["dataset"]
    values = merged(SETTINGS, DATASETS[dataset].settings, settings, tuned or {}, scale.settings)
    values = merged(values, scale.by_dataset.get(dataset, {}), {"seed": seed, "dataset": scale.stand_in or dataset})
    if scale.most_labels is not None:
        values["labels"] = min(values["labels"], scale.most_labels)
    return plain(values)


def plain(values: Settings) -> RunConfig:
    """Return a configuration without what says nothing: options of other methods, and values that are the default."""
    method = METHODS[values.get("method", RunConfig.method)]
    takes = {f.name: f.default for f in fields(method.Config)}
    options = {name: value for name, value in values.get("options", {}).items() if takes.get(name, value) != value}
    config = config_from({**values, "options": options})
    if config.calibration_share == replace(config, calibration_fraction=None).calibration_share:
        config = replace(config, calibration_fraction=None)
    return config


def run_name(config: RunConfig, dataset: str) -> str:
    """Return the stable name of a run on a data set of this name.

    >>> run_name(RunConfig(labels=250, lr=0.1), "digits")
    'digits-250-ccssl-prop-seed0-c924a5'
    """
    return name_for_seed(run_key(config, dataset), config.seed)


def run_key(config: RunConfig, dataset: str) -> tuple[str, str]:
    """Return what the names of runs that differ in their seed have in common: a beginning and an end."""
    told = ("seed", "dataset", "labels", "method", *FREE_ON_RESUME)
    return f"{dataset}-{config.labels}-{config.method}-seed", f"-{checksum(config, RunConfig(), told)}"


def checksum(config: RunConfig | GraphConfig, usual: RunConfig | GraphConfig, told: Sequence[str]) -> str:
    """Return six characters that stand for all fields but those told, as far as they are not as usual."""
    rest = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in told}
    rest = {name: value for name, value in rest.items() if value != getattr(usual, name)}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, default=dict).encode()).hexdigest()[:6]


def name_for_seed(key: tuple[str, str], seed: int) -> str:
    """Return the name of a run of a key."""
    return f"{key[0]}{seed}{key[1]}"
