"""Training on triples: what a step learns from, that the credal gradient flows, and that a run can stop anywhere."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from toy_graph import toy_config, toy_facts, toy_graph

from ccssl import metrics
from ccssl.credal import Levels, contains
from ccssl.credal.possibility import as_dense
from ccssl.credal.reference import project_reference
from ccssl.errors import InputError
from ccssl.graphs.config import METHODS
from ccssl.graphs.known import Places
from ccssl.graphs.ranking import filtered_ranks
from ccssl.graphs.splits import split_of
from ccssl.graphs.training import RULED_OUT, Training, make_scorer
from ccssl.methods import unlabeled_loss
from ccssl.training import checkpoint
from ccssl.training.loop import NonFiniteLoss

CREDAL = ("ccssl-diff", "ccssl-prop")
LEARNING = ("pseudo-label", *CREDAL)


def training(graph=None, scorer=None, **changes):
    config, graph = toy_config(**changes), graph or toy_graph()
    checkpoint.seed_random(config.seed)
    scorer = make_scorer(graph, config) if scorer is None else scorer
    return Training(scorer, graph, split_of(graph, config.split, config.split_mode, config.seed), config)


def advance(ours, steps):
    for _ in range(steps):
        ours.step()
    return ours


def weights(network):
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def pool_scores(ours):
    """Return all unlabeled queries, their places, and the network's scores of their tails as a leaf."""
    places = np.arange(len(ours.pool))
    queries = torch.from_numpy(ours.pool)
    scores = ours.scorer.eval()(queries[:, 0], queries[:, 1]).detach().requires_grad_()
    return ours.pool, places, scores


def second(values):
    """Return the second least of some values, which leaves out the least and nothing else."""
    return float(values.unique()[1])


def projected(q, pi):
    """Return the projections by Algorithm 1, which needs q > 0: among the candidates of each query alone."""
    found = torch.zeros_like(q)
    for row, (q_E, pi_E) in enumerate(zip(q, pi, strict=True)):
        found[row, pi_E > 0] = project_reference(q_E[None, pi_E > 0], pi_E[None, pi_E > 0])[0]
    return found


# ---- what is learned from ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["paired", "random", "paper"])
def test_no_query_is_in_two_parts_and_answers_of_other_parts_are_not_known(mode):
    ours = training(split_mode=mode)
    graph = ours.graph
    facts, calibration, pool = (
        set(map(tuple, part.tolist())) for part in (ours.facts, ours.calibration, ours.pool)
    )
    judged = set(map(tuple, graph.both_ways(np.concatenate([graph.valid, graph.test])).tolist()))
    assert not facts & calibration
    assert not facts & pool
    assert not calibration & pool
    assert not (facts | calibration | pool) & judged
    assert len(facts) + len(calibration) + len(pool) == 2 * len(graph.train)
    places = ours.known.of(*np.array(sorted(facts))[:, :2].T)
    rows = np.array(sorted(facts))[places.rows]
    assert {(h, r, t) for (h, r, _), t in zip(rows.tolist(), places.columns.tolist(), strict=True)} == facts


@pytest.mark.parametrize("batch_of", ["facts", "queries"])
def test_an_epoch_learns_every_fact_once(batch_of):
    ours = training(batch_of=batch_of, batch=7)
    for epoch in range(2):
        found = []
        for step in range(epoch * ours.epoch_steps, (epoch + 1) * ours.epoch_steps):
            rows, answers = ours.labeled_batch(step)
            assert len(rows) <= 7
            found += [
                (*rows[row, :2].tolist(), tail)
                for row, tail in zip(answers.rows.tolist(), answers.columns.tolist(), strict=True)
            ]
        assert sorted(found) == sorted(map(tuple, ours.facts.tolist()))


def test_unlabeled_queries_are_passed_in_turns_at_most_mu_times_the_batch():
    ours = training(batch=16, mu=0.5)  # 80 labeled rows in 5 steps, 40 unlabeled queries
    assert ours.epoch_steps == 5
    assert ours.unlabeled_batch == 8
    found = np.concatenate([ours.unlabeled_places(step) for step in range(5)])
    assert sorted(found.tolist()) == list(range(40))
    assert training(batch=16, mu=0.25).unlabeled_batch == 4
    assert training(batch=80, mu=9.0).unlabeled_batch == 40  # all of them, once an epoch


