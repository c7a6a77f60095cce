r"""Supervised: learn from the labeled items alone.

The reference beside every other method: what unlabeled data brought is the difference to this one, trained with the
same labels, network, augmentation and number of steps. Its loss is the cross-entropy of the labeled items; every
unlabeled item has weight 0.

Shapes: B unlabeled items of a batch, K classes.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ccssl.methods.base import Method, Target, widen
from ccssl.methods.config import SupervisedConfig


class Supervised(Method):
    """Labeled items only."""

    Config: ClassVar[type] = SupervisedConfig
    config: SupervisedConfig

    uses_unlabeled = False

    @torch.no_grad()
    def target(self, weak: Tensor, strong: Tensor, index: Tensor) -> Target:
        """Return the prediction for the weak view, with weight 0."""
        q_BK = widen(weak).softmax(-1)
        return Target(q_BK, torch.zeros_like(q_BK[:, 0]))
