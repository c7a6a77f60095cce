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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils import _pytree

from ccssl.credal.faults import (
    Fault,
    any_of,
    check_classes,
    check_indices,
    check_tensor,
    count_faults,
    degree_faults,
    index_faults,
    is_integer,
    looks,
    refuse,
)

Normalization = Literal["proportional", "top"]
NORMALIZATIONS: tuple[str, ...] = get_args(Normalization)

_MOST = 2**31 - 1  # of int32


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
        """Check what can be checked without reading from the device, and keep the counts as int32."""
        check_classes(self.counts, "counts")
        if not is_integer(self.counts):
            raise ValueError(f"counts must be integers, got {self.counts.dtype}")
        if isinstance(self.size, bool) or not isinstance(self.size, int | torch.SymInt):
            raise ValueError(f"size must be the number of calibration items, an int, got {self.size!r}")
        if not 0 <= self.size < _MOST:
            raise ValueError(f"size must be the number of calibration items, in 0..{_MOST - 1}, got {self.size}")
        _check_normalization(self.normalization)
        if self.top is not None:
            if self.normalization != "top":
                raise ValueError(f"top belongs to normalization 'top', got {self.normalization!r}")
            check_indices(self.top, self.counts, "top")
        if self.counts.dtype != torch.int32:
            # No larger count may come back into the range that is allowed.
            counts = self.counts.long().clamp(-_MOST, _MOST).int()
            object.__setattr__(self, "counts", counts)

    @property
    def shape(self) -> torch.Size:
        """The shape of pi, (..., K)."""
        return self.counts.shape

    @property
    def device(self) -> torch.device:
        """Where the counts live."""
        return self.counts.device

    def __getitem__(self, rows: Any) -> Levels:
        """Select rows: an index into the leading dimensions."""
        leading = (*rows, slice(None)) if isinstance(rows, tuple) else (rows, slice(None))
        top = None if self.top is None else self.top[rows]
        return Levels(self.counts[leading], self.size, self.normalization, top)

    def to(self, device: torch.device | str) -> Levels:
        """Return the same degrees on another device."""
        top = None if self.top is None else self.top.to(device)
        return Levels(self.counts.to(device), self.size, self.normalization, top)

    def p_values(self, dtype: torch.dtype | None = None, *, validate: bool | None = None) -> Tensor:
        """Return the p-values (c + 1) / (L + 1), before normalisation."""
        dtype = dtype or torch.get_default_dtype()
        return (self._numerator(dtype, validate) / (self.size + 1)).to(dtype)

    def dense(self, dtype: torch.dtype | None = None, *, validate: bool | None = None) -> Tensor:
        """Return pi as a tensor of floats, each a correctly rounded division of two integers.

        Counts and top classes out of range are refused on the CPU; where values are not looked at, such a row
        holds NaN.
        """
        dtype = dtype or torch.get_default_dtype()
        numerator = self._numerator(dtype, validate)
        if self.normalization == "proportional":
            return (numerator / numerator.amax(-1, keepdim=True)).to(dtype)
        pi = (numerator / (self.size + 1)).to(dtype)
        return _raise_top(pi, None if self.top is None else self.top.clamp(0, self.shape[-1] - 1))

    def _numerator(self, dtype: torch.dtype, validate: bool | None) -> Tensor:
        """Return c + 1 in a type that holds it exactly: ``dtype`` if that does, else the widest."""
        exact = dtype if self.size * torch.finfo(dtype).eps < 1 else widest(self.device)
        numerator = self.counts.to(exact) + 1
        if looks(self.device, validate):
            refuse(faults_of(self))
            return numerator
        return numerator.masked_fill(any_of(faults_of(self)), torch.nan)


def _flatten_with_keys(pi: Levels) -> tuple[list[tuple[Any, Tensor]], tuple[int, Normalization]]:
    tensors, context = _flatten(pi)
    keys = map(_pytree.GetAttrKey, ("counts", "top"))
    return list(zip(keys, tensors, strict=False)), context


def _flatten(pi: Levels) -> tuple[list[Tensor], tuple[int, Normalization]]:
    return [pi.counts] if pi.top is None else [pi.counts, pi.top], (pi.size, pi.normalization)


def _unflatten(tensors: Iterable[Any], context: tuple[int, Normalization]) -> Levels:
    """Put together what was taken apart, whatever stands for the tensors meanwhile."""
    counts, *top = tensors
    pi = object.__new__(Levels)
    fields = {"counts": counts, "size": context[0], "normalization": context[1], "top": top[0] if top else None}
    for name, value in fields.items():
        object.__setattr__(pi, name, value)
    return pi


# So that torch.export, torch.func and whatever else looks for tensors in arguments finds those of Levels.
_pytree.register_pytree_node(
    Levels,
    _flatten,
    _unflatten,
    serialized_type_name="ccssl.credal.Levels",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)

Possibility = Tensor | Levels


