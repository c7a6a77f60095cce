"""One contract for every score, and each score against its definition written out as a loop."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from ccssl.conformal import SCORES
from ccssl.conformal.scores import cumulative, difference, proportion, randomized_cumulative

# Every member of SCORES appears here with the options that the contract is tested with. "draws" stands for
# one uniform draw an item.
OPTIONS = {
    "difference": [{}],
    "proportion": [{}, {"gamma": 0.0}, {"gamma": 1e-6}, {"gamma": 10.0}],
    "hinge": [{}],
    "cumulative": [{}],
    "randomized-cumulative": [{"uniform": "draws"}],
}
MEMBERS = [(name, options) for name, many in OPTIONS.items() for options in many]

# The score of the most probable class is (a share of) its own probability: these grow with p_y at the top.
NOT_MONOTONE = {"cumulative", "randomized-cumulative"}

over_members = pytest.mark.parametrize(
    ("name", "options"), MEMBERS, ids=lambda value: value if isinstance(value, str) else str(value)
)


def oracle(name, options, p, y, u):
    """The definition for one item: a list of floats, a class, a draw."""
    rival = max(p[j] for j in range(len(p)) if j != y)
    above = math.fsum(p_j for p_j in p if p_j > p[y])
    match name:
        case "difference":
            return rival - p[y]
        case "proportion":
            denominator = p[y] + options.get("gamma", 0.1)
            return rival / denominator if denominator else math.inf
        case "hinge":
            return 1 - p[y]
        case "cumulative":
            return above + p[y]
        case "randomized-cumulative":
            return above + u * p[y]


def draws(p):
    return torch.rand(p.shape[:-1], generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def score(name, options, p, labels=None):
    filled = {key: draws(p) if value == "draws" else value for key, value in options.items()}
    return SCORES[name](p, labels, **filled)


def batch(*shape, dtype=torch.float64, seed=0):
    """Distributions of every kind: smooth, sharp, with ties, with zeros, one-hot, uniform."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(*shape, generator=generator, dtype=torch.float64)
    z = z * torch.tensor([0.0, 0.3, 1.0, 5.0, 200.0, 2000.0])[torch.arange(math.prod(shape[:-1])) % 6].reshape(
        *shape[:-1], 1
    )
    p = z.softmax(-1)
    coarse = (p * 8).round()
    use_coarse = (coarse.sum(-1, keepdim=True) > 0) & (torch.rand(*shape[:-1], 1, generator=generator) < 0.3)
    return torch.where(use_coarse, coarse / coarse.sum(-1, keepdim=True).clamp_min(1), p).to(dtype)


@st.composite
def rows(draw):
    """One distribution over few levels: full of ties and zeros."""
    weights = draw(st.lists(st.integers(0, 6), min_size=2, max_size=7).filter(any))
    return torch.tensor([weights], dtype=torch.float64) / sum(weights)


def test_every_score_is_under_contract():
    assert OPTIONS.keys() == SCORES.keys(), "give the new score its options in OPTIONS and its line in oracle"


@over_members
def test_score_is_what_its_definition_says(name, options):
    p = batch(60, 5)
    u = draws(p)
    expected = [
        [oracle(name, options, row, y, u_i) for y in range(5)]
        for row, u_i in zip(p.tolist(), u.tolist(), strict=True)
    ]
    torch.testing.assert_close(
        score(name, options, p), torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=1e-14
    )


@over_members
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(64, 2), (200, 10), (3, 4, 37)])
def test_score_at_the_label_is_the_entry_of_the_full_matrix_bit_for_bit(name, options, dtype, shape):
    p = batch(*shape, dtype=dtype)
    labels = torch.arange(math.prod(shape[:-1])).reshape(shape[:-1]) % shape[-1]
    full = score(name, options, p)
    assert full.shape == p.shape
    assert full.dtype == dtype
    assert torch.equal(score(name, options, p, labels), full.gather(-1, labels.unsqueeze(-1)).squeeze(-1))
    assert torch.equal(score(name, options, p, labels.to(torch.int32)), score(name, options, p, labels))


