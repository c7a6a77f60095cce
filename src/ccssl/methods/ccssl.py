r"""Conformal credal self-supervised learning, CCSSL (Lienen, Demir and Huellermeier, 2023): guaranteed targets.

As in CSSL the target of an unlabeled item is a credal set. Its size rests not on the model's confidence, but on how
the model fares with held-out labeled items: a part of the labels, the calibration set, is not trained on. With the
prediction q for the weak view, the p-value of class k says how many calibration items are at least as nonconforming
at their true label as this item would be at k (``ccssl.conformal``)::

    p_value(k)  =  ( #{ i : a_i >= a(q, k) } + 1 ) / (L + 1),      pi  =  p_value with its maximum raised to 1,

so that a true label has pi <= delta with probability at most delta, as long as calibration and unlabeled items are
exchangeable: from the same source, seen in the same weak view by the same teacher. The target is ::

    p  =  argmin { KL( p || softmax(strong logits) ) : p in Q_pi },      w = 1.

The two variants differ in the nonconformity score::

    ccssl-diff     a(q, k)  =  max_{j != k} q_j  -  q_k
    ccssl-prop     a(q, k)  =  max_{j != k} q_j  /  (q_k + gamma)

The paper searches gamma in {0.01, 0.1, 1}. Scores are renewed every 10 steps, with a snapshot of the weights as
the teacher: calibration items and unlabeled ones are then scored by the same weights at all times.

Possibilities stay the integers they are (``Levels``), for which the projection needs no sort.

J. Lienen, C. Demir, E. Huellermeier: Conformal credal self-supervised learning. COPA 2023.

Shapes: B unlabeled items of a batch, K classes, L calibration items.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ccssl import collective
from ccssl.conformal import Calibration
from ccssl.credal import Levels, project_logits
from ccssl.methods.base import Method, Target, Teacher, widen
from ccssl.methods.config import CCSSLDiffConfig, CCSSLPropConfig


class CCSSL(Method):
    """Credal targets from conformal p-values; a variant gives the score."""

    uses_calibration = True
    calibrate_every = 10
    teacher: Teacher = "snapshot"

    def __init__(self, classes: int, unlabeled: int, config: Any = None, prior: Tensor | None = None) -> None:
        super().__init__(classes, unlabeled, config, prior)
        self.calibration = self._calibration()

    def _calibration(self) -> Calibration:
        raise NotImplementedError

    @torch.no_grad()
    def calibrate(self, logits: Tensor, labels: Tensor) -> None:
        """Take the scores of the calibration items; those of the first rank count for all."""
        q_LK = collective.broadcast(widen(logits).softmax(-1))
        self.calibration.fit(q_LK, collective.broadcast(labels))

    @torch.no_grad()
    def possibility(self, logits: Tensor) -> Levels:
        """Return the normalised p-values as integers."""
        return self.calibration.levels(widen(logits).softmax(-1), self.config.normalization)

    @torch.no_grad()
    def target(self, weak: Tensor, strong: Tensor, index: Tensor) -> Target:
        """Return the projection of the prediction for the strong view."""
        levels = self.possibility(weak)
        p_BK = project_logits(widen(strong), levels, validate=False)
        return Target(p_BK, torch.ones_like(p_BK[:, 0]), levels)


class CCSSLDiff(CCSSL):
    """CCSSL with the difference score."""

    Config: ClassVar[type] = CCSSLDiffConfig
    config: CCSSLDiffConfig

    def _calibration(self) -> Calibration:
        return Calibration("difference", validate=False)


class CCSSLProp(CCSSL):
    """CCSSL with the proportion score."""

    Config: ClassVar[type] = CCSSLPropConfig
    config: CCSSLPropConfig

    def _calibration(self) -> Calibration:
        return Calibration("proportion", gamma=self.config.gamma, validate=False)
