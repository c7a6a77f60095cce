"""Each figure against its definition as a loop or scikit-learn's, what it must do at the limits, and all together."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix, log_loss

from ccssl import metrics
from ccssl.conformal import Calibration, efficiency, validity_error
from ccssl.credal import Levels
from ccssl.metrics import FIGURES, accuracy, brier, confusion, ece, evaluate, nll, reliability


def batch(items=400, classes=7, *, dtype=torch.float64, scale=2.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    p = (scale * torch.randn(items, classes, generator=generator, dtype=torch.float64)).softmax(-1)
    labels = p.multinomial(1, generator=generator).squeeze(-1)
    return p.to(dtype), labels


def ece_loop(p, labels, bins):
    total = 0.0
    for b in range(bins):
        inside = [(row, y) for row, y in zip(p, labels, strict=True) if b / bins < max(row) <= (b + 1) / bins]
        right = math.fsum(max(row) == row[y] for row, y in inside)
        sure = math.fsum(max(row) for row, y in inside)
        total += abs(right - sure) / len(p)
    return total


ORACLES = {
    "accuracy": lambda p, y: float(np.mean(p.argmax(1) == y)),
    "ece": lambda p, y: ece_loop(p.tolist(), y.tolist(), 15),
    "brier": lambda p, y: math.fsum(((p - np.eye(p.shape[1])[y]) ** 2).ravel()) / len(p),
    "nll": lambda p, y: log_loss(y, p, labels=range(p.shape[1])),
}


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize(("items", "classes"), [(1, 2), (400, 7), (1000, 100)])
def test_figure_is_what_its_definition_says(name, items, classes):
    p, labels = batch(items, classes, scale=1.0)
    found = FIGURES[name](p, labels)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(ORACLES[name](p.numpy(), labels.numpy()), abs=1e-12)


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_do_not_suffer_from_the_type_of_the_probabilities(name, dtype):
    p, labels = batch(20_000, 5, dtype=dtype)
    double = p.double()
    expected = {
        "accuracy": lambda: (double.argmax(-1) == labels).double().mean(),
        "ece": lambda: ece(double / 1, labels),
        "brier": lambda: math.fsum((double - torch.eye(5)[labels]).square().flatten().tolist()) / len(p),
        "nll": lambda: (
            math.fsum(-math.log(x) for x in double.gather(1, labels[:, None]).flatten().tolist()) / len(p)
        ),
    }[name]()
    assert float(FIGURES[name](p, labels)) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("name", FIGURES)
def test_pieces_do_not_show(name, monkeypatch):
    p, labels = batch(101, 6, dtype=torch.float32)
    whole = FIGURES[name](p, labels)
    monkeypatch.setattr(metrics, "_CHUNK", 6 * 7 + 1)
    assert float(FIGURES[name](p, labels)) == pytest.approx(float(whole), rel=1e-14)


@pytest.mark.parametrize("name", FIGURES)
def test_order_of_items_and_names_of_classes_do_not_matter(name):
    p, labels = batch(200, 6)
    items = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    classes = torch.tensor([3, 0, 5, 1, 2, 4])
    other = FIGURES[name](p[items][:, classes], classes.argsort()[labels[items]])
    assert float(other) == pytest.approx(float(FIGURES[name](p, labels)), rel=1e-13)


@pytest.mark.parametrize("name", FIGURES)
def test_a_perfect_prediction(name):
    labels = torch.tensor([2, 0, 1, 1])
    assert float(FIGURES[name](torch.eye(3)[labels], labels)) == (1.0 if name == "accuracy" else 0.0)


def test_a_prediction_that_is_wrong_and_sure():
    p, labels = torch.eye(3)[[1, 2]], torch.tensor([0, 0])
    assert float(accuracy(p, labels)) == 0
    assert float(ece(p, labels)) == 1
    assert float(brier(p, labels)) == 2
    # Infinity would hide all other items: the least normal number bounds it from below.
    assert float(nll(p, labels)) == pytest.approx(-math.log(torch.finfo(torch.float32).tiny))
    assert float(nll(p.double(), labels)) == pytest.approx(-math.log(torch.finfo(torch.float64).tiny))


@pytest.mark.parametrize("figure", [brier, nll])
@given(
    weights=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    step=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_no_prediction_is_better_on_average_than_the_truth(figure, weights, step):
    labels = torch.arange(3).repeat_interleave(torch.tensor(weights))
    truth = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    other = truth.clone()
    other[step[0]] += 0.05
    other[step[1]] -= 0.05
    at_truth, at_other = (float(figure(q.expand(len(labels), 3), labels)) for q in (truth, other))
    assert at_truth <= at_other + 1e-15
    assert at_truth < at_other or step[0] == step[1]


def test_ece_of_an_honest_prediction_vanishes_with_more_items():
    # Labels are drawn from p: about sqrt(2 / (pi n)) * sqrt(conf (1 - conf)) is left in each of 15 bins.
    assert float(ece(*batch(200_000, 4))) < 0.01
    p, labels = batch(200_000, 4)
    assert float(ece((2 * p.log()).softmax(-1), labels)) > 0.05  # sharpened: too sure


def test_a_bin_contains_its_upper_edge():
    # Eleven fifteenths, exactly: the item belongs to the bin that ends there, with the second item.
    p = torch.tensor([[11 / 15, 4 / 15], [0.7, 0.3], [0.74, 0.26]], dtype=torch.float64)
    assert reliability(p, torch.zeros(3, dtype=torch.long)).items.tolist() == [0] * 10 + [2, 1] + [0] * 3


@pytest.mark.parametrize("bins", [1, 2, 15, 40])
def test_reliability_is_what_ece_sums(bins):
    p, labels = batch()
    confidence, right, items = reliability(p, labels, bins)
    assert items.sum() == len(p)
    assert confidence.shape == right.shape == items.shape == (bins,)
    assert torch.equal(confidence.isnan(), items == 0)
    filled = items > 0
    upper = torch.arange(1, bins + 1) / bins
    assert (confidence[filled] <= upper[filled] + 1e-12).all()
    assert (confidence[filled] > upper[filled] - 1 / bins).all()
    gap = (items * (right - confidence).abs()).nansum() / len(p)
    assert float(gap) == pytest.approx(float(ece(p, labels, bins)), rel=1e-12)
    assert float(ece(p, labels, bins)) == pytest.approx(ece_loop(p.tolist(), labels.tolist(), bins), rel=1e-12)


def test_confusion_counts_pairs_and_skips_unknown_labels():
    generator = np.random.default_rng(0)
    labels, predicted = generator.integers(-1, 5, 300), generator.integers(0, 5, 300)
    found = confusion(torch.from_numpy(predicted), torch.from_numpy(labels), classes=5)
    known = labels >= 0
    assert np.array_equal(found.numpy(), confusion_matrix(labels[known], predicted[known], labels=range(5)))
    assert confusion(torch.tensor([2]), torch.tensor([-1]), classes=3).sum() == 0


def credal_batch(items=90):
    p, labels = batch(items + 30, 5, dtype=torch.float32)
    calibration = Calibration().fit(p[:30], labels[:30])
    return p[30:], labels[30:], calibration


def test_evaluate_gives_every_figure():
    p, labels, calibration = credal_batch()
    plain = evaluate(p, labels)
    assert list(plain) == ["accuracy", "ece", "brier", "nll"]
    assert plain == {name: float(figure(p, labels)) for name, figure in FIGURES.items()}

    levels = calibration.levels(p)
    credal = evaluate(p, labels, levels)
    assert list(credal)[4:] == ["validity_error@0.05", "validity_error@0.1", "validity_error@0.25", "efficiency"]
    assert {name: credal[name] for name in plain} == plain
    for delta in (0.05, 0.1, 0.25):
        expected = float(validity_error(levels, labels, delta))
        assert credal[f"validity_error@{delta:g}"] == pytest.approx(expected, rel=1e-6)
        errors = credal[f"validity_error@{delta:g}"] * len(labels)
        assert errors == pytest.approx(round(errors), abs=1e-12), "a share of the items, not rounded to float32"
    assert any(credal[f"validity_error@{delta:g}"] for delta in (0.05, 0.1, 0.25)), (
        "the comparison must say something"
    )
    assert credal["efficiency"] == pytest.approx(float(efficiency(levels.dense(torch.float64)).overall), rel=1e-12)
    assert all(type(figure) is float for figure in credal.values())
    assert json.loads(json.dumps(credal)) == credal


def test_evaluate_takes_levels_and_tensors_alike():
    p, labels, calibration = credal_batch()
    for normalization in ("proportional", "top"):
        levels = calibration.levels(p, normalization)
        assert isinstance(levels, Levels)
        assert evaluate(p, labels, levels) == pytest.approx(
            evaluate(p, labels, levels.dense(torch.float64)), rel=1e-12
        )


def test_evaluate_in_pieces(monkeypatch):
    p, labels, calibration = credal_batch()
    levels = calibration.levels(p)
    whole = evaluate(p, labels, levels)
    monkeypatch.setattr(metrics, "_CHUNK", 37)
    assert evaluate(p, labels, levels) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("credal", [False, True])
def test_items_without_a_label_are_left_out(credal):
    p, labels, calibration = credal_batch()
    partly = labels.clone()
    partly[::3] = -1
    known = partly >= 0
    pi = calibration.levels(p) if credal else None
    assert evaluate(p, partly, pi) == evaluate(p[known], labels[known], pi[known] if credal else None)


def test_where_no_label_is_known_only_the_efficiency_is_left():
    p, labels, calibration = credal_batch()
    unknown = torch.full_like(labels, -1)
    assert evaluate(p, unknown) == {}
    levels = calibration.levels(p)
    assert evaluate(p, unknown, levels) == {"efficiency": evaluate(p, labels, levels)["efficiency"]}


def test_mistakes_are_named():
    p, labels = batch(10, 3)
    with pytest.raises(ValueError, match="labels must hold one class index a row"):
        evaluate(p, labels[:9])
    with pytest.raises(ValueError, match=r"labels must be class indices in 0..2, got 0..3"):
        accuracy(p, torch.tensor([0] * 9 + [3]))
    with pytest.raises(ValueError, match=r"pi must have the shape of the probabilities, \(10, 3\), got \(10, 4\)"):
        evaluate(p, labels, torch.ones(10, 4))
    with pytest.raises(ValueError, match="probabilities must be distributions"):
        nll(2 * p, labels)
    with pytest.raises(ValueError, match="bins must be at least 1, got 0"):
        ece(p, labels, bins=0)
    with pytest.raises(ValueError, match="empty batch"):
        evaluate(p[:0], labels[:0])
