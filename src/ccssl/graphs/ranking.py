r"""Filtered ranks: how far up does a model put the answer of a query?

A test fact (h, r, t) is asked for its tail, (h, r, ?), and for its head, (?, r, t). All entities are candidates but
those that are known to be answers as well, from any part of the data ("filtered"): ranking a true answer above another
one is no error. The rank of the answer among the rest, from 1 on, is not one number where scores tie::

    optimistic     1 + #{ candidates with a larger score }
    pessimistic    #{ candidates with a score at least as large }, the answer included
    realistic      the mean of both: the expected rank if ties are broken at random.

Reported is the realistic one: a model that gives all entities the same score has a mean rank in the middle, not 1. The
figures are those of a list of ranks, of tail queries (``tail.``), of head queries (``head.``) and of both together::

    mrr = mean of 1 / rank            hits@k = share of ranks <= k

*What was never trained.* The score of an entity without a training fact means nothing. As an answer and as a candidate
it scores -infinity; so does the answer to a query from such an entity. They rank last, tied among themselves. A score
that is not a number counts as -infinity, too: no model gains by failing.

Queries are scored in pieces of a bounded number of entries, so that memory does not grow with the graph, and the cost
is linear in its entities.

Shapes: N facts, B queries of a piece, E entities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ccssl.graphs.known import Known
from ccssl.graphs.triples import Graph

TIES = ("realistic", "optimistic", "pessimistic")
HITS = (1, 3, 10)
ENTRIES = 2**22  # scores worked on at once

Scorer = Callable[[Tensor, Tensor], Tensor]  # entities (B,), relations (B,) -> scores of all tails (B, E)


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks of the answers of facts, first as tails, then as heads."""

    optimistic: np.ndarray  # (2N,) float64
    pessimistic: np.ndarray
    relations: np.ndarray  # (2N,) the relation of each fact
    heads: np.ndarray  # (2N,) whether the head was asked for

    @property
    def realistic(self) -> np.ndarray:
        """The expected ranks if ties are broken at random."""
        return (self.optimistic + self.pessimistic) / 2

    def figures(self, ties: Sequence[str] = ("realistic",)) -> dict[str, float]:
        """Return MRR and hits, of both kinds of queries and of each; unrealistic ties get a prefix."""
        found: dict[str, float] = {}
        for kind in ties:
            prefix = "" if kind == "realistic" else f"{kind}."
            found |= _figures(getattr(self, kind), prefix)
            for side, chosen in (("head.", self.heads), ("tail.", ~self.heads)):
                found |= _figures(getattr(self, kind)[chosen], prefix + side)
        return found

    def of_relation(self, relation: int) -> Ranks:
        """Return the ranks of the facts with one relation."""
        rows = self.relations == relation
        return Ranks(self.optimistic[rows], self.pessimistic[rows], self.relations[rows], self.heads[rows])


def _figures(ranks: np.ndarray, prefix: str) -> dict[str, float]:
    if not len(ranks):
        return {}
    found = {f"{prefix}mrr": float((1 / ranks).mean())}
    return found | {f"{prefix}hits@{k}": float((ranks <= k).mean()) for k in HITS}


def rank(scores: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the optimistic and the pessimistic ranks (B,) of the answers (B,) in scores (B, E).

    Entities that are no candidates have the score NaN.

    >>> rank(torch.tensor([[0.5, 0.9, 0.5, 0.1, torch.nan]]), torch.tensor([2]))
    (tensor([2]), tensor([3]))
    """
    answer = scores.gather(-1, answers.unsqueeze(-1))
    return (scores > answer).sum(-1) + 1, (scores >= answer).sum(-1)


@torch.no_grad()
def filtered_ranks(
    scorer: Scorer,
    graph: Graph,
    facts: np.ndarray,
    *,
    known: Known | None = None,
    trained: np.ndarray | None = None,
    device: torch.device | str = "cpu",
    entries: int = ENTRIES,
) -> Ranks:
    """Rank the answers of facts (N, 3), both ways.

    ``known`` holds the answers that are left out beside the one that is asked for, by default all facts of the graph;
    ``trained`` (E,) tells which entities a training fact names, by default all.
    """
    device = torch.device(device)
    known = known or Known(graph.known, 2 * len(graph.relations))
    both = graph.both_ways(facts)
    optimistic, pessimistic = np.empty(len(both)), np.empty(len(both))
    for rows in pieces(len(both), len(graph.entities), entries):
        head, relation, tail = both[rows].T
        answer = torch.from_numpy(tail).to(device)
        scores = scorer(torch.from_numpy(head).to(device), torch.from_numpy(relation).to(device))
        scores = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        own = scores.gather(-1, answer.unsqueeze(-1))
        if trained is not None:
            scores[:, torch.from_numpy(~trained).to(device)] = -math.inf
            hopeless = torch.from_numpy(~(trained[head] & trained[tail])).to(device)
            own = own.masked_fill(hopeless.unsqueeze(-1), -math.inf)
        scores[known.of(head, relation).on(device)] = math.nan
        scores.scatter_(-1, answer.unsqueeze(-1), own)
        optimistic[rows], pessimistic[rows] = (side.cpu().numpy() for side in rank(scores, answer))
    return Ranks(optimistic, pessimistic, np.tile(facts[:, 1], 2), np.arange(len(both)) >= len(facts))


def pieces(rows: int, columns: int, entries: int = ENTRIES) -> Iterator[slice]:
    """Yield slices of so many rows that a matrix has no more than ``entries``, a row at least."""
    step = max(1, entries // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
