r"""Unsupervised data augmentation, UDA (Xie et al., 2020): a sharpened prediction as a soft target.

With the temperature T < 1 the prediction of the weak view is sharpened, and learned where it is confident::

    p = softmax(weak logits / T),      w = 1 if max p >= tau, else 0.

The threshold is applied to the *sharpened* prediction, as in the paper's experiments, where one search space (T
in {0.5, 1}, tau in {0.7, 0.8, 0.9, 0.95}) serves UDA and FixMatch. Xie et al. apply it to the prediction before
sharpening, with T = 0.4 and tau = 0.8; for a given tau fewer items pass then. Their training signal annealing,
which leaves out labeled items that are already predicted well, concerns the labeled loss and is no part of this.

Q. Xie, Z. Dai, E. Hovy, M.-T. Luong, Q. V. Le: Unsupervised data augmentation for consistency training. NeurIPS
2020.

Shapes: B unlabeled items of a batch, K classes.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ccssl.methods.base import Method, Target, widen
from ccssl.methods.config import UDAConfig


class UDA(Method):
    """Sharpened soft targets."""

    Config: ClassVar[type] = UDAConfig
    config: UDAConfig

    @torch.no_grad()
    def target(self, weak: Tensor, strong: Tensor, index: Tensor) -> Target:
        """Return the sharpened prediction for the weak view."""
        p_BK = (widen(weak) / self.config.temperature).softmax(-1)
        return Target(p_BK, (p_BK.amax(-1) >= self.config.threshold).to(p_BK))
