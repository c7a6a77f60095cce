r"""Learning to predict tails from labeled facts and unlabeled queries, epoch by epoch.

A step, for B labeled facts (h, r, t), inverses among them, and a share of the unlabeled queries (h, r, ?):

1. At the start of an epoch the *teacher* is renewed, a copy of the network (``"snapshot"``) or of the averaged one
   (``"ema"``); ``"model"`` is the network as it is in each step. Conformal methods are calibrated anew with it.
2. The teacher predicts the tails of the unlabeled queries. Answers known from labeled facts are no candidates: a
   missing fact is a new one. They get probability and possibility 0, in calibration as well, so that calibration and
   unlabeled queries stay exchangeable. With ``align``, scores are corrected by what the queries of the other direction
   tell (``alignment``).
3. The method turns predictions into a target and a weight for each query, without gradient (``ccssl.methods``).
4. One forward and backward pass, one step of the optimizer, one of the average, for the loss ::

       mean -log q(t | h, r)  +  lambda_u(epoch)  mean( weight * KL(target || q(. | h, r)) )  +  n3 * mean penalty

   with q = softmax over all entities for labeled facts (1vsAll), over the candidates for unlabeled queries, and
   lambda_u rising linearly over the first ``ramp_up`` epochs, for early pseudo-labels are guesses.

With ``batch_of = "queries"`` a row of a batch is a query with all its known tails T(h, r): the loss is the same sum ::

    sum over t in T(h, r) of  -log q(t | h, r)  =  |T| log sum_e exp s_e  -  sum over t in T of s_t,

at the price of one row of scores instead of |T|; only which facts share a batch is another. The binary cross-entropy
takes the known tails of a row as its ones, all other entities as its zeros.

No step reads from the device. What a step draws is a function of the seed and the step, dropout aside, whose generator
is torch's own and part of a checkpoint.

Shapes: B rows of a batch, E entities, L calibration queries, U unlabeled queries.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ccssl import metrics
from ccssl.credal import project_logits
from ccssl.credal.possibility import Possibility
from ccssl.errors import InputError
from ccssl.graphs.alignment import TailAlignment
from ccssl.graphs.calibration import TailCalibration, all_scores, candidate_scores
from ccssl.graphs.config import OWN, GraphConfig
from ccssl.graphs.known import Known, Places
from ccssl.graphs.ranking import ENTRIES, Ranks, filtered_ranks, pieces
from ccssl.graphs.scorers import SCORERS, Multiplicative
from ccssl.graphs.splits import GraphSplit
from ccssl.graphs.triples import Graph
from ccssl.methods import METHODS, Method, Target, unlabeled_loss
from ccssl.training.batches import LABELED, UNLABELED, Stream
from ccssl.training.ema import Ema, copy_weights
from ccssl.training.loop import NonFiniteLoss, evaluating, find_device
from ccssl.training.schedule import cosine

RULED_OUT = -1e4  # logit of what is no candidate, where -infinity times probability 0 would be no number


class Evaluation(NamedTuple):
    """What an evaluation found, by phase; and whether it is the best so far."""

    epoch: int
    figures: dict[str, dict[str, float]]
    best: bool


class Training:
    """A scorer in training: what changes, the step that changes it, and its evaluation."""

    def __init__(self, scorer: nn.Module, graph: Graph, split: GraphSplit, config: GraphConfig) -> None:
        self.config, self.graph, self.split = config, graph, split
        self.device = find_device(config.device)
        self.scorer = scorer.to(self.device)
        entities, relations = len(graph.entities), 2 * len(graph.relations)

        self.facts = split.rows(graph, "labeled")
        self.known = Known(self.facts, relations)
        self.trained = np.zeros(entities, bool)  # which entities a labeled fact names
        self.trained[self.facts[:, [0, 2]]] = True
        self.rows = self.known.queries() if config.batch_of == "queries" else self.facts
        self.calibration = split.rows(graph, "calibration")
        method = METHODS[config.method]
        self.pool = self._pool() if method.uses_unlabeled else np.empty((0, 3), np.int64)
        self._check_parts(method)
        self.method: Any = method(entities, len(self.pool), config.method_config()).to(self.device)
        self.tails: TailCalibration | None = None
        if method.uses_calibration:
            self.tails = TailCalibration(self.method.calibration.config, relations, config.per_relation).to(
                self.device
            )
        self.alignment: TailAlignment | None = None
        if config.align and len(self.pool):
            self.asked = self._asked()
            self.alignment = TailAlignment(self.asked, entities, relations).to(self.device)
        self.teacher = method.teacher if config.teacher == OWN else config.teacher

        self.ema = Ema(self.scorer, config.ema)
        keeps_snapshot = method.uses_unlabeled and self.teacher != "model"
        self.snapshot = copy.deepcopy(self.scorer).eval().requires_grad_(False) if keeps_snapshot else None
        self.optimizer = self._optimizer()
        self.epoch_steps = math.ceil(len(self.rows) / config.batch)
        self.unlabeled_batch = min(
            math.ceil(len(self.pool) / self.epoch_steps), math.ceil(config.mu * min(config.batch, len(self.rows)))
        )
        self._labeled_stream = Stream(len(self.rows), config.seed, LABELED)
        self._unlabeled_stream = Stream(max(1, len(self.pool)), config.seed, UNLABELED)

        self.steps_done = 0
        self.best: dict[str, Any] | None = None  # epoch and figures of the best evaluation so far
        self.best_weights: dict[str, Tensor] = {}
        self.stale = 0  # evaluations since then
        # Loss on labeled and on unlabeled items and mean weight, summed over the last ``summed_steps`` steps.
        self.sums = torch.zeros(3, device=self.device, dtype=torch.float64 if self.device.type != "mps" else None)
        self.summed_steps = 0
        self.first_bad_step = torch.full((), -1, device=self.device)

    def _pool(self) -> np.ndarray:
        """Return the unlabeled queries (U, 3) with their answers, -1 where nobody knows them."""
        graph, hidden = self.graph, self.split.rows(self.graph, "unlabeled")
        queries = graph.queries
        unknown = np.concatenate([queries, np.full((len(queries), 1), -1)], 1)
        parts = [hidden, unknown]
        if self.config.reuse_calibration:
            parts.append(self.calibration)
        pool = np.concatenate(parts)
        if not self.config.exclude_known:
            return pool
        return pool[self.known.count(pool[:, 0], pool[:, 1]) < len(graph.entities)]  # else nothing is left to find

    def _asked(self) -> np.ndarray:
        """Return all queries without a known answer, those of calibration facts among them, each fact once."""
        rows = [self.split.rows(self.graph, part)[:, :2] for part in ("calibration", "unlabeled")]
        return np.concatenate([*rows, self.graph.queries])

    def _check_parts(self, method: type[Method]) -> None:
        config = self.config
        if method.uses_unlabeled and not len(self.pool):
            raise InputError(
                f"method {config.method} learns from unlabeled queries, but split {config.split} leaves none: take "
                "method supervised, a split such as 40:40:20, or give queries of your own (unlabeled.tsv)."
            )
        if method.uses_calibration and not len(self.calibration):
            raise InputError(
                f"method {config.method} needs calibration facts, but split {config.split} leaves none: take three "
                "numbers, such as 40:40:20."
            )
        if config.n3 and not hasattr(self.scorer, "penalty"):
            raise InputError(
                f"n3 needs a scorer with a penalty, and {type(self.scorer).__name__} has none: take n3=0."
            )

    def _optimizer(self) -> torch.optim.Optimizer:
        fused = self.device.type in ("cpu", "cuda")
        parameters = list(self._learned().values())
        if self.config.optimizer == "adagrad":
            return torch.optim.Adagrad(parameters, lr=self.config.lr, fused=self.device.type == "cpu")
        return torch.optim.Adam(parameters, lr=self.config.lr, fused=fused)

    # ---- one step -------------------------------------------------------------------------------------------------

    @property
    def epochs_done(self) -> int:
        """How many passes over the labeled facts are complete."""
        return self.steps_done // self.epoch_steps

    @property
    def finished(self) -> bool:
        """Whether the last epoch is done, or patience is."""
        return self.epochs_done >= self.config.epochs or 0 < self.config.patience <= self.stale

    def step(self) -> None:
        """Learn from one batch."""
        config, step = self.config, self.steps_done
        if len(self.pool) and step % (self.epoch_steps * config.calibrate_every) == 0:
            self.refresh()
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr(step)

        rows, answers = self.labeled_batch(step)
        self.scorer.train()
        if len(self.pool):
            places = self.unlabeled_places(step)
            pool_rows = self.pool[places]
            scores = all_scores(self.scorer, np.concatenate([rows[:, :2], pool_rows[:, :2]]), self.device)
            scores_l, scores_u = scores.split([len(rows), len(pool_rows)])
            loss_u, weight = self.unlabeled_loss(scores_u, pool_rows, places)
        else:
            scores_l = all_scores(self.scorer, rows, self.device)
            loss_u = weight = self.sums.new_zeros(())
        loss_l = self.labeled_loss(scores_l, answers)
        loss = loss_l + self._lambda_u(step) * loss_u
        if config.n3:
            loss = loss + config.n3 * self._penalty(rows, answers)

        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.ema.update(step)

        self.sums += torch.stack([x.detach().to(self.sums.dtype) for x in (loss_l, loss_u, weight)])
        bad = ~loss.detach().isfinite() & (self.first_bad_step < 0)
        self.first_bad_step.copy_(torch.where(bad, step, self.first_bad_step))
        self.summed_steps += 1
        self.steps_done += 1

    def labeled_batch(self, step: int) -> tuple[np.ndarray, Places]:
        """Return the queries of a batch (B, 2 or 3), and where their answers stand."""
        epoch, within = divmod(step, self.epoch_steps)
        size, count = self.config.batch, len(self.rows)
        start = within * size
        rows = self.rows[self._labeled_stream.at(epoch * count + start, min(size, count - start))]
        if self.config.batch_of == "queries":
            return rows, self.known.of(rows[:, 0], rows[:, 1])
        return rows, Places(np.arange(len(rows)), rows[:, 2])

    def unlabeled_places(self, step: int) -> np.ndarray:
        """Return which queries of the pool a step learns from."""
        return self._unlabeled_stream.at(step * self.unlabeled_batch, self.unlabeled_batch)

    def labeled_loss(self, scores: Tensor, answers: Places) -> Tensor:
        """Return the mean loss of the facts of a batch."""
        rows, tails = answers.on(self.device)
        if self.config.loss == "ce":
            return (scores.logsumexp(-1)[rows] - scores[rows, tails]).mean()
        return (softplus(scores).sum() - scores[rows, tails].sum()) / scores.numel()

    def unlabeled_loss(self, scores: Tensor, queries: np.ndarray, places: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the loss on unlabeled queries, given the network's scores of their tails, and the mean weight."""
        weak, excluded = self.teach(queries)
        strong = scores if excluded is None else scores.masked_fill(excluded, RULED_OUT)
        target = self.target(weak, strong.detach(), queries[:, 1], excluded, places)
        return unlabeled_loss(strong, target), target.weight.mean()

    @torch.no_grad()
    def target(
        self, weak: Tensor, strong: Tensor, relations: np.ndarray, excluded: Tensor | None, places: np.ndarray
    ) -> Target:
        """Return what the network should predict: the method's target; of a credal method what is known is no part."""
        pi = self.possibility(weak, relations, excluded)
        if pi is None:
            return self.method.target(weak, strong, torch.from_numpy(places).to(self.device))
        p_BE = project_logits(strong / self.config.temperature, pi, validate=False)
        weight = torch.ones_like(p_BE[:, 0])
        if self.config.min_p_value and self.tails is not None:
            p_values = self.tails.p_values(weak.softmax(-1), relations, excluded)
            weight = (p_values.amax(-1) >= self.config.min_p_value).to(weight.dtype)
        return Target(p_BE, weight, pi)

    def possibility(self, weak: Tensor, relations: np.ndarray, excluded: Tensor | None) -> Possibility | None:
        """Return the possibility degrees of all tails that scores (B, E) stand for, or None without a credal set."""
        if self.tails is None:
            return self.method.possibility(weak)
        return self.tails.possibility(weak.softmax(-1), relations, excluded, self.method.config.normalization)

    @torch.no_grad()
    def teach(self, queries: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Return the teacher's scores of all tails (B, E), and the mask of what is no candidate: -infinity there."""
        scores, excluded = self._teachers_own(queries)
        return scores if self.alignment is None else self.alignment(scores, queries[:, 1]), excluded

    def _teachers_own(self, queries: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Return the same before alignment."""
        return candidate_scores(
            self.teaching_network, queries, self.known if self.config.exclude_known else None, self.device
        )

    @property
    def teaching_network(self) -> nn.Module:
        """The network whose predictions become pseudo-labels."""
        return self.scorer if self.snapshot is None else self.snapshot

    @torch.no_grad()
    def refresh(self) -> None:
        """Renew the snapshot and, with the new teacher, the calibration."""
        if self.snapshot is not None:
            copy_weights(self.ema.network if self.teacher == "ema" else self.scorer, self.snapshot)
        if self.alignment is not None:
            asked = (self.asked[rows] for rows in pieces(len(self.asked), len(self.graph.entities)))
            self.alignment.fit((self._teachers_own(part)[0].softmax(-1), part[:, 1]) for part in asked)
        if self.tails is not None:
            parts = (self.calibration[rows] for rows in pieces(len(self.calibration), len(self.graph.entities)))
            self.tails.fit((self.teach(part)[0].softmax(-1), part) for part in parts)

    def _penalty(self, rows: np.ndarray, answers: Places) -> Tensor:
        """Return the mean penalty of the facts of a batch."""
        heads, relations = rows[answers.rows, 0], rows[answers.rows, 1]
        named = (np.concatenate([heads, answers.columns]), relations)
        arguments: list[Tensor] = []
        for numbers in named:
            number, times = np.unique(numbers, return_counts=True)
            arguments += [torch.from_numpy(number), torch.from_numpy(times).float()]
        penalty: Any = self.scorer
        return penalty.penalty(*(argument.to(self.device) for argument in arguments)) / len(answers.rows)

    def _lr(self, step: int) -> float:
        factor = cosine(step, self.config.epochs * self.epoch_steps) if self.config.schedule == "cosine" else 1.0
        return self.config.lr * factor

    def _lambda_u(self, step: int) -> float:
        ramp = self.config.ramp_up * self.epoch_steps
        return self.config.lambda_u * (min(1.0, step / ramp) if ramp else 1.0)

    # ---- the run, and its evaluation ------------------------------------------------------------------------------

    def run(self) -> Iterator[Evaluation | None]:
        """Train to the end; yield after each step, with what was found where it was followed by an evaluation."""
        while not self.finished:
            self.step()
            epoch, within = divmod(self.steps_done, self.epoch_steps)
            due = within == 0 and (epoch % self.config.eval_every == 0 or epoch == self.config.epochs)
            yield self._evaluate(epoch) if due else None

    def check(self) -> None:
        """Raise if a loss was not finite: nothing after it is worth keeping."""
        step = int(self.first_bad_step)
        if step >= 0:
            facts = [self._named(row) for row in self.labeled_batch(step)[0][:3]]
            raise NonFiniteLoss(
                f"the loss was not finite at step {step}, epoch {step // self.epoch_steps}, in a batch that begins "
                f"with {', '.join(facts)}"
            )

    def _named(self, row: np.ndarray) -> str:
        query = self.graph.named(int(row[0]), int(row[1]))
        return "(" + ", ".join("?" if name is None else name for name in query) + ")"

    def _evaluate(self, epoch: int) -> Evaluation:
        self.check()
        figures: dict[str, dict[str, float]] = {"train": self._losses()}
        if len(self.graph.valid):
            figures["validation"] = self.ranks("valid").figures()
        if len(self.pool) and (found := self.evaluate_pseudo_labels()):
            figures["unlabeled"] = found
        better = "validation" in figures and (
            self.best is None or figures["validation"]["mrr"] > self.best["validation"]["mrr"]
        )
        self.stale = 0 if better or "validation" not in figures else self.stale + 1
        if better:
            self.best = {"epoch": epoch, **{phase: found for phase, found in figures.items() if phase != "train"}}
            if self.config.select == "best":
                self.best_weights = {name: t.clone() for name, t in self.ema.network.state_dict().items()}
        return Evaluation(epoch, figures, better)

    def _losses(self) -> dict[str, float]:
        labeled, unlabeled, weight = (self.sums / self.summed_steps).tolist()
        self.sums.zero_()
        self.summed_steps = 0
        lambda_u = self._lambda_u(self.steps_done - 1)
        found = {"loss": labeled + lambda_u * unlabeled, "loss_labeled": labeled}
        if len(self.pool):
            found |= {"loss_unlabeled": unlabeled, "weight": weight, "lambda_u": lambda_u}
        return found | {"lr": self._lr(self.steps_done - 1)}

    def ranks(self, part: str, network: nn.Module | None = None) -> Ranks:
        """Return the filtered ranks of a network, by default the averaged one, on the part "valid" or "test"."""
        network, facts = network or self.ema.network, getattr(self.graph, part)
        with evaluating(network):
            return filtered_ranks(network, self.graph, facts, trained=self.trained, device=self.device)

    def notices(self) -> list[str]:
        """Tell what a user should know of the parts: entities that only other parts than the labeled one name."""
        unseen = {
            part: int((~self.trained[getattr(self.graph, part)[:, [0, 2]]]).any(-1).sum())
            for part in ("valid", "test")
        }
        return [
            f"{count} facts of the {part} part name an entity without a labeled fact: they rank last"
            for part, count in unseen.items()
            if count
        ]

    @torch.no_grad()
    def evaluate_pseudo_labels(self) -> dict[str, float]:
        """Return the figures of what the teacher says about unlabeled queries whose answers are kept."""
        pool = self.pool[self.pool[:, 2] >= 0]
        most = min(self.config.eval_unlabeled, max(1, ENTRIES // len(self.graph.entities)))
        if not len(pool) or not most:
            return {}
        queries = pool[:: math.ceil(len(pool) / most)]
        weak, excluded = self.teach(queries)
        pi = self.possibility(weak, queries[:, 1], excluded)
        return metrics.evaluate(weak.softmax(-1), torch.from_numpy(queries[:, 2].copy()).to(self.device), pi)

    @property
    def chosen(self) -> nn.Module:
        """The network to report: the averaged one at its best on validation, or at the end."""
        if self.best_weights:
            network = copy.deepcopy(self.ema.network)
            network.load_state_dict(self.best_weights)
            return network
        return self.ema.network

    # ---- state ----------------------------------------------------------------------------------------------------

    def _parts(self) -> dict[str, nn.Module]:
        parts = {"model": self.scorer, "ema": self.ema.network, "method": self.method}
        return parts | {
            name: part
            for name, part in {"snapshot": self.snapshot, "tails": self.tails, "alignment": self.alignment}.items()
            if part is not None
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that a checkpoint keeps."""
        found = {f"{name}.{key}": t for name, part in self._parts().items() for key, t in part.state_dict().items()}
        found |= {f"best.{name}": tensor for name, tensor in self.best_weights.items()}
        for name, parameter in self._learned().items():
            for key, tensor in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{name}.{key}"] = tensor
        return found | {"sums": self.sums}

    def _learned(self) -> dict[str, nn.Parameter]:
        """Return the parameters in the optimizer's order."""
        return {name: parameter for name, parameter in self.scorer.named_parameters() if parameter.requires_grad}

    def state(self) -> dict[str, Any]:
        """Return what else a checkpoint keeps; the places in the data follow from the step."""
        return {
            "steps_done": self.steps_done,
            "summed_steps": self.summed_steps,
            "best": self.best,
            "stale": self.stale,
        }

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Go back to where a checkpoint was made."""

        def below(start: str) -> dict[str, Tensor]:
            return {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}

        for name, part in self._parts().items():
            part.load_state_dict(below(f"{name}."))
        self.best_weights = {name: t.to(self.device) for name, t in below("best.").items()}
        found = {number: below(f"optimizer.{name}.") for number, name in enumerate(self._learned())}
        kept = {number: state for number, state in found.items() if state}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": kept, "param_groups": groups})
        self.sums.copy_(tensors["sums"])
        self.steps_done, self.summed_steps = state["steps_done"], state["summed_steps"]
        self.best, self.stale = state["best"], state["stale"]


def make_scorer(graph: Graph, config: GraphConfig) -> Multiplicative:
    """Return the scorer of a configuration at its first step, drawn from torch's own generator."""
    return Multiplicative(
        SCORERS[config.model],
        len(graph.entities),
        2 * len(graph.relations),
        config.dim,
        normalize=config.normalize,
        input_dropout=config.input_dropout,
        dropout=config.dropout,
        scale=config.init_scale,
    )
