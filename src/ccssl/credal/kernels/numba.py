r"""The projection on CPUs: pool adjacent violators, one pass over the classes in and one out.

Notation of ``ccssl.credal.projection``. Walk through the groups of equal possibility from the least possible
up. A block is a run of groups with rise t = pi(end) - pi(start) and model mass m. Push each group as a block;
while the last block's slope t/m is not above the one before, merge the two. What remains is the greatest convex
minorant; r = t/m on each block, p = q r, and the loss is the sum over blocks of t log(t/m).

The walk's branches cannot be foreseen, so it is done where the hull may bend and nowhere else (``_walk``).

Possibilities with few levels (``solve_levels``) need no sort: a first pass adds q into one bucket a level, the
walk runs over the buckets, a second pass multiplies. Four interleaved sets of buckets are kept where classes
outnumber levels: conformal counts repeat (most classes of a confident prediction have count 0), and adding to
one address again and again waits for its own result.

A row is solved again from its log-probabilities where the last block's mass is so small that q has lost digits
or all of itself (``_solve_log``): the model then gives next to nothing to every class that pi leaves possible.

Masses are float64 whatever the type of q. Kernels release the interpreter's lock and are spread over a thread
pool of ``torch.get_num_threads()`` workers, because numba's own threading layers abort when two Python threads
meet in them or after a fork. Nothing is compiled before the first call; compiled code is cached on disk.

Shapes: N rows, K classes, L calibration items.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from ccssl.credal import faults
from ccssl.credal.possibility import Levels

# Rows whose last block has less mass than this are solved in log-space: the smallest normal number, with a
# margin of about ten digits.
TINY = {torch.float32: 1e-27, torch.float64: 1e-297}
SMALL_K = 32  # below, a softmax inside the kernel beats a call to torch
LEVELS_PER_CLASS = 8  # with more levels than this a class, sorting classes is cheaper than scanning levels
CHUNK = 8  # groups looked at together before the walk: few, so that little is walked around each vertex
PARALLEL_WORK = 1 << 17  # numbers in a call from which several threads pay
HIGH_HALF = 1 if sys.byteorder == "little" else 0  # where an int64 seen as two float32 keeps its upper half
MINUS_ZERO = -(1 << 31)  # -0.0 in float32, seen as an int32
SORT_WORK = 1 << 16  # numbers sorted at once: bounds the extra memory


def _jit(function: Callable[..., Any]) -> Any:
    """Compile at the first call, keep the machine code on disk where some folder can be written."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache is writable
        return numba.njit(**options)(function)


# exp in float32: 2^n exp(r) with |r| <= log(2)/2, a polynomial for exp(r) and a table for 2^n. Free of branches
# and calls, so that it runs in vector registers. Off by at most 0.8 units of rounding; 0 below e^-120 and for NaN.
_FLOOR = np.float32(-120)
_LOG2_E, _LN_2_HIGH, _LN_2_LOW = (
    np.float32(1.4426950408889634),
    np.float32(0.693359375),
    np.float32(-2.1219444e-4),
)
_C7, _C6, _C5, _C4, _C3, _C2 = (np.float32(1 / math.factorial(n)) for n in range(7, 1, -1))
_HALF, _ONE = np.float32(0.5), np.float32(1)
_POWERS = np.ldexp(np.ones(176), np.arange(-175, 1)).astype(np.float32)


@_jit
def _exp_rows(z_NK: np.ndarray, e_NK: np.ndarray) -> None:
    """Write exp(z - max of the row): all rows in one run, since rows of few classes don't fill a register."""
    N, K = z_NK.shape
    for n in range(N):
        peak = z_NK[n, 0]
        for k in range(1, K):
            peak = max(peak, z_NK[n, k])
        for k in range(K):
            e_NK[n, k] = z_NK[n, k] - peak
    e = e_NK.ravel()
    if e.itemsize == 4:
        for i in range(len(e)):
            x = e[i] if e[i] > _FLOOR else _FLOOR
            n = np.floor(x * _LOG2_E + _HALF)
            r = x - n * _LN_2_HIGH - n * _LN_2_LOW
            tail = ((((_C7 * r + _C6) * r + _C5) * r + _C4) * r + _C3) * r + _C2
            e[i] = (tail * r * r + r + _ONE) * _POWERS[np.int64(n) + 175]
    else:
        for i in range(len(e)):
            e[i] = math.exp(e[i])


