"""Conformal p-values against the paper's definition counted one by one, and everything built on them."""

import copy
import dataclasses
import io
import warnings
import weakref
from fractions import Fraction
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ccssl.conformal import SCORES, Calibration
from ccssl.credal.possibility import Levels

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def data(n, classes=5, dtype=torch.float32, seed=0, ties=False):
    """Predictions that are right as often as they say; with ``ties`` on few levels."""
    draw = generator(seed)
    p = (2 * torch.randn(n, classes, generator=draw, dtype=torch.float64)).softmax(-1)
    if ties:
        p = (p * 4).round() + 0.25
        p = p / p.sum(-1, keepdim=True)
    labels = p.multinomial(1, generator=draw).squeeze(-1) if n else torch.empty(0, dtype=torch.int64)
    return p.to(dtype), labels


def fit(calibration, p, labels, **kwargs):
    """Fit, whatever is said about small sets."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return calibration.fit(p, labels, **kwargs)


def counted(name, p_cal, y_cal, p_new, group, **options):
    """Equation (pvalue) in three loops; scores come from the table, a pair at a time."""
    table = SCORES[name]
    alpha = [table(p_cal[i : i + 1], y_cal[i : i + 1], **options).item() for i in range(len(p_cal))]
    alpha_new = [[table(p_new[i : i + 1], torch.tensor([y]), **options).item() for y in range(p_new.shape[1])]
                 for i in range(len(p_new))]  # fmt: skip
    result = np.empty(p_new.shape)
    for i in range(len(p_new)):
        for y in range(p_new.shape[1]):
            members = [a for a, label in zip(alpha, y_cal.tolist(), strict=True) if group is None or label == y]
            result[i, y] = (sum(a >= alpha_new[i][y] for a in members) + 1) / (len(members) + 1)
    return result


class TestPValues:
    @pytest.mark.parametrize("group", [None, "label"])
    @pytest.mark.parametrize("name", ["difference", "proportion", "hinge", "cumulative"])
    @settings(max_examples=25, deadline=None)
    @given(
        sizes=st.tuples(st.integers(0, 14), st.integers(1, 4), st.integers(2, 5)),
        seed=st.integers(0, 10**6),
        ties=st.booleans(),
    )
    def test_are_those_of_the_paper(self, name, group, sizes, seed, ties):
        L, N, K = sizes
        p_cal, y_cal = data(L, K, torch.float64, seed, ties)
        p_new, _ = data(N, K, torch.float64, seed + 1, ties)
        found = fit(Calibration(name, group=group), p_cal, y_cal).p_values(p_new)
        assert np.array_equal(found.numpy(), counted(name, p_cal, y_cal, p_new, group))

    @pytest.mark.parametrize("group", [None, "label"])
    def test_with_draws_are_those_of_the_paper_for_the_same_draws(self, group):
        p_cal, y_cal = data(20, 3, torch.float64, ties=True)
        p_new, _ = data(6, 3, torch.float64, seed=1, ties=True)
        calibration = fit(Calibration("randomized-cumulative", group=group), p_cal, y_cal, generator=generator(3))
        found = calibration.p_values(p_new, generator=generator(4))
        u_cal, u_new = (
            1 - torch.rand(n, generator=generator(s), dtype=torch.float64) for n, s in ((20, 3), (6, 4))
        )
        score = SCORES["randomized-cumulative"]
        alpha, alpha_new = score(p_cal, y_cal, uniform=u_cal), score(p_new, uniform=u_new)
        for y in range(3):
            members = alpha if group is None else alpha[y_cal == y]
            count = (members >= alpha_new[:, y, None]).sum(-1)
            assert torch.equal(found[:, y], (count + 1).double() / (len(members) + 1))

    @pytest.mark.parametrize("group", [None, "label"])
    def test_smoothed_weigh_ties_with_the_draw(self, group):
        p_cal, y_cal = data(40, 3, torch.float64, ties=True)
        p_new, _ = data(9, 3, torch.float64, seed=1, ties=True)
        calibration = fit(Calibration("difference", group=group, smooth=True), p_cal, y_cal)
        found = calibration.p_values(p_new, generator=generator(2))
        u = 1 - torch.rand(9, generator=generator(2), dtype=torch.float64)
        alpha, alpha_new = SCORES["difference"](p_cal, y_cal), SCORES["difference"](p_new)
        for y in range(3):
            members = alpha if group is None else alpha[y_cal == y]
            larger = (members > alpha_new[:, y, None]).sum(-1)
            equal = (members == alpha_new[:, y, None]).sum(-1)
            torch.testing.assert_close(
                found[:, y], (larger + u * (equal + 1)) / (len(members) + 1), rtol=1e-15, atol=0
            )
            assert equal.any()

    def test_smoothed_lie_between_their_neighbours(self):
        p_cal, y_cal = data(40, ties=True)
        p_new, _ = data(200, seed=1, ties=True)
        plain = Calibration().fit(p_cal, y_cal).p_values(p_new)
        smoothed = Calibration(smooth=True).fit(p_cal, y_cal).p_values(p_new, generator=generator())
        assert (smoothed > 0).all()
        assert (smoothed <= plain).all()

    def test_of_a_single_item_are_a_half_or_one(self):
        p, y = data(1)
        found = Calibration().fit(p, y).p_values(data(50, seed=1)[0])
        assert set(found.unique().tolist()) == {0.5, 1.0}

    def test_of_a_tied_set_are_the_floor_or_one(self):
        calibration = Calibration("hinge").fit(
            torch.tensor([[0.75, 0.25]]).expand(9, 2), torch.zeros(9, dtype=torch.int64)
        )
        found = calibration.p_values(torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.875, 0.125]]))
        torch.testing.assert_close(found, torch.tensor([[1.0, 0.1], [0.1, 0.1], [1.0, 0.1]]))

    @pytest.mark.parametrize("group", [None, "label"])
    def test_of_an_empty_set_are_one_and_that_is_said(self, group):
        p, y = data(0)
        with pytest.warns(UserWarning, match="calibration set is empty: every p-value is 1"):
            calibration = Calibration(group=group).fit(p, y)
        assert calibration.fitted
        assert torch.equal(calibration.p_values(data(3)[0]), torch.ones(3, 5))

    def test_of_a_class_without_items_are_one_and_that_is_said(self):
        p, _ = data(30)
        with pytest.warns(UserWarning, match=r"3 of 5 classes have no item .* scarcest other class has 15 .*1/16"):
            calibration = Calibration(group="label").fit(p, torch.arange(30) % 2)
        found = calibration.p_values(data(40, seed=1)[0])
        assert torch.equal(found[:, 2:], torch.ones(40, 3))
        assert (found[:, :2] < 1).any()

    @pytest.mark.parametrize("chunk_size", [1, 7, 64, 2**20])
    @pytest.mark.parametrize(
        "kwargs", [{}, {"group": "label"}, {"smooth": True}, {"smooth": True, "group": "label"}]
    )
    @pytest.mark.parametrize("name", SCORES)
    def test_do_not_depend_on_chunks(self, name, kwargs, chunk_size):
        p, y = data(40, ties=True)
        p_new, _ = data(25, seed=1, ties=True)
        whole, chunked = (
            fit(Calibration(name, chunk_size=size, **kwargs), p, y, generator=generator(1)).p_values(
                p_new, generator=generator(2)
            )
            for size in (None, chunk_size)
        )
        assert torch.equal(whole, chunked)

    @pytest.mark.parametrize("name", ["difference", "proportion", "hinge", "cumulative"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_an_item_met_again_ties_with_itself(self, name, dtype):
        p, y = data(300, 7, dtype)
        calibration = Calibration(name).fit(p, y)
        met = SCORES[name](p.to(calibration.scores.dtype), y)
        expected = (met >= met.unsqueeze(-1)).sum(-1)  # itself included
        for size in (1, 37, 300):
            again = torch.cat([calibration.counts(part) for part in p.split(size)])
            assert torch.equal(again.gather(-1, y.unsqueeze(-1)).squeeze(-1).long(), expected)

    @pytest.mark.parametrize(
        ("fitted", "asked", "result"),
        [
            (torch.float16, torch.float16, torch.float32),
            (torch.bfloat16, torch.float32, torch.float32),
            (torch.float32, torch.float64, torch.float32),
            (torch.float64, torch.float32, torch.float64),
        ],
    )
    def test_precision_is_that_of_the_calibration(self, fitted, asked, result):
        calibration = Calibration().fit(*data(50, dtype=fitted))
        assert calibration.scores.dtype == result
        assert calibration.p_values(data(5, dtype=asked)[0]).dtype == result

    def test_the_order_of_calibration_items_is_immaterial(self):
        p, y = data(60, ties=True)
        order = torch.randperm(60, generator=generator())
        new, _ = data(20, seed=1, ties=True)
        for group in (None, "label"):
            first, second = (fit(Calibration(group=group), p[i], y[i]).p_values(new) for i in (slice(None), order))
            assert torch.equal(first, second)

    def test_class_conditional_are_those_of_a_calibration_of_its_own(self):
        p, y = data(200, 3)
        new, _ = data(50, 3, seed=1)
        conditional = Calibration(group="label").fit(p, y).p_values(new)
        for label in range(3):
            alone = Calibration().fit(p[y == label], y[y == label]).p_values(new)
            assert torch.equal(conditional[:, label], alone[:, label])

    def test_a_new_fit_forgets_the_old_one(self):
        new, _ = data(10, seed=2)
        fresh = Calibration().fit(*data(15, seed=1)).p_values(new)
        assert torch.equal(Calibration().fit(*data(80)).fit(*data(15, seed=1)).p_values(new), fresh)

    def test_strided_and_differentiable_input_is_welcome(self):
        p, y = data(60)
        calibration = Calibration().fit(p, y)
        expected = calibration.p_values(p)
        assert torch.equal(calibration.p_values(p.T.contiguous().T), expected)
        found = calibration.p_values(p.clone().requires_grad_())
        assert torch.equal(found, expected)
        assert not found.requires_grad

    def test_a_score_of_ones_own_and_the_top_normalisation_agree(self):
        """Without ties "top" for the difference score is the same as clipping that score at 0."""

        def clipped(probabilities, labels=None):
            return SCORES["difference"](probabilities, labels).clamp_min(0)

        p, y = data(100, dtype=torch.float64)
        new, _ = data(300, dtype=torch.float64, seed=1)
        by_top = Calibration("difference").fit(p, y).possibility(new, "top")
        assert torch.equal(by_top, Calibration(clipped).fit(p, y).p_values(new))


class TestPossibility:
    @pytest.mark.parametrize("normalization", ["proportional", "top"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_levels_are_the_same_degrees(self, normalization, dtype):
        calibration = Calibration().fit(*data(30, dtype=dtype))
        p, _ = data(80, dtype=dtype, seed=1)
        levels = calibration.levels(p, normalization)
        assert isinstance(levels, Levels)
        assert levels.counts.dtype == torch.int32
        assert levels.size == 30
        pi = calibration.possibility(p, normalization)
        assert torch.equal(levels.dense(pi.dtype), pi)
        assert (pi.amax(-1) == 1).all()
        assert (pi >= calibration.p_values(p)).all()

    @pytest.mark.parametrize("group", [None, "label"])
    def test_is_rounded_once(self, group):
        p, y = data(120, 3)
        new, _ = data(50, 3, seed=1)
        calibration = Calibration(group=group).fit(p, y)
        n = calibration.class_counts.tolist() if group else [120] * 3
        pi = calibration.possibility(new).tolist()
        for counts, degrees in zip(calibration.counts(new).tolist(), pi, strict=True):
            exact = [Fraction(c + 1, n_y + 1) for c, n_y in zip(counts, n, strict=True)]
            assert degrees == [float(np.float32(float(q / max(exact)))) for q in exact]

    def test_top_is_the_class_of_the_model_even_where_p_values_tie(self):
        calibration = Calibration().fit(*data(5))
        p, _ = data(400, seed=1)
        top = p.argmax(-1)
        p_values = calibration.p_values(p)
        assert (p_values.argmax(-1) != top).any()  # the case that matters occurs
        pi = calibration.possibility(p, "top")
        assert torch.equal(pi, p_values.scatter(-1, top.unsqueeze(-1), 1.0))
        assert torch.equal(calibration.levels(p, "top").dense(), pi)

    def test_top_prefers_none_of_several_classes_that_the_model_ties(self):
        calibration = Calibration("hinge").fit(*data(30))
        p = torch.tensor([[0.25, 0.375, 0.375, 0.0, 0.0]])
        expected = calibration.p_values(p).index_fill(-1, torch.tensor([1, 2]), 1.0)
        assert (calibration.p_values(p)[0, 1:3] < 1).all()  # else there would be nothing to raise
        assert torch.equal(calibration.possibility(p, "top"), expected)
        assert torch.equal(calibration.levels(p, "top").dense(), expected)
        smooth = Calibration("hinge", smooth=True).fit(*data(30)).possibility(p, "top", generator=generator())
        assert (smooth[0] == 1).tolist() == [False, True, True, False, False]

    def test_of_smoothed_p_values_is_normalised_too(self):
        calibration = Calibration(smooth=True).fit(*data(50))
        p, _ = data(20, seed=1)
        p_values = calibration.p_values(p, generator=generator(1))
        pi = calibration.possibility(p, generator=generator(1))
        torch.testing.assert_close(pi, p_values / p_values.amax(-1, keepdim=True))
        assert (pi.amax(-1) == 1).all()

    @pytest.mark.parametrize(
        ("kwargs", "reason"), [({"group": "label"}, "one grid"), ({"smooth": True}, "continuous")]
    )
    def test_levels_are_refused_where_there_is_no_grid(self, kwargs, reason):
        calibration = Calibration(**kwargs).fit(*data(300))
        with pytest.raises(ValueError, match=rf"{reason}.*call possibility\(\)"):
            calibration.levels(data(3)[0])


def ladder(size, dtype=torch.float64):
    """A calibration of ``size`` distinct scores, and items whose class 0 has the counts 0, ..., size."""
    step = torch.arange(1, 2 * size + 2, dtype=dtype) / (2 * size + 2)
    p = torch.stack([step, 1 - step], -1)
    return p[1::2], torch.zeros(size, dtype=torch.int64), p[0::2]


class TestPredictSet:
    @pytest.mark.filterwarnings("ignore:delta:UserWarning")
    @pytest.mark.parametrize("size", [1, 2, 9, 18, 19, 20, 29, 39, 48, 99, 199])
    def test_is_the_papers_set_at_every_boundary(self, size):
        p, y, new = ladder(size)
        calibration = Calibration("hinge").fit(p, y)
        counts = calibration.counts(new)[:, 0].tolist()
        assert sorted(counts) == list(range(size + 1))
        decimals = [
            "0",
            "0.01",
            "0.05",
            "0.07",
            "0.1",
            "0.14",
            "0.25",
            "0.28",
            "0.3",
            "0.55",
            "0.7",
            "0.95",
            "1",
        ]
        for text in decimals:
            inside = calibration.predict_set(new, float(text))[:, 0].tolist()
            assert inside == [Fraction(c + 1, size + 1) >= Fraction(text) for c in counts], text
        for numerator in range(size + 2):
            inside = calibration.predict_set(new, numerator / (size + 1))[:, 0].tolist()
            assert inside == [c + 1 >= numerator for c in counts]
        for numerator in range(1, size + 1):
            above, below = (float(np.nextafter(numerator / (size + 1), side)) for side in (1, 0))
            assert calibration.predict_set(new, above)[:, 0].tolist() == [c + 1 > numerator for c in counts]
            assert calibration.predict_set(new, below)[:, 0].tolist() == [c + 1 >= numerator for c in counts]

    @pytest.mark.filterwarnings("ignore:delta:UserWarning", "ignore:with group:UserWarning")
    @pytest.mark.parametrize("group", [None, "label"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_is_where_the_p_value_reaches_delta(self, group, dtype):
        p, y = data(90, 4, dtype)
        calibration = Calibration(group=group).fit(p, y)
        new, _ = data(60, 4, dtype, seed=1)
        n = np.array(calibration.class_counts.tolist() if group else [90] * 4)
        p_values = (calibration.counts(new).numpy() + 1) / (n + 1)
        for delta in (0.05, 0.1, 0.25, 0.9):
            assert np.array_equal(calibration.predict_set(new, delta).numpy(), p_values >= delta)

    def test_shrinks_as_delta_grows_and_holds_the_top_class(self):
        calibration = Calibration("difference").fit(*data(99))
        p, _ = data(200, seed=1)
        sets = [calibration.predict_set(p, delta) for delta in (0.02, 0.1, 0.3, 0.6, 1.0)]
        assert all((small <= large).all() for large, small in pairwise(sets))
        assert sets[0].sum() > sets[-1].sum()

    def test_says_when_delta_is_out_of_reach(self):
        calibration = Calibration().fit(*data(9))
        with pytest.warns(UserWarning, match=r"delta 0.1 excludes no class: with 9 calibration items .* 1/10"):
            assert calibration.predict_set(data(20, seed=1)[0], 0.1).all()
        assert not calibration.predict_set(data(20, seed=1)[0], 0.1001).all()  # says nothing: warnings are errors

    def test_says_which_share_of_classes_is_out_of_reach(self):
        p, _ = data(40, 3)
        labels = torch.tensor([0] * 9 + [1] * 10 + [2] * 21)
        calibration = Calibration(group="label").fit(p, labels)
        with pytest.warns(UserWarning, match=r"delta 0.1 never excludes 1 of 3 classes"):
            calibration.predict_set(p, 0.1)

    def test_of_smoothed_p_values(self):
        calibration = Calibration(smooth=True).fit(*data(9))
        p, _ = data(200, seed=1)
        inside = calibration.predict_set(p, 0.05, generator=generator(1))
        assert torch.equal(inside, calibration.p_values(p, generator=generator(1)) >= 0.05)
        assert not inside.all()  # smoothing has no floor

    @pytest.mark.parametrize("delta", [-0.1, 1.1, float("nan")])
    def test_refuses_what_is_no_significance_level(self, delta):
        calibration = Calibration().fit(*data(9))
        with pytest.raises(ValueError, match=r"delta must be a significance level in \[0, 1\], got"):
            calibration.predict_set(data(3)[0], delta)


class TestState:
    @pytest.mark.parametrize("kwargs", [{}, {"group": "label"}])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_goes_into_a_fresh_calibration_through_a_file(self, kwargs, dtype):
        calibration = fit(Calibration(**kwargs), *data(33, dtype=dtype))
        new, _ = data(20, dtype=dtype, seed=1)
        file = io.BytesIO()
        torch.save(calibration.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        other_size = fit(Calibration(**kwargs), *data(80, 3, seed=4))
        for receiver in (Calibration(**kwargs), other_size):
            for assign in (False, True):
                receiver.load_state_dict(state, assign=assign)
                assert torch.equal(receiver.p_values(new), calibration.p_values(new))
                assert receiver.size == 33

    def test_goes_through_a_parent_module(self):
        parent = torch.nn.ModuleDict({"a": Calibration().fit(*data(12)), "b": Calibration("hinge").fit(*data(7))})
        fresh = torch.nn.ModuleDict({"a": Calibration(), "b": Calibration("hinge")})
        fresh.load_state_dict(parent.state_dict())
        new, _ = data(20, seed=1)
        for name in parent:
            assert torch.equal(fresh[name].p_values(new), parent[name].p_values(new))

    def test_loading_copies(self):
        calibration = Calibration().fit(*data(12))
        fresh = Calibration()
        fresh.load_state_dict(calibration.state_dict())
        calibration.scores.zero_()
        assert fresh.scores.abs().sum() > 0

    def test_unfitted_is_a_state_too(self):
        calibration = Calibration().fit(*data(12))
        calibration.load_state_dict(Calibration().state_dict(), strict=True)
        assert not calibration.fitted
        with pytest.raises(RuntimeError, match=r"call fit\(probabilities, labels\) first"):
            calibration.p_values(data(3)[0])

    def test_of_another_grouping_is_refused(self):
        state = fit(Calibration(group="label"), *data(12)).state_dict()
        with pytest.raises(RuntimeError, match=r"it was made by .*label.*this calibration is .*null"):
            Calibration().load_state_dict(state)
        with pytest.raises(RuntimeError, match=r"it was made by .*null.*this calibration is .*label"):
            Calibration(group="label").load_state_dict(Calibration().fit(*data(12)).state_dict())

    @pytest.mark.parametrize("group", [None, "label"])
    def test_scores_computed_elsewhere_give_the_same_state(self, group):
        p, y = data(60)
        alpha = SCORES["proportion"](p, y, gamma=0.1)
        ours = fit(Calibration(group=group), p, y)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = Calibration(group=group).fit_scores(alpha, y, p.shape[1])
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        for name, tensor in ours.state_dict().items():
            assert torch.equal(tensor, theirs.state_dict()[name]), name
        with pytest.raises(ValueError, match="scores must be float32 or float64, one a label"):
            Calibration().fit_scores(alpha[1:], y, p.shape[1])

    def test_infinite_scores_are_scores(self):
        alpha = torch.tensor([-torch.inf, 0.0, torch.inf])
        calibration = Calibration("hinge").fit_scores(alpha, torch.tensor([0, 1, 1]), 2)
        p = torch.tensor([[0.5, 0.5]])  # scores of 0.5: only infinity is as nonconforming
        assert calibration.counts(p).tolist() == [[1, 1]]

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ({"gamma": 1}, {"gamma": 1.0}),
            ({}, {"gamma": 0.1}),
            ({"score": SCORES["hinge"]}, {"score": "hinge"}),
            (
                {"score": partial(SCORES["proportion"], gamma=2)},
                {"score": partial(SCORES["proportion"], gamma=2.0)},
            ),
        ],
    )
    def test_of_an_equal_configuration_is_taken_however_it_was_written(self, one, other):
        first, second = Calibration(**one).fit(*data(12)), Calibration(**other)
        second.load_state_dict(first.state_dict())
        assert torch.equal(second.p_values(data(20, seed=1)[0]), first.p_values(data(20, seed=1)[0]))

    @pytest.mark.parametrize(
        ("score", "options"),
        [("hinge", {}), (partial(SCORES["proportion"], gamma=3.0), {}), ("proportion", {"gamma": 3})],
    )
    def test_of_another_score_is_refused(self, score, options):
        state = Calibration(score, **options).fit(*data(12)).state_dict()
        with pytest.raises(RuntimeError, match="it was made by"):
            Calibration().load_state_dict(state)

    @pytest.mark.parametrize(
        ("name", "broken", "message"),
        [
            ("scores", lambda x: x.masked_fill(x == x[0], torch.nan), "scores must be numbers"),
            ("scores", lambda x: x.flip(0), "scores must ascend"),
            ("scores", lambda x: x[1:], "class_counts must be the numbers of labels, 59 in sum"),
            ("scores", lambda x: x.half(), "scores must be a list of numbers of torch.float32 or torch.float64"),
            (
                "class_counts",
                lambda x: x - torch.tensor([90, -90, 0, 0, 0]),
                "class_counts must be the numbers of labels",
            ),
            ("class_counts", lambda x: x.sum().reshape(1), "class_counts must be the numbers of labels"),
            (
                "class_counts",
                lambda x: x + torch.tensor([1, -1, 0, 0, 0]),
                "keys must hold as many items of each label",
            ),
            ("keys", lambda x: x[1:], "keys must be one for each of 60 scores"),
            ("keys", lambda x: x + 10_000, "keys must be one for each of 60 scores, of 5 classes"),
            ("keys", lambda x: x - 10_000, "keys must be one for each of 60 scores, of 5 classes"),
        ],
    )
    def test_that_is_broken_is_refused(self, name, broken, message):
        whole = fit(Calibration(group="label"), *data(60))
        state = whole.state_dict()
        receiver = Calibration(group="label")
        with pytest.raises(RuntimeError, match=message):
            receiver.load_state_dict({**state, name: broken(state[name])})
        assert not receiver.fitted

    @pytest.mark.parametrize("cast", [torch.nn.Module.half, torch.nn.Module.bfloat16, torch.nn.Module.double])
    def test_survives_a_cast_of_the_model_around_it(self, cast):
        p, y = data(50)
        calibration = Calibration().fit(p, y)
        before = calibration.p_values(p)
        cast(torch.nn.Sequential(calibration))
        assert torch.equal(calibration.p_values(p), before)

    def test_copies_are_independent(self):
        calibration = Calibration(gamma=0.3).fit(*data(12))
        new, _ = data(20, seed=1)
        twin = copy.deepcopy(calibration)
        expected = calibration.p_values(new)
        calibration.fit(*data(40, seed=5))
        assert torch.equal(twin.p_values(new), expected)


class HostReads(TorchDispatchMode):
    """Refuses operations that wait for the device, and measures the memory alive at any time."""

    BLOCKING = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "equal",
        "is_nonzero",
        "unique",
        "bincount",
    )

    def __init__(self, *inputs):
        super().__init__()
        self.inputs = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        assert name not in self.BLOCKING, f"{name} reads from the device"
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                address = storage.data_ptr()
                if address not in self.alive and address not in self.inputs:
                    self.alive[address] = storage.nbytes()
                    weakref.finalize(tensor, self.alive.pop, address, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


class TestCost:
    @pytest.mark.filterwarnings("ignore:delta:UserWarning")
    @pytest.mark.parametrize("group", [None, "label"])
    @pytest.mark.parametrize("name", SCORES)
    def test_nothing_reads_from_the_device_where_values_are_not_looked_at(self, name, group):
        p, y = data(40)
        new, _ = data(20, seed=1)
        draws = {"generator": generator()}
        with HostReads():
            calibration = Calibration(name, group=group, validate=False).fit(p, y, **draws)
            calibration.p_values(new, **draws)
            calibration.predict_set(new, 0.1, **draws)
            for normalization in ("proportional", "top"):
                calibration.possibility(new, normalization, **draws)
                if group is None:
                    calibration.levels(new, normalization, **draws)

    def test_the_guard_notices_a_read(self):
        with HostReads(), pytest.raises(AssertionError, match="reads from the device"):
            Calibration(validate=True).fit(*data(40))

    @pytest.mark.parametrize("group", [None, "label"])
    @pytest.mark.parametrize("name", ["difference", "proportion", "hinge", "cumulative"])
    def test_another_device_works_and_is_not_looked_at_by_itself(self, name, group):
        """The meta device has no values at all: whatever read one would raise."""
        p, y = (tensor.to("meta") for tensor in data(40))
        calibration = Calibration(name, group=group).fit(p, y)
        assert calibration.p_values(p).device.type == "meta"
        assert calibration.possibility(p, "top").shape == (40, 5)
        assert calibration.predict_set(p, 0.1).dtype == torch.bool

    @pytest.mark.parametrize("kwargs", [{}, {"group": "label"}])
    @pytest.mark.parametrize("name", ["difference", "proportion", "hinge", "cumulative"])
    @pytest.mark.parametrize("items", [448, 5000])
    def test_extra_memory_is_at_most_four_times_the_output(self, name, kwargs, items):
        calibration = fit(Calibration(name, validate=False, **kwargs), *data(50, 100))
        new, _ = data(items, 100)
        with HostReads(new) as meter:
            output = calibration.p_values(new)
        size = output.numel() * output.element_size()
        assert size <= meter.peak <= 5 * size


class TestInput:
    P, Y = data(12)

    @pytest.mark.parametrize(
        ("p", "y", "message"),
        [
            (P[0], Y, r"probabilities must have shape \(items, classes\).*got \(5,\)"),
            (P[None], Y, r"probabilities must have shape .*got \(1, 12, 5\)"),
            (P[:, :1], Y, r"at least 2 classes, got \(12, 1\)"),
            ((P * 100).long(), Y, "probabilities must be floating point, got torch.int64"),
            (P.log(), Y, "rows of numbers >= 0 with sum 1; row 0 has the least value -"),
            (P * 2, Y, r"row 0 has .* the sum 2"),
            (
                P.masked_fill(torch.eye(12, 5, dtype=torch.bool), torch.nan),
                Y,
                "row 0 has the least value nan",
            ),
            (P.masked_fill(torch.eye(12, 5, dtype=torch.bool), torch.inf), Y, "row 0 .* sum inf"),
            (P, Y[:-1], r"labels must hold one class index a row, integers of shape \(12,\), got .*\(11,\)"),
            (P, Y[:, None], r"labels .* got torch.int64 of shape \(12, 1\)"),
            (P, Y.float(), "labels .* got torch.float32"),
            (P, Y > 1, "labels .* got torch.bool"),
            (P, Y - Y.min() + 5, "labels must be class indices in 0..4, got 5.."),
            (P, Y - Y.max() - 1, r"labels must be class indices in 0..4, got -\d..-1"),
            (P, Y.to("meta"), "labels must be on cpu like the rest, got meta"),
        ],
    )
    def test_bad_calibration_data_is_refused(self, p, y, message):
        with pytest.raises(ValueError, match=message):
            Calibration().fit(p, y)

    @pytest.mark.parametrize(
        ("p", "message"),
        [
            (P[0], r"probabilities must have shape"),
            (P[:0], r"probabilities is an empty batch: it has shape \(0, 5\)"),
            (
                P[:, :4] / P[:, :4].sum(-1, keepdim=True),
                r"must have 5 classes as in fit, got shape \(12, 4\)",
            ),
            ((P * 100).int(), "probabilities must be floating point, got torch.int32"),
            (P * torch.nan, "row 0 has the least value nan"),
            (P.to("meta"), "probabilities must be on cpu like the calibration scores, got meta"),
        ],
    )
    @pytest.mark.parametrize("kwargs", [{}, {"smooth": True}])
    def test_bad_items_are_refused(self, p, message, kwargs):
        calibration = Calibration(**kwargs).fit(self.P, self.Y)
        for method in (calibration.p_values, calibration.counts, calibration.possibility):
            with pytest.raises(ValueError, match=message):
                method(p, generator=generator())

    def test_values_are_not_looked_at_where_that_is_asked(self):
        Calibration(validate=False).fit(self.P * 3, self.Y).p_values(self.P * 2)
        with pytest.raises(ValueError, match="row 0"):
            Calibration(validate=True).fit(self.P * 3, self.Y)

    @pytest.mark.parametrize(
        ("scores", "labels", "classes", "message"),
        [
            (torch.tensor([0.1, torch.nan]), torch.tensor([0, 1]), 3, "scores must be numbers, got nan in row 1"),
            (torch.rand(2), torch.tensor([0, 3]), 3, r"labels must be class indices in 0..2, got 0..3"),
            (torch.rand(2), torch.tensor([0.0, 1.0]), 3, "labels must hold one class index a row, integers"),
            (torch.rand(2), torch.tensor([0, 1]), 1, "classes must be the number of classes, an int of at least 2"),
            (torch.rand(2), torch.tensor([0, 1]), 3.0, "classes must be the number of classes"),
            ([0.1, 0.2], torch.tensor([0, 1]), 3, "scores must be a tensor, got list"),
            (torch.rand(2), np.array([0, 1]), 3, "labels must be a tensor, got ndarray"),
        ],
    )
    def test_bad_scores_are_refused(self, scores, labels, classes, message):
        with pytest.raises(ValueError, match=message):
            Calibration("hinge").fit_scores(scores, labels, classes)

    @pytest.mark.parametrize("items", [[[0.5, 0.5]], np.array([[0.5, 0.5]]), None])
    def test_what_is_no_tensor_is_refused(self, items):
        with pytest.raises(ValueError, match="probabilities must be a tensor, got"):
            Calibration().fit(items, torch.tensor([0]))
        with pytest.raises(ValueError, match="probabilities must be a tensor, got"):
            Calibration().fit(self.P, self.Y).p_values(items)

    def test_smoothed_p_values_have_no_floor_to_warn_of(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Calibration(smooth=True).fit(self.P, self.Y).predict_set(self.P, 0.01, generator=generator())
        with pytest.warns(UserWarning, match="every p-value is the item's draw"):
            Calibration(smooth=True).fit(self.P[:0], self.Y[:0])
        with pytest.warns(UserWarning, match=r"is the item's draw, which knows nothing: 4 of 5 classes have none"):
            Calibration(smooth=True, group="label").fit(self.P, torch.zeros_like(self.Y))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_softmax_in_any_precision_is_a_distribution(self, dtype):
        p = (5 * torch.randn(200, 1000, generator=generator())).to(dtype).softmax(-1)
        Calibration().fit(p, torch.zeros(200, dtype=torch.int64)).p_values(p)

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
    def test_labels_are_integers_of_any_width(self, dtype):
        expected = Calibration().fit(self.P, self.Y)
        assert torch.equal(Calibration().fit(self.P, self.Y.to(dtype)).scores, expected.scores)

    def test_before_fit_there_is_nothing_to_compare_with(self):
        for ask in (Calibration().p_values, Calibration().levels, Calibration(smooth=True).p_values):
            with pytest.raises(RuntimeError, match=r"call fit\(probabilities, labels\) first"):
                ask(self.P)

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"score": "diference"}, "score must be one of difference, proportion, .* got 'diference'"),
            ({"score": "difference", "gamma": 0.1}, "score 'difference' takes no options, got 'gamma'"),
            ({"score": "proportion", "alpha": 0.1}, "score 'proportion' takes gamma, got 'alpha'"),
            ({"score": "proportion", "gamma": -1.0}, "gamma must be a finite number, at least 0, got -1"),
            ({"group": "class"}, "group must be None or 'label', got 'class'"),
            ({"chunk_size": 0}, "chunk_size must be at least 1, an int, got 0"),
            ({"score": 3}, "score must be one of .*, or a function, got 3"),
            ({"smooth": "yes"}, "smooth must be True or False, got 'yes'"),
            ({"validate": 1}, "validate must be True, False or None, got 1"),
        ],
    )
    def test_bad_configuration_is_refused_at_once(self, kwargs, message):
        with pytest.raises(ValueError, match=message):
            Calibration(**kwargs)

    def test_draws_need_a_generator(self):
        with pytest.raises(
            ValueError, match=r"generator must be a torch.Generator, for score 'randomized-cumulative'"
        ):
            Calibration("randomized-cumulative").fit(self.P, self.Y)
        smooth = Calibration(smooth=True).fit(self.P, self.Y)
        with pytest.raises(ValueError, match=r"generator must be a torch.Generator, for smooth=True"):
            smooth.p_values(self.P)
        assert torch.equal(
            smooth.p_values(self.P, generator=generator(1)), smooth.p_values(self.P, generator=generator(1))
        )
        assert not torch.equal(
            smooth.p_values(self.P, generator=generator(1)), smooth.p_values(self.P, generator=generator(2))
        )

    def test_the_configuration_is_frozen_and_shown(self):
        calibration = Calibration("proportion", gamma=0.5, group="label")
        assert repr(calibration) == "Calibration(score='proportion', gamma=0.5, group='label', not fitted)"
        with pytest.raises(dataclasses.FrozenInstanceError):
            calibration.config.group = None

    def test_gamma_matters(self):
        new, _ = data(50, seed=1)
        first, second = (Calibration(gamma=gamma).fit(*data(50)).p_values(new) for gamma in (0.01, 10.0))
        assert not torch.equal(first, second)
