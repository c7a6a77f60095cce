r"""Losses with a credal set as the target.

The generalised loss of a set of distributions Q and a prediction q is the loss of the most favourable member
(the optimistic superset loss)::

    L*(Q, q) = min { KL(p || q) : p in Q }.

``credal_loss`` takes any possibility distribution; see ``ccssl.credal.projection`` for the solution and its
gradient softmax(z) - p*. A one-hot pi makes it the cross-entropy, an all-ones pi makes it 0.

``relaxation_loss`` is the special case pi = (1 at the label, alpha elsewhere) of credal self-supervised learning
(Lienen and Huellermeier, 2021), for which one comparison replaces the hull.
"""

from __future__ import annotations

from numbers import Real
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ccssl.credal.faults import Fault, check_classes, check_indices, check_tensor, logit_faults, looks, refuse
from ccssl.credal.possibility import Possibility
from ccssl.credal.projection import loss_of, prepare

Reduction = Literal["mean", "sum", "none"]


def credal_loss(
    logits: Tensor,
    pi: Possibility,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    *,
    validate: bool | None = None,
) -> Tensor:
    """Return min { KL(p || softmax(logits)) : p in Q_pi }, weighted and reduced.

    logits (..., K) of any floating type; float16 and bfloat16 are computed in float32, and if pi is wider than
    the logits, in pi's type. pi (..., K): possibilities with maximum 1, or ``Levels``; no gradient flows to it.
    weight (...): a factor an item. ``"mean"`` divides by the number of items, not by the sum of weights: an item
    of weight 0 counts as one learned perfectly, as in the paper.

    ``validate`` switches the checks of values; by default they run on the CPU, where they cost nothing, and not
    on accelerators, where they would make the device wait.

    >>> logits = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
    >>> loss = credal_loss(logits, torch.tensor([[0.3, 1.0, 0.1]]))
    >>> loss.backward()
    >>> loss.detach(), logits.grad  # softmax is (.84, .11, .04), its projection (.29, .70, .01)
    (tensor(0.9444), tensor([[ 0.5580, -0.5858,  0.0278]]))
    """
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(logits).tangent is not None:
        raise RuntimeError(
            "credal_loss has no forward-mode derivative: use reverse mode, loss.backward() or torch.autograd.grad"
        )
    average = weight is None and reduction == "mean"
    loss = loss_of(prepare(logits, pi, validate), average)
    return loss if average else _reduce(loss, weight, reduction, validate)


def relaxation_loss(
    logits: Tensor,
    label: Tensor,
    alpha: Tensor | float,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    *,
    validate: bool | None = None,
) -> Tensor:
    r"""Return the credal loss of pi = (1 at ``label``, ``alpha`` at every other class), in closed form.

    Q_pi holds the distributions with p(label) >= 1 - alpha. With q = softmax(logits), the loss is 0 if
    q(label) >= 1 - alpha; otherwise the other classes keep their proportions and share alpha::

        (1 - alpha) log((1 - alpha) / q(label)) + alpha log(alpha / (1 - q(label)))

    label (...): class indices; alpha: a number, or one an item, in [0, 1]; no gradient flows to it. alpha = 0 is
    the cross-entropy. ``validate`` as in ``credal_loss``; an item with a value that is not finite costs NaN.

    >>> relaxation_loss(torch.zeros(1, 4), torch.tensor([2]), alpha=0.5)
    tensor(0.1438)
    >>> relaxation_loss(torch.zeros(1, 4), torch.tensor([2]), alpha=0.75)
    tensor(0.)
    """
    check_classes(logits, "logits")
    if not logits.is_floating_point():
        raise ValueError(f"logits must be floating point, got {logits.dtype}")
    check_indices(label, logits, "label", validate)
    if not isinstance(alpha, Tensor):
        if not (isinstance(alpha, Real) and 0 <= alpha <= 1):
            raise ValueError(f"alpha must lie in [0, 1], got {alpha!r}")
    elif alpha.is_complex() or alpha.shape not in ((), label.shape):
        raise ValueError(
            f"alpha must be a number, or one an item, real of shape {tuple(label.shape)}, "
            f"got {alpha.dtype} of shape {tuple(alpha.shape)}"
        )
    elif alpha.device != logits.device:
        raise ValueError(f"alpha must be on {logits.device} like logits, got {alpha.device}")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    alpha = torch.as_tensor(alpha, dtype=logits.dtype, device=logits.device).detach()
    if looks(logits.device, validate):
        alpha_1 = alpha.unsqueeze(-1)
        refuse(logit_faults(logits))
        refuse([Fault(~((alpha_1 >= 0) & (alpha_1 <= 1)), alpha_1, "alpha must lie in [0, 1]")])
    column = label.long().unsqueeze(-1)
    log_q = logits.log_softmax(-1)
    log_q_label = log_q.gather(-1, column).squeeze(-1)
    log_q_rest = log_q.scatter(-1, column, -torch.inf).logsumexp(-1)
    inside = log_q_label >= torch.log1p(-alpha)  # not so for NaN, which must not turn into 0
    keep, rest = 1 - alpha, alpha
    divergence = keep * (torch.log1p(-alpha) - log_q_label) + torch.xlogy(rest, rest) - rest * log_q_rest
    return _reduce(divergence.masked_fill(inside, 0).clamp(min=0), weight, reduction, validate)


def _reduce(loss: Tensor, weight: Tensor | None, reduction: Reduction, validate: bool | None) -> Tensor:
    if weight is not None:
        check_tensor(weight, "weight")
        if weight.shape != loss.shape or weight.is_complex():
            raise ValueError(
                f"weight must have one number an item, {tuple(loss.shape)}, "
                f"got {tuple(weight.shape)} of {weight.dtype}"
            )
        if weight.device != loss.device:
            raise ValueError(f"weight must be on {loss.device} like logits, got {weight.device}")
        if looks(loss.device, validate):
            weight_1 = weight.unsqueeze(-1)
            refuse([Fault(~weight_1.isfinite(), weight_1, "weight must be finite")])
        loss = loss * weight
    if reduction == "mean":
        return loss.mean()
    if reduction == "sum":
        return loss.sum()
    if reduction == "none":
        return loss
    raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