@_jit
def _finite(z_K: np.ndarray, q_K: np.ndarray) -> bool:
    """Tell whether all logits are finite; where q is positive they are."""
    ordinary = 0
    for k in range(len(q_K)):
        ordinary += q_K[k] > 0
    if ordinary < len(q_K):
        for k in range(len(z_K)):
            if not np.isfinite(z_K[k]):
                return False
    return True


@_jit
def _solve_log(z_K: np.ndarray, class_K: np.ndarray, pi_K: np.ndarray, gradient: bool, out_K: np.ndarray) -> float:
    """Pool adjacent violators on logarithms; return the loss, write p or q - p to ``out_K``.

    ``class_K`` lists the classes and ``pi_K`` the possibilities in ascending order.
    """
    K = len(z_K)
    peak = -np.inf
    for k in range(K):
        peak = max(peak, z_K[k])
    total = 0.0
    for k in range(K):
        total += math.exp(z_K[k] - peak)
    log_sum = peak + math.log(total)
    start_B, log_m_B, last_B = np.empty(K), np.empty(K), np.empty(K, np.int64)
    blocks = 0
    reached = 0.0
    for i in range(K):
        start, end, log_m = reached, pi_K[i], z_K[class_K[i]] - log_sum
        reached = end
        while blocks > 0:
            rise, rise_below = end - start, start - start_B[blocks - 1]
            if rise > 0 and (
                rise_below <= 0 or math.log(rise) - log_m > math.log(rise_below) - log_m_B[blocks - 1]
            ):
                break
            blocks -= 1
            start = start_B[blocks]
            high, low = max(log_m, log_m_B[blocks]), min(log_m, log_m_B[blocks])
            log_m = high + math.log1p(math.exp(low - high))
        start_B[blocks], log_m_B[blocks], last_B[blocks] = start, log_m, i
        blocks += 1
    loss = 0.0
    i = 0
    for b in range(blocks):
        rise = (start_B[b + 1] if b < blocks - 1 else 1.0) - start_B[b]
        log_r = -np.inf
        if blocks == 1:
            log_r = 0.0
        elif rise > 0:
            log_r = math.log(rise) - log_m_B[b]
            loss += rise * log_r
        while i <= last_B[b]:
            k = class_K[i]
            p = math.exp(z_K[k] - log_sum + log_r)
            out_K[k] = math.exp(z_K[k] - log_sum) - p if gradient else p
            i += 1
    return max(loss, 0.0)


@_jit
def _push(
    rise_B: np.ndarray,
    mass_B: np.ndarray,
    last_B: np.ndarray,
    blocks: int,
    rise: float,
    mass: float,
    last: int,
) -> int:
    """Push a block on the stack, merging while its slope is not above the one before; return the new height.

    Slopes are compared by products, so that blocks without mass need no case of their own. A block without
    rise stays apart from one with: its classes are impossible, and p must be 0 there exactly.
    """
    while blocks > 0:
        if rise > 0 and rise_B[blocks - 1] == 0:
            break
        if rise * mass_B[blocks - 1] > rise_B[blocks - 1] * mass:
            break
        blocks -= 1
        rise += rise_B[blocks]
        mass += mass_B[blocks]
    rise_B[blocks], mass_B[blocks], last_B[blocks] = rise, mass, last
    return blocks + 1


