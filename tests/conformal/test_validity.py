"""Validity measured, audited, and, over thousands of drawings of the calibration set, proved to hold.

The statistical tests come in pairs: the same test passes what is sound and rejects what is broken.
"""

import dataclasses
import json
import warnings
from fractions import Fraction
from functools import cache
from itertools import combinations
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from scipy.stats import beta, betabinom, binom

from ccssl.conformal import SCORES, Calibration, audit, efficiency, validity, validity_error
from ccssl.credal.possibility import NORMALIZATIONS, Levels, possibility


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Thousands of tiny calls are slower on several threads, many times so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def data(n, seed=0, classes=4, sharpness=1.0, coarse=False, draw=None):
    """Predictions that are right as often as they say, before they are sharpened."""
    draw = draw or generator(seed)
    z = 1.5 * torch.randn(n, classes, generator=draw, dtype=torch.float64)
    labels = z.softmax(-1).multinomial(1, generator=draw).squeeze(-1)
    p = (sharpness * z).softmax(-1)
    if coarse:
        p = (p * 4).round() + 0.5
        p = p / p.sum(-1, keepdim=True)
    return p, labels


class TestValidityError:
    def test_counts_the_labels_of_little_possibility(self):
        pi = torch.tensor([[1.0, 0.2], [0.1, 1.0], [1.0, 0.05]])
        labels = torch.tensor([1, 0, 1])
        found = {delta: validity_error(pi, labels, delta).item() for delta in (0.0, 0.05, 0.1, 0.2, 1.0)}
        assert found == pytest.approx({0.0: 0, 0.05: 1 / 3, 0.1: 2 / 3, 0.2: 1, 1.0: 1})

    @pytest.mark.parametrize("normalization", NORMALIZATIONS)
    def test_levels_are_compared_exactly_at_every_boundary(self, normalization):
        for size in (1, 9, 19, 39, 99):
            counts = torch.stack([torch.arange(-1, size + 1), torch.full((size + 2,), size)], -1)
            labels = torch.zeros(size + 2, dtype=torch.int64)
            pi = Levels(counts, size, normalization)
            for text in ("0.01", "0.05", "0.07", "0.1", "0.14", "0.25", "0.3", "0.55", "0.7", "0.95"):
                expected = [Fraction(c + 1, size + 1) <= Fraction(text) for c in range(-1, size)] + [False]
                for row, small in enumerate(expected):
                    assert validity_error(pi[row : row + 1], labels[:1], float(text)).item() == small

    def test_of_normalised_levels_divides_once(self):
        """k/1000 by 10k/1000 is 0.1, but not for float32, which divides twice where p-values come first."""
        k = torch.arange(1, 100, dtype=torch.int32)
        pi = Levels(torch.stack([k - 1, 10 * k - 1], -1), size=999)
        labels = torch.zeros(99, dtype=torch.int64)
        p = pi.p_values(torch.float32)
        assert validity_error(p / p.amax(-1, keepdim=True), labels, 0.1) < 1
        assert validity_error(pi, labels, 0.1) == 1
        assert validity_error(pi.dense(torch.float32), labels, 0.1) == 1

    @pytest.mark.parametrize("top", [None, "model"])
    @pytest.mark.parametrize("normalization", NORMALIZATIONS)
    def test_levels_are_the_dense_degrees(self, normalization, top):
        counts = torch.randint(-1, 7, (300, 4), generator=generator(), dtype=torch.int32)
        counts[:, 0] = counts[:, 0].clamp_min(0)
        labels = torch.randint(4, (300,), generator=generator(1))
        given = torch.randint(4, (300,), generator=generator(2)) if top and normalization == "top" else None
        pi = Levels(counts, 6, normalization, given)
        for delta in (0.0, 0.2, 0.5, 0.9, 1.0):
            assert validity_error(pi, labels, delta) == validity_error(pi.dense(torch.float64), labels, delta)

    def test_takes_any_leading_shape(self):
        pi = possibility(torch.rand(3, 7, 4, generator=generator()))
        labels = torch.randint(4, (3, 7), generator=generator(1))
        assert validity_error(pi, labels, 0.4) == validity_error(pi.flatten(0, 1), labels.flatten(), 0.4)
        assert validity_error(pi[0, 0], labels[0, 0], 1.0) == 1

    @pytest.mark.parametrize(
        ("pi", "labels", "delta", "message"),
        [
            (
                torch.ones(3, 1),
                torch.zeros(3).long(),
                0.1,
                "pi must end in a dimension of at least 2 classes",
            ),
            (torch.ones(0, 2), torch.zeros(0).long(), 0.1, "pi is an empty batch"),
            (torch.ones(3, 2), torch.zeros(2).long(), 0.1, r"labels must hold one class index a row.*\(3,\)"),
            (torch.ones(3, 2), torch.zeros(3), 0.1, "labels must hold one class index a row.*float32"),
            (
                torch.ones(3, 2),
                torch.tensor([0, 1, 2]),
                0.1,
                r"labels must be class indices in 0..1, got 0..2",
            ),
            (torch.ones(3, 2), torch.zeros(3).long(), 1.5, r"delta must be .* in \[0, 1\], got 1.5"),
            (torch.ones(3, 2), torch.zeros(3).long().to("meta"), 0.1, "labels must be on cpu .* got meta"),
        ],
    )
    def test_refuses_what_it_cannot_measure(self, pi, labels, delta, message):
        with pytest.raises(ValueError, match=message):
            validity_error(pi, labels, delta)

    @pytest.mark.parametrize("normalization", NORMALIZATIONS)
    def test_reads_nothing_from_another_device(self, normalization):
        """The meta device has no values: whatever read one would raise."""
        labels = torch.zeros(5, dtype=torch.int64, device="meta")
        levels = Levels(torch.zeros(5, 3, dtype=torch.int32, device="meta"), 9, normalization)
        for pi in (levels, torch.zeros(5, 3, device="meta")):
            assert validity_error(pi, labels, 0.1).device.type == "meta"
            assert efficiency(pi).overall.device.type == "meta"