def test_queries_of_ones_own_join_the_pool_without_an_answer():
    plain = training()
    graph = toy_graph(queries=[("e00", "like", None), (None, "shift 1", "e07")])
    ours = training(graph)
    assert np.array_equal(ours.pool[:-2], plain.pool)
    assert ours.pool[-2:, 2].tolist() == [-1, -1]
    assert [graph.named(*row[:2]) for row in ours.pool[-2:].tolist()] == [
        ("e00", "like", None),
        (None, "shift 1", "e07"),
    ]
    advance(ours, ours.epoch_steps)
    assert ours.evaluate_pseudo_labels()["accuracy"] >= 0


def test_queries_alone_suffice_for_pseudo_labels():
    graph = toy_graph(queries=[(f"e{i:02d}", "like", None) for i in range(20)])
    ours = training(graph, method="pseudo-label", split="all")
    advance(ours, 3)
    assert len(ours.pool) == 20
    assert ours.evaluate_pseudo_labels() == {}  # nobody knows their answers


def test_calibration_queries_may_be_learned_from_without_their_answers():
    ours, plain = training(reuse_calibration=True), training()
    assert np.array_equal(ours.pool, np.concatenate([plain.pool, plain.calibration]))
    assert np.array_equal(ours.facts, plain.facts)
    assert np.array_equal(ours.known.queries(), plain.known.queries())
    ours.step()
    one = weights(ours.scorer)
    shuffled = training(reuse_calibration=True)
    shuffled.pool[:, 2] = 0  # another answer of each query
    shuffled.step()
    assert same(one, weights(shuffled.scorer))


def test_a_query_whose_every_tail_is_known_asks_nothing():
    facts = [*toy_facts(), *[("e00", "near", f"e{i:02d}") for i in range(20)]]
    from ccssl.graphs.triples import make_graph

    graph = make_graph("toy", facts, queries=[("e00", "near", None), ("e00", "like", None)])
    ours = training(graph, method="pseudo-label", split="all")
    assert [graph.named(*row[:2]) for row in ours.pool.tolist()] == [("e00", "like", None)]
    assert len(training(graph, method="pseudo-label", split="all", exclude_known=False).pool) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "all"}, "learns from unlabeled queries, but split all leaves none"),
        ({"split": "40:60"}, "needs calibration facts, but split 40:60 leaves none"),
        ({"split": "all", "method": "pseudo-label"}, r"give queries of your own \(unlabeled.tsv\)"),
        ({"n3": 0.1, "scorer": nn.Identity()}, "n3 needs a scorer with a penalty, and Identity has none"),
    ],
)
def test_missing_parts_are_named(changes, message):
    with pytest.raises(InputError, match=message):
        training(**changes)


def test_strangers_are_told():
    graph = toy_graph()
    split = split_of(graph, "1:1:98")
    ours = Training(make_scorer(graph, toy_config()), graph, split, toy_config(split="1:1:98"))
    assert ours.trained.sum() == 2
    assert [notice.split(" name an entity")[0] for notice in ours.notices()] == [
        f"{int((~ours.trained[getattr(graph, part)[:, [0, 2]]]).any(1).sum())} facts of the {part} part"
        for part in ("valid", "test")
    ]
    assert training(split="all", method="supervised").notices() == []


# ---- losses --------------------------------------------------------------------------------------------------------


def random_batch(seed=0, rows=9, entities=20):
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, entities, generator=draw, dtype=torch.float64, requires_grad=True)
    return scores, torch.randint(entities, (rows,), generator=draw)


def test_the_loss_of_facts_is_cross_entropy_over_all_tails():
    scores, tails = random_batch()
    found = training().labeled_loss(scores, Places(np.arange(9), tails.numpy()))
    torch.testing.assert_close(found, cross_entropy(scores, tails))


