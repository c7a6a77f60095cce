r"""Credal self-supervised learning, CSSL (Lienen and Huellermeier, 2021): a set of distributions for a target.

Let q = softmax(weak logits), y = argmax q, and let q' be q aligned with the class frequencies (``alignment``). The
less confident the aligned prediction, the more is left open::

    alpha  =  max( 1 - max_k q'_k,  1e-3 ),      pi  =  1 at y,  alpha elsewhere.

The credal set Q_pi holds the distributions with p(y) >= 1 - alpha. The target is its member nearest to the
prediction of the strong view (``ccssl.credal.projection``; the loss is ``ccssl.credal.relaxation_loss``)::

    p  =  argmin { KL( p || softmax(strong logits) ) : p in Q_pi },      w = 1:

no item is left out, the doubtful ones only demand less. The class y is that of the prediction *before* alignment;
alignment has a say in the confidence alone.

J. Lienen, E. Huellermeier: Credal self-supervised learning. NeurIPS 2021.

Shapes: B unlabeled items of a batch, K classes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ccssl.credal import project_logits
from ccssl.methods.alignment import Alignment
from ccssl.methods.base import Method, Target, widen
from ccssl.methods.config import CSSLConfig


class CSSL(Method):
    """Credal targets from the model's own confidence."""

    Config: ClassVar[type] = CSSLConfig
    config: CSSLConfig

    def __init__(self, classes: int, unlabeled: int, config: Any = None, prior: Tensor | None = None) -> None:
        super().__init__(classes, unlabeled, config, prior)
        self.alignment = Alignment(self.prior, self.config.memory)

    @torch.no_grad()
    def possibility(self, logits: Tensor) -> Tensor:
        """Return 1 at the most probable class and alpha elsewhere."""
        q_BK = widen(logits).softmax(-1)
        alpha_B1 = (1 - self.alignment(q_BK).amax(-1, keepdim=True)).clamp(min=self.config.least_alpha)
        return alpha_B1.expand_as(q_BK).scatter(-1, q_BK.argmax(-1, keepdim=True), 1.0)

    @torch.no_grad()
    def target(self, weak: Tensor, strong: Tensor, index: Tensor) -> Target:
        """Return the projection of the prediction for the strong view."""
        pi_BK = self.possibility(weak)
        self.alignment.update(widen(weak).softmax(-1))
        p_BK = project_logits(widen(strong), pi_BK, validate=False)
        return Target(p_BK, torch.ones_like(p_BK[:, 0]), pi_BK)
