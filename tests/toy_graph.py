"""A small graph for tests of link prediction, with rules that a model can learn in a second: shifts and likenesses."""

from typing import Any

import numpy as np

from ccssl.graphs.config import GraphConfig
from ccssl.graphs.triples import Graph, make_graph

ENTITIES = 20
SHIFTS = (1, 2, 5)


def toy_facts() -> list[tuple[str, str, str]]:
    """Return all facts: entity i is followed by i + 1, i + 2 and i + 5 around a circle, and is like i + 4 and i + 8."""
    names = [f"e{i:02d}" for i in range(ENTITIES)]
    found = []
    for i, name in enumerate(names):
        found += [(name, f"shift {shift}", names[(i + shift) % ENTITIES]) for shift in SHIFTS]
        found += [(name, "like", names[(i + step) % ENTITIES]) for step in (4, 8, 12, 16)]
    return found


def toy_graph(seed: int = 0, **parts: Any) -> Graph:
    """Return 100 of the 140 facts for training, 20 for validation and 20 for tests."""
    facts = toy_facts()
    order = np.random.default_rng(seed).permutation(len(facts))
    train, valid, test = ([facts[i] for i in part] for part in np.split(order, [100, 120]))
    return make_graph("toy", **{"train": train, "valid": valid, "test": test, **parts})


def toy_config(**changes: Any) -> GraphConfig:
    """Return a configuration of a fraction of a second, whatever the defaults are."""
    small = {
        "dataset": "toy",
        "split": "40:40:20",
        "split_mode": "paired",
        "method": "ccssl-diff",
        "model": "complex",
        "dim": 8,
        "normalize": "none",
        "input_dropout": 0.0,
        "dropout": 0.0,
        "init_scale": 0.1,
        "loss": "ce",
        "batch_of": "facts",
        "batch": 32,
        "epochs": 4,
        "optimizer": "adam",
        "lr": 0.03,
        "schedule": "constant",
        "n3": 0.0,
        "ema": 0.9,
        "lambda_u": 0.5,
        "ramp_up": 2,
        "mu": 2.0,
        "teacher": "own",
        "calibrate_every": 1,
        "per_relation": False,
        "min_p_value": 0.0,
        "temperature": 1.0,
        "reuse_calibration": False,
        "align": False,
        "exclude_known": True,
        "eval_every": 2,
        "patience": 0,
        "select": "best",
        "device": "cpu",
        "seed": 0,
    }
    return GraphConfig(**{**small, **changes})