@pytest.mark.parametrize("loss", ["ce", "bce"])
def test_the_loss_of_queries_sums_over_all_their_answers(loss):
    scores, _ = random_batch(rows=3)
    answers = Places(np.array([0, 0, 1, 2, 2, 2]), np.array([3, 4, 0, 1, 18, 19]))
    found = training(loss=loss, batch_of="queries").labeled_loss(scores, answers)
    if loss == "ce":
        expected = cross_entropy(scores[answers.rows], torch.from_numpy(answers.columns))
    else:
        ones = torch.zeros_like(scores)
        ones[answers.rows, answers.columns] = 1
        expected = binary_cross_entropy_with_logits(scores, ones)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("n3", [0.0, 0.01])
def test_queries_with_all_answers_are_the_same_loss_as_their_facts(n3):
    """With all facts in one batch even the step is the same."""
    ours = [
        advance(training(method="supervised", batch=1000, batch_of=kind, n3=n3, lr=1e-3, optimizer="adagrad"), 1)
        for kind in ("facts", "queries")
    ]
    assert ours[0].epoch_steps == ours[1].epoch_steps == 1
    assert len(ours[1].rows) < len(ours[0].rows)
    torch.testing.assert_close(ours[0].sums, ours[1].sums, rtol=1e-5, atol=0)
    for one, two in zip(*(one.scorer.parameters() for one in ours), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-7)
        assert one.grad.abs().sum() > 0


def test_the_penalty_is_the_mean_over_the_facts_of_a_batch():
    ours = training(method="supervised", n3=0.5, batch=8, lr=0.0)
    rows, _ = ours.labeled_batch(0)
    h, r, t = torch.from_numpy(rows).T
    cubes = sum(
        vectors.unflatten(-1, (2, -1)).norm(dim=-2).pow(3).sum(-1)
        for vectors in (ours.scorer.entities[h], ours.scorer.relations[r], ours.scorer.entities[t])
    )
    expected = cross_entropy(ours.scorer(h, r), t) + 0.5 * cubes.mean()
    gradient = torch.autograd.grad(expected, ours.scorer.entities)[0]
    advance(ours, 1)
    torch.testing.assert_close(ours.scorer.entities.grad, gradient, rtol=1e-4, atol=1e-6)


# ---- the unlabeled part --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", LEARNING)
def test_the_unlabeled_term_alone_moves_the_weights(method, monkeypatch):
    """With the labeled loss silenced nothing is left but lambda_u times the unlabeled one."""

    def silent(self, scores, answers):
        return 0 * scores.sum()

    learned = advance(training(method=method, ramp_up=0), 4)  # a teacher that knows a little
    monkeypatch.setattr(Training, "labeled_loss", silent)
    for lambda_u, moves in ((0.0, False), (0.5, True)):
        ours = training(method=method, lambda_u=lambda_u, ramp_up=0)
        ours.scorer.load_state_dict(learned.scorer.state_dict())
        before = weights(ours.scorer)
        advance(ours, 3)
        assert same(before, weights(ours.scorer)) != moves
        assert float(ours.sums[1]) > 0


@pytest.mark.parametrize("per_relation", [False, True])
@pytest.mark.parametrize("method", CREDAL)
def test_the_credal_gradient_is_prediction_minus_projection(method, per_relation):
    """Against Algorithm 1 of the paper, over the candidates of each query; nothing at what is known."""
    ours = advance(training(method=method, per_relation=per_relation, ramp_up=0, lr=0.1), 8)
    queries, places, scores = pool_scores(ours)
    loss, weight = ours.unlabeled_loss(scores, queries, places)
    loss.backward()
    weak, excluded = ours.teach(queries)
    pi = as_dense(ours.possibility(weak, queries[:, 1], excluded), torch.float64)
    candidates = scores.detach().double().masked_fill(excluded, RULED_OUT)
    q = candidates.softmax(-1)
    p = projected(q, pi)
    expected = (q - p) / len(queries)
    torch.testing.assert_close(scores.grad.double(), expected, rtol=1e-3, atol=1e-6)
    divergence = (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1).mean()
    assert float(loss.detach()) == pytest.approx(float(divergence), rel=1e-4)
    assert (scores.grad[excluded] == 0).all()
    taught = scores.grad.abs().sum(-1) > 1e-4
    assert taught.double().mean() > 0.1
    assert float(weight) == 1


