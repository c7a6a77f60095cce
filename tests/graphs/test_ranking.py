"""Filtered ranks: PyKEEN's on the same scores, a slow loop's on any scores, and the same in any number of pieces."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_graph import toy_graph

from ccssl.graphs.known import Known
from ccssl.graphs.ranking import HITS, TIES, filtered_ranks, pieces, rank
from ccssl.graphs.triples import make_graph

GRAPH = toy_graph()
E, R = len(GRAPH.entities), len(GRAPH.relations)


class Table:
    """A scorer that looks scores up, and notes how large the matrices are that it is asked for."""

    def __init__(self, scores):
        self.scores = scores  # (E, 2R, E)
        self.largest = 0

    def __call__(self, entities, relations):
        self.largest = max(self.largest, len(entities) * self.scores.shape[-1])
        return self.scores[entities, relations].clone()


def drawn(levels=None, seed=0):
    """Return scores; with few levels many of them tie."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(E, 2 * R, E, generator=draw)
    return Table(scores if levels is None else (scores * levels / 3).round())


class PykeenModel:
    """What PyKEEN's evaluator asks of a model, answered from our table of scores."""

    def __init__(self, table):
        self.table, self.device, self.num_entities = table, torch.device("cpu"), E

    def eval(self):
        return self

    def to(self, device):
        return self

    def predict(self, hrt_batch, target, **_):
        head, relation, tail = hrt_batch.T
        return self.table(head, relation) if target == "tail" else self.table(tail, relation + R)


def by_pykeen(table, facts, others):
    evaluation = pytest.importorskip("pykeen.evaluation")
    found = evaluation.RankBasedEvaluator(filtered=True).evaluate(
        PykeenModel(table),
        torch.from_numpy(facts),
        batch_size=16,
        use_tqdm=False,
        additional_filter_triples=[torch.from_numpy(other) for other in others],
    )
    names = {"mrr": "inverse_harmonic_mean_rank", **{f"hits@{k}": f"hits_at_{k}" for k in HITS}}
    return {
        ("" if ties == "realistic" else f"{ties}.")
        + ("" if side == "both" else f"{side}.")
        + ours: found.get_metric(f"{side}.{ties}.{theirs}")
        for ties in TIES
        for side in ("both", "head", "tail")
        for ours, theirs in names.items()
    }


@pytest.mark.parametrize("levels", [None, 1, 3])
@pytest.mark.parametrize("part", ["valid", "test"])
def test_figures_are_those_of_pykeen(levels, part):
    table = drawn(levels)
    facts = getattr(GRAPH, part)
    ours = filtered_ranks(table, GRAPH, facts).figures(TIES)
    theirs = by_pykeen(table, facts, [GRAPH.train, GRAPH.valid, GRAPH.test])
    assert ours.keys() == theirs.keys()
    assert len(ours) == 3 * 3 * 4
    for name, figure in theirs.items():
        assert ours[name] == pytest.approx(figure, rel=1e-6), name  # realistic ranks are float32 there
    assert (ours["optimistic.mrr"] > ours["mrr"] > ours["pessimistic.mrr"]) == (levels is not None)
    unfiltered = by_pykeen(table, facts, [])
    assert any(abs(unfiltered[name] - ours[name]) > 1e-3 for name in ours)


def slow_ranks(scores, answer, candidates):
    better = sum(scores[c] > scores[answer] for c in candidates if c != answer)
    equal = sum(scores[c] == scores[answer] for c in candidates if c != answer)
    return 1 + better, 1 + better + equal


few_scores = st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0, math.inf, math.nan])
facts_of_four = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 3)), min_size=2, max_size=12, unique=True
)


