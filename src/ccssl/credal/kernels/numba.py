r"""The projection on CPUs: pool adjacent violators, one pass over the classes in and one out.

Notation of ``ccssl.credal.projection``. Walk through the groups of equal possibility from the least possible
up. A block is a run of groups with rise t in possibility and model mass m. Wherever a block's slope t/m is not
above that of the block before, merge the two. What remains is the greatest convex minorant; r = t/m on each
block, p = q r, and the loss is the sum over blocks of t log(t/m).

*Merging* (``_hull``). Whether a slope rises is a coin toss to the processor: merges one by one would cost a wrong
guess each. So they are first done all at once, in rounds without branches. Where the slope does not rise from one
block to the next, the point between them lies on or above the line through its two neighbours and is no vertex;
a round drops all such points, usually half of all. When few are left, or rounds no longer help, they are merged one
by one. Blocks only ever add masses, so that nothing cancels; and no mass is 0, for two points in one place would
drop each other.

*Levels* (``solve_levels``). Conformal counts need no sort: a first pass adds q into one bucket a level, the hull is
found over the buckets, a second pass multiplies. Four interleaved sets of buckets are kept: conformal counts repeat
(most classes of a confident prediction have count 0), and adding to one address again and again waits for its own
result. Where levels outnumber classes most buckets are empty, and marks tell which are not (``_occupied``).

*Real values* (``solve``). Classes are sorted, by integers that hold the possibility and the class. Those of 32 bits,
which sort faster, round the possibility; classes that share a step are put in order afterwards (``_settle``).

*Many classes* (``_sift``). Few of them can be a vertex, and only those are sorted. As if pi had few levels, masses
are added into buckets, here on a grid over the fourth root of pi, since most are small. After each bucket the sum of
masses is known, and the possibility up to the width of the bucket; the hull over some of these points, each taken at
its highest, lies nowhere below the true one. A bucket whose lower right corner lies above that hull holds no vertex,
and its mass goes as a whole to the next class that may be one. The margin is far above rounding, so that the result
does not depend on the sieve.

A row is solved again from its logits where the last block's mass is so small that q has lost digits or all of
itself (``_solve_log``): the model then gives next to nothing to every class that pi leaves possible.

Instead of q, kernels work on e = exp(z - max z), and divide by its sum where they multiply anyway. Masses are float64
whatever the type of e. Kernels release the interpreter's lock and are spread over a thread pool of
``torch.get_num_threads()`` workers, because numba's own threading layers abort when two Python threads meet in them
or after a fork. Nothing is compiled before the first call; compiled code is cached on disk.

Shapes: N rows, K classes, C classes that are sorted, J buckets or levels, B blocks.
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

# Rows whose last block has less mass than this are solved in log-space: the smallest normal number, with a
# margin of about ten digits.
TINY = {torch.float32: 1e-27, torch.float64: 1e-297}
# With more levels than this sorting classes is cheaper than looking for levels.
LEVELS, LEVELS_PER_CLASS = 200, 64
PARALLEL_WORK = 1 << 17  # numbers in a call from which several threads pay
SORT_WORK = 1 << 16  # numbers sorted at once: bounds the extra memory
EXP_WORK = 1 << 12  # numbers whose exponential is taken at once: they stay in the fastest cache
FEW = 16  # blocks that are merged one by one
SIFT = 2_500  # classes from which it pays to find out which of them to sort
CLASSES_PER_BUCKET = 2  # in the mean
MOST_BUCKETS = 1 << 16
STRIDE = 4  # buckets from one point of the sieve's hull to the next
LOWER_HALF = 0xFFFFFFFF  # of a key of 64 bits: the class
UPPER_HALF = 1 if sys.byteorder == "little" else 0  # the possibility
LAST_KEY = np.iinfo(np.int64).max


def _jit(function: Callable[..., Any]) -> Any:
    """Compile at the first call, keep the machine code on disk where some folder can be written."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache is writable
        return numba.njit(**options)(function)


# exp in float32: 2^n exp(r) with |r| <= log(2)/2, a polynomial for exp(r), and n added to the exponent. Free of
# branches and calls, so that it runs in vector registers. Off by at most 0.8 units of rounding, never below 2^-126.
_FLOOR = np.float32(-87)
_LOG2_E, _LN_2_HIGH, _LN_2_LOW = (
    np.float32(1.4426950408889634),
    np.float32(0.693359375),
    np.float32(-2.1219444e-4),
)
_C7, _C6, _C5, _C4, _C3, _C2 = (np.float32(1 / math.factorial(n)) for n in range(7, 1, -1))
_HALF, _ONE = np.float32(0.5), np.float32(1)
_EXPONENT = np.int32(23)  # bits below the exponent of a float32
_SIGN, _REST = np.int32(31), np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)  # seen as an int32


