"""Runs to report on: small ones, on coloured patterns whose classes have names that a careless page would obey."""

from pathlib import Path

import numpy as np
import pytest

from ccssl.experiments.config import RunConfig
from ccssl.experiments.run import train

NAMES = (
    "<script>alert(1)</script>",
    "\"&'",
    "{{ 7 * 7 }} $x^2$ ☃",
    "a name that is far longer than any column of a table",
)
METHODS = ("supervised", "ccssl-prop", "cssl", "fixmatch")
SEEDS = (0, 1)


def patterns(count, seed):
    """Return images of four patterns under noise, and their labels."""
    draw = np.random.default_rng(seed)
    shapes = np.random.default_rng(9).integers(60, 196, (len(NAMES), 8, 8, 3))
    labels = draw.permutation(np.arange(count) % len(NAMES))
    return (shapes[labels] + 40 * draw.standard_normal((count, 8, 8, 3))).clip(0, 255).astype(np.uint8), labels


def write_data(path, hidden):
    """Write a data set; with ``hidden`` nobody knows the labels of the unlabeled images."""
    images, labels = patterns(120, 1)
    test_images, test_labels = patterns(60, 2)
    if hidden:
        known = np.argsort(labels, kind="stable").reshape(len(NAMES), -1)[:, :6]
        labels = np.where(np.isin(np.arange(len(labels)), known), labels, -1)
    arrays = {
        "train_images": images,
        "train_labels": labels,
        "test_images": test_images,
        "test_labels": test_labels,
    }
    np.savez(path, **arrays, class_names=np.array(NAMES))
    return path


def made(folder, data, **changes):
    """Make a run of a second."""
    small = {"labels": 24, "steps": 16, "batch": 8, "mu": 2, "eval_every": 4, "lr": 0.03, "ema": 0.5}
    rest = {"precision": "fp32", "device": "cpu"}
    train(RunConfig(dataset=str(data), **{**small, **rest, **changes}), folder, quiet=True)
    return folder


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="session")
def data(home):
    return write_data(home / "strange.npz", hidden=False)


@pytest.fixture(scope="session")
def runs(home, data):
    """Runs by method and seed: folders."""
    return {
        (method, seed): made(home / f"{method}-{seed}", data, method=method, seed=seed)
        for method in METHODS
        for seed in SEEDS
    }


@pytest.fixture(scope="session")
def secret_run(home):
    """A run on images of which nobody knows the labels that it was not given."""
    return made(home / "secret", write_data(home / "hidden.npz", hidden=True))