@pytest.mark.parametrize("method", LEARNING)
def test_known_tails_are_no_part_of_what_is_learned(method):
    ours = advance(training(method=method, ramp_up=0), 8)
    queries, places, scores = pool_scores(ours)
    weak, excluded = ours.teach(queries)
    assert excluded.any()
    known = {tuple(fact) for fact in ours.facts.tolist()}
    for (entity, relation, _), row in zip(queries.tolist(), excluded.tolist(), strict=True):
        assert row == [(entity, relation, tail) in known for tail in range(20)]
    strong = scores.detach().masked_fill(excluded, RULED_OUT)
    target = ours.target(weak, strong, queries[:, 1], excluded, places)
    assert (target.probabilities[excluded] == 0).all()
    torch.testing.assert_close(target.probabilities.sum(-1), torch.ones(len(queries)))
    assert (weak.softmax(-1)[excluded] == 0).all()
    if method in CREDAL:
        pi = as_dense(target.possibility)
        assert (pi[excluded] == 0).all()
        assert (pi[~excluded] > 0).all()
        assert contains(target.probabilities, pi, atol=1e-4).all()
    else:
        best = scores.detach().masked_fill(excluded, -math.inf).argmax(-1)
        assert torch.equal(target.probabilities.argmax(-1), best)


def test_known_tails_are_left_out_of_the_calibration_too():
    ours = training(lr=0.1)
    advance(ours, ours.epoch_steps)
    ours.refresh()
    weak, excluded = ours.teach(ours.calibration)
    q = weak.softmax(-1)
    answers = torch.from_numpy(ours.calibration[:, 2])
    assert not excluded.gather(-1, answers.unsqueeze(-1)).any()
    rivals = q.scatter(-1, answers.unsqueeze(-1), -1.0).amax(-1)
    expected = (rivals - q.gather(-1, answers.unsqueeze(-1)).squeeze(-1)).sort().values
    torch.testing.assert_close(ours.tails.groups[0].scores, expected)
    loose = training(lr=0.1, exclude_known=False)
    advance(loose, loose.epoch_steps)
    assert loose.teach(loose.calibration)[1] is None
    assert not torch.allclose(loose.tails.groups[0].scores, expected)


@pytest.mark.parametrize("method", LEARNING)
def test_known_tails_may_stay_candidates_if_asked_for(method):
    ours = advance(training(method=method, exclude_known=False, ramp_up=0), 8)
    queries, places, scores = pool_scores(ours)
    loss, _ = ours.unlabeled_loss(scores, queries, places)
    loss.backward()
    places = ours.known.of(queries[:, 0], queries[:, 1])
    assert (scores.grad[places.on("cpu")] != 0).any()


@pytest.mark.parametrize("per_relation", [False, True])
def test_queries_with_a_low_largest_p_value_can_be_left_out(per_relation):
    ours = advance(training(lr=0.1, per_relation=per_relation), 9)
    queries, places, _ = pool_scores(ours)
    weak, excluded = ours.teach(queries)
    largest = ours.tails.p_values(weak.softmax(-1), queries[:, 1], excluded).amax(-1)
    threshold = second(largest)
    strong = weak.masked_fill(excluded, RULED_OUT)
    every = ours.target(weak, strong, queries[:, 1], excluded, places)
    assert (every.weight == 1).all()
    ours.config = replace(ours.config, min_p_value=threshold)
    found = ours.target(weak, strong, queries[:, 1], excluded, places)
    assert torch.equal(found.weight, (largest >= threshold).float())
    assert 0 < found.weight.mean() < 1
    assert torch.equal(found.probabilities, every.probabilities)