@_jit
def _exp_rows(z_NK: np.ndarray, e_NK: np.ndarray, finite_N: np.ndarray) -> None:
    """Write exp(z - max of the row), and whether all of the row is finite, from float32.

    Seen as an integer, with the order of negative numbers reversed, a float32 compares without a case for NaN.
    """
    N, K = z_NK.shape
    bits_NK = z_NK.view(np.int32)
    most_1 = np.empty(1, np.int32)
    step = max(1, EXP_WORK // K)
    for start in range(0, N, step):
        end = min(start + step, N)
        for n in range(start, end):
            z_K, e_K, bits_K = z_NK[n], e_NK[n], bits_NK[n]
            least, most = np.int32(_REST), np.int32(-_REST)
            for k in range(K):
                order = bits_K[k] ^ ((bits_K[k] >> _SIGN) & _REST)
                least = min(least, order)
                most = max(most, order)
            finite_N[n] = least > -_INFINITY - 1 and most < _INFINITY
            most_1[0] = most ^ ((most >> _SIGN) & _REST)
            peak = most_1.view(np.float32)[0]
            for k in range(K):
                e_K[k] = z_K[k] - peak
        # All rows in one run, since rows of few classes don't fill a register.
        e = e_NK[start:end].ravel()
        power = e.view(np.int32)
        for i in range(len(e)):
            x = e[i] if e[i] > _FLOOR else _FLOOR
            n = np.floor(x * _LOG2_E + _HALF)
            r = x - n * _LN_2_HIGH - n * _LN_2_LOW
            tail = ((((_C7 * r + _C6) * r + _C5) * r + _C4) * r + _C3) * r + _C2
            e[i] = tail * r * r + r + _ONE
            power[i] += np.int32(n) << _EXPONENT


@_jit
def _solve_log(
    z_K: np.ndarray, class_K: np.ndarray, pi_K: np.ndarray, gradient: bool, scale: float, out_K: np.ndarray
) -> float:
    """Pool adjacent violators on logarithms; return the loss, write p or q - p to ``out_K``.

    ``class_K`` lists the classes and ``pi_K`` the possibilities in ascending order. A block keeps the largest of its
    logits and the logarithm of its mass relative to that, for the sum of the two would lose digits where logits are
    huge; from these alone comes p = t exp(z - log m).
    """
    K = len(z_K)
    peak = -np.inf
    for k in range(K):
        peak = max(peak, z_K[k])
    total = 0.0
    for k in range(K):
        total += math.exp(z_K[k] - peak)
    log_total = math.log(total)
    start_B, peak_B, log_m_B, last_B = np.empty(K), np.empty(K), np.empty(K), np.empty(K, np.int64)
    blocks = 0
    reached = 0.0
    for i in range(K):
        start, end = reached, pi_K[i]
        high, log_m = np.float64(z_K[class_K[i]]), 0.0
        reached = end
        while blocks > 0:
            rise, rise_below = end - start, start - start_B[blocks - 1]
            if rise > 0 and (
                rise_below <= 0
                or math.log(rise) - log_m - (math.log(rise_below) - log_m_B[blocks - 1]) > high - peak_B[blocks - 1]
            ):
                break
            blocks -= 1
            start = start_B[blocks]
            low, log_low = peak_B[blocks], log_m_B[blocks]
            if low > high:
                high, log_m, low, log_low = low, log_low, high, log_m
            log_m += math.log1p(math.exp(low - high + log_low - log_m))
        start_B[blocks], peak_B[blocks], log_m_B[blocks], last_B[blocks] = start, high, log_m, i
        blocks += 1
    loss = 0.0
    i = 0
    for b in range(blocks):
        rise = (start_B[b + 1] if b < blocks - 1 else 1.0) - start_B[b]
        if rise > 0 and blocks > 1:
            loss += rise * (math.log(rise) - log_m_B[b] + log_total + (peak - peak_B[b]))
        while i <= last_B[b]:
            k = class_K[i]
            p = rise * math.exp(z_K[k] - peak_B[b] - log_m_B[b])
            out_K[k] = scale * (math.exp(z_K[k] - peak - log_total) - p if gradient else p)
            i += 1
    return max(loss, 0.0)


@_jit
def _merge(top_B: np.ndarray, mass_B: np.ndarray, last_B: np.ndarray, blocks: int) -> int:
    """Merge every block into the next one wherever the slope does not rise, all at once; return how many are left.

    Slopes are compared by products, so that blocks without mass need no case of their own.
    """
    kept = 0
    pending = 0.0
    floor, top, mass = 0.0, top_B[0], mass_B[0]
    for b in range(1, blocks):
        next_top, next_mass = top_B[b], mass_B[b]
        pending += mass
        top_B[kept], mass_B[kept], last_B[kept] = top, pending, last_B[b - 1]
        rises = (next_top - top) * mass > (top - floor) * next_mass
        kept += rises
        pending = 0.0 if rises else pending
        floor, top, mass = top, next_top, next_mass
    top_B[kept], mass_B[kept], last_B[kept] = top, pending + mass, last_B[blocks - 1]
    return kept + 1


@_jit
def _hull(top_B: np.ndarray, mass_B: np.ndarray, last_B: np.ndarray, blocks: int) -> int:
    """Merge blocks until all slopes rise; return how many are left.

    A block is known by the possibility at its end, its mass, and its last member.
    """
    while blocks > FEW:
        before = blocks
        blocks = _merge(top_B, mass_B, last_B, blocks)
        if 4 * blocks > 3 * before:
            break
    height = 0
    for b in range(blocks):
        top, mass, last = top_B[b], mass_B[b], last_B[b]
        while height > 0:
            below, floor = top_B[height - 1], top_B[height - 2] if height > 1 else 0.0
            if (top - below) * mass_B[height - 1] > (below - floor) * mass:
                break
            height -= 1
            mass += mass_B[height]
        top_B[height], mass_B[height], last_B[height] = top, mass, last
        height += 1
    return height


@_jit
def _factors(
    top_B: np.ndarray, mass_B: np.ndarray, blocks: int, impossible: float, gradient: bool, scale: float
) -> tuple[float, float]:
    """Turn the blocks' masses into p / e, or (q - p) / e, where q = e / total; return the loss, and this for pi = 0.

    ``impossible`` is the mass of the classes with pi = 0. One block and none of these means that q lies in Q_pi:
    p = q and a loss of 0, exactly.
    """
    total = impossible
    for b in range(blocks):
        total += mass_B[b]
    if blocks == 1 and impossible == 0:
        mass_B[0] = 0.0 if gradient else scale / total
        return 0.0, 0.0
    loss = 0.0
    floor = 0.0
    for b in range(blocks):
        rise = top_B[b] - floor
        floor = top_B[b]
        factor = rise / mass_B[b]
        loss += rise * math.log(factor * total)
        mass_B[b] = scale * (1.0 / total - factor if gradient else factor)
    return max(loss, 0.0), scale / total if gradient else 0.0


@_jit
def _occupied(
    count_K: np.ndarray, low: int, high: int, mark_J: np.ndarray, group_G: np.ndarray, level_B: np.ndarray
) -> int:
    """Write the levels that some class has, ascending; return how many they are.

    Marks are bytes, since storing one waits for nothing; they are read and cleared eight at a time, and first of all
    those of the groups of 64 levels that hold any.
    """
    eight_W, groups_H = mark_J.view(np.uint64), group_G.view(np.uint64)
    for k in range(len(count_K)):
        mark_J[count_K[k] + 1] = 1
        group_G[(count_K[k] + 1) >> 6] = 1
    levels = 0
    for h in range(low >> 9, (high >> 9) + 1):
        if groups_H[h] == 0:
            continue
        for g in range(8 * h, 8 * h + 8):
            if group_G[g] == 0:
                continue
            for w in range(8 * g, 8 * g + 8):
                if eight_W[w] == 0:
                    continue
                for j in range(8 * w, 8 * w + 8):
                    level_B[levels] = j
                    levels += mark_J[j]
                eight_W[w] = 0
        groups_H[h] = 0
    return levels


@_jit
def _add_up(mass_CJ: np.ndarray, j: int) -> None:
    """Add the four masses of a level into the first, and clear the others."""
    mass_CJ[0, j] = (mass_CJ[0, j] + mass_CJ[1, j]) + (mass_CJ[2, j] + mass_CJ[3, j])
    mass_CJ[1, j] = 0
    mass_CJ[2, j] = 0
    mass_CJ[3, j] = 0


@_jit
def _levels_rows(
    z_NK: np.ndarray,
    good_N: np.ndarray,
    counts_NK: np.ndarray,
    top_N: np.ndarray,
    size: int,
    proportional: bool,
    gradient: bool,
    scale: float,
    tiny: float,
    out_NK: np.ndarray,
    loss_N: np.ndarray,
) -> None:
    """Solve rows of quantised pi. ``out_NK`` holds exp(z) up to a factor; it is overwritten."""
    N, K = z_NK.shape
    has_top = len(top_N) > 0
    marked = size >= K
    most_blocks = min(size, K) + 4 if marked else size + 4
    mass_CJ, factor_J = np.zeros((4, size + 3)), np.zeros(size + 3, out_NK.dtype)
    top_B, mass_B, last_B = np.empty(most_blocks), np.empty(most_blocks), np.empty(most_blocks, np.int64)
    level_B = np.empty(most_blocks, np.int64)
    groups = 8 * ((size + 2) // 512 + 1)
    mark_J, group_G = np.zeros(64 * groups, np.uint8), np.zeros(groups, np.uint8)
    for n in range(N):
        e_K, count_K = out_NK[n], counts_NK[n]
        loss_N[n] = np.nan
        least, most = count_K[0], count_K[0]
        for k in range(1, K):
            least = min(least, count_K[k])
            most = max(most, count_K[k])
        top = top_N[n] if has_top else -1
        possible = 0 <= top < K if has_top else most >= 0
        good_N[n] &= least >= -1 and most <= size and possible
        if not good_N[n]:
            e_K[:] = np.nan
            continue

        # First pass: one bucket a level. The top class stands aside.
        low, high = least + 1, most + 1
        e_top = e_K[0]
        if has_top:
            e_top = e_K[top]
            e_K[top] = 0
        whole = K // 4 * 4
        for k in range(0, whole, 4):
            mass_CJ[0, count_K[k] + 1] += e_K[k]
            mass_CJ[1, count_K[k + 1] + 1] += e_K[k + 1]
            mass_CJ[2, count_K[k + 2] + 1] += e_K[k + 2]
            mass_CJ[3, count_K[k + 3] + 1] += e_K[k + 3]
        for k in range(whole, K):
            mass_CJ[0, count_K[k] + 1] += e_K[k]
        levels = _occupied(count_K, low, high, mark_J, group_G, level_B) if marked else 0
        for i in range(levels):
            _add_up(mass_CJ, level_B[i])
        if not marked:
            for j in range(low, high + 1):
                _add_up(mass_CJ, j)

        # The hull over the levels that have mass, and over the top class behind them where there is one.
        impossible = mass_CJ[0, 0]
        mass_CJ[0, 0] = 0
        unit = high if proportional else size + 1
        blocks = 0
        first = max(low, 1)
        for i in range(levels if marked else high + 1 - first):
            j = level_B[i] if marked else first + i
            mass = mass_CJ[0, j]
            mass_CJ[0, j] = 0
            top_B[blocks], mass_B[blocks], last_B[blocks] = j / unit, mass, j
            blocks += j > 0 and (mass > 0 or (j == high and not has_top))
        if has_top:
            top_B[blocks], mass_B[blocks], last_B[blocks] = 1.0, e_top, high
            blocks += 1
        top_B[blocks - 1] = 1.0
        blocks = _hull(top_B, mass_B, last_B, blocks)
        if mass_B[blocks - 1] < tiny:
            pi_K = (count_K + 1) / unit
            if has_top:
                pi_K[top] = 1.0
            elif not proportional:
                pi_K[count_K == most] = 1.0
            class_K = np.argsort(pi_K)
            loss_N[n] = _solve_log(z_NK[n], class_K, pi_K[class_K], gradient, scale, e_K)
            continue

        # Second pass: p = q r.
        loss_N[n], factor_J[0] = _factors(top_B, mass_B, blocks, impossible, gradient, scale)
        if marked:
            b = 0
            for i in range(levels):
                while last_B[b] < level_B[i]:
                    b += 1
                factor_J[level_B[i]] = mass_B[b] if level_B[i] > 0 else factor_J[0]
        else:
            for b in range(blocks):
                for j in range(first, last_B[b] + 1):
                    factor_J[j] = mass_B[b]
                first = last_B[b] + 1
        for k in range(K):
            e_K[k] *= factor_J[count_K[k] + 1]
        if has_top:
            e_K[top] = e_top * mass_B[blocks - 1]


@_jit
def _check(pi_NK: np.ndarray, slack: float, good_N: np.ndarray) -> None:
    """Clear the mark of the rows that are no possibility distributions."""
    N, K = pi_NK.shape
    least, most, one = pi_NK.dtype.type(0), pi_NK.dtype.type(1 + slack), pi_NK.dtype.type(1 - slack)
    for n in range(N):
        pi_K = pi_NK[n]
        inside, ones = 0, 0
        for k in range(K):
            inside += (pi_K[k] >= least) & (pi_K[k] <= most)
            ones += pi_K[k] >= one
        good_N[n] &= inside == K and ones > 0


@_jit
def _keys(pi_NK: np.ndarray, bits: int, key_NK: np.ndarray) -> None:
    """Pack possibilities, rounded to a grid of 2^(32 - bits) steps, and class indices of so many bits."""
    N, K = pi_NK.shape
    scale = np.float32(2.0 ** min(32 - bits, 24) * (1 - 2.0**-16))
    shift = np.uint32(bits)
    for n in range(N):
        pi_K, key_K = pi_NK[n], key_NK[n]
        for k in range(K):
            key_K[k] = np.uint32(np.uint32(np.int32(np.sqrt(pi_K[k]) * scale)) << shift) | np.uint32(k)


@_jit
def _nearest(key_K: np.ndarray) -> np.uint32:
    """Return a number below 2^b where two neighbours differ in their last b bits alone."""
    least = np.uint32(0xFFFFFFFF)
    for i in range(1, len(key_K)):
        least = min(least, np.uint32(key_K[i] ^ key_K[i - 1]))
    return least


@_jit
def _settle(pi_NK: np.ndarray, good_N: np.ndarray, bits: int, key_NK: np.ndarray) -> None:
    """Bring sorted keys that share a step of the grid into the order of their possibilities."""
    N, K = pi_NK.shape
    step, mask = np.uint32(1 << bits), np.uint32((1 << bits) - 1)
    for n in range(N):
        key_K, pi_K = key_NK[n], pi_NK[n]
        if _nearest(key_K) >= step or not good_N[n]:
            continue
        end = 1
        while end < K:
            while end < K and np.uint32(key_K[end] ^ key_K[end - 1]) >= step:
                end += 1
            first = end - 1
            while end < K and np.uint32(key_K[end] ^ key_K[first]) < step:
                end += 1
            falls = 0
            for i in range(first + 1, end):
                falls += pi_K[key_K[i] & mask] < pi_K[key_K[i - 1] & mask]
            if falls == 0:
                continue
            if end - first > FEW:
                run_C = key_K[first:end].copy()
                degree_C = np.empty(len(run_C), pi_K.dtype)
                for i in range(len(run_C)):
                    degree_C[i] = pi_K[run_C[i] & mask]
                key_K[first:end] = run_C[np.argsort(degree_C)]
            else:
                for i in range(first + 1, end):
                    key = key_K[i]
                    degree = pi_K[key & mask]
                    while i > first and pi_K[key_K[i - 1] & mask] > degree:
                        key_K[i] = key_K[i - 1]
                        i -= 1
                    key_K[i] = key


@_jit
def _bucket(degree: np.float32, scale: np.float32) -> np.int32:
    """Return where a possibility lies on the grid of the sieve."""
    return np.int32(np.sqrt(np.sqrt(degree)) * scale)


@_jit
def _sift(
    pi_NK: np.ndarray,
    e_NK: np.ndarray,
    good_N: np.ndarray,
    key_NK: np.ndarray,
    width_N: np.ndarray,
    bucket_NK: np.ndarray,
    carry_NJ: np.ndarray,
) -> int:
    """Write the keys of the classes that may be a vertex, the rest as large numbers; return how many there are at most.

    ``bucket_NK`` gets each class's place on the grid, ``carry_NJ`` the mass left out between a bucket with such
    classes and the one before. A row that is no possibility distribution gets none.
    """
    N, K = pi_NK.shape
    J = carry_NJ.shape[1] - 1
    bits_NK = pi_NK.view(np.int32)
    scale = np.float32(J)
    mass_J, x_J, open_J = np.empty(J + 1), np.empty(J + 1), np.empty(J + 1, np.uint8)
    edge_J = (np.arange(J + 2) / J) ** 4  # bucket j holds possibilities from edge j to edge j + 1
    low_J = edge_J * (1 - 4e-6)
    room = J // STRIDE + 2
    top_B, mass_B, last_B = np.empty(room), np.empty(room), np.empty(room, np.int64)
    widest = 0
    for n in range(N):
        pi_K, e_K, bits_K, key_K = pi_NK[n], e_NK[n], bits_NK[n], key_NK[n]
        bucket_K, carry_J = bucket_NK[n], carry_NJ[n]
        width_N[n] = 0
        if not good_N[n]:
            continue

        # As if pi had few levels.
        for k in range(K):
            bucket_K[k] = _bucket(pi_K[k], scale)
        highest = bucket_K[0]
        for k in range(K):
            highest = max(highest, bucket_K[k])
        mass_J[:] = 0
        for k in range(K):
            mass_J[bucket_K[k]] += e_K[k]
        total = 0.0
        for j in range(J + 1):
            total += mass_J[j]
            x_J[j] = total

        # A hull nowhere below the true one, and the buckets that may lie below it.
        blocks = 0
        x = 0.0
        for j in range(STRIDE - 1, J, STRIDE):
            top_B[blocks], mass_B[blocks], last_B[blocks] = edge_J[j + 1], x_J[j] - x, j
            x = x_J[j]
            blocks += 1
        top_B[blocks], mass_B[blocks], last_B[blocks] = 1.0, x_J[J] - x, J
        blocks = _hull(top_B, mass_B, last_B, blocks + 1)
        slip = 1e-10 * total
        first, x, floor = 0, 0.0, 0.0
        for b in range(blocks):
            last = last_B[b]
            run = x_J[last] - x
            slope = (top_B[b] - floor) / run if run > slip else np.inf
            base = floor - slope * (x - slip) if run > slip else np.inf
            for j in range(first, last + 1):
                open_J[j] = (low_J[j] - base <= slope * x_J[j]) & (mass_J[j] > 0)
            first, x, floor = last + 1, x_J[last], top_B[b]
        open_J[highest] = 1

        width = 0
        for k in range(K):
            key_K[width] = (np.int64(bits_K[k]) << 32) | np.int64(k)
            width += int(open_J[bucket_K[k]])
        width_N[n] = width
        widest = max(widest, width)
        pending = 0.0
        for j in range(J + 1):
            carry_J[j] = pending
            pending += mass_J[j]
            pending = 0.0 if open_J[j] else pending
    for n in range(N):
        key_NK[n, width_N[n] : widest] = LAST_KEY
    return widest


@_jit
def _gather(
    pi_K: np.ndarray,
    e_K: np.ndarray,
    key_C: np.ndarray,
    mask: int,
    e_C: np.ndarray,
    top_B: np.ndarray,
    mass_B: np.ndarray,
    last_B: np.ndarray,
) -> int:
    """Take the masses in sorted order and merge for the first time, in one go; return how many blocks there are."""
    kept = 0
    pending = 0.0
    k = key_C[0] & mask
    e_C[0] = e_K[k]
    floor, top, mass = 0.0, float(pi_K[k]), float(e_C[0])
    for i in range(1, len(e_C)):
        k = key_C[i] & mask
        e = e_K[k]
        e_C[i] = e
        next_top, next_mass = float(pi_K[k]), float(e)
        next_top = next_top if next_top < 1 else 1.0
        pending += mass
        top_B[kept], mass_B[kept], last_B[kept] = top, pending, i - 1
        rises = (next_top - top) * mass > (top - floor) * next_mass
        kept += rises
        pending = 0.0 if rises else pending
        floor, top, mass = top, next_top, next_mass
    top_B[kept], mass_B[kept], last_B[kept] = 1.0, pending + mass, len(e_C) - 1
    return kept + 1


@_jit
def _gather_sifted(
    pair_C: np.ndarray,
    e_K: np.ndarray,
    key_C: np.ndarray,
    carry_J: np.ndarray,
    e_C: np.ndarray,
    top_B: np.ndarray,
    mass_B: np.ndarray,
    last_B: np.ndarray,
) -> int:
    """Take the masses in sorted order, and before the first class of a bucket what was left out in front of it.

    ``pair_C`` are the keys as pairs of float32: the upper half of each is the possibility.
    """
    scale = np.float32(len(carry_J) - 1)
    before = np.uint32(0)
    for i in range(len(e_C)):
        degree = pair_C[2 * i + UPPER_HALF]
        bucket = np.uint32(_bucket(degree, scale))
        e_C[i] = e_K[key_C[i] & LOWER_HALF]
        top_B[i], last_B[i] = float(degree) if degree < 1 else 1.0, i
        mass_B[i] = e_C[i] + carry_J[bucket] * (bucket > before)  # no branch, it could not be foreseen
        before = bucket
    top_B[len(e_C) - 1] = 1.0
    return len(e_C)


@_jit
def _sorted_rows(
    z_NK: np.ndarray,
    pi_NK: np.ndarray,
    good_N: np.ndarray,
    key_NK: np.ndarray,
    mask: int,
    width_N: np.ndarray,
    bucket_NK: np.ndarray,
    carry_NJ: np.ndarray,
    gradient: bool,
    scale: float,
    tiny: float,
    out_NK: np.ndarray,
    loss_N: np.ndarray,
) -> None:
    """Solve rows of real-valued pi. ``out_NK`` holds exp(z) up to a factor; it is overwritten.

    ``key_NK`` & mask are the classes in ascending order of their possibilities; where buckets are given only
    some classes are there, ``width_N`` of them.
    """
    N, K = z_NK.shape
    sifted = len(bucket_NK) > 0
    room_C, factor_J = np.empty(K, out_NK.dtype), np.empty(carry_NJ.shape[1], out_NK.dtype)
    top_B, mass_B, last_B = np.empty(K), np.empty(K), np.empty(K, np.int64)
    for n in range(N):
        e_K, pi_K, key_C = out_NK[n], pi_NK[n], key_NK[n, : width_N[n] if sifted else K]
        if not good_N[n]:
            loss_N[n] = np.nan
            e_K[:] = np.nan
            continue

        # What is impossible comes first and has no part in the hull.
        impossible = 0.0
        zeros = 0
        while pi_K[key_C[zeros] & mask] == 0:
            room_C[zeros] = e_K[key_C[zeros] & mask]
            impossible += room_C[zeros]
            zeros += 1
        zero_C, key_C, e_C = key_C[:zeros], key_C[zeros:], room_C[zeros : len(key_C)]
        if sifted:
            pair_C = key_C.view(np.float32)
            blocks = _gather_sifted(pair_C, e_K, key_C, carry_NJ[n], e_C, top_B, mass_B, last_B)
        else:
            blocks = _gather(pi_K, e_K, key_C, mask, e_C, top_B, mass_B, last_B)
        blocks = _hull(top_B, mass_B, last_B, blocks)
        if mass_B[blocks - 1] < tiny:
            class_K = np.argsort(pi_K)
            degree_K = np.minimum(pi_K[class_K], 1.0)
            degree_K[K - 1] = 1.0
            loss_N[n] = _solve_log(z_NK[n], class_K, degree_K, gradient, scale, e_K)
            continue

        loss_N[n], factor = _factors(top_B, mass_B, blocks, impossible, gradient, scale)
        if sifted:
            # A bucket that was left out belongs to the next class that was not.
            bucket_K = bucket_NK[n]
            first = 0
            for b in range(blocks):
                last = np.int64(bucket_K[key_C[last_B[b]] & mask])
                factor_J[first : last + 1] = mass_B[b]
                first = last + 1
            for k in range(K):
                e_K[k] *= factor_J[bucket_K[k]]
        for i in range(zeros):
            e_K[zero_C[i] & mask] = room_C[i] * factor
        start = np.uint64(0)
        for b in range(blocks):
            factor = mass_B[b]
            stop = np.uint64(last_B[b]) + np.uint64(1)
            for i in range(start, stop):
                e_K[key_C[i] & mask] = e_C[i] * factor
            start = stop


@_jit
def _degrees(counts_NK: np.ndarray, top_N: np.ndarray, size: int, proportional: bool, pi_NK: np.ndarray) -> None:
    """Write the possibilities that quantised ones stand for, NaN in rows where they stand for none."""
    N, K = counts_NK.shape
    for n in range(N):
        count_K, pi_K = counts_NK[n], pi_NK[n]
        least, most = count_K[0], count_K[0]
        for k in range(1, K):
            least = min(least, count_K[k])
            most = max(most, count_K[k])
        top = top_N[n] if len(top_N) > 0 else -1
        possible = 0 <= top < K if len(top_N) > 0 else most >= 0
        if least < -1 or most > size or not possible:
            pi_K[:] = np.nan
            continue
        unit = float(most + 1 if proportional else size + 1)
        for k in range(K):
            pi_K[k] = (count_K[k] + 1) / unit
        if len(top_N) > 0:
            pi_K[top] = 1
        elif not proportional:
            for k in range(K):
                pi_K[k] = 1 if count_K[k] == most else pi_K[k]


def solve(
    logits_NK: Tensor, pi_NK: Tensor, gradient: bool, validate: bool, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Solve for real-valued pi."""
    loss_N, out_NK, good_N = _solve(logits_NK, pi_NK.numpy(), gradient, scale)
    if validate and not good_N.all():
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
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Solve for quantised pi: in O(K + L) by buckets, or by sorting where levels far outnumber classes."""
    N, K = logits_NK.shape
    counts = counts_NK.numpy()
    top = np.empty(0, np.int64) if top_N is None else top_N.long().contiguous().numpy()
    if size > LEVELS + LEVELS_PER_CLASS * K:
        pi = np.empty((N, K), logits_NK.numpy().dtype)
        _degrees(counts, top, size, proportional, pi)
        loss_N, out_NK, good_N = _solve(logits_NK, pi, gradient, scale)
    else:
        loss_N, out_NK, good_N = (
            torch.empty(N, dtype=logits_NK.dtype),
            torch.empty_like(logits_NK),
            np.empty(N, np.bool_),
        )
        z, out, loss = logits_NK.numpy(), out_NK.numpy(), loss_N.numpy()
        tiny = TINY[logits_NK.dtype]

        def work(first: int, end: int) -> None:
            rows = slice(first, end)
            _exponentials(z[rows], out[rows], good_N[rows])
            _levels_rows(
                z[rows], good_N[rows], counts[rows], top[rows], size, proportional, gradient, scale, tiny,
                out[rows], loss[rows],
            )  # fmt: skip

        _spread(work, N, K)
    if validate and not good_N.all():
        faults.refuse(faults.level_faults(logits_NK, counts_NK, top_N, size))
    return loss_N, out_NK


def _solve(logits_NK: Tensor, pi_NK: np.ndarray, gradient: bool, scale: float) -> tuple[Tensor, Tensor, np.ndarray]:
    """Sort classes, or those that matter, a few rows at a time; return what ``solve`` does, and which rows are bad."""
    N, K = logits_NK.shape
    loss_N, out_NK, good_N = (
        torch.empty(N, dtype=logits_NK.dtype),
        torch.empty_like(logits_NK),
        np.empty(N, np.bool_),
    )
    z, out, loss = logits_NK.numpy(), out_NK.numpy(), loss_N.numpy()
    tiny, slack = TINY[logits_NK.dtype], faults.SLACK * np.finfo(pi_NK.dtype).eps
    packed = pi_NK.dtype == np.float32
    bits = (K - 1).bit_length()
    buckets = min(K // CLASSES_PER_BUCKET, MOST_BUCKETS) + 1 if packed and K >= SIFT else 0
    step = max(1, SORT_WORK // K)

    def work(first: int, end: int) -> None:
        for start in range(first, end, step):
            rows = slice(start, min(start + step, end))
            n = rows.stop - start
            pi, good = pi_NK[rows], good_N[rows]
            _exponentials(z[rows], out[rows], good)
            _check(pi, slack, good)
            place = n if buckets else 0
            width_N, bucket_NK, carry_NJ = (
                np.empty(place, np.int64),
                np.empty((place, K), np.uint32),
                np.empty((place, buckets)),
            )
            if buckets:
                key, mask = np.empty((n, K), np.int64), LOWER_HALF
                widest = _sift(pi, out[rows], good, key, width_N, bucket_NK, carry_NJ)
                key[:, :widest].sort(-1)
            elif packed:
                key, mask = np.empty((n, K), np.uint32), (1 << bits) - 1
                _keys(pi, bits, key)
                key.sort(-1)
                _settle(pi, good, bits, key)
            else:
                key, mask = pi.argsort(-1), LOWER_HALF
            _sorted_rows(
                z[rows],
                pi,
                good,
                key,
                key.dtype.type(mask),
                width_N,
                bucket_NK,
                carry_NJ,
                gradient,
                scale,
                tiny,
                out[rows],
                loss[rows],
            )

    _spread(work, N, K)
    return loss_N, out_NK, good_N


def _exponentials(z: np.ndarray, out: np.ndarray, finite: np.ndarray) -> None:
    """Write exp(z - max of the row), and which rows are finite."""
    if z.dtype == np.float32:
        _exp_rows(z, out, finite)
        return
    with np.errstate(all="ignore"):
        np.subtract(z, z.max(-1, keepdims=True), out=out)
        np.exp(out, out=out)
        np.maximum(out, np.finfo(out.dtype).tiny, out=out)
    np.isfinite(z).all(-1, out=finite)


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
