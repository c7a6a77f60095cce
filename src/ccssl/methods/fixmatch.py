r"""FixMatch (Sohn et al., 2020): confident hard labels from the weak view, learned on the strong view.

With q = softmax(weak logits / T) the target of an unlabeled item is ::

    p = one-hot( argmax q ),      w = 1 if max q >= tau, else 0.

tau = 0.95 and T = 1 are the authors' values; the paper searches tau in {0.7, 0.8, 0.9, 0.95} and T in {0.5, 1}. A
temperature cannot change a hard label: T < 1 makes predictions pass that would fail otherwise.

*With distribution alignment* (``fixmatch-da``) q is aligned with the class frequencies first (``alignment``), and
the target is the aligned prediction itself, the soft variant of the paper::

    p = aligned q,      w = 1 if max aligned q >= tau, else 0.

With ``hard`` it is one-hot at the largest entry of aligned q, as in the paper's published code.

K. Sohn et al.: FixMatch: simplifying semi-supervised learning with consistency and confidence. NeurIPS 2020.

Shapes: B unlabeled items of a batch, K classes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ccssl.methods.alignment import Alignment
from ccssl.methods.base import Method, Target, one_hot, widen
from ccssl.methods.config import FixMatchConfig, FixMatchDAConfig


class FixMatch(Method):
    """Hard labels of confident predictions."""

    Config: ClassVar[type] = FixMatchConfig
    config: FixMatchConfig

    @torch.no_grad()
    def target(self, weak: Tensor, strong: Tensor, index: Tensor) -> Target:
        """Return the most probable class of the weak view."""
        q_BK = (widen(weak) / self.config.temperature).softmax(-1)
        confidence_B, label_B = q_BK.max(-1)
        return Target(one_hot(label_B, q_BK), (confidence_B >= self.config.threshold).to(q_BK))


class FixMatchDA(Method):
    """Confident predictions, aligned with the class frequencies."""

    Config: ClassVar[type] = FixMatchDAConfig
    config: FixMatchDAConfig

    def __init__(self, classes: int, unlabeled: int, config: Any = None, prior: Tensor | None = None) -> None:
        super().__init__(classes, unlabeled, config, prior)
        self.alignment = Alignment(self.prior, self.config.memory)

    @torch.no_grad()
    def target(self, weak: Tensor, strong: Tensor, index: Tensor) -> Target:
        """Return the aligned prediction for the weak view."""
        q_BK = (widen(weak) / self.config.temperature).softmax(-1)
        aligned_BK = self.alignment(q_BK)
        self.alignment.update(q_BK)
        confidence_B, label_B = aligned_BK.max(-1)
        p_BK = one_hot(label_B, aligned_BK) if self.config.hard else aligned_BK
        return Target(p_BK, (confidence_B >= self.config.threshold).to(p_BK))