def test_a_query_that_is_left_out_teaches_nothing():
    ours = advance(training(lr=0.1), 9)
    queries, places, scores = pool_scores(ours)
    weak, excluded = ours.teach(queries)
    largest = ours.tails.p_values(weak.softmax(-1), queries[:, 1], excluded).amax(-1)
    ours.config = replace(ours.config, min_p_value=second(largest))
    loss, weight = ours.unlabeled_loss(scores, queries, places)
    loss.backward()
    out = largest < ours.config.min_p_value
    assert out.any()
    assert (scores.grad[out] == 0).all()
    assert (scores.grad[~out] != 0).any()
    assert float(weight) == pytest.approx(1 - float(out.double().mean()))


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_temperature_sharpens_what_is_projected_and_nothing_else(temperature):
    ours = advance(training(lr=0.1, temperature=temperature), 9)
    queries, places, scores = pool_scores(ours)
    weak, excluded = ours.teach(queries)
    strong = scores.detach().masked_fill(excluded, RULED_OUT)
    target = ours.target(weak, strong, queries[:, 1], excluded, places)
    pi = as_dense(target.possibility, torch.float64)
    expected = projected((strong.double() / temperature).softmax(-1), pi)
    torch.testing.assert_close(target.probabilities.double(), expected, rtol=1e-3, atol=1e-5)
    plain = projected(strong.double().softmax(-1), pi)
    assert not torch.allclose(expected, plain, atol=1e-3)
    loss, _ = ours.unlabeled_loss(scores, queries, places)
    torch.testing.assert_close(loss.detach(), unlabeled_loss(strong, target))


def test_supervised_training_ignores_what_is_unlabeled():
    plain = advance(training(method="supervised", split="40:0:60"), 6)
    graph = toy_graph(queries=[("e00", "like", None)])
    ours = advance(training(graph, method="supervised", split="40:40:20", lambda_u=9.0, teacher="ema"), 6)
    assert len(ours.pool) == 0
    assert same(weights(plain.scorer), weights(ours.scorer))
    assert float(ours.sums[1]) == 0


