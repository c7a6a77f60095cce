"""What the method promises, on real digits: unlabeled images help, and the validity guarantee holds. Minutes: slow."""

import copy
import statistics
from dataclasses import replace

import numpy as np
import pytest

from ccssl.conformal import audit
from ccssl.experiments.config import RunConfig
from ccssl.experiments.run import prepare, split_of
from ccssl.images.sources import load
from ccssl.images.splits import Split

pytestmark = pytest.mark.slow


def accuracy(method, seed):
    config = RunConfig(dataset="digits", labels=40, method=method, steps=500, seed=seed, precision="fp32")
    data = load("digits")
    training = prepare(config, data, split_of(config, data))
    for _ in training.run(config.steps):
        pass
    return training.evaluate_on("test")["accuracy"]


def test_unlabeled_digits_bring_five_points():
    gains = [accuracy("ccssl-prop", seed) - accuracy("supervised", seed) for seed in range(3)]
    assert statistics.mean(gains) >= 0.05, gains


SEEDS, LOOKS, STEPS, EVERY = 3, 8, 200, 25
FALSE_ALARM = 0.01  # probability that a sound calibration is rejected at any look of any seed


def shuffled(seed):
    """Return the digits, divided anew into training and test images: what is fresh is then a matter of chance."""
    data = load("digits")
    images = np.concatenate([data.train_images, data.test_images])
    labels = np.concatenate([data.train_labels, data.test_labels])
    order, train = np.random.default_rng(seed).permutation(len(labels)), len(data.train_labels)
    images, labels = images[order], labels[order]
    return replace(
        data,
        train_images=images[:train],
        train_labels=labels[:train],
        test_images=images[train:],
        test_labels=labels[train:],
    )


def audits(seed, plant=lambda split: split):
    """Train, and audit the averaged network's calibration on fresh images every ``EVERY`` steps.

    The looks at a run depend on each other, whichever way; that one of them raises a false alarm is at most as
    probable as the sum over all looks (Bonferroni), whatever the dependence.
    """
    config = RunConfig(
        dataset="digits",
        labels=200,
        label_sampling="iid",
        calibration_fraction=0.5,
        mu=3,
        steps=STEPS,
        seed=seed,
        ema=0.95,
        precision="fp32",
    )
    data = shuffled(seed)
    training = prepare(config, data, plant(split_of(config, data)))
    found = []
    for done in training.run(STEPS):
        if done % EVERY == 0:
            probabilities, labels, _ = training.predictions("test")
            method = copy.deepcopy(training.method)
            training.calibrate(method, training.ema.network, None)
            found.append(
                audit(
                    method.calibration,
                    probabilities,
                    labels,
                    level=FALSE_ALARM / (SEEDS * LOOKS),
                    simulations=20_000,
                )
            )
            figures = training.evaluate_on("test")
            for row in found[-1].rows:  # possibilities are p-values or more
                assert figures[f"validity_error@{row.delta:g}"] <= row.error
    assert len(found) == LOOKS
    return found


@pytest.mark.parametrize("seed", range(SEEDS))
def test_validity_errors_stay_within_their_band_throughout_a_run(seed):
    for look in audits(seed):
        assert look.calibration_items == 100
        assert look.valid, look.verdict
        assert all(row.reachable for row in look.rows)


def test_a_calibration_that_was_trained_on_leaves_the_band(monkeypatch):
    """The same audit with the same level: it would find the fault that the split refuses to make."""

    def overlapping(split):
        return replace(split, labeled=np.union1d(split.labeled, split.calibration))

    monkeypatch.setattr(Split, "check", lambda split: None)
    looks = audits(0, overlapping)
    assert not looks[-1].valid
    assert "trained on" in looks[-1].verdict
