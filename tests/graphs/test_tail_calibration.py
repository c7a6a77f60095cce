"""Calibrations of tails: p-values by counting, nothing for what is known, and the promised coverage over redraws."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ccssl.conformal.calibration import CalibrationConfig
from ccssl.credal import Levels
from ccssl.credal.possibility import as_dense
from ccssl.graphs.calibration import TailCalibration, candidate_scores
from ccssl.graphs.known import Known
from ccssl.graphs.predictor import coverage_band

E, R = 6, 4  # relations of both kinds
L, B = 40, 12


def problem(seed=0, size=L, dtype=torch.float64):
    """Return distributions with answers, and further ones with what is no candidate; the sums are those of softmax."""
    draw = torch.Generator().manual_seed(seed)
    facts = torch.stack([torch.randint(high, (size,), generator=draw) for high in (E, R, E)], 1).numpy()
    held_out = torch.randn(size, E, generator=draw, dtype=dtype).mul(2).softmax(-1)
    excluded = torch.rand(B, E, generator=draw) < 0.3
    excluded[:, 0] = False
    q = torch.randn(B, E, generator=draw, dtype=dtype).mul(2).masked_fill(excluded, -torch.inf).softmax(-1)
    relations = torch.randint(R, (B,), generator=draw).numpy()
    return held_out, facts, q, relations, excluded


def nonconformity(q, answer, gamma):
    rival = max(p for entity, p in enumerate(q) if entity != answer)
    return rival - q[answer] if gamma is None else rival / (q[answer] + gamma)


def by_counting(held_out, facts, q, relations, excluded, gamma, per_relation):
    """Return p-values by the definition, with loops."""
    scores = [
        nonconformity(row, fact[2], gamma) for row, fact in zip(held_out.tolist(), facts.tolist(), strict=True)
    ]
    found = []
    for row, relation, out in zip(q.tolist(), relations.tolist(), excluded.tolist(), strict=True):
        mine = [
            a for a, fact in zip(scores, facts.tolist(), strict=True) if not per_relation or fact[1] == relation
        ]
        p = [(sum(a >= nonconformity(row, y, gamma) for a in mine) + 1) / (len(mine) + 1) for y in range(E)]
        found.append([0.0 if o else value for o, value in zip(out, p, strict=True)])
    return torch.tensor(found, dtype=torch.float64)


def fitted(held_out, facts, gamma=None, per_relation=False):
    config = CalibrationConfig("difference") if gamma is None else CalibrationConfig("proportion", {"gamma": gamma})
    tails = TailCalibration(config, R, per_relation)
    tails.fit([(held_out, facts)])
    return tails


@pytest.mark.parametrize("per_relation", [False, True])
@pytest.mark.parametrize("gamma", [None, 0.1, 0.5])
def test_p_values_by_counting(gamma, per_relation):
    held_out, facts, q, relations, excluded = problem()
    tails = fitted(held_out, facts, gamma, per_relation)
    expected = by_counting(held_out, facts, q, relations, excluded, gamma, per_relation)
    found = tails.p_values(q, relations, excluded)
    torch.testing.assert_close(found, expected)
    assert (found[excluded] == 0).all()
    other = by_counting(held_out, facts, q, relations, excluded, gamma, not per_relation)
    assert not torch.allclose(found, other)


@pytest.mark.parametrize("normalization", ["proportional", "top"])
@pytest.mark.parametrize("per_relation", [False, True])
def test_possibilities_are_p_values_with_the_maximum_raised_to_1(per_relation, normalization):
    held_out, facts, q, relations, excluded = problem()
    tails = fitted(held_out, facts, per_relation=per_relation)
    p = tails.p_values(q, relations, excluded)
    pi = tails.possibility(q, relations, excluded, normalization)
    assert isinstance(pi, Levels) != per_relation
    dense = as_dense(pi, torch.float64)
    assert (dense.amax(-1) == 1).all()
    assert (dense[excluded] == 0).all()
    assert (dense[~excluded] > 0).all()
    if normalization == "proportional":
        torch.testing.assert_close(dense, p / p.amax(-1, keepdim=True))
    else:
        top = dense == 1
        torch.testing.assert_close(dense[~top], p[~top])
        assert top.gather(-1, q.argmax(-1, keepdim=True)).all()


@pytest.mark.parametrize("per_relation", [False, True])
def test_sets_hold_the_candidates_with_a_p_value_of_delta_or_more(per_relation):
    held_out, facts, q, relations, excluded = problem()
    tails = fitted(held_out, facts, per_relation=per_relation)
    p = tails.p_values(q, relations, excluded)
    for delta in (0.05, 0.1, 0.25, 0.5, 1.0):
        found = tails.predict_set(q, relations, delta, excluded)
        assert torch.equal(found, (p >= delta) & ~excluded)
    assert 0 < tails.predict_set(q, relations, 0.25, excluded).sum() < (~excluded).sum()


def test_without_a_mask_everything_is_a_candidate():
    held_out, facts, q, relations, _ = problem()
    tails = fitted(held_out, facts)
    none = torch.zeros(B, E, dtype=torch.bool)
    assert torch.equal(tails.p_values(q, relations), tails.p_values(q, relations, none))
    assert (tails.p_values(q, relations) > 0).all()
    assert torch.equal(tails.predict_set(q, relations, 0.3), tails.predict_set(q, relations, 0.3, none))


@pytest.mark.parametrize("per_relation", [False, True])
def test_scores_may_come_in_pieces_and_what_was_fitted_before_is_forgotten(per_relation):
    held_out, facts, q, relations, excluded = problem()
    whole = fitted(held_out, facts, per_relation=per_relation)
    pieced = fitted(*problem(seed=1)[:2], per_relation=per_relation)
    pieced.fit((held_out[i : i + 7], facts[i : i + 7]) for i in range(0, L, 7))
    assert pieced.sizes == whole.sizes
    assert torch.equal(pieced.p_values(q, relations, excluded), whole.p_values(q, relations, excluded))
    if per_relation:
        assert whole.sizes == [int((facts[:, 1] == number).sum()) for number in range(R)]
    else:
        assert whole.sizes == [L]


def test_a_relation_without_calibration_facts_leaves_everything_possible():
    held_out, facts, q, relations, excluded = problem()
    held_out, facts = held_out[facts[:, 1] != 2], facts[facts[:, 1] != 2]
    tails = fitted(held_out, facts, per_relation=True)
    assert tails.sizes[2] == 0
    rows = relations == 2
    assert rows.any()
    assert torch.equal(tails.p_values(q, relations, excluded)[rows], (~excluded).double()[rows])
    assert torch.equal(tails.predict_set(q, relations, 0.01, excluded)[rows], ~excluded[rows])
    assert not torch.equal(tails.predict_set(q, relations, 0.5, excluded), ~excluded)


@pytest.mark.parametrize("per_relation", [False, True])
def test_a_state_can_be_loaded(per_relation):
    held_out, facts, q, relations, excluded = problem()
    ours = fitted(held_out, facts, per_relation=per_relation)
    again = TailCalibration(CalibrationConfig("difference"), R, per_relation)
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again.p_values(q, relations, excluded), ours.p_values(q, relations, excluded))
    with pytest.raises(RuntimeError, match="proportion"):
        TailCalibration(CalibrationConfig("proportion"), R, per_relation).load_state_dict(ours.state_dict())


class Fixed(nn.Module):
    """Scores by table, that tell whether they were asked for in training mode."""

    def __init__(self, scores):
        super().__init__()
        self.scores = nn.Parameter(scores)

    def forward(self, entities, relations):
        return self.scores[entities, relations] + 100 * self.training


def test_candidates_are_scored_in_evaluation_mode_and_known_tails_left_out():
    scorer = Fixed(torch.randn(E, R, E)).train()
    facts = np.array([[0, 1, 2], [0, 1, 3], [4, 2, 0]])
    queries = np.array([[4, 2], [0, 1], [1, 1]])
    scores, excluded = candidate_scores(scorer, queries, Known(facts, R), torch.device("cpu"))
    assert excluded.nonzero().tolist() == [[0, 0], [1, 2], [1, 3]]
    expected = scorer.scores[[4, 0, 1], [2, 1, 1]].detach()
    assert torch.equal(scores, expected.masked_fill(excluded, -torch.inf))
    assert scorer.training
    assert not scores.requires_grad
    scores, excluded = candidate_scores(scorer, queries, None, torch.device("cpu"))
    assert excluded is None
    assert torch.equal(scores, expected)


# ---- the guarantee -------------------------------------------------------------------------------------------------

NODES, KINDS, FACTS = 25, 3, 320
LABELED, HELD_OUT, FRESH = 100, 110, 110
REDRAWS, DELTA = 300, 0.1


def world(seed):
    """Return true facts, and a model that half knows them: it scores what is true a little higher."""
    draw = np.random.default_rng(seed)
    rows = draw.choice(NODES * KINDS * NODES, FACTS, replace=False)
    facts = np.stack([rows // (KINDS * NODES), rows // NODES % KINDS, rows % NODES], 1)
    scores = draw.standard_normal((NODES, 2 * KINDS, NODES))
    both = both_ways(facts)
    scores[both[:, 0], both[:, 1], both[:, 2]] += 1.5
    return facts, torch.from_numpy(scores)


def both_ways(facts):
    head, relation, tail = facts.T
    return np.concatenate([facts, np.stack([tail, relation + KINDS, head], 1)])


def misses(facts, scores, seed, *, per_relation=False, calibrate_on=slice(LABELED, LABELED + HELD_OUT)):
    """Divide the facts anew; return whether each fresh query's set misses its answer, and the facts."""
    order = np.random.default_rng((7, seed)).permutation(FACTS)
    known = Known(both_ways(facts[order[:LABELED]]), 2 * KINDS)
    held_out, fresh = (both_ways(facts[order[part]]) for part in (calibrate_on, slice(LABELED + HELD_OUT, FACTS)))
    tails = TailCalibration(CalibrationConfig("difference"), 2 * KINDS, per_relation)

    def distribution(queries):
        row = scores[queries[:, 0], queries[:, 1]]
        excluded = torch.zeros_like(row, dtype=torch.bool)
        excluded[known.of(queries[:, 0], queries[:, 1]).on("cpu")] = True
        return row.masked_fill(excluded, -torch.inf).softmax(-1), excluded

    tails.fit([(distribution(held_out)[0], held_out)])
    q, excluded = distribution(fresh)
    found = tails.predict_set(q, fresh[:, 1], DELTA, excluded)
    return ~found[torch.arange(len(fresh)), torch.from_numpy(fresh[:, 2])].numpy(), fresh