def test_supervised_training_is_plain_adam():
    ours = training(method="supervised", ema=0.0)
    twin = make_scorer(ours.graph, ours.config)
    twin.load_state_dict(ours.scorer.state_dict())
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.03)
    for step in range(5):
        rows, _ = ours.labeled_batch(step)
        h, r, t = torch.from_numpy(rows).T
        optimizer.zero_grad()
        cross_entropy(twin(h, r), t).backward()
        optimizer.step()
    advance(ours, 5)
    for network in (ours.scorer, ours.ema.network):
        for found, expected in zip(network.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_moves_the_weights_and_their_average(method):
    ours = training(method=method)
    before, average = weights(ours.scorer), weights(ours.ema.network)
    advance(ours, 2)
    for name in ("entities", "relations"):
        assert not torch.equal(before[name], ours.scorer.state_dict()[name])
        assert not torch.equal(average[name], ours.ema.network.state_dict()[name])
    ours.check()


@pytest.mark.parametrize("method", METHODS)
def test_the_rooms_methods_are_those_of_the_configuration(method):
    ours = training(method=method)
    assert (ours.tails is not None) == (method in CREDAL)
    assert (len(ours.pool) > 0) == (method != "supervised")


# ---- teachers ------------------------------------------------------------------------------------------------------


def test_the_model_teaches_itself():
    ours = advance(training(method="pseudo-label"), 3)
    assert ours.teacher == "model"
    assert ours.teaching_network is ours.scorer
    assert ours.snapshot is None


@pytest.mark.parametrize("teacher", ["snapshot", "ema"])
def test_a_teacher_stays_for_an_epoch_and_is_then_renewed(teacher):
    ours = training(teacher=teacher, calibrate_every=2)
    source = ours.scorer if teacher == "snapshot" else ours.ema.network
    for epoch in range(4):
        if epoch % 2 == 0:
            expected = weights(source)
        for _ in range(ours.epoch_steps):
            ours.step()
            assert same(weights(ours.teaching_network), expected)
    assert not same(weights(source), expected)
    assert not ours.teaching_network.training


@pytest.mark.parametrize("teacher", ["model", "snapshot", "ema"])
def test_calibration_is_the_teachers_at_the_start_of_the_epoch(teacher):
    ours = training(teacher=teacher)
    advance(ours, ours.epoch_steps)
    at_start = weights(ours.ema.network if teacher == "ema" else ours.scorer)
    ours.step()
    scores = ours.tails.groups[0].scores.clone()
    fresh = training(teacher="model")
    fresh.scorer.load_state_dict(at_start)
    fresh.refresh()
    torch.testing.assert_close(fresh.tails.groups[0].scores, scores)
    advance(ours, ours.epoch_steps - 1)
    assert torch.equal(ours.tails.groups[0].scores, scores)
    ours.step()
    assert not torch.equal(ours.tails.groups[0].scores, scores)


def test_one_calibration_serves_all_relations_unless_each_has_its_own():
    one, each = advance(training(), 1), advance(training(per_relation=True), 1)
    assert one.tails.sizes == [len(one.calibration)]
    assert each.tails.sizes == [int((each.calibration[:, 1] == number).sum()) for number in range(8)]
    queries, _, _ = pool_scores(each)
    weak, excluded = each.teach(queries)
    assert isinstance(one.possibility(weak, queries[:, 1], excluded), Levels)
    assert not isinstance(each.possibility(weak, queries[:, 1], excluded), Levels)


# ---- schedules -----------------------------------------------------------------------------------------------------


def evaluations(ours):
    return [found for found in ours.run() if found is not None]


@pytest.mark.parametrize("ramp_up", [0, 2, 4])
def test_the_unlabeled_weight_rises_over_its_epochs(ramp_up):
    ours = training(lambda_u=0.4, ramp_up=ramp_up, eval_every=1, batch=8)
    found = [evaluation.figures["train"]["lambda_u"] for evaluation in evaluations(ours)]
    steps = np.arange(1, 5) * ours.epoch_steps - 1  # told is the weight in the last step of an epoch
    assert found == pytest.approx(
        0.4 * np.minimum(1, steps / (ramp_up * ours.epoch_steps)) if ramp_up else [0.4] * 4
    )


def test_in_the_first_step_of_a_ramp_nothing_unlabeled_is_learned():
    ours, plain = advance(training(ramp_up=3), 1), advance(training(lambda_u=0.0), 1)
    assert same(weights(ours.scorer), weights(plain.scorer))
    advance(ours, 1)
    advance(plain, 1)
    assert not same(weights(ours.scorer), weights(plain.scorer))


def test_the_learning_rate_is_constant_or_falls_along_a_cosine():
    for schedule, last in (("constant", 1.0), ("cosine", math.cos(7 * math.pi / 16))):
        ours = training(schedule=schedule, epochs=30, eval_every=1, method="supervised")
        rates = [found.figures["train"]["lr"] for found in evaluations(ours)]
        assert rates == sorted(rates, reverse=True)
        assert rates[0] == pytest.approx(0.03, rel=0.01)
        assert rates[-1] == pytest.approx(0.03 * last, rel=0.1)  # that of the last step, one before the end
        assert ours.optimizer.param_groups[0]["lr"] == rates[-1]


@pytest.mark.parametrize("patience", [1, 3])
def test_training_ends_when_validation_no_longer_improves(patience):
    """Without a learning rate the first evaluation stays the best."""
    ours = training(lr=0.0, patience=patience, eval_every=1, epochs=50)
    found = evaluations(ours)
    assert [evaluation.best for evaluation in found] == [True] + [False] * patience
    assert ours.finished
    assert ours.epochs_done == patience + 1
    assert len(evaluations(training(lr=0.0, eval_every=1, epochs=9))) == 9


def test_without_validation_facts_patience_is_endless():
    ours = training(toy_graph(valid=[]), patience=1, eval_every=1, epochs=5)
    assert len(evaluations(ours)) == 5
    assert ours.best is None
    assert ours.chosen is ours.ema.network


def test_the_best_on_validation_is_kept_or_the_last():
    best, last = (training(select=select, eval_every=1, epochs=12, lr=0.3, ema=0.0) for select in ("best", "last"))
    kept = {}
    for found in best.run():
        if found is not None:
            kept[found.epoch] = weights(best.ema.network), found.figures["validation"]["mrr"]
    top = max(kept, key=lambda epoch: (kept[epoch][1], -epoch))
    assert top < 12  # else there is nothing to tell apart
    assert best.best["epoch"] == top
    assert best.best["validation"]["mrr"] == kept[top][1] == best.ranks("valid", best.chosen).figures()["mrr"]
    assert same(weights(best.chosen), kept[top][0])
    evaluations(last)
    assert last.best == best.best
    assert same(weights(last.chosen), kept[12][0])


def test_evaluations_come_every_so_many_epochs_and_at_the_end():
    ours = training(epochs=5, eval_every=2)
    assert [found.epoch for found in evaluations(ours)] == [2, 4, 5]
    assert ours.steps_done == 5 * ours.epoch_steps


def test_evaluation_changes_nothing_that_training_depends_on():
    one, two = (
        training(dropout=0.3, normalize="batch", epochs=6),
        training(dropout=0.3, normalize="batch", epochs=6),
    )
    torch.manual_seed(1)
    advance(one, 5)
    torch.manual_seed(1)
    advance(two, 2)
    two.ranks("test")
    two.evaluate_pseudo_labels()
    _ = two.chosen
    advance(two, 3)
    assert same(one.tensors(), two.tensors())


# ---- figures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_an_evaluation_tells_losses_ranks_and_the_quality_of_pseudo_labels(method):
    (found,) = evaluations(training(method=method, epochs=2))
    assert found.figures["train"]["loss"] > 0
    assert {"mrr", "hits@1", "hits@3", "hits@10", "head.mrr", "tail.mrr"} <= found.figures["validation"].keys()
    assert ("unlabeled" in found.figures) == (method != "supervised")
    if method != "supervised":
        assert ("validity_error@0.1" in found.figures["unlabeled"]) == (method in CREDAL)
        assert {"accuracy", "nll"} <= found.figures["unlabeled"].keys()
        train = found.figures["train"]
        assert train["loss"] == pytest.approx(
            train["loss_labeled"] + train["lambda_u"] * train["loss_unlabeled"], rel=1e-6
        )


def test_losses_are_means_over_the_steps_since_the_last_evaluation():
    ours = training(method="supervised", epochs=4, eval_every=2, lr=0.0)
    first, second = (found.figures["train"]["loss"] for found in evaluations(ours))
    batches = [ours.labeled_batch(step)[0] for step in range(2 * ours.epoch_steps)]
    expected = np.mean([
        float(cross_entropy(ours.scorer(*torch.from_numpy(rows[:, :2]).T), torch.from_numpy(rows[:, 2])).detach())
        for rows in batches
    ])  # fmt: skip
    assert first == pytest.approx(expected, rel=1e-5)
    assert second == pytest.approx(first, rel=0.1)  # other batches, whose last is smaller


def test_pseudo_labels_are_judged_by_the_answers_that_were_taken_away():
    ours = advance(training(), 7)
    queries = ours.pool
    weak, excluded = ours.teach(queries)
    expected = metrics.evaluate(
        weak.softmax(-1),
        torch.from_numpy(queries[:, 2].copy()),
        ours.possibility(weak, queries[:, 1], excluded),
    )
    assert ours.evaluate_pseudo_labels() == expected
    ours.config = replace(ours.config, eval_unlabeled=10)
    assert 0 < ours.evaluate_pseudo_labels()["nll"] != expected["nll"]
    ours.config = replace(ours.config, eval_unlabeled=0)
    assert ours.evaluate_pseudo_labels() == {}


@pytest.mark.parametrize("model", ["distmult", "complex", "qmult"])
def test_a_run_learns(model):
    ours = training(model=model, method="supervised", split="all", dim=32, epochs=60, lr=0.05, eval_every=60)
    before = ours.ranks("test", ours.scorer).figures()["mrr"]
    evaluations(ours)
    after = ours.ranks("test", ours.chosen).figures()["mrr"]
    assert before < 0.35
    assert after > (0.35 if model == "distmult" else 0.6)  # shifts have a direction, which DistMult cannot tell


@pytest.mark.parametrize("options", [{"optimizer": "adagrad", "lr": 0.1}, {"loss": "bce"}, {"batch_of": "queries"},
                                     {"n3": 1e-3}, {"normalize": "unit"}, {"normalize": "batch"}, {"dropout": 0.2},
                                     {"input_dropout": 0.1}, {"schedule": "cosine"}])  # fmt: skip
def test_every_way_to_train_learns(options):
    small = {"method": "supervised", "split": "all", "dim": 32, "epochs": 60, "lr": 0.05, "eval_every": 60}
    ours = training(**{**small, **options})
    evaluations(ours)
    assert ours.ranks("valid", ours.chosen).figures()["mrr"] > 0.45


# ---- reads ---------------------------------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Notes every operation that hands a value from the device to the host."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in (
            "_local_scalar_dense",
            "nonzero",
            "is_nonzero",
            "equal",
            "masked_select",
        ):
            self.found.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch_of", ["facts", "queries"])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_reads_nothing_from_the_device(method, batch_of):
    ours = training(method=method, batch_of=batch_of, n3=0.1, min_p_value=0.3, calibrate_every=1, align=True)
    ours.step()
    with Reads() as reads:
        advance(ours, 2 * ours.epoch_steps)  # with refreshes of teacher and calibration
    assert reads.found == []
    with Reads() as reads:
        ours.check()
    assert reads.found