@given(facts_of_four, st.lists(few_scores, min_size=64, max_size=64), st.integers(1, 9), st.booleans())
def test_ranks_by_a_slow_loop(facts, scores, entries, some_untrained):
    """With ties, scores that are no numbers, answers known from elsewhere, and entities that were never trained."""
    names = [("abcd"[h], "rs"[r], "abcd"[t]) for h, r, t in facts]
    base = make_graph("drawn", [("a", "r", "b"), ("c", "s", "d")])
    rows = np.array([(base.entity_number[h], base.relation_number[r], base.entity_number[t]) for h, r, t in names])
    asked, known = rows[: len(rows) // 2 + 1], rows
    trained = np.array([True, True, not some_untrained, True])
    table = Table(torch.tensor(scores).reshape(4, 4, 4))
    found = filtered_ranks(
        table, base, asked, known=Known(base.both_ways(known), 4), trained=trained, entries=entries
    )
    expected = []
    answers = {}
    for head, relation, tail in base.both_ways(known).tolist():
        answers.setdefault((head, relation), set()).add(tail)
    for head, relation, tail in base.both_ways(asked).tolist():
        row = [-math.inf if math.isnan(s) else s for s in table.scores[head, relation].tolist()]
        row = [s if trained[entity] else -math.inf for entity, s in enumerate(row)]
        if not trained[head] or not trained[tail]:
            row[tail] = -math.inf
        candidates = [e for e in range(4) if e == tail or e not in answers[head, relation]]
        expected.append(slow_ranks(row, tail, candidates))
    assert list(zip(found.optimistic.tolist(), found.pessimistic.tolist(), strict=True)) == expected
    assert np.array_equal(found.realistic, np.array(expected).mean(1))
    assert found.heads.tolist() == [False] * len(asked) + [True] * len(asked)
    assert np.array_equal(found.relations, np.tile(asked[:, 1], 2))


@pytest.mark.parametrize("ties", TIES)
def test_figures_are_means_over_the_ranks(ties):
    ranks = filtered_ranks(drawn(2), GRAPH, GRAPH.test)
    figures = ranks.figures((ties,))
    prefix = "" if ties == "realistic" else f"{ties}."
    found = getattr(ranks, ties)
    for side, rows in (("", slice(None)), ("tail.", slice(0, 20)), ("head.", slice(20, 40))):
        assert figures[f"{prefix}{side}mrr"] == pytest.approx(np.mean([1 / r for r in found[rows]]))
        for k in HITS:
            assert figures[f"{prefix}{side}hits@{k}"] == np.mean([r <= k for r in found[rows]])
    assert figures[f"{prefix}mrr"] == pytest.approx(
        (figures[f"{prefix}head.mrr"] + figures[f"{prefix}tail.mrr"]) / 2
    )


def test_the_ranks_of_relations_are_a_partition():
    ranks = filtered_ranks(drawn(), GRAPH, GRAPH.test)
    parts = [ranks.of_relation(number) for number in range(R)]
    assert sum(len(part.optimistic) for part in parts) == len(ranks.optimistic)
    weighted = sum(len(p.optimistic) * p.figures()["mrr"] for p in parts if len(p.optimistic))
    assert weighted / len(ranks.optimistic) == pytest.approx(ranks.figures()["mrr"])
    assert parts[0].figures().keys() == ranks.figures().keys()
    assert ranks.of_relation(R).figures() == {}


def test_a_model_that_says_nothing_gets_the_middle_and_not_the_top():
    for constant in (0.0, math.nan, -math.inf, math.inf):
        ranks = filtered_ranks(Table(torch.full((E, 2 * R, E), constant)), GRAPH, GRAPH.test)
        assert (ranks.optimistic == 1).all()
        known = Known(GRAPH.known, 2 * R)
        both = GRAPH.both_ways(GRAPH.test)
        candidates = E - known.count(both[:, 0], both[:, 1]) + 1
        assert np.array_equal(ranks.pessimistic, candidates)
        assert np.array_equal(ranks.realistic, (1 + candidates) / 2)


def test_a_test_entity_that_was_never_trained_ranks_last():
    """As an answer, as the entity that is asked about, and as a candidate of others."""
    table = drawn()
    trained = np.ones(E, bool)
    stranger = int(GRAPH.test[0, 2])
    trained[stranger] = False
    table.scores[:, :, stranger] = 1e6  # what it would be given
    ranks = filtered_ranks(table, GRAPH, GRAPH.test, trained=trained)
    assert ranks.pessimistic[0] > 10
    assert ranks.optimistic[0] == ranks.pessimistic[0]  # last, and alone there
    both = GRAPH.both_ways(GRAPH.test)
    named = (both[:, [0, 2]] == stranger).any(1)
    known = Known(GRAPH.known, 2 * R)
    candidates = E - known.count(both[:, 0], both[:, 1]) + 1
    assert np.array_equal(ranks.pessimistic[named], candidates[named])
    table.scores[:, :, stranger] = -1e6
    others = filtered_ranks(table, GRAPH, GRAPH.test)
    assert np.array_equal(ranks.realistic[~named], others.realistic[~named])


@given(st.integers(1, 3 * E))
def test_pieces_bound_the_matrices_and_change_nothing(entries):
    whole, cut = drawn(2), drawn(2)
    expected = filtered_ranks(whole, GRAPH, GRAPH.test)
    found = filtered_ranks(cut, GRAPH, GRAPH.test, entries=entries)
    assert whole.largest == 2 * len(GRAPH.test) * E
    assert cut.largest <= max(entries, E)
    for name in ("optimistic", "pessimistic", "relations", "heads"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 200))
def test_pieces_cover_every_row_once(rows, columns, entries):
    found = list(pieces(rows, columns, entries))
    assert [row for part in found for row in range(rows)[part]] == list(range(rows))
    assert all(0 < part.stop - part.start <= max(1, entries // max(1, columns)) for part in found)


def test_a_scorer_of_ones_own_scores_is_left_unchanged():
    """Filtering works on a copy where the scorer gives the same tensor again and again."""
    fixed = torch.zeros(2 * len(GRAPH.test), E)
    filtered_ranks(lambda entities, relations: fixed, GRAPH, GRAPH.test)
    assert torch.equal(fixed, torch.zeros_like(fixed))


def test_half_precision_scores_are_ranked():
    table = drawn(3)
    expected = filtered_ranks(table, GRAPH, GRAPH.test).realistic
    table.scores = table.scores.bfloat16()  # small integers, which it holds exactly
    assert np.array_equal(filtered_ranks(table, GRAPH, GRAPH.test).realistic, expected)


def test_rank_of_a_single_candidate_is_one():
    scores = torch.tensor([[math.nan, 0.3, math.nan]])
    assert [int(side) for side in rank(scores, torch.tensor([1]))] == [1, 1]