def possibility(
    p_values: Tensor,
    normalization: Normalization = "proportional",
    top: Tensor | None = None,
    *,
    validate: bool | None = None,
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
    if top is not None:
        if normalization != "top":
            raise ValueError(f"top belongs to normalization 'top', got {normalization!r}")
        check_indices(top, p_values, "top")
    if looks(p_values.device, validate):
        refuse([Fault(~((p_values >= 0) & (p_values <= 1)), p_values, "p_values must lie in [0, 1]")])
        if top is None:
            most = p_values.amax(-1, keepdim=True)
            refuse([Fault(most <= 0, most, "p_values must have a positive number in each row", "at most ")])
        else:
            refuse(index_faults(top, p_values.shape[-1], "top"))
    if normalization == "proportional":
        return p_values / p_values.amax(-1, keepdim=True)
    return _raise_top(p_values, top)


def contains(p: Tensor, pi: Possibility, atol: float | None = None, *, validate: bool | None = None) -> Tensor:
    """Tell, row by row, whether the distribution p lies in Q_pi, up to ``atol``.

    Checks p >= 0, sum p = 1 and the K ordered constraints. The default tolerance is 64 units of rounding of
    p's type (8e-6 for float32, 1.4e-14 for float64); sums are taken in float64 where the device has it.

    >>> pi = torch.tensor([0.5, 1.0, 0.2])
    >>> contains(torch.tensor([[0.3, 0.6, 0.1], [0.6, 0.3, 0.1]]), pi)
    tensor([ True, False])
    """
    check_classes(p, "p")
    if not p.is_floating_point():
        raise ValueError(f"p must be floating point, got {p.dtype}")
    check_possibility(pi, validate)
    _check_together(p, pi, "p")
    if atol is not None and not (isinstance(atol, Real) and atol >= 0):
        raise ValueError(f"atol must be a tolerance, a number of at least 0, got {atol!r}")
    if looks(p.device, validate):
        refuse([Fault(~p.isfinite(), p, "p must be finite")])
    tolerance = 64 * torch.finfo(p.dtype).eps if atol is None else atol
    wide = widest(p.device)
    p_K, pi_K = torch.broadcast_tensors(p.to(wide), as_dense(pi, wide))
    bound_K, order_K = pi_K.sort(-1)
    mass_K = p_K.gather(-1, order_K).cumsum(-1)
    bounded = (mass_K <= bound_K + tolerance).all(-1)
    is_distribution = (p_K >= -tolerance).all(-1) & ((p_K.sum(-1) - 1).abs() <= tolerance)
    return bounded & is_distribution


def upper_probability(pi: Possibility, event_mask: Tensor, *, validate: bool | None = None) -> Tensor:
    """Return max of pi over the event, the least upper bound of p(event) over p in Q_pi; 0 if it is empty.

    >>> upper_probability(torch.tensor([0.5, 1.0, 0.2]), torch.tensor([True, False, True]))
    tensor(0.5000)
    """
    _check_event(pi, event_mask, validate)
    return as_dense(pi).where(event_mask, 0).amax(-1)


def lower_probability(pi: Possibility, event_mask: Tensor, *, validate: bool | None = None) -> Tensor:
    """Return 1 - upper(complement), the greatest lower bound of p(event) over p in Q_pi.

    >>> lower_probability(torch.tensor([0.5, 1.0, 0.2]), torch.tensor([False, True, False]))
    tensor(0.5000)
    """
    _check_event(pi, event_mask, validate)
    return 1 - as_dense(pi).where(~event_mask, 0).amax(-1)


def as_dense(pi: Possibility, dtype: torch.dtype | None = None) -> Tensor:
    """Return pi as a tensor, in its own dtype unless one is given. Values are not looked at."""
    if isinstance(pi, Levels):
        return pi.dense(dtype, validate=False)
    return pi if dtype is None else pi.to(dtype)


def widest(device: torch.device) -> torch.dtype:
    """Return the widest floating type of a device: Apple's have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def faults_of(pi: Possibility) -> Iterator[Fault]:
    """Yield everything that may be wrong with the values of pi."""
    return count_faults(pi.counts, pi.top, pi.size) if isinstance(pi, Levels) else degree_faults(pi)


def check_possibility(pi: Possibility, validate: bool | None = None) -> None:
    """Refuse what is no possibility distribution; look at its values as ``looks`` says."""
    if not isinstance(pi, Levels):
        check_classes(pi, "pi")
        if not pi.is_floating_point():
            raise ValueError(f"pi must be floating point or Levels, got {pi.dtype}")
    if looks(pi.device, validate):
        refuse(faults_of(pi))


def _raise_top(pi: Tensor, top: Tensor | None) -> Tensor:
    if top is None:
        return pi.masked_fill(pi == pi.amax(-1, keepdim=True), 1.0)
    return pi.scatter(-1, top.long().unsqueeze(-1), 1.0)


def _check_normalization(normalization: str) -> None:
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization must be one of {', '.join(NORMALIZATIONS)}, got {normalization!r}")


def _check_event(pi: Possibility, event_mask: Tensor, validate: bool | None) -> None:
    check_possibility(pi, validate)
    check_tensor(event_mask, "event_mask")
    if event_mask.dtype != torch.bool:
        raise ValueError(f"event_mask must be boolean, True for the classes of the event, got {event_mask.dtype}")
    if event_mask.ndim < 1 or event_mask.shape[-1] != pi.shape[-1]:
        raise ValueError(
            f"event_mask must have one entry a class, {pi.shape[-1]}, got shape {tuple(event_mask.shape)}"
        )
    _check_together(event_mask, pi, "event_mask")


def _check_together(tensor: Tensor, pi: Possibility, name: str) -> None:
    """Refuse what does not fit to pi: another device, other classes, rows that cannot be broadcast."""
    if tensor.device != pi.device:
        raise ValueError(f"{name} must be on {pi.device} like pi, got {tensor.device}")
    if tensor.shape[-1] != pi.shape[-1]:
        raise ValueError(
            f"{name} and pi must agree in the number of classes, got {tensor.shape[-1]} and {pi.shape[-1]}"
        )
    if any(a != b and 1 not in (a, b) for a, b in zip(tensor.shape[-2::-1], pi.shape[-2::-1], strict=False)):
        raise ValueError(f"{name} and pi must have rows that fit, got {tuple(tensor.shape)} and {tuple(pi.shape)}")