@over_members
def test_score_of_an_item_does_not_depend_on_its_batch(name, options):
    p = batch(50, 9, dtype=torch.float32)
    u = draws(p)
    for i in (0, 17, 49):
        filled = {key: u[i : i + 1] if value == "draws" else value for key, value in options.items()}
        assert torch.equal(SCORES[name](p[i : i + 1], **filled)[0], score(name, options, p)[i])


@over_members
@given(p=rows(), data=st.data())
def test_renaming_classes_renames_scores(name, options, p, data):
    order = torch.tensor(data.draw(st.permutations(range(p.shape[-1]))))
    assert torch.equal(score(name, options, p[:, order]), score(name, options, p)[:, order])


@over_members
@given(p=rows())
def test_a_more_probable_class_has_no_larger_score(name, options, p):
    ascending = p.sort(-1).values
    scores = score(name, options, ascending)[0]
    assert (scores[1:] <= scores[:-1]).all()


@over_members
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_more_probable_class_has_no_larger_score_at_the_limit_of_rounding(name, options, dtype):
    p = batch(600, 12, dtype=dtype, seed=3).sort(-1).values
    scores = score(name, options, p)
    assert (scores[:, 1:] <= scores[:, :-1]).all()


@over_members
@given(p=rows(), y=st.integers(0, 6), share=st.floats(0.01, 1))
def test_score_falls_as_the_class_grows_at_the_cost_of_the_others(name, options, p, y, share):
    y = y % p.shape[-1]
    grown = p * (1 - share)
    grown[0, y] += share
    before, after = (score(name, options, q, torch.tensor([y])).item() for q in (p, grown))
    if name in NOT_MONOTONE:
        # What falls is the mass before the class.
        u = draws(p).item() if "uniform" in options else 1.0
        before, after = before - u * p[0, y].item(), after - u * grown[0, y].item()
    assert after <= before + 1e-12


@over_members
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_nan_where_probabilities_vanish(name, options, dtype):
    p = torch.tensor(
        [[1, 0, 0], [0, 1, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3], [1, 1e-45, 1e-30], [0, 0, 0]],
        dtype=dtype,
    )
    for scores in (score(name, options, p), score(name, options, p, torch.tensor([1, 0, 2, 0, 1, 2]))):
        assert not scores.isnan().any()


def test_proportion_without_damping_is_infinite_where_there_is_no_mass():
    p = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert proportion(p, gamma=0.0).tolist() == [[0.0, math.inf], [math.inf, math.inf]]


@pytest.mark.parametrize("gamma", [-0.1, math.nan, math.inf])
def test_proportion_refuses_a_gamma_that_is_no_damping(gamma):
    with pytest.raises(ValueError, match=r"gamma must be a finite number, at least 0, got"):
        proportion(torch.tensor([[0.5, 0.5]]), gamma=gamma)


def test_only_the_two_largest_probabilities_matter_to_the_rival():
    p = torch.tensor([[0.5, 0.3, 0.1, 0.1]])
    moved = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    for function in (difference, proportion):
        assert torch.equal(function(p)[:, :2], function(moved)[:, :2])


def test_randomized_score_of_the_true_label_is_uniform_where_the_model_knows_the_truth():
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([[0.6, 0.25, 0.1, 0.05]], dtype=torch.float64).expand(4000, 4)
    labels = p.multinomial(1, generator=generator).squeeze(-1)
    u = torch.rand(4000, generator=generator, dtype=torch.float64)
    assert kstest(randomized_cumulative(p, labels, uniform=u).numpy(), "uniform").pvalue > 1e-6
    # Without the draws it is far from uniform: the test can fail.
    assert kstest(cumulative(p, labels).numpy(), "uniform").pvalue < 1e-6