@_jit
def _coarse(groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the room that ``_walk`` needs for chunks."""
    chunks = groups // CHUNK + 1
    return np.empty(chunks), np.empty(chunks), np.empty(chunks), np.empty(chunks, np.int64)


@_jit
def _walk(
    pi_G: np.ndarray,
    mass_G: np.ndarray,
    G: int,
    rise_B: np.ndarray,
    mass_B: np.ndarray,
    last_B: np.ndarray,
    coarse: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> int:
    """Leave the blocks of the hull over the first G groups in the ``_B`` arrays; return how many there are.

    Where there are many groups they are first taken in chunks. The hull over the ends of chunks, H, lies nowhere
    below the true one. A vertex inside a chunk would lie on the true hull, so below H, which rises: a chunk whose
    *first* possibility is not below H at the chunk's *end* holds no vertex, and its mass goes to the next group
    that may be one. Sums start anew in each coarse block: compared with small ones, differences of large ones
    would be noise.
    """
    blocks = 0
    reached = 0.0
    if G < 4 * CHUNK:
        for g in range(G):
            if mass_G[g] > 0 or g == G - 1:
                blocks = _push(rise_B, mass_B, last_B, blocks, pi_G[g] - reached, mass_G[g], g)
                reached = pi_G[g]
        return blocks
    sum_C, rise_C, mass_C, last_C = coarse
    chunks = (G + CHUNK - 1) // CHUNK
    arcs = 0
    for c in range(chunks):
        end = min((c + 1) * CHUNK, G)
        a, b = 0.0, 0.0
        for g in range(c * CHUNK, end - 1, 2):
            a += mass_G[g]
            b += mass_G[g + 1]
        if (end - c * CHUNK) % 2:
            a += mass_G[end - 1]
        sum_C[c] = a + b
        arcs = _push(rise_C, mass_C, last_C, arcs, pi_G[end - 1] - reached, a + b, c)
        reached = pi_G[end - 1]
    c = 0
    reached = 0.0
    pending = 0.0  # mass of the groups passed over
    for arc in range(arcs):
        base = pi_G[c * CHUNK - 1] if c > 0 else 0.0
        run = 0.0
        while c <= last_C[arc]:
            start, end = c * CHUNK, min((c + 1) * CHUNK, G)
            run += sum_C[c]
            if c < last_C[arc] and (pi_G[start] - base) * mass_C[arc] >= rise_C[arc] * run:
                pending += sum_C[c]
            else:
                for g in range(start, end):
                    pending += mass_G[g]
                    if pending > 0 or g == G - 1:
                        blocks = _push(rise_B, mass_B, last_B, blocks, pi_G[g] - reached, pending, g)
                        reached = pi_G[g]
                        pending = 0.0
            c += 1
    return blocks


@_jit
def _factors(rise_B: np.ndarray, mass_B: np.ndarray, blocks: int, gradient: bool) -> float:
    """Turn the blocks' masses into p / e, or (q - p) / e, where q = e / total; return the loss.

    One block means q lies in Q_pi: p = q and a loss of 0, exactly.
    """
    total = 0.0
    for b in range(blocks):
        total += mass_B[b]
    if blocks == 1:
        mass_B[0] = 0.0 if gradient else 1.0 / total
        return 0.0
    loss = 0.0
    for b in range(blocks):
        factor = 0.0
        if rise_B[b] > 0:
            factor = rise_B[b] / mass_B[b]
            loss += rise_B[b] * math.log(factor * total)
        mass_B[b] = 1.0 / total - factor if gradient else factor
    return max(loss, 0.0)


@_jit
def _levels_rows(
    z_NK: np.ndarray,
    counts_NK: np.ndarray,
    top_N: np.ndarray,
    size: int,
    proportional: bool,
    gradient: bool,
    tiny: float,
    ready: bool,
    out_NK: np.ndarray,
    loss_N: np.ndarray,
    bad_N: np.ndarray,
) -> None:
    """Solve rows of quantised pi. ``out_NK`` holds softmax(z) where ``ready``; it is overwritten."""
    N, K = z_NK.shape
    if not ready:
        _exp_rows(z_NK, out_NK)
    has_top = len(top_N) > 0
    copies = 4 if size + 3 <= K else 1
    mass_CB = np.zeros((4, size + 3))
    factor_B = np.zeros(size + 3, out_NK.dtype)
    pi_B, rise_B, mass_B, last_B = (
        np.empty(size + 3),
        np.empty(size + 3),
        np.empty(size + 3),
        np.empty(size + 3, np.int64),
    )
    coarse = _coarse(size + 3)
    for n in range(N):
        z_K, q_K, count_K = z_NK[n], out_NK[n], counts_NK[n]
        loss_N[n] = np.nan
        least, most = count_K[0], count_K[0]
        for k in range(1, K):
            least = min(least, count_K[k])
            most = max(most, count_K[k])
        top = top_N[n] if has_top else -1
        possible = 0 <= top < K if has_top else most >= 0
        bad_N[n] = least < -1 or most > size or not possible or not _finite(z_K, q_K)
        if bad_N[n]:
            q_K[:] = np.nan
            continue

        # First pass: one bucket a level. The top class stands aside.
        high = most + 1
        q_top = q_K[0]
        if has_top:
            q_top = q_K[top]
            q_K[top] = 0
        for c in range(copies):
            for j in range(high + 1):
                mass_CB[c, j] = 0
        if copies == 4:
            whole = K // 4 * 4
            for k in range(0, whole, 4):
                mass_CB[0, count_K[k] + 1] += q_K[k]
                mass_CB[1, count_K[k + 1] + 1] += q_K[k + 1]
                mass_CB[2, count_K[k + 2] + 1] += q_K[k + 2]
                mass_CB[3, count_K[k + 3] + 1] += q_K[k + 3]
            for k in range(whole, K):
                mass_CB[0, count_K[k] + 1] += q_K[k]
            for j in range(high + 1):
                mass_CB[0, j] = (mass_CB[0, j] + mass_CB[1, j]) + (mass_CB[2, j] + mass_CB[3, j])
        else:
            for k in range(K):
                mass_CB[0, count_K[k] + 1] += q_K[k]

        # The walk over levels, and over the top class behind them where there is one.
        unit = high if proportional else size + 1
        for j in range(high + 1):
            pi_B[j] = j / unit
        one = high + has_top
        pi_B[one], mass_CB[0, one] = 1.0, q_top if has_top else mass_CB[0, high]
        blocks = _walk(pi_B, mass_CB[0], one + 1, rise_B, mass_B, last_B, coarse)
        if mass_B[blocks - 1] < tiny:
            pi_K = (count_K + 1) / unit
            if has_top:
                pi_K[top] = 1.0
            elif not proportional:
                pi_K[count_K == most] = 1.0
            class_K = np.argsort(pi_K)
            loss_N[n] = _solve_log(z_K, class_K, pi_K[class_K], gradient, q_K)
            continue

        # Second pass: p = q r.
        loss_N[n] = _factors(rise_B, mass_B, blocks, gradient)
        j = 0
        for b in range(blocks):
            while j <= last_B[b]:
                factor_B[j] = mass_B[b]
                j += 1
        for k in range(K):
            q_K[k] *= factor_B[count_K[k] + 1]
        if has_top:
            q_K[top] = q_top * factor_B[one]


@_jit
def _keys(pi_NK: np.ndarray, key_NK: np.ndarray) -> None:
    """Pack float32 possibilities and class indices into integers that sort as the possibilities do."""
    N, K = pi_NK.shape
    bits_NK = pi_NK.view(np.int32)
    for n in range(N):
        for k in range(K):
            bits = bits_NK[n, k] if bits_NK[n, k] != MINUS_ZERO else 0  # as it would hide what is below 0
            key_NK[n, k] = (np.int64(bits) << 32) | np.int64(k)


@_jit
def _sorted_rows(
    z_NK: np.ndarray,
    sorted_NK: np.ndarray,
    key_NK: np.ndarray,
    gradient: bool,
    tiny: float,
    slack: float,
    ready: bool,
    out_NK: np.ndarray,
    loss_N: np.ndarray,
    bad_N: np.ndarray,
) -> None:
    """Solve rows of real-valued pi, given in ascending order; the low halves of ``key_NK`` name the classes."""
    N, K = z_NK.shape
    if not ready:
        _exp_rows(z_NK, out_NK)
    pi_K, q_K, class_K = np.empty(K), np.empty(K), np.empty(K, np.int64)
    rise_B, mass_B, last_B = np.empty(K), np.empty(K), np.empty(K, np.int64)
    coarse = _coarse(K)
    for n in range(N):
        z_K, out_K = z_NK[n], out_NK[n]
        loss_N[n] = np.nan
        for i in range(K):
            class_K[i] = key_NK[n, i] & 0xFFFFFFFF
            q_K[i] = out_K[class_K[i]]
            pi_K[i] = sorted_NK[n, i]
        # Sorting has put what is below 0, above 1 or NaN at one of the ends.
        normal = pi_K[0] >= 0 and 1 - slack <= pi_K[K - 1] <= 1 + slack
        bad_N[n] = not normal or not _finite(z_K, q_K)
        if bad_N[n]:
            out_K[:] = np.nan
            continue
        pi_K[K - 1] = 1.0
        i = K - 2
        while i >= 0 and pi_K[i] > 1:
            pi_K[i] = 1.0
            i -= 1
        blocks = _walk(pi_K, q_K, K, rise_B, mass_B, last_B, coarse)
        if mass_B[blocks - 1] < tiny:
            loss_N[n] = _solve_log(z_K, class_K, pi_K, gradient, out_K)
            continue
        loss_N[n] = _factors(rise_B, mass_B, blocks, gradient)
        i = 0
        for b in range(blocks):
            while i <= last_B[b]:
                out_K[class_K[i]] = q_K[i] * mass_B[b]
                i += 1


def solve(logits_NK: Tensor, pi_NK: Tensor, gradient: bool, validate: bool) -> tuple[Tensor, Tensor]:
    """Solve for real-valued pi: sort classes a few rows at a time, then walk."""
    ready, out_NK = _softmax(logits_NK)
    N, K = logits_NK.shape
    loss_N, bad_N = torch.empty(N, dtype=logits_NK.dtype), np.empty(N, np.bool_)
    z, pi, out, loss = logits_NK.numpy(), pi_NK.numpy(), out_NK.numpy(), loss_N.numpy()
    tiny, slack = TINY[logits_NK.dtype], faults.SLACK * torch.finfo(pi_NK.dtype).eps
    step = max(1, SORT_WORK // K)

    def work(first: int, end: int) -> None:
        for start in range(first, end, step):
            rows = slice(start, min(start + step, end))
            if pi.dtype == np.float32:
                key = np.empty((rows.stop - rows.start, K), np.int64)
                _keys(pi[rows], key)
                key.sort(-1)
                ascending = key.view(np.float32)[:, HIGH_HALF::2]
            else:
                key = pi[rows].argsort(-1)
                ascending = np.take_along_axis(pi[rows], key, -1)
            _sorted_rows(z[rows], ascending, key, gradient, tiny, slack, ready, out[rows], loss[rows], bad_N[rows])

    _spread(work, N, K)
    if validate and bad_N.any():
        faults.refuse(faults.real_faults(logits_NK, pi_NK))
    return loss_N, out_NK


def solve_levels(
    logits_NK: Tensor,
    counts_NK: Tensor,
    top_N: Tensor | None,
    size: int,
    proportional: bool,
    gradient: bool,
    validate: bool,
) -> tuple[Tensor, Tensor]:
    """Solve for quantised pi: in O(K + L) by buckets, or by sorting where levels far outnumber classes."""
    N, K = logits_NK.shape
    if size + 3 > LEVELS_PER_CLASS * K:
        if validate:
            faults.refuse(faults.count_faults(counts_NK, top_N, size))
        levels = Levels(counts_NK, size, "proportional" if proportional else "top", top_N)
        return solve(logits_NK, levels.dense(logits_NK.dtype, validate=False), gradient, validate)
    ready, out_NK = _softmax(logits_NK)
    loss_N, bad_N = torch.empty(N, dtype=logits_NK.dtype), np.empty(N, np.bool_)
    z, counts, out, loss = logits_NK.numpy(), counts_NK.numpy(), out_NK.numpy(), loss_N.numpy()
    top = np.empty(0, np.int64) if top_N is None else top_N.long().contiguous().numpy()
    tiny = TINY[logits_NK.dtype]

    def work(first: int, end: int) -> None:
        rows = slice(first, end)
        _levels_rows(
            z[rows], counts[rows], top[rows], size, proportional, gradient, tiny, ready,
            out[rows], loss[rows], bad_N[rows],
        )  # fmt: skip

    _spread(work, N, K)
    if validate and bad_N.any():
        faults.refuse(faults.level_faults(logits_NK, counts_NK, top_N, size))
    return loss_N, out_NK


def _softmax(logits_NK: Tensor) -> tuple[bool, Tensor]:
    """Return softmax(logits) and True, or room for it and False where the kernel does it faster."""
    if logits_NK.shape[-1] <= SMALL_K:
        return False, torch.empty_like(logits_NK)
    return True, logits_NK.softmax(-1)


def _spread(work: Callable[[int, int], None], rows: int, classes: int) -> None:
    """Call ``work(first, end)`` on contiguous shares of the rows, one a thread where that pays."""
    threads = min(torch.get_num_threads(), rows)
    if threads == 1 or rows * classes < PARALLEL_WORK:
        work(0, rows)
        return
    bounds = [rows * i // threads for i in range(threads + 1)]
    list(_pool(threads).map(work, bounds[:-1], bounds[1:]))


_POOLS: dict[tuple[int, int], ThreadPoolExecutor] = {}


def _pool(threads: int) -> ThreadPoolExecutor:
    """Return this process's pool; a forked child has none of its parent's threads and makes its own."""
    key = (os.getpid(), threads)
    if key not in _POOLS:
        _POOLS[key] = ThreadPoolExecutor(threads, thread_name_prefix="ccssl")
    return _POOLS[key]
