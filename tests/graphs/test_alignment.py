"""Alignment of tails: by the formula, silent where nothing is known, in training for teacher and calibration alike."""

import numpy as np
import pytest
import torch
from toy_graph import toy_config, toy_graph

from ccssl.graphs.alignment import LEAST, TailAlignment
from ccssl.graphs.predictor import LinkPredictor
from ccssl.graphs.splits import split_of
from ccssl.graphs.training import Training, make_scorer
from ccssl.training import checkpoint

E, R = 6, 2


def problem(seed=0, facts=30):
    """Return both queries of random facts, and a teacher's distributions for them."""
    draw = np.random.default_rng(seed)
    h, r, t = draw.integers(E, size=facts), draw.integers(R, size=facts), draw.integers(E, size=facts)
    queries = np.concatenate([np.stack([h, r], 1), np.stack([t, r + R], 1)])
    scores = torch.randn(2 * facts, E, generator=torch.Generator().manual_seed(seed))
    return queries, scores, np.concatenate([t, h])


def fitted(queries, scores):
    alignment = TailAlignment(queries, E, 2 * R)
    alignment.fit([(scores.softmax(-1), queries[:, 1])])
    return alignment


def by_formula(queries, scores, relation):
    """Return the factors of all tails for a relation, with loops."""
    q = scores.softmax(-1).tolist()
    inverse = (relation + R) % (2 * R)
    factors = []
    for tail in range(E):
        asked = sum(list(query) == [tail, inverse] for query in queries.tolist())
        predicted = sum(row[tail] for row, query in zip(q, queries.tolist(), strict=True) if query[1] == relation)
        factors.append((asked + LEAST) / (predicted + LEAST))
    return torch.tensor(factors)


def test_predictions_are_corrected_by_the_formula():
    queries, scores, _ = problem()
    found = fitted(queries, scores)(scores, queries[:, 1]).softmax(-1)
    for row, (_, relation) in enumerate(queries.tolist()):
        expected = scores[row].softmax(-1) * by_formula(queries, scores, relation)
        torch.testing.assert_close(found[row], expected / expected.sum())
    assert not torch.allclose(found, scores.softmax(-1), atol=0.05)


def test_pieces_and_repeated_fits_change_nothing():
    queries, scores, _ = problem()
    whole, again = fitted(queries, scores), fitted(queries, torch.randn_like(scores))
    again.fit((scores[i : i + 7].softmax(-1), queries[i : i + 7, 1]) for i in range(0, len(queries), 7))
    torch.testing.assert_close(again.log_ratio, whole.log_ratio)


def test_on_the_whole_entities_are_predicted_as_often_as_they_are_asked_about():
    queries, scores, answers = problem(facts=300)
    alignment = fitted(queries, scores)
    for relation in range(2 * R):
        rows = queries[:, 1] == relation
        asked = np.bincount(answers[rows], minlength=E)
        before, after = (
            np.abs(s[rows].softmax(-1).sum(0).numpy() - asked).sum()
            for s in (scores, alignment(scores, queries[:, 1]))
        )
        assert after < before / 2


def test_where_nothing_is_known_nothing_is_corrected():
    queries, scores, _ = problem()
    one_way = queries[:, 1] != 1 + R  # no head query of the second relation
    alignment = fitted(queries[one_way], scores[one_way])
    found = alignment(scores, queries[:, 1])
    alone = np.isin(queries[:, 1], [1, 1 + R])
    assert torch.equal(found[alone], scores[alone])
    assert not torch.equal(found[~alone], scores[~alone])
    fresh = TailAlignment(queries, E, 2 * R)
    assert torch.equal(fresh(scores, queries[:, 1]), scores)


def test_what_is_no_candidate_stays_out():
    queries, scores, _ = problem()
    scores[:, 2] = -torch.inf
    found = fitted(queries, scores)(scores, queries[:, 1])
    assert torch.equal(found.isneginf(), scores.isneginf())
    assert (found.softmax(-1)[:, 2] == 0).all()


def training(**changes):
    config, graph = toy_config(align=True, lr=0.1, ramp_up=0, **changes), toy_graph()
    checkpoint.seed_random(0)
    return Training(
        make_scorer(graph, config), graph, split_of(graph, config.split, config.split_mode, config.seed), config
    )


@pytest.mark.parametrize("method", ["ccssl-diff", "pseudo-label"])
def test_the_teacher_is_aligned_and_the_calibration_with_it(method):
    ours = training(method=method)
    for _ in range(2 * ours.epoch_steps + 1):
        ours.step()
    asked = np.concatenate([ours.calibration, ours.pool])[:, :2]
    assert sorted(map(tuple, ours.asked.tolist())) == sorted(map(tuple, asked.tolist()))
    weak, _ = ours.teach(ours.pool)
    own, _ = ours._teachers_own(ours.pool)
    torch.testing.assert_close(weak, ours.alignment(own, ours.pool[:, 1]))
    assert not torch.allclose(weak, own)
    if ours.tails is not None:
        ours.refresh()
        q = ours.teach(ours.calibration)[0].softmax(-1)
        answers = torch.from_numpy(ours.calibration[:, 2]).unsqueeze(-1)
        rivals = q.scatter(-1, answers, -1.0).amax(-1)
        torch.testing.assert_close(
            ours.tails.groups[0].scores, (rivals - q.gather(-1, answers)[:, 0]).sort().values
        )


def test_without_unlabeled_queries_there_is_nothing_to_align():
    assert training(method="supervised").alignment is None


def test_predictions_for_new_queries_are_not_aligned():
    ours = training(epochs=4)
    for _ in ours.run():
        pass
    predictor = LinkPredictor.of(ours)
    queries = ours.graph.both_ways(ours.graph.test)
    found = predictor.degrees(queries)
    with torch.no_grad():
        scores = predictor.network(*torch.from_numpy(queries[:, :2]).T)
    scores[ours.known.of(queries[:, 0], queries[:, 1]).on("cpu")] = -torch.inf
    torch.testing.assert_close(torch.from_numpy(found.probability), scores.softmax(-1))
