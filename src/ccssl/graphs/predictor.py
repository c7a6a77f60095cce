r"""New facts and sets of tails, with what conformal prediction says of them: a link predictor that is ready to use.

A query (h, r, ?) or (?, r, t) is answered by the entities that are not known as answers from labeled facts, its
*candidates*. The distribution over them, p-values and possibility degrees are those of ``calibration``: for a new fact
drawn like the calibration facts, its answer lies in the prediction set ::

    Gamma_delta = { candidates with p-value >= delta }        with probability 1 - delta, at least.

Listed as new facts are the candidates that no part of the graph knows, the most probable first. Leaving out what other
parts know happens after the p-values are taken, so that they keep their meaning; so does leaving out entities without a
labeled fact, about which nothing was learned.

What calibrates are the calibration facts of the split. A split without any (``all``, ``40:60``) takes the validation
facts: they were not learned from either, but if the weights were chosen by them, sets are a little too small.

Where there are none either, every candidate has the p-value 1: p-values and sets say nothing (``UNCALIBRATED``).

Everything is computed in pieces of a bounded number of entries, whatever the number of queries.

Shapes: B queries of a piece, E entities, k facts of a query, R relations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from ccssl.conformal.calibration import CalibrationConfig
from ccssl.conformal.validity import law_of_errors, law_of_sum
from ccssl.credal.possibility import Normalization, as_dense
from ccssl.errors import InputError
from ccssl.graphs.calibration import TailCalibration, candidate_scores
from ccssl.graphs.config import GraphConfig
from ccssl.graphs.files import load_graph
from ccssl.graphs.known import Known
from ccssl.graphs.ranking import TIES, Ranks, pieces
from ccssl.graphs.splits import split_of
from ccssl.graphs.training import Training, make_scorer
from ccssl.graphs.triples import Graph, Query
from ccssl.training import checkpoint

SIDES = ("tail", "head")

# What calibration facts are needed for, of a new fact and of a query, and what to say without any.
CALIBRATED = ("p_value", "possibility", "in_set", "set_size", "set")
UNCALIBRATED = "There are no calibration facts, nor validation facts in their place: p-values and sets say nothing."


class Link(NamedTuple):
    """A new fact, and what is said of it."""

    head: str
    relation: str
    tail: str
    asked: str  # tail or head: which of them answers the query
    place: int  # among the new facts of its query, from 1 on
    score: float
    probability: float  # among the candidates of the query
    p_value: float
    possibility: float
    in_set: bool  # whether it is in the prediction set
    set_size: int  # of the query


class Links(NamedTuple):
    """New facts of a piece of the queries, by numbers: one row a fact."""

    queries: np.ndarray  # (n, 2) entity and relation; from R on, a head was asked for
    answers: np.ndarray  # (n,)
    place: np.ndarray
    score: np.ndarray
    probability: np.ndarray
    p_value: np.ndarray
    possibility: np.ndarray
    in_set: np.ndarray
    set_size: np.ndarray

    def columns(self, graph: Graph) -> dict[str, np.ndarray]:
        """Return the fields of ``Link`` as columns."""
        entities, relations = np.array(graph.entities, object), np.array(graph.relations, object)
        entity, relation = self.queries.T
        asks_head = relation >= len(relations)
        known, answer = entities[entity], entities[self.answers]
        return {
            "head": np.where(asks_head, answer, known),
            "relation": relations[relation % len(relations)],
            "tail": np.where(asks_head, known, answer),
            "asked": np.where(asks_head, "head", "tail"),
            **{name: getattr(self, name) for name in Link._fields[4:]},
        }


# What is said of no query: the columns are there.
NO_LINKS = Links(
    np.empty((0, 2), np.int64),
    *(np.empty(0, kind) for kind in (np.int64, np.int64, *4 * [np.float32], np.bool_, np.int64)),
)


class TailSets(NamedTuple):
    """Prediction sets of a piece of the queries."""

    queries: np.ndarray  # (B, 2)
    members: list[np.ndarray]  # of each query, the entities in its set

    def columns(self, graph: Graph) -> dict[str, np.ndarray]:
        """Return head, relation and tail (? for what was asked), and the set's size and the names in it, a list."""
        names = [graph.named(int(entity), int(relation)) for entity, relation in self.queries]
        columns = {
            title: np.array([query[place] or "?" for query in names], object)
            for place, title in enumerate(("head", "relation", "tail"))
        }
        columns["set_size"] = np.array([len(members) for members in self.members], np.int64)
        columns["set"] = np.empty(len(self.members), object)
        for row, members in enumerate(self.members):
            columns["set"][row] = [graph.entities[n] for n in members]
        return columns


