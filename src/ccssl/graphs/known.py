r"""Which answers of a query are known already.

A missing fact is a new fact. So the tails that are known for (h, r, ?) are no candidates for a further one: among the
facts learned from, for unlabeled and calibration queries; among all facts, where a test fact is ranked ("filtered").

Facts are kept sorted by their query h S + r (S the number of relations, inverses included), so that the known tails of
a query are one stretch, found by two binary searches; what a batch needs is a list of places, never a matrix.

Shapes: N facts, B queries, M places found.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Places(NamedTuple):
    """Entries of a matrix with a row for each query of a batch and a column for each entity."""

    rows: np.ndarray  # (M,) int64, ascending
    columns: np.ndarray  # (M,)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return rows and columns as an index of a tensor on a device."""
        rows, columns = (torch.from_numpy(side).to(device, non_blocking=True) for side in self)
        return rows, columns


class Known:
    """The known tails of every query."""

    def __init__(self, facts: np.ndarray, relations: int) -> None:
        """Take facts (N, 3), inverses among them; ``relations`` counts both kinds."""
        self.relations = relations
        head, relation, tail = facts.T
        key = head * relations + relation
        order = np.lexsort((tail, key))
        key, tail = key[order], tail[order]
        fresh = np.ones(len(key), bool)
        fresh[1:] = (key[1:] != key[:-1]) | (tail[1:] != tail[:-1])
        self._key, self._tail = key[fresh], tail[fresh]

    def of(self, entities: np.ndarray, relations: np.ndarray) -> Places:
        """Return the places of the known tails of a batch of queries."""
        key = entities * self.relations + relations
        start, end = (np.searchsorted(self._key, key, side) for side in ("left", "right"))
        count = end - start
        rows = np.repeat(np.arange(len(key)), count)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
        return Places(rows, self._tail[start[rows] + within])

    def count(self, entities: np.ndarray, relations: np.ndarray) -> np.ndarray:
        """Return how many tails are known of each query."""
        key = entities * self.relations + relations
        return np.searchsorted(self._key, key, "right") - np.searchsorted(self._key, key, "left")

    def queries(self) -> np.ndarray:
        """Return each query (Q, 2) that has a known tail, once."""
        key = np.unique(self._key)
        return np.stack([key // self.relations, key % self.relations], 1)
