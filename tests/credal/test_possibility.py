"""Possibility distributions: normalisations, levels, membership and the probabilities of events."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import levels, problems

from ccssl.credal import Levels, contains, extreme_points, lower_probability, possibility, upper_probability

P = torch.tensor([[0.1, 0.4, 0.4], [0.2, 0.3, 0.6]])
PI = torch.tensor([[0.1, 1.0, 0.4], [1.0, 0.3, 0.6]])


def test_proportional_divides_by_the_maximum():
    pi = possibility(P)
    torch.testing.assert_close(pi, torch.tensor([[0.25, 1, 1], [1 / 3, 0.5, 1]]))
    assert (pi.amax(-1) == 1).all()


def test_top_raises_the_models_class_and_no_other():
    pi = possibility(P, "top", top=torch.tensor([2, 0]))
    torch.testing.assert_close(pi, torch.tensor([[0.1, 0.4, 1], [1, 0.3, 0.6]]))
    every = possibility(P, "top")  # no class is preferred by its index: all tied ones are raised
    torch.testing.assert_close(every, torch.tensor([[0.1, 1, 1], [0.2, 0.3, 1]]))


@given(
    st.integers(2, 9), st.integers(0, 60), st.sampled_from(["proportional", "top", "given"]), st.integers(0, 999)
)
def test_levels_are_the_possibility_of_their_p_values(classes, size, kind, seed):
    pi = levels(5, classes, size, "top" if kind == "given" else kind, seed, with_top=kind == "given")
    dense = possibility(pi.p_values(torch.float64), pi.normalization, pi.top)
    torch.testing.assert_close(pi.dense(torch.float64), dense, rtol=1e-15, atol=0)
    assert (pi.dense().amax(-1) == 1).all()
    assert (pi.dense() >= pi.p_values()).all()
    assert ((pi.counts == -1) == (pi.p_values() == 0)).all()


def test_levels_select_rows_and_move():
    pi = levels(6, 4, 9, "top", 0, with_top=True)
    assert torch.equal(pi[2:4].dense(), pi.dense()[2:4])
    assert torch.equal(pi[torch.tensor([5, 0])].dense(), pi.dense()[[5, 0]])
    assert pi.to("meta").device.type == "meta"
    assert pi.shape == (6, 4)


@given(problems(max_classes=5))
def test_membership_is_what_the_definition_says_of_every_event(problem):
    logits, pi = problem
    p = logits.softmax(-1)
    K = pi.shape[-1]
    events = [torch.tensor(event) for event in itertools.product([False, True], repeat=K) if any(event)]
    slack = [float(upper_probability(pi, event) - p[0, event].sum()) for event in events]
    if min(slack) > 1e-9 or min(slack) < -1e-9:  # within rounding of a face either answer is right
        assert bool(contains(p, pi)) == (min(slack) >= 0)


def test_membership_needs_a_distribution():
    pi = torch.ones(3)
    rows = torch.tensor([[0.2, 0.3, 0.5], [0.2, 0.3, 0.4], [1.2, -0.2, 0.0]])
    assert contains(rows, pi).tolist() == [True, False, False]
    assert contains(rows, pi, atol=0.3).all()


@given(problems(max_classes=5))
def test_bounds_of_events_are_attained_in_the_set(problem):
    _, pi = problem
    vertices = extreme_points(pi[0])
    for event in itertools.product([False, True], repeat=pi.shape[-1]):
        mask = torch.tensor(event)
        attained = vertices[:, mask].sum(-1)
        torch.testing.assert_close(upper_probability(pi[0], mask), attained.max(), rtol=0, atol=1e-12)
        torch.testing.assert_close(lower_probability(pi[0], mask), attained.min(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: possibility(P, "softmax"), "normalization must be one of proportional, top, got 'softmax'"),
        (lambda: possibility(P.long()), "p_values must be floating point, got torch.int64"),
        (lambda: possibility(P[:, :1]), "p_values must end in a dimension of at least 2 classes"),
        (lambda: possibility(P, top=torch.tensor([0, 0])), "top belongs to normalization 'top'"),
        (lambda: possibility(P, "top", torch.tensor([0])), r"top must hold one class index a row.*\(2,\)"),
        (lambda: possibility(P, "top", torch.tensor([0, 1]).to("meta")), "top must be on cpu .*got meta"),
        (lambda: Levels(P, 3), "counts must be integers, got torch.float32"),
        (lambda: Levels(torch.tensor(3), 3), "counts must end in a dimension of at least 2 classes"),
        (lambda: Levels(torch.tensor([1, 2]), -1), "size must be the number of calibration items"),
        (lambda: Levels(torch.tensor([1, 2]), 3, top=torch.tensor(0)), "top belongs to normalization 'top'"),
        (lambda: contains(P, torch.ones(4)), "p and pi must agree in the number of classes, got 3 and 4"),
        (lambda: contains(PI.numpy(), PI), "p must be a tensor, got ndarray"),
        (lambda: contains(P, PI, atol="x"), "atol must be a tolerance, a number of at least 0, got 'x'"),
        (lambda: contains(P, PI, atol=float("nan")), "atol must be a tolerance, .* got nan"),
        (lambda: contains(P * torch.tensor([1, torch.nan, 1]), PI), "p must be finite, got nan in row 0, class 1"),
        (lambda: contains(P, PI, validate="x"), "validate must be True, False or None, got 'x'"),
        (lambda: upper_probability(PI, torch.tensor([1, 0, 1])), "event_mask must be boolean"),
        (
            lambda: upper_probability(PI, torch.tensor([True])),
            r"event_mask must have one entry a class, 3, got shape \(1,\)",
        ),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