class TestEfficiency:
    def test_is_the_mean_possibility(self):
        pi = possibility(torch.rand(50, 6, generator=generator()))
        found = efficiency(pi)
        assert found.overall.item() == pytest.approx(pi.numpy().mean(), rel=1e-6)
        np.testing.assert_allclose(found.per_class.numpy(), pi.numpy().mean(0), rtol=1e-6)

    @pytest.mark.parametrize("normalization", NORMALIZATIONS)
    def test_levels_are_the_dense_degrees(self, normalization):
        pi = Levels(torch.randint(0, 9, (50, 6), generator=generator()), 8, normalization)
        assert torch.equal(efficiency(pi).per_class, efficiency(pi.dense()).per_class)

    def test_of_one_class_and_of_all(self):
        assert efficiency(torch.eye(4)).overall == 0.25
        assert efficiency(torch.ones(3, 5, 4)).overall == 1
        assert efficiency(torch.ones(4)).per_class.shape == (4,)

    def test_of_half_precision_is_summed_in_single(self):
        pi = torch.tensor([1.0, 0.4], dtype=torch.float16).expand(5000, 2)
        assert efficiency(pi).overall.dtype == torch.float32
        assert efficiency(pi).overall.item() == pytest.approx(0.7, abs=1e-3)

    def test_a_sharper_model_is_more_efficient_at_equal_validity(self):
        sizes = []
        for sharpness in (0.0, 1.0):
            p, y = data(400, sharpness=sharpness)
            sizes.append(efficiency(Calibration().fit(p[:200], y[:200]).levels(p[200:])).overall.item())
        assert sizes[1] < sizes[0]


# ---- validity over drawings of everything

REPETITIONS, SIZE, CLASSES = 2000, 19, 3
DELTAS = (0.05, 0.1, 0.25)  # the first two are reached exactly with 19 calibration items
NAMES = list(SCORES)
FALSE_ALARM = 1e-6 / (len(NAMES) * len(NORMALIZATIONS) * len(DELTAS))