# ---- repeat, stop, go on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_equal_seeds_give_equal_bits(method):
    one, two = (advance(training(method=method, dropout=0.2), 7) for _ in range(2))
    assert same(one.tensors(), two.tensors())
    other = advance(training(method=method, dropout=0.2, seed=1), 7)
    assert not same(weights(one.scorer), weights(other.scorer))


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "supervised"},
        {"method": "pseudo-label", "teacher": "ema", "optimizer": "adagrad"},
        {"method": "ccssl-diff", "dropout": 0.3, "input_dropout": 0.1, "align": True},
        {"method": "ccssl-prop", "per_relation": True, "normalize": "batch", "calibrate_every": 2},
        {"method": "ccssl-diff", "teacher": "model", "batch_of": "queries", "n3": 0.01, "schedule": "cosine"},
    ],
)
def test_a_training_goes_on_from_its_checkpoint_bit_for_bit(tmp_path, changes):
    whole, cut = training(epochs=6, **changes), training(epochs=6, **changes)
    torch.manual_seed(1)
    for _ in whole.run():
        pass
    torch.manual_seed(1)
    for _ in cut.run():
        if cut.steps_done == 2 * cut.epoch_steps + 1:  # after an evaluation, within an epoch
            break
    randomness, state = checkpoint.random_state()
    checkpoint.save(tmp_path, cut.steps_done, cut.tensors() | randomness, cut.state() | state)
    again = training(epochs=6, **changes)
    tensors, state = checkpoint.load(tmp_path)
    again.load(tensors, state)
    checkpoint.set_random_state(tensors, state)
    for _ in again.run():
        pass
    assert same(whole.tensors(), again.tensors())
    assert whole.state() == again.state()
    assert whole.steps_done == 6 * whole.epoch_steps


