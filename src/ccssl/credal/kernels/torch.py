r"""The projection in plain torch, for any device: gift wrapping of all rows at once, in log-space.

Notation of ``ccssl.credal.projection``: classes (or groups of classes with equal possibility) are sorted by
ascending pi; group j has model mass m_j. The hull starts at (0, 0). From its current vertex i the next one is

    argmin_{j > i}  (pi_j - pi_i) / (m_{i+1} + ... + m_j),      the farthest among equals,

and that slope is the ratio r = p / q of all classes between the two. Everything is kept as logarithms: masses
that underflow still decide where the projection lies. Sums start anew at each vertex, so nothing cancels.

Costs O(K) a hull segment, as many rounds as the row with the most segments needs, and after each round one look
whether all rows are done (on an accelerator that look is a transfer; ``triton.py`` does without). Some twenty
arrays of the size of the rows are alive at once, so only so many rows are taken together.

Shapes: N rows, K classes, B groups in ascending order of possibility.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ccssl.credal import faults
from ccssl.credal.possibility import Levels, widest

LEVELS_PER_CLASS = 8  # with more levels than this a class, sorting classes is cheaper than scanning levels

# Numbers worked on at once, which bounds the extra memory; on a device each chunk costs a transfer a round.
CPU_WORK = 1 << 14
DEVICE_WORK = 1 << 20


def hull(log_mass_NB: Tensor, pi_NB: Tensor) -> Tensor:
    """Return log r of each group: the log-slopes of the greatest convex minorant of (sum of m, pi)."""
    groups = torch.arange(pi_NB.shape[-1], device=pi_NB.device)
    vertex_N1 = groups.new_full((len(pi_NB), 1), -1)
    height_N1 = pi_NB.new_zeros(len(pi_NB), 1)
    log_r_NB = torch.zeros_like(pi_NB)
    log_total_N1 = None
    while True:
        ahead_NB = groups > vertex_N1
        log_run_NB = log_mass_NB.where(ahead_NB, -torch.inf).logcumsumexp(-1)
        if log_total_N1 is None:
            # the same sum as the last run: a row that needs one segment gets log r = 0 exactly
            log_total_N1 = log_run_NB[:, -1:]
        log_rise_NB = (pi_NB - height_N1).clamp(min=0).log()
        slope_NB = (log_rise_NB - (log_run_NB - log_total_N1)).where(log_rise_NB > -torch.inf, -torch.inf)
        slope_NB = slope_NB.where(ahead_NB, torch.inf)
        least_N1 = slope_NB.amin(-1, keepdim=True)
        reached_NB = ahead_NB & (slope_NB <= least_N1)
        next_N1 = groups.where(reached_NB, -1).amax(-1, keepdim=True)
        next_N1 = next_N1.maximum(vertex_N1 + 1).clamp(max=len(groups) - 1)  # NaN must not stop the walk
        log_r_NB = least_N1.where(ahead_NB & (groups <= next_N1), log_r_NB)
        vertex_N1 = next_N1
        height_N1 = pi_NB.gather(-1, vertex_N1)
        if bool((vertex_N1 == len(groups) - 1).all()):
            return log_r_NB


def solve(
    logits_NK: Tensor, pi_NK: Tensor, gradient: bool, validate: bool, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Solve for real-valued pi: sort the classes, wrap the hull, put the ratios back in place."""
    if validate:
        faults.refuse(faults.real_faults(logits_NK, pi_NK))
    return _by_rows(logits_NK, lambda rows: _solve_rows(logits_NK[rows], pi_NK[rows], gradient), scale)


