r"""Conformal p-values of tails: how well does an entity answer a query, compared with answers that were kept aside?

A calibration fact (h, r, t) was not learned from. Its nonconformity score is that of t among the *candidates* of its
query (h, r, ?): all entities but the tails known from labeled facts, for a missing fact is a new fact. The model's
distribution is taken over the candidates, everything known has probability 0. A new query is treated alike, so that its
answer t*, if it is a new one drawn like the calibration facts, is exchangeable with theirs, and ::

    P( p_value(t*) <= delta )  <=  delta.

What is known gets the p-value and the possibility 0.

*Two queries a fact.* Each calibration fact gives two scores, of its tail and of its head, which are not independent.
For L facts and a fresh fact, the two scores of each are exchangeable *pairs*: among all 2L + 2 scores, one drawn at
random from the fresh pair has a uniform rank. Leaving its twin out of the comparison changes a p-value by less than
1 / (2L + 1), and the bound above by no more than 1 / (2L + 2).

*A calibration for each relation* (and each direction) makes the bound hold for each relation; there, every fact has one
score, and the bound is exact. What it costs are facts: with n of them no p-value is below 1 / (n + 1), and a relation
without any leaves every tail possible.

Shapes: B queries, E entities, L calibration facts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from ccssl.conformal import Calibration
from ccssl.conformal.calibration import CalibrationConfig
from ccssl.credal import Levels
from ccssl.credal.possibility import Normalization, Possibility
from ccssl.graphs.known import Known
from ccssl.training.loop import evaluating


def all_scores(scorer: nn.Module, queries: np.ndarray, device: torch.device) -> Tensor:
    """Return the scores of all tails (B, E) for rows that begin with an entity and a relation."""
    columns = torch.from_numpy(np.ascontiguousarray(queries[:, :2].T)).to(device, non_blocking=True)
    return scorer(columns[0], columns[1])


@torch.no_grad()
def candidate_scores(
    scorer: nn.Module, queries: np.ndarray, known: Known | None, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return a scorer's scores (B, E) in evaluation mode, -infinity for what is known, and the mask of that."""
    with evaluating(scorer):
        scores_BE = all_scores(scorer, queries, device)
    if known is None:
        return scores_BE, None
    excluded_BE = torch.zeros_like(scores_BE, dtype=torch.bool)
    excluded_BE[known.of(queries[:, 0], queries[:, 1]).on(device)] = True
    return scores_BE.masked_fill(excluded_BE, -math.inf), excluded_BE


class TailCalibration(nn.Module):
    """Calibrations of tails: one for all relations, or one for each relation and direction.

    All methods take distributions (B, E) over the candidates, the relations (B,) of the queries, and the mask (B, E) of
    what is no candidate, if anything.
    """

    def __init__(self, config: CalibrationConfig, relations: int, per_relation: bool = False) -> None:
        """``relations`` counts both kinds, inverses included."""
        super().__init__()
        self.config = config
        self.groups = nn.ModuleList(
            Calibration(config.score, validate=False, **config.options)
            for _ in range(relations if per_relation else 1)
        )

    @torch.no_grad()
    def fit(self, parts: Iterable[tuple[Tensor, np.ndarray]]) -> None:
        """Take the scores of calibration facts: pieces of distributions (B, E) and facts (B, 3)."""
        alpha_L = torch.empty(0)  # filled piece by piece, and doubled when it is full
        facts: list[np.ndarray] = []
        filled = entities = 0
        for q_BE, part in parts:
            tails = torch.from_numpy(part[:, 2].copy()).to(q_BE.device)
            alpha_B = self.config.score_function(q_BE, tails, **self.config.options)
            # Small tensors kept for each piece would lie between the large ones, whose place the C library could then
            # not give to the next piece: memory would grow as if every distribution was kept.
            if filled + len(alpha_B) > len(alpha_L):
                alpha_L = torch.cat([alpha_L.to(alpha_B)[:filled], alpha_B.new_empty(filled + 2 * len(alpha_B))])
            alpha_L[filled : filled + len(alpha_B)] = alpha_B
            filled += len(alpha_B)
            facts.append(part)
            entities = q_BE.shape[1]
        alpha_L, fact_L = alpha_L[:filled], np.concatenate(facts)
        with _silence():
            for number, rows in self._rows(fact_L[:, 1], every=True):
                tails = torch.from_numpy(fact_L[rows, 2].copy()).to(alpha_L.device)
                self._group(number).fit_scores(alpha_L[_index(rows, alpha_L)], tails, entities)

    @property
    def sizes(self) -> list[int]:
        """The number of calibration scores of each group."""
        return [self._group(number).size for number in range(len(self.groups))]

    @torch.no_grad()
    def p_values(self, q_BE: Tensor, relations: np.ndarray, excluded: Tensor | None = None) -> Tensor:
        """Return the p-values of all tails (B, E), 0 for what is excluded."""
        p_BE = torch.empty_like(q_BE)
        for number, rows in self._rows(relations):
            index = _index(rows, q_BE)
            p_BE[index] = self._group(number).p_values(q_BE[index]).to(p_BE.dtype)
        return p_BE if excluded is None else p_BE.masked_fill_(excluded, 0)

    @torch.no_grad()
    def possibility(
        self,
        q_BE: Tensor,
        relations: np.ndarray,
        excluded: Tensor | None = None,
        normalization: Normalization = "proportional",
    ) -> Possibility:
        """Return the possibility degrees of all tails, as ``Levels`` if all relations share one calibration."""
        if len(self.groups) == 1:
            return _rule_out(self._group(0).levels(q_BE, normalization), excluded)
        pi_BE = torch.empty_like(q_BE)
        for number, rows in self._rows(relations):
            index = _index(rows, q_BE)
            levels = self._group(number).levels(q_BE[index], normalization)
            levels = _rule_out(levels, None if excluded is None else excluded[index])
            pi_BE[index] = levels.dense(pi_BE.dtype, validate=False)
        return pi_BE

    @torch.no_grad()
    def predict_set(
        self, q_BE: Tensor, relations: np.ndarray, delta: float, excluded: Tensor | None = None
    ) -> Tensor:
        """Return the mask (B, E) of the tails with a p-value of at least ``delta``; nothing that is excluded."""
        set_BE = torch.empty(q_BE.shape, dtype=torch.bool, device=q_BE.device)
        with _silence():
            for number, rows in self._rows(relations):
                index = _index(rows, q_BE)
                set_BE[index] = self._group(number).predict_set(q_BE[index], delta)
        return set_BE if excluded is None else set_BE & ~excluded

    def _group(self, number: int) -> Calibration:
        group = self.groups[number]
        assert isinstance(group, Calibration)
        return group

    def _rows(self, relations: np.ndarray, every: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the groups that are there, or all, and the rows of each."""
        if len(self.groups) == 1:
            yield 0, np.arange(len(relations))
            return
        for number in range(len(self.groups)) if every else np.unique(relations).tolist():
            yield number, np.flatnonzero(relations == number)


def _index(rows: np.ndarray, like: Tensor) -> Tensor | slice:
    return slice(None) if len(rows) == len(like) else torch.from_numpy(rows).to(like.device)


def _rule_out(levels: Levels, excluded: Tensor | None) -> Levels:
    if excluded is None:
        return levels
    return Levels(levels.counts.masked_fill(excluded, -1), levels.size, levels.normalization, levels.top)


@contextmanager
def _silence() -> Iterator[None]:
    """Say nothing of scarce calibration facts: ``sizes`` tells them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the calibration set is empty|delta .* excludes no class")
        yield
