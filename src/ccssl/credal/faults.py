"""What may be wrong with what the user gave, written down once: for a ValueError, or for NaN in the rows concerned.

Shapes, types and devices are always checked: that costs nothing (``check_tensor``, ``check_classes``,
``check_indices``). *Values* are looked at where that is free (``looks``): on the CPU, but not on an accelerator,
where it makes the host wait, and not while a graph is traced, which it would break. A ``Fault`` tells where a wrong
value lies and what was expected; ``refuse`` raises the first one as a ValueError. Where values are not looked at,
a row with a fault (``any_of``) is NaN, and leaves the other rows alone.

Shapes: ``...`` any leading shape, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

SLACK = 8  # by how many units of rounding the maximum of pi may miss 1


class Fault(NamedTuple):
    """What may be wrong with values: where it is so, what is there, and what was expected."""

    bad: Tensor  # (..., K), or (..., 1) where a row as a whole is at fault
    values: Tensor  # of the same shape
    must: str
    how: str = ""  # in front of the value
    advice: str = ""


def logit_faults(logits: Tensor) -> Iterator[Fault]:
    """Yield what may be wrong with logits."""
    yield Fault(~logits.isfinite(), logits, "logits must be finite")


def degree_faults(pi: Tensor) -> Iterator[Fault]:
    """Yield what may be wrong with real-valued possibilities."""
    slack = SLACK * torch.finfo(pi.dtype).eps
    yield Fault(~((pi >= 0) & (pi <= 1 + slack)), pi, "pi must lie in [0, 1]")
    most = pi.amax(-1, keepdim=True)
    advice = ": normalise it with ccssl.credal.possibility"
    yield Fault(most < 1 - slack, most, "pi must have maximum 1 in each row", advice=advice)


def count_faults(counts: Tensor, top: Tensor | None, size: int) -> Iterator[Fault]:
    """Yield what may be wrong with quantised possibilities."""
    yield Fault((counts < -1) | (counts > size), counts, f"counts must lie in -1..{size}")
    if top is None:
        most = counts.amax(-1, keepdim=True)
        yield Fault(most < 0, most, "counts must leave a class possible in each row", "at most ")
    else:
        yield from index_faults(top, counts.shape[-1], "top")


def real_faults(logits: Tensor, pi: Tensor) -> Iterator[Fault]:
    """Yield what may be wrong with a projection's logits and real-valued pi."""
    yield from logit_faults(logits)
    yield from degree_faults(pi)


def level_faults(logits: Tensor, counts: Tensor, top: Tensor | None, size: int) -> Iterator[Fault]:
    """Yield what may be wrong with a projection's logits and quantised pi."""
    yield from logit_faults(logits)
    yield from count_faults(counts, top, size)


def index_faults(indices: Tensor, classes: int, name: str) -> Iterator[Fault]:
    """Yield what may be wrong with class indices (...)."""
    column = indices.unsqueeze(-1)
    yield Fault((column < 0) | (column >= classes), column, f"{name} must lie in 0..{classes - 1}")


def looks(device: torch.device, validate: bool | None) -> bool:
    """Tell whether to look at values: as asked for, or else where that makes no device wait and no graph break."""
    check_validate(validate)
    if validate is None:
        return device.type == "cpu" and not torch.compiler.is_compiling()
    return validate


def check_validate(validate: bool | None) -> None:
    """Refuse what is no answer to the question whether to look at values."""
    if validate is not None and not isinstance(validate, bool):
        raise ValueError(f"validate must be True, False or None, got {validate!r}")


def any_of(faults: Iterable[Fault]) -> Tensor:
    """Return a mask (..., 1) of the rows with a fault."""
    return reduce(torch.logical_or, (fault.bad.any(-1, keepdim=True) for fault in faults))


def refuse(faults: Iterable[Fault]) -> None:
    """Raise a ValueError about the first value at fault: the argument, the value, its place, what was expected."""
    for bad, values, must, how, advice in faults:
        if bool(bad.any()):
            at = bad.nonzero()[0].tolist()
            value = values[tuple(at)].item()
            row = "" if len(at) == 1 else f" in row {at[0] if len(at) == 2 else tuple(at[:-1])}"
            column = "" if bad.shape[-1] == 1 else f"{',' if row else ' in'} class {at[-1]}"
            shown = f"{value:g}" if isinstance(value, float) else value
            raise ValueError(f"{must}, got {how}{shown}{row}{column}{advice}")


def check_tensor(tensor: object, name: str) -> None:
    """Refuse lists, arrays and None."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}: convert it with torch.as_tensor")


def check_classes(tensor: Tensor, name: str) -> None:
    """Refuse what is no tensor, has no rows, or has fewer than two classes in its last dimension."""
    check_tensor(tensor, name)
    if tensor.ndim < 1 or tensor.shape[-1] < 2:
        raise ValueError(f"{name} must end in a dimension of at least 2 classes, got shape {tuple(tensor.shape)}")
    if math.prod(tensor.shape[:-1]) == 0:
        raise ValueError(f"{name} is an empty batch: it has shape {tuple(tensor.shape)}, expected a row or more")


def check_indices(indices: Tensor, rows: Tensor, name: str, validate: bool | None = False) -> None:
    """Refuse what is not one class index for each row of (..., K); look at values as ``looks`` says."""
    check_tensor(indices, name)
    if not is_integer(indices) or indices.shape != rows.shape[:-1]:
        raise ValueError(
            f"{name} must hold one class index a row, integers of shape {tuple(rows.shape[:-1])}, "
            f"got {indices.dtype} of shape {tuple(indices.shape)}"
        )
    if indices.device != rows.device:
        raise ValueError(f"{name} must be on {rows.device} like the rest, got {indices.device}")
    if looks(indices.device, validate):
        refuse(index_faults(indices, rows.shape[-1], name))


def is_integer(tensor: Tensor) -> bool:
    """Tell whether a tensor holds integers, of whatever width."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