def solve_levels(
    logits_NK: Tensor,
    counts_NK: Tensor,
    top_N: Tensor | None,
    size: int,
    proportional: bool,
    gradient: bool,
    validate: bool,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Solve for quantised pi without sorting classes, or by sorting where levels far outnumber classes."""
    if validate:
        faults.refuse(faults.level_faults(logits_NK, counts_NK, top_N, size))
    sparse = size + 3 > LEVELS_PER_CLASS * logits_NK.shape[-1]
    normalization = "proportional" if proportional else "top"

    def work(rows: slice) -> tuple[Tensor, Tensor]:
        top = None if top_N is None else top_N[rows]
        pi = Levels(counts_NK[rows], size, normalization, top)
        if sparse:
            return _solve_rows(logits_NK[rows], pi.dense(widest(pi.device), validate=False), gradient)
        return _solve_level_rows(logits_NK[rows], pi, gradient)

    return _by_rows(logits_NK, work, scale)


def _solve_rows(logits_NK: Tensor, pi_NK: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    log_q_NK = _log_softmax(logits_NK)
    sorted_NK, order_NK = pi_NK.to(log_q_NK.dtype).sort(-1)
    sorted_NK.clamp_(max=1)[:, -1] = 1  # which rounding may have missed
    log_r_NK = hull(log_q_NK.gather(-1, order_NK), sorted_NK)
    log_r_NK = torch.empty_like(log_r_NK).scatter(-1, order_NK, log_r_NK)
    log_r_NK.masked_fill_(faults.any_of(faults.real_faults(logits_NK, pi_NK)), torch.nan)
    return _spread(log_q_NK, log_r_NK, gradient, logits_NK.dtype)


def _solve_level_rows(logits_NK: Tensor, pi: Levels, gradient: bool) -> tuple[Tensor, Tensor]:
    """Form group j = count + 1 in 0..L+1, and put the top class into L+2.

    Empty groups carry no mass and never shape the hull. Masses are summed relative to the largest of their
    group, so that a group of improbable classes does not vanish. Wrong counts and top classes are brought into
    range first, for a device must not meet an index outside, and their rows are NaN in the end.
    """
    size, top_N = pi.size, pi.top
    log_q_NK = _log_softmax(logits_NK)
    group_NK = (pi.counts.long() + 1).clamp(0, size + 1)
    most_N1 = group_NK.amax(-1, keepdim=True)
    if top_N is not None:
        top_N1 = top_N.long().unsqueeze(-1).clamp(0, logits_NK.shape[-1] - 1)
        group_NK = group_NK.scatter(-1, top_N1, size + 2)
    ladder_B = torch.arange(size + 3, device=log_q_NK.device, dtype=log_q_NK.dtype)
    if pi.normalization == "proportional":
        pi_NB = (ladder_B / most_N1).clamp(max=1)
    elif top_N is None:
        pi_NB = (ladder_B / (size + 1)).masked_fill(ladder_B >= most_N1, 1.0)
    else:
        pi_NB = (ladder_B / (size + 1)).clamp(max=1).expand(len(group_NK), -1).contiguous()
    peak_NB = torch.full_like(pi_NB, -torch.inf).scatter_reduce(-1, group_NK, log_q_NK, "amax")
    relative_NK = (log_q_NK - peak_NB.gather(-1, group_NK)).exp()
    log_mass_NB = peak_NB + torch.zeros_like(pi_NB).scatter_add(-1, group_NK, relative_NK).log()
    log_r_NK = hull(log_mass_NB, pi_NB).gather(-1, group_NK)
    log_r_NK.masked_fill_(faults.any_of(faults.level_faults(logits_NK, pi.counts, top_N, size)), torch.nan)
    return _spread(log_q_NK, log_r_NK, gradient, logits_NK.dtype)


def _by_rows(
    logits_NK: Tensor, work: Callable[[slice], tuple[Tensor, Tensor]], scale: float
) -> tuple[Tensor, Tensor]:
    """Call ``work`` on so many rows at a time, and put together what it returns, the second times ``scale``."""
    N, K = logits_NK.shape
    step = max(1, (CPU_WORK if logits_NK.device.type == "cpu" else DEVICE_WORK) // K)
    loss_N, out_NK = logits_NK.new_empty(N), torch.empty_like(logits_NK)
    for start in range(0, N, step):
        rows = slice(start, start + step)
        loss_N[rows], out_NK[rows] = work(rows)
    return loss_N, out_NK if scale == 1 else out_NK.mul_(scale)


def _log_softmax(logits_NK: Tensor) -> Tensor:
    """Return log q in float64 where the device has it: a logarithm of -10,000 in float32 is off by 0.001."""
    return logits_NK.log_softmax(-1, dtype=widest(logits_NK.device))


def _spread(log_q_NK: Tensor, log_r_NK: Tensor, gradient: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """From log q and log r = log(p/q) to the loss sum p log r, and p or q - p."""
    p_NK = (log_q_NK + log_r_NK).exp()
    loss_N = (p_NK * log_r_NK).where(p_NK != 0, 0).sum(-1).clamp(min=0)
    return loss_N.to(dtype), (log_q_NK.exp() - p_NK if gradient else p_NK).to(dtype)
