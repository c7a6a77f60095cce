"""Wrong values in the projection's input: how they are found and what is said about them.

The numba kernel meets faults on its way and asks only for the message; the others look beforehand, which reads
from the device and therefore happens on request.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

BAD_LOGITS, BAD_PI, NO_ONE, BAD_COUNT, BAD_TOP = range(1, 6)
SLACK = 8  # by how many units of rounding the maximum of pi may miss 1


def check(logits_NK: Tensor, pi_NK: Tensor) -> None:
    """Raise a ValueError about the first value at fault in logits or real-valued pi."""
    slack = SLACK * torch.finfo(pi_NK.dtype).eps
    _refuse(BAD_LOGITS, ~logits_NK.isfinite(), logits_NK, pi_NK)
    _refuse(BAD_PI, ~((pi_NK >= 0) & (pi_NK <= 1 + slack)), logits_NK, pi_NK)
    _refuse(NO_ONE, pi_NK.amax(-1, keepdim=True) < 1 - slack, logits_NK, pi_NK)


def check_levels(logits_NK: Tensor, counts_NK: Tensor, top_N: Tensor | None, size: int) -> None:
    """Raise a ValueError about the first value at fault in logits or quantised pi."""
    _refuse(BAD_LOGITS, ~logits_NK.isfinite(), logits_NK, counts_NK)
    check_counts(counts_NK, top_N, size)


def check_counts(counts_NK: Tensor, top_N: Tensor | None, size: int) -> None:
    """Raise a ValueError about the first count or top class at fault."""
    _refuse(BAD_COUNT, (counts_NK < -1) | (counts_NK > size), counts_NK, counts_NK, top_N, size)
    if top_N is None:
        _refuse(NO_ONE, counts_NK.amax(-1, keepdim=True) < 0, counts_NK, counts_NK)
    else:
        outside_N1 = ((top_N < 0) | (top_N >= counts_NK.shape[-1])).unsqueeze(-1)
        _refuse(BAD_TOP, outside_N1, counts_NK, counts_NK, top_N, size)


def _refuse(
    fault: int, bad: Tensor, logits_NK: Tensor, pi_NK: Tensor, top_N: Tensor | None = None, size: int = -1
) -> None:
    if bool(bad.any()):
        n, k = bad.nonzero()[0].tolist()
        raise_fault(fault, n, k, logits_NK, pi_NK, top_N, size)


def raise_fault(
    fault: int, n: int, k: int, logits_NK: Tensor, pi_NK: Tensor, top_N: Tensor | None = None, size: int = -1
) -> NoReturn:
    """Raise a ValueError that names the argument, the value, its place and what was expected."""
    place = f"in row {n}, class {k}"
    if fault == BAD_LOGITS:
        raise ValueError(f"logits must be finite, got {logits_NK[n, k].item()} {place}")
    if fault == BAD_PI:
        raise ValueError(f"pi must lie in [0, 1], got {pi_NK[n, k].item():g} {place}")
    if fault == BAD_COUNT:
        raise ValueError(f"counts must lie in -1..{size}, got {pi_NK[n, k].item()} {place}")
    if fault == BAD_TOP and top_N is not None:
        raise ValueError(f"top must lie in 0..{pi_NK.shape[-1] - 1}, got {top_N[n].item()} in row {n}")
    if pi_NK.is_floating_point():
        raise ValueError(
            f"pi must have maximum 1 in each row, got {pi_NK[n].max().item():g} in row {n}: "
            "normalise it with ccssl.credal.possibility"
        )
    raise ValueError(f"counts must leave a class possible in each row, got -1 for all of row {n}")
