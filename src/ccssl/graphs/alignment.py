r"""Alignment of tails: what the queries of one direction tell about the answers of the other.

An unlabeled fact (h, r, t) leaves two queries behind, (h, r, ?) and (?, r, t), and nobody knows which two belong
together. But the second names t: taken together, the head queries of r say how often each entity is a tail among the
missing facts of r. Let f_r(t) be that number, and m_r(t) the sum of the teacher's predictions q(t | h, r) over the tail
queries of r. On the whole the teacher should predict t as often as it is asked about, so that its predictions are
corrected by ::

    aligned(t)  =  q(t | h, r) (f_r(t) + e) / (m_r(t) + e)  /  (the same summed over all tails),      e = 0.1,

and those of head queries in the same way. This is the distribution alignment of image classification (D. Berthelot et
al., 2020), with frequencies for each relation that are counted instead of estimated. Where a relation has no queries of
the other direction, nothing is known and nothing corrected.

*Calibration queries* count among the unlabeled ones, their answers being hidden here: then calibration and unlabeled
facts enter f and m alike and stay exchangeable, and so do their scores. New queries, such as those of test facts, have
no part in this: predictions for them are never aligned, and are calibrated without it (``predictor``).

Shapes: B queries, E entities, S relations, inverses included.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

LEAST = 0.1


class TailAlignment(nn.Module):
    """The correction of a teacher's scores by how often each entity is asked about.

    >>> queries = np.array([[0, 0], [1, 0], [2, 1], [2, 1]])  # (0, r, ?), (1, r, ?), and twice (?, r, 2)
    >>> alignment = TailAlignment(queries, entities=3, relations=2)
    >>> alignment.fit([(torch.full((4, 3), 1 / 3), queries[:, 1])])
    >>> alignment(torch.zeros(1, 3), np.array([0])).softmax(-1)
    tensor([[0.0435, 0.0435, 0.9130]])
    """

    asked: Tensor  # (S, E) f: how often queries the other way round name an entity
    log_ratio: Tensor  # (S, E)

    def __init__(self, queries: np.ndarray, entities: int, relations: int) -> None:
        """Take queries whose rows begin with entity and relation; ``relations`` counts both kinds."""
        super().__init__()
        inverse = (queries[:, 1] + relations // 2) % relations
        place = np.bincount(inverse * entities + queries[:, 0], minlength=relations * entities)
        asked_SE = torch.from_numpy(place.reshape(relations, entities)).float()
        self.register_buffer("asked", asked_SE, persistent=False)
        self.register_buffer("log_ratio", torch.zeros_like(asked_SE))

    @torch.no_grad()
    def fit(self, parts: Iterable[tuple[Tensor, np.ndarray]]) -> None:
        """Take what the teacher predicts for these queries: pieces of distributions (B, E) and relations (B,)."""
        mean_SE = torch.zeros_like(self.log_ratio)
        for q_BE, relations in parts:
            mean_SE.index_add_(0, torch.from_numpy(relations.copy()).to(q_BE.device), q_BE.to(mean_SE.dtype))
        asked_S1, mean_S1 = self.asked.sum(-1, keepdim=True), mean_SE.sum(-1, keepdim=True)
        asked_SE = self.asked * mean_S1 / asked_S1.clamp(min=1)  # as many as there are predictions
        known_S1 = (asked_S1 > 0) & (mean_S1 > 0)
        self.log_ratio.copy_(((asked_SE + LEAST) / (mean_SE + LEAST)).log().masked_fill(~known_S1, 0))

    def forward(self, scores_BE: Tensor, relations: np.ndarray) -> Tensor:
        """Return the aligned scores (B, E) of queries with these relations (B,)."""
        return scores_BE + self.log_ratio[torch.from_numpy(relations.copy()).to(scores_BE.device)]
