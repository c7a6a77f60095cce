r"""Possibility distributions: from p-values to degrees of possibility, and the credal set these span.

A possibility distribution on K classes is a function pi with values in [0, 1] and maximum 1. It bounds the
probability of every event A from above and, by duality, from below::

    upper(A) = max_{y in A} pi(y)          lower(A) = 1 - upper(complement of A)

The *credal set* of pi holds the distributions that respect all these bounds::

    Q_pi = { p : p(A) <= max_{y in A} pi(y)  for all A }

Of the 2^K constraints only K matter. Sort the classes so that pi_1 <= ... <= pi_K = 1; then
(Delgado and Moral, 1987)::

    p in Q_pi   <=>   p_1 + ... + p_i <= pi_i   for i = 1, ..., K

because an event A has the same bound as the whole set {y : pi(y) <= max_A pi}, which contains it.

Conformal p-values become possibility degrees once their maximum is raised to 1. There are two ways:

* ``"proportional"`` divides by the maximum (normalisation 1 of the paper, the default);
* ``"top"`` sets 1 at the model's most probable class and keeps the other degrees (normalisation 2). It gives
  smaller credal sets. The class is the *model's*: p-values tie, and the first maximal one is often another
  class.

Conformal degrees are also *quantised*: with L calibration items a p-value is (c + 1) / (L + 1) for an integer
count c. ``Levels`` keeps the counts. It stands wherever pi may stand, is compared with a significance level
without rounding, and lets the projection run in O(K + L) without sorting classes.

Shapes: ``...`` any leading shape, K classes, L calibration items.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Normalization = Literal["proportional", "top"]
NORMALIZATIONS: tuple[str, ...] = get_args(Normalization)


@dataclass(frozen=True, eq=False)
class Levels:
    """A quantised possibility distribution: the counts of conformal p-values and how to normalise them.

    ``counts[..., k]`` = c says that c of the ``size`` calibration scores are at least as nonconforming as
    class k; its p-value is (c + 1) / (size + 1). A count of -1 rules a class out: p-value and possibility 0.

    With ``normalization="proportional"`` the possibility is (c + 1) / (c_max + 1), with ``"top"`` it is 1 at
    the class ``top`` (at every maximal count where ``top`` is not given) and the p-value elsewhere.

    >>> pi = Levels(torch.tensor([[0, 3, 1]]), size=4)
    >>> pi.dense(torch.float64)
    tensor([[0.2500, 1.0000, 0.5000]], dtype=torch.float64)
    >>> Levels(torch.tensor([[0, 3, 1]]), size=4, normalization="top").dense()
    tensor([[0.2000, 1.0000, 0.4000]])
    """

    counts: Tensor  # (..., K) integers in -1..size
    size: int
    normalization: Normalization = "proportional"
    top: Tensor | None = None  # (...) class indices, for "top" only

    def __post_init__(self) -> None:
        """Check what can be checked without reading from the device."""
        if self.counts.is_floating_point() or self.counts.is_complex() or self.counts.dtype == torch.bool:
            raise ValueError(f"counts must be integers, got {self.counts.dtype}")
        if self.counts.ndim < 1:
            raise ValueError("counts must have a last dimension for the classes, got a single number")
        if self.size < 0:
            raise ValueError(f"size must be the number of calibration items, at least 0, got {self.size}")
        _check_normalization(self.normalization)
        if self.top is not None:
            if self.normalization != "top":
                raise ValueError(f"top belongs to normalization 'top', got {self.normalization!r}")
            _check_top(self.top, self.counts)

    @property
    def shape(self) -> torch.Size:
        """The shape of pi, (..., K)."""
        return self.counts.shape

    @property
    def device(self) -> torch.device:
        """Where the counts live."""
        return self.counts.device

    def __getitem__(self, rows: object) -> Levels:
        """Select rows: an index into the leading dimensions."""
        top = None if self.top is None else self.top[rows]  # type: ignore[index]
        return Levels(self.counts[rows], self.size, self.normalization, top)  # type: ignore[index]

    def to(self, device: torch.device | str) -> Levels:
        """Return the same degrees on another device."""
        top = None if self.top is None else self.top.to(device)
        return Levels(self.counts.to(device), self.size, self.normalization, top)

    def p_values(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the p-values (c + 1) / (L + 1), before normalisation."""
        return (self.counts + 1).to(dtype or torch.get_default_dtype()) / (self.size + 1)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return pi as a tensor of floats, each a single correctly rounded division of two integers."""
        numerator = (self.counts + 1).to(dtype or torch.get_default_dtype())
        if self.normalization == "proportional":
            return numerator / numerator.amax(-1, keepdim=True)
        return _raise_top(numerator / (self.size + 1), self.top)


Possibility = Tensor | Levels


def possibility(
    p_values: Tensor, normalization: Normalization = "proportional", top: Tensor | None = None
) -> Tensor:
    """Raise the maximum of each row of p-values to exactly 1.

    ``"proportional"`` divides the row by its maximum. ``"top"`` sets 1 at the class ``top`` (N,), normally the
    model's argmax, or, where it is not given, at every class that attains the maximum.

    >>> p = torch.tensor([[0.1, 0.4, 0.2]])
    >>> possibility(p)
    tensor([[0.2500, 1.0000, 0.5000]])
    >>> possibility(p, "top", top=torch.tensor([1]))
    tensor([[0.1000, 1.0000, 0.2000]])
    """
    check_classes(p_values, "p_values")
    _check_normalization(normalization)
    if not p_values.is_floating_point():
        raise ValueError(f"p_values must be floating point, got {p_values.dtype}")
    if normalization == "proportional":
        if top is not None:
            raise ValueError("top belongs to normalization 'top', got 'proportional'")
        return p_values / p_values.amax(-1, keepdim=True)
    if top is not None:
        _check_top(top, p_values)
    return _raise_top(p_values, top)


def contains(p: Tensor, pi: Possibility, atol: float | None = None) -> Tensor:
    """Tell, row by row, whether the distribution p lies in Q_pi, up to ``atol``.

    Checks p >= 0, sum p = 1 and the K ordered constraints. The default tolerance is 64 units of rounding of
    p's type (8e-6 for float32, 1.4e-14 for float64); sums are taken in float64.

    >>> pi = torch.tensor([0.5, 1.0, 0.2])
    >>> contains(torch.tensor([[0.3, 0.6, 0.1], [0.6, 0.3, 0.1]]), pi)
    tensor([ True, False])
    """
    check_classes(p, "p")
    pi_K = as_dense(pi, torch.float64)
    if pi_K.shape[-1] != p.shape[-1]:
        raise ValueError(f"p and pi must agree in the number of classes, got {p.shape[-1]} and {pi_K.shape[-1]}")
    tolerance = 64 * torch.finfo(p.dtype).eps if atol is None else atol
    p_K, pi_K = torch.broadcast_tensors(p.double(), pi_K)
    bound_K, order_K = pi_K.sort(-1)
    mass_K = p_K.gather(-1, order_K).cumsum(-1)
    bounded = (mass_K <= bound_K + tolerance).all(-1)
    is_distribution = (p_K >= -tolerance).all(-1) & ((p_K.sum(-1) - 1).abs() <= tolerance)
    return bounded & is_distribution


def upper_probability(pi: Possibility, event_mask: Tensor) -> Tensor:
    """Return max of pi over the event, the least upper bound of p(event) over p in Q_pi; 0 if it is empty.

    >>> upper_probability(torch.tensor([0.5, 1.0, 0.2]), torch.tensor([True, False, True]))
    tensor(0.5000)
    """
    pi_K = as_dense(pi)
    if event_mask.dtype != torch.bool:
        raise ValueError(f"event_mask must be boolean, True for the classes of the event, got {event_mask.dtype}")
    if event_mask.shape[-1] != pi_K.shape[-1]:
        raise ValueError(f"event_mask must have one entry a class, {pi_K.shape[-1]}, got {event_mask.shape[-1]}")
    return pi_K.where(event_mask, 0).amax(-1)


def lower_probability(pi: Possibility, event_mask: Tensor) -> Tensor:
    """Return 1 - upper(complement), the greatest lower bound of p(event) over p in Q_pi.

    >>> lower_probability(torch.tensor([0.5, 1.0, 0.2]), torch.tensor([False, True, False]))
    tensor(0.5000)
    """
    return 1 - upper_probability(pi, ~event_mask)


def as_dense(pi: Possibility, dtype: torch.dtype | None = None) -> Tensor:
    """Return pi as a tensor, in its own dtype unless one is given."""
    if isinstance(pi, Levels):
        return pi.dense(dtype)
    return pi if dtype is None else pi.to(dtype)


def check_classes(tensor: Tensor, name: str) -> None:
    """Refuse a tensor that has no rows or fewer than two classes in its last dimension."""
    if tensor.ndim < 1 or tensor.shape[-1] < 2:
        raise ValueError(f"{name} must end in a dimension of at least 2 classes, got shape {tuple(tensor.shape)}")
    if math.prod(tensor.shape[:-1]) == 0:
        raise ValueError(f"{name} is an empty batch: it has shape {tuple(tensor.shape)}, expected a row or more")


def _raise_top(pi: Tensor, top: Tensor | None) -> Tensor:
    if top is None:
        return pi.masked_fill(pi == pi.amax(-1, keepdim=True), 1.0)
    return pi.scatter(-1, top.long().unsqueeze(-1), 1.0)


def _check_normalization(normalization: str) -> None:
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization must be one of {', '.join(NORMALIZATIONS)}, got {normalization!r}")


def _check_top(top: Tensor, rows: Tensor) -> None:
    if top.is_floating_point() or top.shape != rows.shape[:-1]:
        raise ValueError(
            f"top must hold one class index a row, integers of shape {tuple(rows.shape[:-1])}, "
            f"got {top.dtype} of shape {tuple(top.shape)}"
        )
    if top.device != rows.device:
        raise ValueError(f"top must be on {rows.device} like the rest, got {top.device}")
