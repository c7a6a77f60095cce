r"""Pseudo-labels (Lee, 2013): believe the most probable class.

With q = softmax(weak logits) the target of an unlabeled item is ::

    p = one-hot( argmax q ),      w = 1 if max q >= tau, else 0.

Lee has no threshold: tau = 0, the default. The label is predicted from the weak view and learned on the strong
one, like that of every method here; Lee's is learned on the view from which it was predicted. So this is FixMatch
without its threshold, and says what the threshold is worth. What Lee raises over time, the weight of the unlabeled
loss, is constant here.

D.-H. Lee: Pseudo-label: the simple and efficient semi-supervised learning method for deep neural networks. ICML
workshop on challenges in representation learning, 2013.

Shapes: B unlabeled items of a batch, K classes.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ccssl.methods.base import Method, Target, one_hot, widen
from ccssl.methods.config import PseudoLabelConfig


class PseudoLabel(Method):
    """Hard labels of all predictions, or of the confident ones."""

    Config: ClassVar[type] = PseudoLabelConfig
    config: PseudoLabelConfig

    @torch.no_grad()
    def target(self, weak: Tensor, strong: Tensor, index: Tensor) -> Target:
        """Return the most probable class of the weak view."""
        q_BK = widen(weak).softmax(-1)
        confidence_B, label_B = q_BK.max(-1)
        return Target(one_hot(label_B, q_BK), (confidence_B >= self.config.threshold).to(q_BK))
