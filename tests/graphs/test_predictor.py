"""New facts and sets of tails: recomputed one query at a time, nothing that is known, the same in any pieces."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from toy_graph import ENTITIES, toy_config, toy_graph

from ccssl.errors import InputError
from ccssl.graphs import predictor as room
from ccssl.graphs.calibration import TailCalibration
from ccssl.graphs.predictor import Link, LinkPredictor, coverage_band, coverage_band_of_groups
from ccssl.graphs.ranking import pieces
from ccssl.graphs.triples import make_graph

R = 4
FIT = {"split": "60:30:10", "epochs": 40, "dim": 16, "lr": 0.05, "eval_every": 20}


def fitted(graph=None, **changes):
    return LinkPredictor(toy_config(**{**FIT, **changes})).fit(toy_graph() if graph is None else graph)


def exact(predictor):
    """Return a predictor whose weights are so round that scores are exact, however many are computed at once.

    Else the order of summation could break a tie with a calibration score, and move a p-value by a step.
    """
    training = predictor.training
    training.best_weights = {name: (8 * t).round() / 8 for name, t in training.best_weights.items()}
    return LinkPredictor.of(training)


@pytest.fixture(scope="module")
def predictor():
    return exact(fitted())


@pytest.fixture(scope="module")
def each(predictor):
    """The same, calibrated for each relation and direction."""
    return LinkPredictor.of(predictor.training, per_relation=True)


def queries_both_ways(graph):
    every = [(e, r) for e in range(len(graph.entities)) for r in range(2 * len(graph.relations))]
    return [graph.named(*query) for query in every]


def numbers_of(links):
    return [link[5:9] for link in links]


def asked_at_once(predictor, queries):
    """Return scores and distributions of queries, and what is known of them from labeled facts."""
    graph, facts = predictor.graph, predictor.training.facts.tolist()
    numbers = [graph.query(query) for query in queries]
    with torch.no_grad():
        scores = predictor.network(*torch.tensor(numbers).T)
    known = torch.zeros_like(scores, dtype=torch.bool)
    for row, query in enumerate(numbers):
        known[row, [t for h, r, t in facts if (h, r) == query]] = True
    return scores, scores.masked_fill(known, -torch.inf).softmax(-1), known


def by_counting(predictor, query, q, known, delta):
    """Return p-values and possibilities of all entities for one query, and the members of its set."""
    tails = predictor.tails
    assert isinstance(tails, TailCalibration)
    group = tails.groups[predictor.graph.query(query)[1] if len(tails.groups) > 1 else 0]
    p = torch.zeros(len(q))
    for e in (~known).nonzero().flatten().tolist():
        alpha = torch.cat([q[:e], q[e + 1 :]]).max() - q[e]
        p[e] = ((group.scores >= alpha).sum() + 1) / (group.size + 1)
    return p, p / p.max(), [e for e in range(len(q)) if p[e] >= delta]


@pytest.mark.parametrize("kind", ["predictor", "each"])
@pytest.mark.parametrize("delta", [0.1, 0.4])
def test_predictions_are_those_of_one_query_at_a_time(kind, delta, request):
    predictor = request.getfixturevalue(kind)
    graph, trained = predictor.graph, predictor.training.trained
    every = {tuple(fact) for fact in graph.known.tolist()}
    queries = queries_both_ways(graph)
    found = predictor.predict(queries, top=3, delta=delta)
    sets = predictor.predict_sets(queries, delta=delta)
    expected = []
    for query, scores, q, known, members in zip(queries, *asked_at_once(predictor, queries), sets, strict=True):
        p, pi, wanted = by_counting(predictor, query, q, known, delta)
        assert members == [graph.entities[e] for e in wanted]
        new = [e for e in range(ENTITIES) if (*graph.query(query), e) not in every and trained[e]]
        for place, e in enumerate(sorted(new, key=lambda e: -float(scores[e]))[:3], 1):
            name = graph.entities[e]
            side = "head" if query[0] is None else "tail"
            triple = (query[0] or name, query[1], query[2] or name)
            numbers = [float(values[e]) for values in (scores, q, p, pi)]
            expected.append(Link(*triple, side, place, *numbers, e in wanted, len(wanted)))
    assert [link[:5] for link in found] == [link[:5] for link in expected]
    np.testing.assert_allclose(numbers_of(found), numbers_of(expected), rtol=1e-4, atol=1e-6)
    assert [link[9:] for link in found] == [link[9:] for link in expected]
    assert {link.in_set for link in found} == {True, False}


def test_only_new_facts_are_predicted(predictor):
    graph = predictor.graph
    known = {
        (graph.entities[h], graph.relations[r], graph.entities[t])
        for part in (graph.train, graph.valid, graph.test)
        for h, r, t in part.tolist()
    }
    assert len(known) == 140
    found = predictor.predict(queries_both_ways(graph), top=ENTITIES)
    triples = [link[:3] for link in found]
    assert not known & set(triples)
    every = ENTITIES**2 * R
    assert len(set(triples)) == every - len(known)  # all that is missing
    assert len(triples) == 2 * len(set(triples))  # and each of them in both directions


def test_by_default_all_tail_queries_are_asked(predictor):
    found = predictor.predict(top=2)
    assert {link.asked for link in found} == {"tail"}
    assert {(link.head, link.relation) for link in found} == {
        (head, relation) for head in predictor.graph.entities for relation in predictor.graph.relations
    }
    assert len(found) == 2 * ENTITIES * R


def test_the_top_is_a_beginning_of_what_a_larger_top_gives(predictor):
    few, many = (predictor.predict([("e03", "like", None), (None, "shift 2", "e04")], top=top) for top in (2, 50))
    assert [link for link in many if link.place <= 2] == few
    for query in (0, 1):
        asked = [link for link in many if (link.asked == "head") == query]
        assert [link.place for link in asked] == list(range(1, len(asked) + 1))
        assert [link.score for link in asked] == sorted((link.score for link in asked), reverse=True)


def test_a_least_p_value_leaves_out_the_rest(predictor):
    queries = queries_both_ways(predictor.graph)
    every = predictor.predict(queries, top=ENTITIES)
    found = predictor.predict(queries, top=ENTITIES, min_p_value=0.3)
    kept = [link for link in every if link.p_value >= 0.3]
    assert [link[:4] for link in found] == [link[:4] for link in kept]
    assert 0 < len(found) < len(every)
    assert all(link.p_value == 1 for link in predictor.predict(queries, min_p_value=1.0))


class Largest:
    """Stands before a scorer and notes the largest matrix that it was asked for."""

    def __init__(self, network):
        self.network, self.entries = network, 0
        self.training = False

    def __call__(self, entities, relations):
        scores = self.network(entities, relations)
        self.entries = max(self.entries, scores.numel())
        return scores

    def eval(self):
        return self

    def train(self, mode):
        return self


@pytest.mark.parametrize("kind", ["predictor", "each"])
def test_everything_is_done_in_bounded_pieces(kind, request, monkeypatch):
    predictor = request.getfixturevalue(kind)
    queries = queries_both_ways(predictor.graph)
    whole = predictor.predict(queries), predictor.predict_sets(queries), predictor.coverage()
    largest = Largest(predictor.network)
    monkeypatch.setattr(predictor, "network", largest)
    monkeypatch.setattr(room, "pieces", partial(pieces, entries=7 * ENTITIES))
    cut = predictor.predict(queries), predictor.predict_sets(queries), predictor.coverage()
    assert largest.entries == 7 * ENTITIES
    assert [link[:5] for link in cut[0]] == [link[:5] for link in whole[0]]
    np.testing.assert_allclose(numbers_of(cut[0]), numbers_of(whole[0]), rtol=1e-4, atol=1e-6)
    assert cut[1:] == whole[1:]
    assert len(list(predictor.chunks(queries))) == -(-len(queries) // 7)


def test_chunks_are_the_same_as_columns(predictor):
    queries = queries_both_ways(predictor.graph)[:30]
    columns = list(predictor.chunks(queries, top=4))
    assert [list(part) for part in columns] == [list(Link._fields)] * len(columns)
    rows = [row for part in columns for row in zip(*(c.tolist() for c in part.values()), strict=True)]
    assert [Link(*row) for row in rows] == predictor.predict(queries, top=4)
    sets = [row for part in predictor.set_chunks(queries) for row in zip(*part.values(), strict=True)]
    assert [(h, r, t) for h, r, t, *_ in sets] == [tuple(name or "?" for name in query) for query in queries]
    members = predictor.predict_sets(queries)
    assert [(size, names) for *_, size, names in sets] == [(len(names), names) for names in members]


def test_no_query_is_no_prediction(predictor):
    assert predictor.predict([]) == []
    assert predictor.predict_sets([]) == []
    (links,) = predictor.chunks([])
    assert {name: len(column) for name, column in links.items()} == dict.fromkeys(Link._fields, 0)
    (sets,) = predictor.set_chunks([])
    assert list(sets) == ["head", "relation", "tail", "set_size", "set"]


def test_a_query_with_nothing_left_to_find_gets_nothing():
    facts = [("a", "r", "a"), ("a", "r", "b"), ("b", "r", "a"), ("b", "s", "b")]
    graph = make_graph("full", facts, [("b", "s", "a")])
    predictor = LinkPredictor(toy_config(method="supervised", split="all", dim=4)).fit(graph)
    assert predictor.predict([("a", "r", None)]) == []
    assert predictor.predict_sets([("a", "r", None)]) == [[]]
    assert [link[:3] for link in predictor.predict([("b", "r", None)])] == [("b", "r", "b")]


# ---- coverage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["predictor", "each"])
@pytest.mark.parametrize("delta", [0.1, 0.3])
def test_coverage_counts_answers_in_their_sets(kind, delta, request):
    predictor = request.getfixturevalue(kind)
    graph = predictor.graph
    found = predictor.coverage(delta)
    facts = graph.both_ways(graph.test)
    sets = predictor.predict_sets([graph.named(h, r) for h, r, _ in facts.tolist()], delta)
    held = np.array([graph.entities[t] in members for members, t in zip(sets, facts[:, 2].tolist(), strict=True)])
    sizes = np.array([len(members) for members in sets])
    assert found["coverage"] == held.mean()
    assert (found["size"], found["median_size"]) == (sizes.mean(), np.median(sizes))
    assert (found["queries"], found["entities"], found["delta"]) == (40, ENTITIES, delta)
    relation = facts[:, 1] % R
    for number, name in enumerate(graph.relations):
        rows = relation == number
        if rows.any():
            told = found["relations"][name]
            assert (told["queries"], told["coverage"]) == (rows.sum(), held[rows].mean())
            assert told["size"] == sizes[rows].mean()
        else:
            assert name not in found["relations"]
    assert found["calibration"] == 30
    assert found["part"] == "calibration part of the split"
    assert found["per_relation"] == (kind == "each")
    if kind == "predictor":
        assert tuple(found["band"]) == coverage_band(delta, 30, 20)
    else:
        sizes = np.reshape(predictor.tails.sizes, (2, R))
        assert sizes.sum() == 60
        assert tuple(found["band"]) == coverage_band_of_groups(
            delta, sizes, np.bincount(graph.test[:, 1], minlength=R)
        )


def shares_held(delta, calibration, fresh, draws, rng):
    """Return coverages of calibrations by group, the scores of heads those of tails where both have as many."""
    held = np.zeros(draws)
    for (tails, heads), facts in zip(calibration.T, fresh, strict=True):
        kept, new = rng.random((draws, max(tails, heads))), rng.random((draws, facts))
        for size in (tails, heads):
            p_values = ((kept[:, :size, None] >= new[:, None]).sum(1) + 1) / (size + 1)
            held += (p_values >= delta).sum(1)
    return held / (2 * fresh.sum())


@pytest.mark.parametrize("delta", [0.1, 0.25])
def test_the_band_of_groups_is_that_of_calibrations_by_group(delta):
    """Small groups miss less than delta: the band of one calibration of all facts would be another."""
    calibration, fresh = np.array([[4, 12, 15, 30, 3], [4, 12, 15, 30, 3]]), np.array([40, 30, 30, 20, 0])
    held = shares_held(delta, calibration, fresh, 20_000, np.random.default_rng(0))
    found = coverage_band_of_groups(delta, calibration, fresh)
    assert found == pytest.approx(np.quantile(held, [0.025, 0.975]), abs=1 / 120 + 1e-9)
    assert found != pytest.approx(coverage_band(delta, 64, 120), abs=1 / 120 + 1e-9)


def test_the_band_of_groups_of_unequal_directions():
    calibration, fresh = np.array([[11, 30], [30, 22]]), np.array([60, 50])
    held = shares_held(0.1, calibration, fresh, 20_000, np.random.default_rng(0))
    low, high = coverage_band_of_groups(0.1, calibration, fresh)
    inside = ((low - 1e-9 <= held) & (held <= high + 1e-9)).mean()
    assert 0.945 < inside < 0.99
    assert coverage_band_of_groups(0.1, np.full((2, 3), 9), np.full(3, 50)) == (1, 1)
    assert coverage_band_of_groups(0, calibration, fresh) == (1, 1)
    assert coverage_band_of_groups(0.5, np.zeros((2, 3), int), np.full(3, 50)) == (1, 1)


def test_a_larger_delta_gives_smaller_sets(predictor):
    queries = queries_both_ways(predictor.graph)
    loose, strict = (predictor.predict_sets(queries, delta) for delta in (0.05, 0.5))
    assert all(set(few) <= set(many) for few, many in zip(strict, loose, strict=True))
    assert sum(map(len, strict)) < sum(map(len, loose))


def test_without_calibration_facts_the_validation_facts_calibrate():
    predictor = fitted(split="all", method="supervised")
    found = predictor.coverage(0.1)
    assert (found["part"], found["calibration"]) == ("validation facts", 20)
    assert predictor.tails.sizes == [40]
    assert 0.6 < found["coverage"] <= 1
    assert found["size"] < ENTITIES


def test_without_either_every_candidate_is_possible():
    predictor = fitted(toy_graph(valid=[]), split="all", method="supervised")
    assert predictor.tails is None
    found = predictor.coverage(0.1)
    assert (found["coverage"], found["band"], found["calibration"]) == (1.0, [1.0, 1.0], 0)
    known = predictor.training.known.count(np.array([3]), np.array([0]))[0]
    (members,) = predictor.predict_sets([("e03", "like", None)])
    assert len(members) == ENTITIES - known
    assert {link.p_value for link in predictor.predict([("e03", "like", None)])} == {1.0}


def test_without_test_facts_there_is_no_coverage():
    predictor = fitted(toy_graph(test=[]), epochs=2)
    assert predictor.coverage() == {}
    assert predictor.coverage(part="valid")["queries"] == 40


@pytest.mark.parametrize("method", ["ccssl-prop", "pseudo-label", "supervised"])
def test_every_method_predicts_with_p_values(method):
    predictor = fitted(method=method, epochs=4)
    assert predictor.tails.config.score == ("proportion" if method == "ccssl-prop" else "difference")
    links = predictor.predict([("e00", "like", None)], top=5)
    assert len(links) == 5
    assert all(0 < link.p_value <= link.possibility <= 1 for link in links)


# ---- use -----------------------------------------------------------------------------------------------------------


def test_fitting_repeats_and_finds_the_rules(predictor):
    again = exact(fitted())
    assert again.predict() == predictor.predict()
    assert predictor.evaluate()["mrr"] > 0.4
    assert predictor.evaluate() == predictor.training.ranks("test", predictor.network).figures(
        ("realistic", "optimistic", "pessimistic")
    )
    assert predictor.ranks("valid").figures()["mrr"] == predictor.evaluate("valid")["mrr"]


def test_a_graph_may_be_named():
    predictor = LinkPredictor(toy_config(epochs=1, eval_every=1, batch=2000)).fit("nations")
    assert predictor.graph.name == "nations"
    assert len(predictor.predict([("brazil", "embassy", None)], top=3)) == 3


def test_fields_may_be_given_by_name():
    assert LinkPredictor(epochs=3, dim=16).config.epochs == 3
    with pytest.raises(InputError, match="give a configuration or its fields, not both: config and epochs, lr"):
        LinkPredictor(toy_config(), epochs=3, lr=0.1)


class Bilinear(nn.Module):
    """A scorer of a user's own."""

    def __init__(self):
        super().__init__()
        self.entities = nn.Embedding(ENTITIES, 8)
        self.relations = nn.Parameter(torch.randn(2 * R, 8, 8))

    def forward(self, entities, relations):
        return (self.entities(entities)[:, None] @ self.relations[relations])[:, 0] @ self.entities.weight.T