def test_a_loss_that_is_not_finite_is_found_with_its_step_and_facts():
    ours = advance(training(method="supervised"), 4)
    with torch.no_grad():
        ours.scorer.relations.fill_(torch.nan)
    advance(ours, 3)
    rows, _ = ours.labeled_batch(4)
    named = ours.graph.named(*rows[0, :2].tolist())
    first = "(" + ", ".join(name or "?" for name in named) + ")"
    with pytest.raises(NonFiniteLoss) as refused:
        ours.check()
    assert f"not finite at step 4, epoch {4 // ours.epoch_steps}, in a batch that begins with {first}" in str(
        refused.value
    )


# ---- a scorer of one's own -----------------------------------------------------------------------------------------


class Bilinear(nn.Module):
    """A scorer of another kind (RESCAL), as a user might write it."""

    def __init__(self, entities, relations, dim):
        super().__init__()
        self.entities = nn.Embedding(entities, dim)
        self.relations = nn.Parameter(0.3 * torch.randn(relations, dim, dim))

    def forward(self, entities, relations):
        query = torch.einsum("bd,bde->be", self.entities(entities), self.relations[relations])
        return query @ self.entities.weight.T


@pytest.mark.parametrize("method", METHODS)
def test_any_scorer_learns_with_any_method(method):
    torch.manual_seed(0)
    ours = training(scorer=Bilinear(20, 8, 8), method=method, epochs=60, eval_every=60, lr=0.05)
    learned = ours.facts[: len(ours.facts) // 2]

    def quality(network):
        return filtered_ranks(network, ours.graph, learned).figures()["mrr"]

    before = quality(ours.scorer)
    evaluations(ours)
    assert before < 0.3
    assert quality(ours.chosen) > 0.8
    assert len(ours.ranks("test").realistic) == 40