def is_invalid(pi, labels, delta):
    """Exact binomial test of P(pi(Y) <= delta) <= delta, one row a repetition.

    Every repetition has a training, a calibration and a test set of its own and one test item, so that the
    errors are independent: their number is stochastically at most Binomial(rows, delta) if pi is valid. A
    valid pi is rejected with probability below FALSE_ALARM, which makes less than 1e-6 over all scores,
    normalisations and deltas.
    """
    errors = round(validity_error(pi, labels, delta).item() * len(labels))
    return binom.sf(errors - 1, len(labels), delta) < FALSE_ALARM


@cache
def world(reuse):
    """Draw REPETITIONS small problems: Gaussian classes, and a predictor that remembers its training items.

    The predictor lets the training items vote, near ones more. Returns its predictions for calibration and
    test items with their labels. With ``reuse`` the calibration items are among those it was trained on.
    """
    draw = generator(2023)
    centers = torch.tensor([[0.0, 0.0], [0.7, 0.0], [0.0, 0.7]], dtype=torch.float64)

    def items(n):
        labels = torch.randint(CLASSES, (REPETITIONS, n), generator=draw)
        return centers[labels] + torch.randn(REPETITIONS, n, 2, generator=draw, dtype=torch.float64), labels

    (x_train, y_train), (x_cal, y_cal), (x_test, y_test) = items(40), items(SIZE), items(1)
    if reuse:
        x_cal, y_cal = x_train[:, :SIZE], y_train[:, :SIZE]
    votes = torch.nn.functional.one_hot(y_train, CLASSES).double()

    def predict(x):
        closeness = torch.exp(-8 * torch.cdist(x, x_train) ** 2)
        belief = closeness @ votes + 1e-3
        return belief / belief.sum(-1, keepdim=True)

    return predict(x_cal), y_cal, predict(x_test), y_test.squeeze(-1)


def possibilities(reuse, make, transform=lambda calibration: calibration):
    """Calibrate every problem anew; return the possibilities of its test item, one row a problem."""
    p_cal, y_cal, p_test, _ = world(reuse)
    draw = generator(1)
    rows = {normalization: [] for normalization in NORMALIZATIONS}
    calibration = make()
    for cal, labels, test in zip(p_cal, y_cal, p_test, strict=True):
        transform(calibration.fit(cal, labels, generator=draw))
        for normalization, found in rows.items():
            found.append(calibration.possibility(test, normalization, generator=draw))
    return {normalization: torch.cat(found) for normalization, found in rows.items()}


class TestValidityOverRepetitions:
    """Float64 throughout, so that a degree is the float64 nearest to its fraction, and so is delta."""

    @pytest.mark.parametrize("name", NAMES)
    def test_holds_for_every_score_and_normalisation(self, name):
        _, _, _, labels = world(False)
        for normalization, pi in possibilities(False, lambda: Calibration(name, validate=False)).items():
            for delta in DELTAS:
                assert not is_invalid(pi, labels, delta), (normalization, delta)

    @pytest.mark.parametrize("name", NAMES)
    def test_is_lost_where_training_items_are_reused(self, name):
        _, _, _, labels = world(True)
        for normalization, pi in possibilities(True, lambda: Calibration(name, validate=False)).items():
            # With 19 items the proportional degree is at most 0.05 only where some class fits better than all
            # of them: remembered items leave no room for that, and hide the fault at this delta.
            for delta in DELTAS if normalization == "top" else DELTAS[1:]:
                assert is_invalid(pi, labels, delta), (normalization, delta)

    def test_is_lost_where_one_calibration_score_in_the_count_is_forgotten(self):
        """The finest error there is, p = c / (L + 1): the test has the power to see it."""
        _, _, _, labels = world(False)
        p_cal, y_cal, p_test, _ = world(False)
        counts = torch.cat(
            [
                Calibration("difference", validate=False).fit(cal, y).counts(test)
                for cal, y, test in zip(p_cal, y_cal, p_test, strict=True)
            ]
        )
        assert not is_invalid(Levels(counts, SIZE, "top", p_test[:, 0].argmax(-1)), labels, 0.05)
        assert is_invalid(Levels(counts - 1, SIZE, "top", p_test[:, 0].argmax(-1)), labels, 0.05)

    @pytest.mark.parametrize("kwargs", [{"group": "label"}, {"smooth": True}])
    def test_holds_for_class_conditional_and_smoothed_p_values(self, kwargs):
        _, _, _, labels = world(False)
        found = possibilities(False, lambda: Calibration("proportion", validate=False, **kwargs))
        for pi in found.values():
            for delta in DELTAS:
                assert not is_invalid(pi, labels, delta)
                for label in range(CLASSES):
                    if "group" in kwargs:
                        assert not is_invalid(pi[labels == label], labels[labels == label], delta)

    def test_smoothed_p_values_are_exactly_uniform(self):
        """Without normalisation the error is delta, neither more nor less, ties or not."""
        p_cal, y_cal, p_test, labels = world(False)
        calibration, draw = Calibration("hinge", smooth=True, validate=False), generator(1)
        p = torch.cat(
            [
                calibration.fit((cal * 4).round() / 4, y).p_values((test * 4).round() / 4, generator=draw)
                for cal, y, test in zip(p_cal, y_cal, p_test, strict=True)
            ]
        )
        for delta in (0.03, *DELTAS, 0.5):
            errors = round(validity_error(p, labels, delta, validate=False).item() * REPETITIONS)
            assert binom.cdf(errors, REPETITIONS, delta) > 1e-7
            assert binom.sf(errors - 1, REPETITIONS, delta) > 1e-7


