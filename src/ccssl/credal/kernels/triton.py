r"""The hull on CUDA: one program a row, gift wrapping in registers, no look from the host.

The same recursion as ``hull`` in ``torch.py``, whose ``solve`` functions prepare the groups: here the loop over
hull segments runs inside the program, so each row stops by itself and the host never waits. A row's groups must
fit the registers of a program; longer rows take the plain torch loop.
"""

# Triton's decorator rewrites types: its scalars compare and its launches take options that no stub knows.
# pyright: reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccssl.credal.kernels import torch as anywhere

MAX_GROUPS = 16_384


@triton.jit
def _log_add(a, b):  # noqa: ANN001, ANN202 - triton types its arguments itself
    peak = tl.maximum(a, b)
    gap = tl.where(peak == float("-inf"), float("-inf"), tl.minimum(a, b) - peak)
    return peak + tl.log(1 + tl.exp(gap))


@triton.jit
def _hull_row(log_mass, pi, log_r, groups, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    row = tl.program_id(0).to(tl.int64) * groups
    index = tl.arange(0, BLOCK)
    inside = index < groups
    log_m = tl.load(log_mass + row + index, inside, other=float("-inf"))
    height = tl.load(pi + row + index, inside, other=1.0)
    zero = tl.sum(tl.where(index < 0, height, 0.0), 0)  # a scalar of the row's own precision
    result = tl.zeros_like(height)
    vertex = -1
    level = zero
    log_total = zero
    while vertex < groups - 1:
        ahead = (index > vertex) & inside
        log_run = tl.associative_scan(tl.where(ahead, log_m, float("-inf")), 0, _log_add)
        if vertex < 0:
            log_total = tl.max(tl.where(index == groups - 1, log_run, float("-inf")), 0)
        rise = tl.where(ahead & (height > level), height - level, 0.0)
        log_rise = tl.where(rise > 0, tl.log(tl.where(rise > 0, rise, 1.0)), float("-inf"))
        slope = tl.where(rise > 0, log_rise - (log_run - log_total), float("-inf"))
        slope = tl.where(ahead, slope, float("inf"))
        least = tl.min(slope, 0)
        reached = tl.max(tl.where(ahead & (slope <= least), index, vertex + 1), 0)  # NaN must not stop the walk
        result = tl.where(ahead & (index <= reached), least, result)
        level = tl.max(tl.where(index == reached, height, 0.0), 0)
        vertex = reached
    tl.store(log_r + row + index, result, inside)


def hull(log_mass_NB: Tensor, pi_NB: Tensor) -> Tensor:
    """Return log r of each group, as ``ccssl.credal.kernels.torch.hull`` does."""
    rows, groups = pi_NB.shape
    if groups > MAX_GROUPS:
        return anywhere.hull(log_mass_NB, pi_NB)
    log_r_NB = torch.empty_like(pi_NB)
    block = triton.next_power_of_2(groups)
    warps = 4 if block <= 1024 else 16
    _hull_row[(rows,)](log_mass_NB.contiguous(), pi_NB.contiguous(), log_r_NB, groups, BLOCK=block, num_warps=warps)
    return log_r_NB


def solve(logits_NK: Tensor, pi_NK: Tensor, gradient: bool, validate: bool) -> tuple[Tensor, Tensor]:
    """Solve for real-valued pi."""
    return anywhere.solve(logits_NK, pi_NK, gradient, validate, hull)


def solve_levels(
    logits_NK: Tensor,
    counts_NK: Tensor,
    top_N: Tensor | None,
    size: int,
    proportional: bool,
    gradient: bool,
    validate: bool,
) -> tuple[Tensor, Tensor]:
    """Solve for quantised pi."""
    return anywhere.solve_levels(logits_NK, counts_NK, top_N, size, proportional, gradient, validate, hull)