class Degrees(NamedTuple):
    """What is said of every entity as the answer of B queries: each (B, E), 0 for what is no candidate."""

    probability: np.ndarray
    p_value: np.ndarray
    possibility: np.ndarray
    in_set: np.ndarray


class LinkPredictor:
    """Learn from a graph with few facts, predict new ones.

    >>> predictor = LinkPredictor(split="60:30:10", epochs=3, dim=16, batch=256).fit("nations")
    >>> links = predictor.predict([("brazil", "embassy", None)], top=2)
    >>> [(link.head, link.relation, link.asked, link.place) for link in links]
    [('brazil', 'embassy', 'tail', 1), ('brazil', 'embassy', 'tail', 2)]
    >>> sorted(predictor.coverage(delta=0.25))  # doctest: +NORMALIZE_WHITESPACE
    ['band', 'calibration', 'coverage', 'delta', 'entities', 'median_size', 'part', 'per_relation', 'queries',
     'relations', 'size']
    """

    def __init__(
        self, config: GraphConfig | None = None, *, scorer: nn.Module | None = None, **settings: Any
    ) -> None:
        """Take a configuration, or its fields by name, and a scorer of your own in place of ``config.model``."""
        if config is not None and settings:
            raise InputError(f"give a configuration or its fields, not both: config and {', '.join(settings)}.")
        self.config = config or GraphConfig(**settings)
        self.scorer = scorer
        self._training: Training | None = None

    @classmethod
    def of(cls, training: Training, per_relation: bool | None = None) -> Self:
        """Return the predictor of a finished training; ``per_relation`` may differ from the training's."""
        config = training.config if per_relation is None else replace(training.config, per_relation=per_relation)
        predictor = cls(config)
        predictor._take(training)
        return predictor

    def fit(self, graph: Graph | str) -> Self:
        """Train on a graph, or on the one of this name (``load_graph``)."""
        graph = load_graph(graph) if isinstance(graph, str) else graph
        config = self.config
        checkpoint.seed_random(config.seed)
        scorer = make_scorer(graph, config) if self.scorer is None else self.scorer
        training = Training(scorer, graph, split_of(graph, config.split, config.split_mode, config.seed), config)
        for _ in training.run():
            pass
        self._take(training)
        return self

    def _take(self, training: Training) -> None:
        self._training, self.graph = training, training.graph
        self.network, self.device = training.chosen, training.device
        self.every = Known(self.graph.known, 2 * len(self.graph.relations))
        method_score = training.tails.config if training.tails is not None else CalibrationConfig("difference")
        self.normalization: Normalization = getattr(training.method.config, "normalization", "proportional")
        facts, self.part = training.calibration, "calibration part of the split"
        if not len(facts):
            facts, self.part = self.graph.both_ways(self.graph.valid), "validation facts"
        self.calibration_facts = len(facts) // 2
        self.tails: TailCalibration | None = None
        if len(facts):
            relations = 2 * len(self.graph.relations)
            self.tails = TailCalibration(method_score, relations, self.config.per_relation).to(self.device)
            parts = (facts[rows] for rows in pieces(len(facts), len(self.graph.entities)))
            self.tails.fit((self._distribution(part)[1], part) for part in parts)

    @property
    def training(self) -> Training:
        """The training that made this predictor."""
        if self._training is None:
            raise InputError("this predictor has learned nothing yet: call fit(graph) first.")
        return self._training

    def evaluate(self, part: str = "test") -> dict[str, float]:
        """Return the filtered figures on the part "test" or "valid", with all kinds of ties."""
        return self.ranks(part).figures(TIES)

    def ranks(self, part: str = "test") -> Ranks:
        """Return the filtered ranks of a part's facts."""
        return self.training.ranks(part, self.training.chosen)

    def predict(
        self, queries: Iterable[Query] | None = None, *, top: int = 10, delta: float = 0.1, min_p_value: float = 0.0
    ) -> list[Link]:
        """Return the new facts of queries, ``top`` of each at most, of which None or "?" is asked; by default all."""
        found: list[Link] = []
        for columns in self.chunks(queries, top=top, delta=delta, min_p_value=min_p_value):
            rows = (column.tolist() for column in columns.values())
            found += [Link(*row) for row in zip(*rows, strict=True)]
        return found

    def chunks(
        self, queries: Iterable[Query] | None = None, *, top: int = 10, delta: float = 0.1, min_p_value: float = 0.0
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yield the same as columns, a bounded piece of the queries at a time."""
        for links in self.links(self._queries(queries), top=top, delta=delta, min_p_value=min_p_value):
            yield links.columns(self.graph)

    def predict_sets(self, queries: Iterable[Query] | None = None, delta: float = 0.1) -> list[list[str]]:
        """Return the prediction set of each query, by default of all tail queries."""
        found: list[list[str]] = []
        for sets in self.sets(self._queries(queries), delta):
            found += [[self.graph.entities[n] for n in members] for members in sets.members]
        return found

    def set_chunks(
        self, queries: Iterable[Query] | None = None, delta: float = 0.1
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yield queries and their prediction sets as columns, a bounded piece at a time."""
        for sets in self.sets(self._queries(queries), delta):
            yield sets.columns(self.graph)

    @torch.no_grad()
    def links(
        self, queries: np.ndarray, *, top: int = 10, delta: float = 0.1, min_p_value: float = 0.0
    ) -> Iterator[Links]:
        """Yield new facts by numbers, for queries by numbers (N, 2)."""
        check_options(top=top, delta=delta, min_p_value=min_p_value)
        if not len(queries):
            yield NO_LINKS
        for rows in pieces(len(queries), len(self.graph.entities)):
            yield self._links(queries[rows], min(top, len(self.graph.entities)), delta, min_p_value)

    def _links(self, queries: np.ndarray, top: int, delta: float, min_p_value: float) -> Links:
        scores_BE, q_BE, excluded_BE = self._distribution(queries)
        p_BE, pi_BE, set_BE = self._conformal(q_BE, queries[:, 1], excluded_BE, delta)
        new_BE = torch.ones_like(set_BE)
        new_BE[self.every.of(queries[:, 0], queries[:, 1]).on(self.device)] = False
        new_BE &= torch.from_numpy(self.training.trained).to(self.device) & (p_BE >= min_p_value)
        listed = scores_BE.masked_fill(~new_BE, -torch.inf)
        order_BE = listed.sort(dim=-1, descending=True, stable=True).indices[:, :top]
        listed_BE = new_BE.gather(-1, order_BE)
        row, place = (side.cpu() for side in listed_BE.nonzero(as_tuple=True))
        answer = order_BE.cpu()[row, place]

        def at(values: Tensor) -> np.ndarray:
            return values.cpu()[row, answer].numpy()

        return Links(
            queries[row.numpy(), :2],
            answer.numpy(),
            place.numpy() + 1,
            at(scores_BE),
            at(q_BE),
            at(p_BE),
            at(pi_BE),
            at(set_BE),
            set_BE.sum(-1).cpu()[row].numpy(),
        )

    @torch.no_grad()
    def sets(self, queries: np.ndarray, delta: float) -> Iterator[TailSets]:
        """Yield the prediction sets of queries by numbers (N, 2)."""
        _check_share("delta", delta)
        if not len(queries):
            yield TailSets(queries, [])
        for rows in pieces(len(queries), len(self.graph.entities)):
            _, q_BE, excluded_BE = self._distribution(queries[rows])
            set_BE = self._conformal(q_BE, queries[rows][:, 1], excluded_BE, delta)[2].cpu().numpy()
            yield TailSets(queries[rows], [np.flatnonzero(members) for members in set_BE])

    @torch.no_grad()
    def degrees(self, queries: np.ndarray, delta: float = 0.1) -> Degrees:
        """Return what is said of every entity, for a few queries by numbers (B, 2)."""
        _check_share("delta", delta)
        _, q_BE, excluded_BE = self._distribution(queries)
        found = q_BE, *self._conformal(q_BE, queries[:, 1], excluded_BE, delta)
        return Degrees(*(values.cpu().numpy() for values in found))

    @torch.no_grad()
    def coverage(self, delta: float = 0.1, part: str = "test") -> dict[str, Any]:
        """Return how often the prediction sets of a part's facts hold the answer, and how large they are.

        ``band`` is where it lies in 95% of cases if the facts are exchangeable (``band``).
        """
        _check_share("delta", delta)
        facts = self.training.graph.both_ways(getattr(self.graph, part))
        if not len(facts):
            return {}
        held, sizes = np.empty(len(facts), bool), np.empty(len(facts))
        for rows in pieces(len(facts), len(self.graph.entities)):
            _, q_BE, excluded_BE = self._distribution(facts[rows])
            set_BE = self._conformal(q_BE, facts[rows][:, 1], excluded_BE, delta)[2].cpu().numpy()
            held[rows] = set_BE[np.arange(len(set_BE)), facts[rows][:, 2]]
            sizes[rows] = set_BE.sum(-1)
        relation = facts[:, 1] % len(self.graph.relations)
        return {
            "delta": delta,
            "part": self.part,
            "calibration": self.calibration_facts,
            "per_relation": self.config.per_relation,
            "coverage": float(held.mean()),
            "band": list(self.band(delta, facts)),
            "size": float(sizes.mean()),
            "median_size": float(np.median(sizes)),
            "queries": len(facts),
            "entities": len(self.graph.entities),
            "relations": {
                self.graph.relations[number]: {
                    "queries": int((relation == number).sum()),
                    "coverage": float(held[relation == number].mean()),
                    "size": float(sizes[relation == number].mean()),
                }
                for number in np.unique(relation).tolist()
            },
        }

    def band(self, delta: float, facts: np.ndarray) -> tuple[float, float]:
        """Return where the coverage of facts (2N, 3), each asked both ways, lies in 95% of cases if it is by chance.

        The two queries of a fact count as one draw, for they are not independent: the band of a calibration of all
        relations is that of half as many queries and scores, and with one for each relation and direction, the more
        answers of a relation's tails are missed, the more are of its heads.
        """
        if self.tails is None or len(self.tails.groups) == 1:
            return coverage_band(delta, self.calibration_facts, len(facts) // 2)
        relations = len(self.graph.relations)
        fresh = np.bincount(facts[:, 1] % relations, minlength=relations) // 2
        return coverage_band_of_groups(delta, np.reshape(self.tails.sizes, (2, relations)), fresh)

    def tail_queries(self) -> np.ndarray:
        """Return by numbers (N, 2) the queries for tails of each entity and relation that were trained."""
        entities = np.flatnonzero(self.training.trained)
        relations = np.unique(self.training.facts[:, 1] % len(self.training.graph.relations))
        return np.stack([np.repeat(entities, len(relations)), np.tile(relations, len(entities))], 1)

    def _queries(self, queries: Iterable[Query] | None) -> np.ndarray:
        """Return queries by numbers, by default all for tails."""
        if queries is None:
            return self.tail_queries()
        graph = self.training.graph
        return np.array([graph.query(query) for query in queries], np.int64).reshape(-1, 2)

    def _distribution(self, queries: np.ndarray) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return scores, the distribution over the candidates, and the mask of what is no candidate: each (B, E)."""
        known = self.training.known if self.training.config.exclude_known else None
        scores_BE, excluded_BE = candidate_scores(self.network, queries, known, self.device)
        return scores_BE, scores_BE.softmax(-1), excluded_BE

    def _conformal(
        self, q_BE: Tensor, relations: np.ndarray, excluded: Tensor | None, delta: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return p-values, possibility degrees and sets; where nothing calibrates, all candidates are possible."""
        if self.tails is None:
            p_BE = torch.ones_like(q_BE) if excluded is None else (~excluded).to(q_BE.dtype)
            return p_BE, p_BE, p_BE > 0
        p_BE = self.tails.p_values(q_BE, relations, excluded)
        pi = self.tails.possibility(q_BE, relations, excluded, self.normalization)
        return p_BE, as_dense(pi, q_BE.dtype), self.tails.predict_set(q_BE, relations, delta, excluded)


def check_options(*, top: int, delta: float, min_p_value: float) -> None:
    """Refuse what cannot be asked for."""
    if top < 1:
        raise InputError(f"top must be at least 1, got {top}.")
    _check_share("delta", delta)
    _check_share("min_p_value", min_p_value)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InputError(f"{name} must lie in [0, 1], got {value:g}.")


def coverage_band(delta: float, calibration: int, fresh: int, level: float = 0.95) -> tuple[float, float]:
    """Return where the coverage of fresh items lies with probability ``level``, if the calibration is exact.

    The number of misses is beta-binomial (``ccssl.conformal.validity``). Without a calibration item nothing is missed.

    >>> low, high = coverage_band(0.1, calibration=1000, fresh=500)
    >>> 0.86 < low < 0.9 < high < 0.94
    True
    """
    from scipy.stats import betabinom

    k = int(np.floor(delta * (calibration + 1) * (1 + 1e-12)))
    if k < 1:
        return 1.0, 1.0
    if k > calibration:
        return 0.0, 1.0
    law = betabinom(fresh, k, calibration + 1 - k)
    least, most = (float(law.ppf(tail)) for tail in ((1 - level) / 2, (1 + level) / 2))
    return 1 - most / fresh, 1 - least / fresh


def coverage_band_of_groups(
    delta: float, calibration: np.ndarray, fresh: np.ndarray, level: float = 0.95
) -> tuple[float, float]:
    """Return the same where each relation and direction is calibrated by itself, (2, R) facts, for fresh facts (R,).

    A group of n calibration facts misses with probability k / (n + 1), k the number of p-values 1 / (n + 1),
    2 / (n + 1), ... below delta: never, if n is small. The misses of relations are independent, and their laws are
    convolved. Those of heads and tails of one relation are not: they are taken as large together and small together,
    which spreads the sum most.

    >>> coverage_band_of_groups(0.1, calibration=np.full((2, 5), 9), fresh=np.full(5, 100))  # 1/10 is not below 0.1
    (1.0, 1.0)
    >>> low, high = coverage_band_of_groups(0.1, calibration=np.full((2, 5), 14), fresh=np.full(5, 100))
    >>> low < 1 - 1 / 15 < high
    True
    """
    missed = np.maximum(np.ceil(delta * (calibration + 1) * (1 - 1e-12)).astype(np.int64) - 1, 0)
    laws = [
        _law_together(
            *(law_of_errors(int(facts), int(k), int(n) + 1) for k, n in zip(missed_2, sizes_2, strict=True))
        )
        for facts, missed_2, sizes_2 in zip(fresh, missed.T, calibration.T, strict=True)
        if facts
    ]
    below = reduce(law_of_sum, laws).cumsum()
    queries = 2 * fresh.sum()
    least, most = (float(np.searchsorted(below, tail)) for tail in ((1 - level) / 2, (1 + level) / 2))
    return float(1 - most / queries), float(1 - least / queries)


def _law_together(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the probabilities of the sum of two numbers of misses that grow together: of their quantiles' sum."""
    below = [np.append(np.minimum(law.cumsum()[:-1], 1), 1) for law in (first, second)]
    steps = np.union1d(*below)
    sums = np.searchsorted(below[0], steps) + np.searchsorted(below[1], steps)
    return np.bincount(sums, np.diff(steps, prepend=0), len(first) + len(second) - 1)