# ------------------------------------------------------------------------------------------- the audit


def ranked(test_ranks, size, items):
    """A calibration and fresh items whose scores have the given places among all size + items scores."""
    score = torch.arange(1, size + items + 1, dtype=torch.float64) / (size + items + 1)
    p = torch.stack([1 - score, score], -1)  # the hinge score of class 0 is the score
    fresh = torch.zeros(size + items, dtype=torch.bool)
    fresh[list(test_ranks)] = True
    labels = torch.zeros(size + items, dtype=torch.int64)
    return Calibration("hinge").fit(p[~fresh], labels[~fresh]), p[fresh], labels[fresh]


def fit_quietly(calibration, size):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return calibration.fit(*data(size))


def quick(*args, level=0.3, **kwargs):
    return audit(*args, level=level, simulations=60, **kwargs)


class TestAuditLaw:
    @pytest.mark.parametrize(("size", "items", "delta"), [(4, 3, 0.25), (4, 3, 0.4), (5, 2, 0.5), (3, 3, 0.99)])
    def test_p_value_is_the_share_of_orders_with_as_many_errors(self, size, items, delta):
        """All orders of size + items scores are equally likely: count them."""
        rows = [
            quick(*ranked(places, size, items), deltas=[delta]).rows[0]
            for places in combinations(range(size + items), items)
        ]
        for row in rows:
            as_many = sum(other.errors >= row.errors for other in rows) / len(rows)
            assert row.p_value == pytest.approx(as_many, rel=1e-12)
        assert len({row.errors for row in rows}) > 1

    def test_statistics_of_all_p_values_are_those_of_all_orders(self):
        size, items = 5, 3
        found = [
            audit(*ranked(places, size, items), deltas=[0.5], simulations=4000).uniformity
            for places in combinations(range(size + items), items)
        ]
        for row in found:
            for name in ("excess", "distance"):
                statistic = getattr(row, name)
                exact = np.mean([getattr(other, name) >= statistic - 1e-12 for other in found])
                assert getattr(row, f"{name}_p_value") == pytest.approx(exact, abs=0.05)  # 6 standard errors

    def test_errors_of_classes_add_up(self):
        p, y = data(120, classes=3)
        new, labels = data(60, seed=1, classes=3)
        calibration = Calibration(group="label").fit(p, y)
        n, m = calibration.class_counts.tolist(), labels.bincount(minlength=3).tolist()
        row = quick(calibration, new, labels, deltas=[0.2]).rows[0]
        rng = np.random.default_rng(0)
        drawn = sum(
            rng.binomial(m_y, rng.beta(int(0.2 * (n_y + 1)), n_y + 1 - int(0.2 * (n_y + 1)), 40_000))
            for n_y, m_y in zip(n, m, strict=True)
        )
        assert row.p_value == pytest.approx((drawn >= row.errors).mean(), abs=0.015)
        np.testing.assert_allclose(row.band, np.quantile(drawn / 60, [0.025, 0.975]), atol=0.02)
        assert row.band[0] < row.long_run[0] < row.long_run[1] < row.band[1]

    def test_one_class_alone_is_the_ordinary_audit(self):
        p, y = data(150, classes=3)
        new, labels = data(200, seed=1, classes=3)
        of = labels == 1
        within = quick(Calibration(group="label").fit(p, y), new[of], labels[of])
        alone = quick(Calibration().fit(p[y == 1], y[y == 1]), new[of], labels[of])
        assert within.rows == alone.rows
        assert within.uniformity == alone.uniformity

    def test_bands_are_quantiles_of_the_law(self):
        new, labels = data(500, seed=1)
        row = quick(Calibration().fit(*data(99)), new, labels, deltas=[0.1]).rows[0]
        low, high = betabinom(500, 10, 90).ppf([0.025, 0.975]) / 500
        assert row.band == (low, high)
        rng = np.random.default_rng(0)
        np.testing.assert_allclose(row.long_run, np.quantile(rng.beta(10, 90, 10**6), [0.025, 0.975]), atol=5e-4)

    @pytest.mark.parametrize("text", ["0.05", "0.07", "0.14", "0.29", "0.55", "0.57", "0.58"])
    def test_a_delta_on_the_grid_is_reached_exactly(self, text):
        """0.29 * 100 < 29 and 0.07 * 100 > 7 in float64."""
        calibration, fresh = Calibration().fit(*data(99)), data(50, seed=1)
        k = int(100 * Fraction(text))
        for delta, reached in ((float(text), k), (float(np.nextafter(float(text), 0)), k - 1)):
            (row,) = quick(calibration, *fresh, deltas=[delta]).rows
            np.testing.assert_allclose(row.long_run, beta.ppf([0.025, 0.975], reached, 100 - reached), rtol=1e-12)

    def test_a_delta_inside_a_cell_of_smoothed_p_values_counts_as_its_upper_end(self):
        calibration, fresh = Calibration(smooth=True).fit(*data(19)), data(50, seed=1)
        for delta, reached in ((0.01, 1), (0.05, 1), (0.12, 3)):
            (row,) = quick(calibration, *fresh, deltas=[delta], generator=generator()).rows
            np.testing.assert_allclose(row.long_run, beta.ppf([0.025, 0.975], reached, 20 - reached), rtol=1e-12)

    @pytest.mark.parametrize(
        ("kwargs", "coarse"),
        [
            ({}, False),
            ({}, True),
            ({"group": "label"}, False),
            ({"smooth": True}, True),
            ({"score": "cumulative"}, True),
        ],
    )
    def test_false_alarms_are_as_rare_as_promised(self, kwargs, coarse):
        """80 audits of sound calibrations at level 0.1: 24 alarms or more have a probability under 1e-6."""
        draw = generator(5)
        alarms = 0
        for _ in range(80):
            calibration = Calibration(validate=False, **kwargs).fit(*data(60, draw=draw, coarse=coarse))
            fresh = data(80, draw=draw, coarse=coarse)
            alarms += not audit(calibration, *fresh, level=0.1, simulations=99, generator=draw).valid
        assert binom.sf(23, 80, 0.1) < 1e-6
        assert alarms < 24

    @pytest.mark.parametrize("kwargs", [{}, {"group": "label"}, {"smooth": True}])
    def test_cells_that_are_taken_together_keep_the_law(self, kwargs, monkeypatch):
        calibration, fresh = fit_quietly(Calibration(**kwargs), 300), data(400, seed=1)
        every = audit(calibration, *fresh, simulations=4000, generator=generator())
        monkeypatch.setattr(validity, "SIMULATED_CELLS", 40)
        monkeypatch.setattr(validity, "FEWEST_THRESHOLDS", 12)
        some = audit(calibration, *fresh, simulations=4000, generator=generator())
        assert some.rows == every.rows
        assert len(some.curve.threshold) < len(every.curve.threshold) / 5
        exact = dict(
            zip(every.curve.threshold, zip(*dataclasses.astuple(every.curve)[1:], strict=True), strict=True)
        )
        found = zip(*dataclasses.astuple(some.curve), strict=True)
        for threshold, error, low, high in found:
            assert error == pytest.approx(exact[threshold][0], abs=1e-12)
            assert (low, high) == pytest.approx(exact[threshold][1:], abs=0.012)  # simulated both times

    def test_faults_are_found_with_cells_taken_together(self, monkeypatch):
        monkeypatch.setattr(validity, "SIMULATED_CELLS", 40)
        calibration, (new, labels) = Calibration().fit(*data(300)), data(400, seed=1)
        wrong = (labels + (torch.arange(400) % 4 == 0)) % 4  # every fourth label is another
        assert audit(calibration, new, labels).uniformity.excess_p_value > 0.01
        assert audit(calibration, new, wrong).uniformity.excess_p_value < 0.01

    def test_the_law_of_many_items_loses_nothing_that_matters(self):
        laws = [
            betabinom.pmf(np.arange(n + 1), n, a, b) for n, a, b in ((2000, 3, 40), (500, 10, 90), (30, 0.5, 9))
        ]
        exact, found = laws[0], laws[0]
        for law in laws[1:]:
            exact, found = np.convolve(exact, law), validity.law_of_sum(found, law)
        np.testing.assert_allclose(found, exact, rtol=1e-9, atol=1e-29)
        np.testing.assert_allclose(
            validity.law_of_errors(700, 13, 80), betabinom.pmf(np.arange(701), 700, 13, 67), rtol=1e-9
        )