def test_a_scorer_of_ones_own():
    scorer = Bilinear()
    predictor = LinkPredictor(toy_config(**FIT), scorer=scorer).fit(toy_graph())
    assert predictor.training.scorer is scorer
    assert len(predictor.predict(top=1)) == ENTITIES * R
    assert 0 < predictor.coverage()["coverage"] <= 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.predict([("e00", "lke", None)]), r"the graph has no relation 'lke'\. Did you mean like"),
        (lambda p: p.predict([("e0", "like", None)]), "no entity 'e0'"),
        (lambda p: p.predict([("e00", "like", "e01")]), "a query asks for its head or for its tail"),
        (lambda p: p.predict(top=0), "top must be at least 1, got 0"),
        (lambda p: p.predict(delta=-0.1), r"delta must lie in \[0, 1\], got -0.1"),
        (lambda p: p.predict(min_p_value=1.1), r"min_p_value must lie in \[0, 1\], got 1.1"),
        (lambda p: p.predict_sets(delta=1.5), "delta must lie in"),
        (lambda p: p.coverage(delta=float("nan")), "delta must lie in"),
        (lambda p: LinkPredictor(toy_config()).predict(), r"has learned nothing yet: call fit\(graph\) first"),
        (lambda p: LinkPredictor(toy_config()).evaluate(), "has learned nothing yet"),
        (lambda p: LinkPredictor(toy_config()).coverage(), "has learned nothing yet"),
    ],
)
def test_mistakes_are_named(predictor, call, message):
    with pytest.raises(InputError, match=message):
        call(predictor)
