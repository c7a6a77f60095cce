r"""FlexMatch (Zhang et al., 2021): a lower threshold for classes that are learned more slowly.

Every unlabeled item remembers its last *confident* label: argmax q, at the last time that max q >= tau, where
q = softmax(weak logits); until then it is unused. The learning status of class k is the number of items that
remember it, relative to the most common class::

    b_k  =  #{ items with label k }  /  max_j #{ items with label j },

or, with warm-up, relative to the number of unused items as long as that is larger. The target of an item is then ::

    p = one-hot( argmax q ),      w = 1 if max q >= tau b / (2 - b),  b the status of class argmax q,      else 0.

The mapping b / (2 - b) rises slowly at first and faster later. As long as nothing is remembered all b are 0 and
every prediction passes; warm-up keeps the thresholds low while most items are unused. A step is judged by what was
remembered before it. tau is 0.95 with Zhang et al. and searched in {0.8, 0.9, 0.95} by the paper, warm-up on and
off.

*Counting.* The counts are kept up to date, so that a step's cost does not grow with the pool. An item that comes
twice in a batch remembers its last confident label there, ranks in order.

B. Zhang et al.: FlexMatch: boosting semi-supervised learning with curriculum pseudo labeling. NeurIPS 2021.

Shapes: B unlabeled items of a batch (of all ranks), K classes, U items in the unlabeled pool.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ccssl import collective
from ccssl.methods.base import Method, Target, one_hot, widen
from ccssl.methods.config import FlexMatchConfig


class FlexMatch(Method):
    """Hard labels of predictions that are confident for their class."""

    Config: ClassVar[type] = FlexMatchConfig
    config: FlexMatchConfig

    remembered: Tensor  # (U,) the last confident label of each item, -1 if there was none
    counts: Tensor  # (K + 1,) the number of unused items, then of items with each label

    def __init__(self, classes: int, unlabeled: int, config: Any = None, prior: Tensor | None = None) -> None:
        super().__init__(classes, unlabeled, config, prior)
        self.register_buffer("remembered", torch.full((unlabeled,), -1))
        self.register_buffer("counts", torch.tensor([unlabeled] + [0] * classes))

    def thresholds(self) -> Tensor:
        """Return the threshold of each class (K,), as of now."""
        count_K = self.counts[1:].to(self.prior)
        most = (self.counts if self.config.warmup else self.counts[1:]).amax().clamp(min=1)
        status_K = count_K / most
        return self.config.threshold * (status_K / (2 - status_K))

    @torch.no_grad()
    def target(self, weak: Tensor, strong: Tensor, index: Tensor) -> Target:
        """Return the most probable class of the weak view, and remember it where it is confident."""
        q_BK = widen(weak).softmax(-1)
        confidence_B, label_B = q_BK.max(-1)
        weight_B = (confidence_B >= self.thresholds().gather(0, label_B)).to(q_BK)
        self._remember(index, label_B, confidence_B >= self.config.threshold)
        return Target(one_hot(label_B, q_BK), weight_B)

    def _remember(self, index: Tensor, label: Tensor, confident: Tensor) -> None:
        """Remember the confident labels of the batch on all ranks."""
        item_B = collective.gather(index.long())
        label_B = collective.gather(label.where(confident, -1))
        counts_B = label_B >= 0
        later_BB = ((item_B[:, None] == item_B) & counts_B).triu(1)
        last_B = counts_B & ~later_BB.any(-1)
        old_B = self.remembered.gather(0, item_B)
        # Adding integers, 0 for all but one row of an item, is the same in any order: no device can disagree.
        self.remembered.scatter_add_(0, item_B, (label_B - old_B).where(last_B, 0))
        self.counts.scatter_add_(0, old_B + 1, -last_B.long())
        self.counts.scatter_add_(0, label_B + 1, last_B.long())