class TestAuditVerdict:
    def test_of_a_sound_calibration(self):
        result = audit(Calibration().fit(*data(200)), *data(800, seed=1))
        assert result.valid
        assert result.verdict.startswith("No sign against validity in 800 fresh items with 200 calibration items")
        assert [row.delta for row in result.rows] == [0.05, 0.1, 0.25]
        assert "could be smaller" not in result.verdict

    @pytest.mark.parametrize("group", [None, "label"])
    def test_of_reused_training_items(self, group):
        verdicts = []
        for reuse in (True, False):
            # One item a problem: predictors differ, items are exchangeable all the same.
            p_cal, y_cal, p_test, y_test = world(reuse)
            calibration = Calibration(group=group).fit(p_cal[:200, 0], y_cal[:200, 0])
            verdicts.append(audit(calibration, p_test[200:700, 0], y_test[200:700]))
        broken, sound = verdicts
        assert not broken.valid
        assert broken.verdict.startswith("Not valid: at delta 0.05 the true label is deemed implausible for ")
        assert broken.rows[0].error > broken.rows[0].band[1]
        assert sound.valid

    def test_of_faults_between_the_deltas(self):
        result = audit(Calibration("hinge").fit(*data(300)), *data(2000, seed=1, sharpness=2.5), deltas=[0.001])
        assert result.rows[0].errors == 0
        assert not result.valid
        assert "more small p-values than chance explains" in result.verdict

    def test_of_an_overly_cautious_calibration(self):
        def lumpy(probabilities, labels=None):
            return SCORES["hinge"](probabilities, labels).mul(2).floor()

        result = audit(Calibration(lumpy).fit(*data(200)), *data(800, seed=1))
        assert result.valid
        assert result.uniformity.distance_p_value < 0.01 < result.uniformity.excess_p_value
        assert "the sets could be smaller" in result.verdict

    def test_of_deltas_out_of_reach(self):
        result = audit(Calibration().fit(*data(15)), *data(100, seed=1), deltas=[0.01, 0.05, 0.5])
        assert [row.reachable for row in result.rows] == [False, False, True]
        assert result.rows[0].band == result.rows[0].long_run == (0, 0)
        assert result.rows[0].p_value == 1
        assert "delta 0.01, 0.05 is out of reach for so few calibration items" in result.verdict

    @pytest.mark.parametrize("group", [None, "label"])
    def test_of_an_empty_calibration(self, group):
        with pytest.warns(UserWarning, match="calibration set is empty"):
            calibration = Calibration(group=group).fit(torch.ones(0, 4), torch.ones(0).long())
        result = audit(calibration, *data(50))
        assert result.valid
        assert not any(row.reachable for row in result.rows)

    def test_is_one_sentence_and_repeatable(self):
        first, second = (audit(Calibration().fit(*data(80)), *data(90, seed=1)) for _ in range(2))
        assert first == second
        assert first.verdict.endswith(".")
        assert ". " not in first.verdict

    def test_of_randomised_calibrations_takes_their_draws(self):
        calibration = Calibration("randomized-cumulative").fit(*data(80), generator=generator())
        assert audit(calibration, *data(90, seed=1), generator=generator(1)).valid
        with pytest.raises(ValueError, match="generator must be"):
            audit(calibration, *data(90, seed=1))

    def test_does_not_depend_on_how_items_are_batched(self):
        p, y = data(3000, seed=1)
        order = torch.randperm(3000, generator=generator())
        calibration = Calibration().fit(*data(80))
        assert quick(calibration, p, y) == quick(calibration, p[order], y[order])

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            (
                {"deltas": []},
                r"deltas must be significance levels in \(0, 1\), a sequence of one or more, got \[\]",
            ),
            ({"deltas": [0.1, 1.0]}, r"deltas must be .* got \[0.1, 1.0\]"),
            ({"level": 0.0}, "level must be in"),
            ({"level": 1e-4}, "simulations, an int, more than 4/level"),
            ({"simulations": 10}, "simulations, an int, more than 4/level .* got level 0.05 and simulations 10"),
            ({"labels": torch.zeros(3).long()}, r"labels must hold one class index a row"),
            ({"labels": torch.full((20,), 9)}, r"labels must be class indices in 0..3, got 9..9"),
            ({"probabilities": torch.ones(20, 4)}, "row 0 has"),
            ({"probabilities": torch.ones(0, 4), "labels": torch.ones(0).long()}, "empty batch"),
        ],
    )
    def test_bad_input_is_refused(self, kwargs, message):
        p, y = data(20)
        arguments = {"probabilities": p, "labels": y} | kwargs
        with pytest.raises(ValueError, match=message):
            audit(Calibration().fit(*data(30)), **arguments)

    def test_needs_a_fitted_calibration(self):
        with pytest.raises(RuntimeError, match="call fit"):
            audit(Calibration(), *data(20))