def test_tail_sets_cover_within_the_beta_binomial_band():
    """Over redraws of what is labeled, held out and fresh; each redraw is judged by the band of its sizes."""
    low, high = coverage_band(DELTA, HELD_OUT, FRESH)
    coverage = []
    for seed in range(REDRAWS):
        facts, scores = world(seed)
        coverage.append(1 - misses(facts, scores, seed)[0].mean())
    coverage = np.array(coverage)
    outside = np.sum((coverage < low) | (coverage > high))
    # A 95% band for pairs that were not independent at all; ours are less dependent, and rather inside.
    assert outside <= 0.05 * REDRAWS + 3 * np.sqrt(0.05 * 0.95 * REDRAWS)
    error = 1 - coverage.mean()
    noise = 4 * coverage.std() / np.sqrt(REDRAWS)
    assert error <= DELTA + 1 / (2 * HELD_OUT + 2) + noise
    assert error >= DELTA - 2 / HELD_OUT - noise  # nor are sets larger than they need to be
    assert coverage.std() > 0.01


def test_the_band_finds_out_who_calibrates_with_what_the_model_knows():
    """The facts kept aside were scored higher than fresh ones, as if they had been learned from."""
    low, _ = coverage_band(DELTA, HELD_OUT, FRESH)
    below = 0
    for seed in range(20):
        facts, scores = world(seed)
        order = np.random.default_rng((7, seed)).permutation(FACTS)
        learned = both_ways(facts[order[LABELED : LABELED + HELD_OUT]])
        scores[learned[:, 0], learned[:, 1], learned[:, 2]] += 2
        below += 1 - misses(facts, scores, seed)[0].mean() < low
    assert below >= 18