class TestAuditPicture:
    RESULT = audit(Calibration().fit(*data(60)), *data(200, seed=1), simulations=200)

    def test_is_well_formed_and_the_same_each_time(self):
        svg = self.RESULT.svg()
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert svg == self.RESULT.svg()

    @pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
    def test_is_written_in_the_format_of_the_ending(self, ending, tmp_path):
        path = self.RESULT.plot(tmp_path / f"audit.{ending}")
        start = path.read_bytes()[:8]
        assert start.startswith({"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}[ending])

    def test_shows_what_was_found(self):
        left, right = self.RESULT.figure().axes
        (steps,) = [line for line in left.lines if line.get_label() == "observed"]
        assert tuple(steps.get_ydata()[1:]) == self.RESULT.curve.error
        assert [text.get_text() for text in right.texts] == [f"{row.error:.1%}" for row in self.RESULT.rows[::-1]]

    def test_curve_is_the_distribution_of_the_p_values(self):
        calibration = Calibration().fit(*data(60))
        new, labels = data(200, seed=1)
        p = calibration.p_values(new).gather(-1, labels.unsqueeze(-1)).numpy()
        curve = self.RESULT.curve
        np.testing.assert_allclose(curve.error, [(p <= t).mean() for t in curve.threshold], rtol=1e-12)
        assert all(low <= t <= high for t, low, high in zip(curve.threshold, curve.low, curve.high, strict=True))

    def test_becomes_json(self):
        read = json.loads(json.dumps(self.RESULT.to_dict()))
        assert read["verdict"] == self.RESULT.verdict
        assert read["rows"][0]["errors"] == self.RESULT.rows[0].errors
        assert read.keys() == {field.name for field in dataclasses.fields(self.RESULT)}

    def test_cannot_be_changed(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            self.RESULT.valid = False