def deceived_world(seed):
    """Return the same, with a model that is sure of the first relation's tails, and wrong."""
    facts, scores = world(seed)
    both = both_ways(facts)
    first = both[both[:, 1] == 0]
    scores[first[:, 0], first[:, 1], first[:, 2]] -= 1.5
    scores[:, 0] *= 3
    return facts, scores


def test_per_relation_each_relation_is_covered():
    missed, count = np.zeros(2 * KINDS), np.zeros(2 * KINDS)
    for seed in range(REDRAWS // 2):
        found, fresh = misses(*deceived_world(seed), seed, per_relation=True)
        np.add.at(missed, fresh[:, 1], found)
        np.add.at(count, fresh[:, 1], 1)
    error = missed / count
    assert (error <= DELTA + 4 * np.sqrt(DELTA * (1 - DELTA) / count)).all()
    assert (error >= DELTA - 0.04).all()


def test_marginal_coverage_need_not_hold_for_one_relation():
    """What per-relation calibration is for."""
    missed, count = 0, 0
    for seed in range(40):
        found, fresh = misses(*deceived_world(seed), seed)
        missed += found[fresh[:, 1] == 0].sum()
        count += (fresh[:, 1] == 0).sum()
    assert missed / count > 2 * DELTA


@pytest.mark.parametrize(("delta", "calibration", "fresh"), [(0.1, 110, 110), (0.25, 30, 500), (0.05, 400, 50)])
def test_the_band_holds_95_percent_of_exact_calibrations(delta, calibration, fresh):
    low, high = coverage_band(delta, calibration, fresh)
    draw = np.random.default_rng(0)
    k = int(np.floor(delta * (calibration + 1)))
    error = draw.binomial(fresh, draw.beta(k, calibration + 1 - k, 20_000))
    inside = np.mean((1 - error / fresh >= low - 1e-12) & (1 - error / fresh <= high + 1e-12))
    assert 0.945 <= inside <= 0.995
    tighter = coverage_band(delta, calibration, fresh, level=0.5)
    assert low < tighter[0] <= 1 - delta + 0.02
    assert tighter[1] < high


def test_the_band_where_nothing_or_everything_can_be_excluded():
    assert coverage_band(0.1, calibration=5, fresh=10) == (1.0, 1.0)
    assert coverage_band(1.0, calibration=5, fresh=10) == (0.0, 1.0)


RESIDENT = Path("/proc/self/statm")


@pytest.mark.skipif(not RESIDENT.exists(), reason="only Linux tells the memory of a process so")
def test_memory_does_not_grow_with_the_calibration_facts():
    """What is kept of each piece must not pin the place of the piece itself, 2 MB here."""
    rows, entities, pieces = 128, 4096, 150
    facts = np.zeros((rows, 3), np.int64)

    def parts():
        for _ in range(pieces):
            yield torch.randn(rows, entities).softmax(-1), facts

    def resident():
        return int(RESIDENT.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    tails = TailCalibration(CalibrationConfig("difference"), R)
    tails.fit([next(parts())])
    before = resident()
    tails.fit(parts())
    assert tails.sizes == [rows * pieces]
    assert resident() - before < pieces * rows * entities * 4 / 5
