r"""The projection on CUDA: fused programs, no look from the host, no atomics, so the same bits in every run.

Notation of ``ccssl.credal.projection``: groups of classes in ascending order of possibility, group j with model
mass m_j; r = p / q is the slope of the greatest convex minorant of (m_1 + ... + m_j, pi_j). Three ways lead there.

*Levels* (``_levels_row``). Counts name the groups, so nothing is sorted. Which class belongs to which group is a
matrix of zeros and ones, made tile by tile in registers: its column sums add up the masses, its row sums hand each
class the r of its group. One launch; rows too long for one program are split, and a launch before it measures
the parts.

*Real-valued pi, or more levels than a tile is worth* (``_sorted_row``): ``torch.sort``, then one launch.

*Rows too long for registers*: the minorant of a whole has its vertices among those of its parts. ``_chunks_row``
finds the minorants of chunks; ``_merge_row`` joins neighbours, twice as long with each launch: of two adjacent
convex chains there is one common tangent, everything between its ends leaves the hull, and the ends are found by
binary search; ``_spread_row`` hands out the slopes. The launches depend on K only. A tangent spans the chunks
between its ends: its mass is their totals, what follows a in a's chunk, and what precedes b in b's. These are sums
of positive numbers; nothing is ever subtracted from a running sum, and nothing cancels.

In registers (``_wrap``) the hull is found by gift wrapping, as in ``torch.py``, where the recursion is written down:
a loop over hull segments inside the program, so each row stops by itself.

All masses are float64 logarithms relative to the largest logit: classes that underflow still decide where the
projection lies. ``_wrap`` leaves logarithms for sums, relative to the largest mass ahead. What underflows there
precedes a mass e^745 times as large; if pi rises before that mass, no hull has a vertex between the two.

Shapes: N rows, K classes, B groups, S splits of a row (or its chunks).
"""

# Triton's decorator rewrites types: its scalars compare and its launches take options that no stub knows.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false
# ruff: noqa: ANN001, ANN202 - triton types the arguments of its functions itself

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ccssl.credal import faults
from ccssl.credal.possibility import Levels

TILE = 4096  # pairs of a class and a group looked at together
FEW_GROUPS = 256  # up to here tiles beat sorting, whatever the number of classes
MOST_GROUPS = 4096  # up to here where a row has few tiles
TILES = 32  # how many tiles make a program's share of a row
MOST_SPLITS = 64
WHOLE = 4096  # the longest sorted row that one program takes
CHUNK = 1024


@triton.jit
def _wrap(log_m, height, level, last, index):
    """Wrap groups 0..last, rising from ``level``.

    Returns for each group its segment's log slope t/m, first group, end, and the log mass from its start on; the log
    total mass, and the loss.
    """
    slopes = tl.zeros_like(log_m)
    starts = tl.zeros_like(index)
    stops = tl.zeros_like(index)
    rests = tl.zeros_like(log_m)
    first = 0
    log_total = tl.zeros_like(level)
    loss = tl.zeros_like(level)
    while first <= last:
        ahead = (index >= first) & (index <= last)
        peak = tl.max(tl.where(ahead, log_m, float("-inf")), 0)
        run = tl.where(ahead, tl.exp(tl.where(ahead, log_m, peak) - peak), 0.0)
        run = tl.cumsum(run, 0)
        rise = tl.where(height <= level, 0.0, height - level)
        slope = tl.where(rise == 0, 0.0, rise / run)
        least = tl.min(tl.where(ahead, slope, float("inf")), 0)
        reached = tl.max(tl.where(ahead & (slope <= least), index, first), 0)  # NaN must not stop the walk
        next_level = tl.sum(tl.where(index == reached, height, 0.0), 0)
        gain = tl.where(next_level <= level, 0.0, next_level - level)
        log_mass = tl.log(tl.sum(tl.where(index == reached, run, 0.0), 0)) + peak
        log_rest = tl.log(tl.sum(tl.where(index == last, run, 0.0), 0)) + peak
        if first == 0:
            log_total = log_rest  # the very sum that a single segment has as its mass: its log r is 0 exactly
        log_slope = tl.where(gain == 0, float("-inf"), tl.log(gain) - log_mass)
        loss += tl.where(gain == 0, 0.0, gain * (log_slope + log_total))
        segment = ahead & (index <= reached)
        slopes = tl.where(segment, log_slope, slopes)
        starts = tl.where(segment, first, starts)
        stops = tl.where(segment, reached + 1, stops)
        rests = tl.where(segment, log_rest, rests)
        level = next_level
        first = reached + 1
    return slopes, starts, stops, rests, log_total, loss


@triton.jit
def _tile(logits, counts, top, classes, end, size, index, HAS_TOP: tl.constexpr):
    """Load some classes of a row: their logits, the matrix of which is in which group, and which are at fault."""
    inside = classes < end
    z = tl.load(logits + classes, inside, other=float("-inf"))
    count = tl.load(counts + classes, inside, other=-2)
    wrong = inside & ((count < -1) | (count > size) | ~(tl.abs(z) < float("inf")))
    group = count + 1
    if HAS_TOP:
        group = tl.where(inside & (classes == top), size + 2, group)
    return z, group[:, None] == index[None, :], wrong


@triton.jit
def _measure(
    logits, counts, top, begin, end, size, index, HAS_TOP: tl.constexpr, CLASSES: tl.constexpr, GROUPS: tl.constexpr
):
    """Return the largest logit of each group, and its mass relative to that; NaN where there is a fault."""
    peak = tl.full((GROUPS,), float("-inf"), tl.float64)
    mass = tl.zeros((GROUPS,), tl.float64)
    faults = 0
    for k in range(begin, end, CLASSES):
        z, hit, wrong = _tile(logits, counts, top, k + tl.arange(0, CLASSES), end, size, index, HAS_TOP)
        known = peak
        peak = tl.maximum(known, tl.max(tl.where(hit, z[:, None], float("-inf")), 0).to(tl.float64))
        own = tl.sum(tl.where(hit, peak[None, :], 0.0), 1)
        e = tl.exp(z.to(tl.float64) - own)
        mass *= tl.exp(tl.where(peak == known, 0.0, known - peak))
        mass += tl.sum(tl.where(hit, e[:, None], 0.0), 0)
        faults += tl.sum(wrong.to(tl.int32), 0)
    return peak, tl.where(faults > 0, float("nan"), mass)


@triton.jit(do_not_specialize=["size", "split"])
def _measure_row(
    logits, counts, top, peaks, masses, K, size, split,
    HAS_TOP: tl.constexpr, CLASSES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Measure the groups in a part of a row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    index = tl.arange(0, GROUPS)
    raised = -1
    if HAS_TOP:
        raised = tl.load(top + row).to(tl.int32)
    begin = part * split
    end = tl.minimum(begin + split, K)
    peak, mass = _measure(
        logits + row * K, counts + row * K, raised, begin, end, size, index, HAS_TOP, CLASSES, GROUPS
    )
    place = (row * tl.num_programs(1) + part) * GROUPS + index
    tl.store(peaks + place, peak)
    tl.store(masses + place, mass)


@triton.jit(do_not_specialize=["size", "split"])
def _levels_row(
    logits, counts, top, peaks, masses, loss, out, K, size, split,
    HAS_TOP: tl.constexpr, PROPORTIONAL: tl.constexpr, GRADIENT: tl.constexpr, WHOLE: tl.constexpr,
    CLASSES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Solve a part of a row of quantised pi: group j holds the classes of count j - 1, the last one the top class."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    index = tl.arange(0, GROUPS)
    logits += row * K
    counts += row * K
    raised = -1
    if HAS_TOP:
        raised = tl.load(top + row).to(tl.int32)
    if WHOLE:
        peak, mass = _measure(logits, counts, raised, 0, K, size, index, HAS_TOP, CLASSES, GROUPS)
    else:
        peak = tl.full((GROUPS,), float("-inf"), tl.float64)
        mass = tl.zeros((GROUPS,), tl.float64)
        for i in range(parts):
            place = (row * parts + i) * GROUPS + index
            other = tl.load(peaks + place)
            more = tl.load(masses + place)
            known = peak
            peak = tl.maximum(known, other)
            mass *= tl.exp(tl.where(peak == known, 0.0, known - peak))
            mass += more * tl.exp(tl.where(peak == other, 0.0, other - peak))

    most = tl.max(peak, 0)
    last = tl.max(tl.where(mass > 0, index, 0), 0)
    if HAS_TOP:  # noqa: SIM108 - decided when the kernel is compiled: the other side does not exist then
        faulty = (raised < 0) | (raised >= K)
    else:
        faulty = last == 0  # no class is possible
    faulty |= tl.sum((mass != mass).to(tl.int32), 0) > 0
    log_m = tl.where(mass > 0, peak - most + tl.log(mass), float("-inf"))
    ladder = index.to(tl.float64)
    if PROPORTIONAL:
        height = tl.minimum(ladder / last.to(tl.float64), 1.0)
    else:
        height = tl.where(index >= last, 1.0, tl.minimum(ladder / (size + 1), 1.0))
    log_r, _, _, _, log_total, divergence = _wrap(log_m, height, tl.cast(0.0, tl.float64), last, index)

    if part == 0:
        tl.store(loss + row, tl.where(faulty, float("nan"), tl.where(divergence < 0, 0.0, divergence)))
    log_r += log_total
    begin = part * split
    for k in range(begin, tl.minimum(begin + split, K), CLASSES):
        classes = k + tl.arange(0, CLASSES)
        z, hit, _wrong = _tile(logits, counts, raised, classes, K, size, index, HAS_TOP)
        log_q = z.to(tl.float64) - most - log_total
        result = tl.exp(log_q + tl.sum(tl.where(hit, log_r[None, :], 0.0), 1))
        if GRADIENT:
            result = tl.exp(log_q) - result
        tl.store(out + row * K + classes, tl.where(faulty, float("nan"), result), classes < K)


@triton.jit
def _sorted_row(logits, pi, order, loss, out, K, SLACK: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """Solve a row of real-valued pi, sorted."""
    row = tl.program_id(0).to(tl.int64) * K
    index = tl.arange(0, BLOCK)
    inside = index < K
    k = tl.load(order + row + index, inside, other=0)
    z = tl.load(logits + row + k, inside, other=float("-inf")).to(tl.float64)
    height = tl.load(pi + row + index, inside, other=1.0).to(tl.float64)
    wrong = inside & ~((tl.abs(z) < float("inf")) & (height >= 0) & (height <= 1 + SLACK))
    one = inside & (height >= 1 - SLACK)
    faulty = (tl.sum(wrong.to(tl.int32), 0) > 0) | (tl.sum(one.to(tl.int32), 0) == 0)
    height = tl.where((index == K - 1) | (height > 1), 1.0, height)
    log_m = z - tl.max(z, 0)
    log_r, _, _, _, log_total, divergence = _wrap(log_m, height, tl.cast(0.0, tl.float64), K - 1, index)
    log_q = log_m - log_total
    result = tl.exp(log_q + (log_r + log_total))
    if GRADIENT:
        result = tl.exp(log_q) - result
    tl.store(out + row + k, tl.where(faulty, float("nan"), result), inside)
    tl.store(loss + tl.program_id(0), tl.where(faulty, float("nan"), tl.where(divergence < 0, 0.0, divergence)))


@triton.jit
def _chunks_row(logits, pi, order, most, before, after, totals, log_r, start, stop, K, CHUNK: tl.constexpr):
    """Wrap a chunk of a sorted row, and measure it up to the end of each class and from each vertex on."""
    row = tl.program_id(0).to(tl.int64) * K
    chunk = tl.program_id(1)
    index = tl.arange(0, CHUNK)
    offset = chunk * CHUNK
    place = row + offset + index
    inside = offset + index < K
    k = tl.load(order + place, inside, other=0)
    z = tl.load(logits + row + k, inside, other=float("-inf")).to(tl.float64)
    height = tl.load(pi + place, inside, other=1.0).to(tl.float64)
    level = tl.load(pi + row + offset - 1, chunk > 0, other=0.0).to(tl.float64)
    log_m = z - tl.load(most + tl.program_id(0)).to(tl.float64)
    last = tl.minimum(K - offset, CHUNK) - 1
    slope, first, end, rest, log_total, _ = _wrap(log_m, height, level, last, index)
    peak = tl.max(log_m, 0)
    tl.store(before + place, tl.log(tl.cumsum(tl.exp(log_m - peak), 0)) + peak, inside)
    tl.store(after + place, rest, inside)
    tl.store(totals + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + chunk, log_total)
    tl.store(log_r + place, slope, inside)
    tl.store(start + place, offset + first, inside)
    tl.store(stop + place, offset + end, inside)


@triton.jit
def _chord(pi, before, after, totals, a, b, middle, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the log slope of the line from the start of class a <= middle to the start of class b >= middle."""
    index = tl.arange(0, CHUNKS)
    left = tl.minimum(a // CHUNK, middle // CHUNK - 1)
    right = tl.maximum((b - 1) // CHUNK, middle // CHUNK)
    between = tl.load(totals + index, (index > left) & (index < right), other=float("-inf"))
    head = tl.load(after + a, a < middle, other=float("-inf"))
    tail = tl.load(before + b - 1, b > middle, other=float("-inf"))
    peak = tl.maximum(tl.max(between, 0), tl.maximum(head, tail))
    mass = tl.sum(tl.exp(between - peak), 0) + tl.exp(head - peak) + tl.exp(tail - peak)
    height = tl.load(pi + b - 1, b > 0, other=0.0).to(tl.float64)
    rise = height - tl.load(pi + a - 1, a > 0, other=0.0).to(tl.float64)
    return tl.where(rise <= 0, float("-inf"), tl.log(tl.where(rise <= 0, 1.0, rise)) - (tl.log(mass) + peak))


@triton.jit(do_not_specialize=["chunks", "width"])
def _merge_row(
    pi, before, after, totals, log_r, start, stop, K, chunks, width,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Join the hulls of two neighbours of ``width`` chunks. One warp only: it writes what it has read."""
    row = tl.program_id(0).to(tl.int64)
    pi += row * K
    before += row * K
    after += row * K
    totals += row * chunks
    log_r += row * K
    start += row * K
    stop += row * K
    a = tl.program_id(1) * 2 * width * CHUNK
    middle = a + width * CHUNK
    end = tl.minimum(middle + width * CHUNK, K)

    # Where does the left chain end? Its segment stays if the right chain's point farthest below the line through
    # the segment, which is where the right chain becomes as steep, is not below it.
    high = tl.minimum(middle, end)
    while a < high:
        segment = tl.load(start + (a + high) // 2)
        after_segment = tl.load(stop + segment)
        slope = tl.load(log_r + segment)
        b = middle
        b_high = end
        while b < b_high:
            other = tl.load(start + (b + b_high) // 2)
            less = tl.load(log_r + other) < slope
            b = tl.where(less, tl.load(stop + other), b)
            b_high = tl.where(less, b_high, other)
        chord = _chord(pi, before, after, totals, after_segment, b, middle, CHUNK, CHUNKS)
        below = (b > middle) & (chord < slope)
        high = tl.where(below, segment, high)
        a = tl.where(below, a, after_segment)

    # The tangent from there: it touches the right chain where this becomes as steep.
    if a < middle:
        b = middle
        b_high = end
        while b < b_high:
            other = tl.load(start + (b + b_high) // 2)
            less = tl.load(log_r + other) < _chord(pi, before, after, totals, a, other, middle, CHUNK, CHUNKS)
            b = tl.where(less, tl.load(stop + other), b)
            b_high = tl.where(less, b_high, other)
        chord = _chord(pi, before, after, totals, a, b, middle, CHUNK, CHUNKS)
        tl.store(log_r + a, chord)
        tl.store(stop + a, b)
        for k in range(a, b, FILL):
            place = k + tl.arange(0, FILL)
            tl.store(start + place, tl.zeros_like(place) + a, place < b)


@triton.jit(do_not_specialize=["chunks"])
def _spread_row(
    logits, order, most, totals, log_r, start, stop, loss, out, K, chunks,
    GRADIENT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """From the slopes of a row's hull to p or q - p, and a part of the loss."""
    row = tl.program_id(0).to(tl.int64) * K
    part = tl.program_id(0).to(tl.int64) * chunks
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = place < K
    index = tl.arange(0, CHUNKS)
    total = tl.load(totals + part + index, index < chunks, other=float("-inf"))
    peak = tl.max(total, 0)
    log_total = tl.log(tl.sum(tl.exp(total - peak), 0)) + peak
    k = tl.load(order + row + place, inside, other=0)
    z = tl.load(logits + row + k, inside, other=float("-inf")).to(tl.float64)
    log_q = z - tl.load(most + tl.program_id(0)).to(tl.float64) - log_total
    segment = tl.load(start + row + place, inside, other=0)
    ratio = tl.load(log_r + row + segment) + log_total
    ratio = tl.where(tl.load(stop + row) == K, tl.where(ratio == ratio, 0.0, ratio), ratio)  # q in Q_pi, exactly
    result = tl.exp(log_q + ratio)
    tl.store(loss + part + tl.program_id(1), tl.sum(tl.where(inside & (result != 0), result * ratio, 0.0), 0))
    if GRADIENT:
        result = tl.exp(log_q) - result
    tl.store(out + row + k, result, inside)


def solve(
    logits_NK: Tensor, pi_NK: Tensor, gradient: bool, validate: bool, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Solve for real-valued pi: sort the classes, then wrap the hull, of the whole row or chunk by chunk."""
    if validate:
        faults.refuse(faults.real_faults(logits_NK, pi_NK))
    N, K = logits_NK.shape
    sorted_NK, order_NK = pi_NK.sort(-1)
    out_NK = torch.empty_like(logits_NK)
    slack = faults.SLACK * torch.finfo(pi_NK.dtype).eps
    if K > WHOLE:
        loss_N = _solve_long(logits_NK, sorted_NK, order_NK, slack, gradient, out_NK)
        return loss_N, _scaled(out_NK, scale)
    loss_N = logits_NK.new_empty(N)
    block = triton.next_power_of_2(K)
    with torch.cuda.device_of(logits_NK):
        _sorted_row[(N,)](
            logits_NK, sorted_NK, order_NK, loss_N, out_NK, K,
            SLACK=slack, GRADIENT=gradient, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return loss_N, _scaled(out_NK, scale)


def _solve_long(
    logits_NK: Tensor, sorted_NK: Tensor, order_NK: Tensor, slack: float, gradient: bool, out_NK: Tensor
) -> Tensor:
    """Fill ``out_NK`` and return the loss: hulls of chunks, joined pair by pair."""
    N, K = logits_NK.shape
    chunks = triton.cdiv(K, CHUNK)
    least_N, most_N = logits_NK.aminmax(dim=-1)
    # Sorting has put what is below 0, above 1 or NaN at one of the ends.
    normal_N = (sorted_NK[:, 0] >= 0) & ((sorted_NK[:, -1] - 1).abs() <= slack)
    most_N = most_N.masked_fill(~(normal_N & least_N.isfinite() & most_N.isfinite()), torch.nan)
    sorted_NK.clamp_(max=1)[:, -1] = 1
    before_NK, after_NK, log_r_NK = logits_NK.new_empty(3, N, K, dtype=torch.float64)
    start_NK, stop_NK = logits_NK.new_empty(2, N, K, dtype=torch.int32)
    totals_NS, loss_NS = logits_NK.new_empty(2, N, chunks, dtype=torch.float64)
    hull = (log_r_NK, start_NK, stop_NK)
    sizes = {"CHUNK": CHUNK, "CHUNKS": triton.next_power_of_2(chunks)}
    with torch.cuda.device_of(logits_NK):
        _chunks_row[(N, chunks)](
            logits_NK, sorted_NK, order_NK, most_N, before_NK, after_NK, totals_NS, *hull, K,
            CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip
        width = 1
        while width < chunks:
            _merge_row[(N, triton.cdiv(chunks - width, 2 * width))](
                sorted_NK, before_NK, after_NK, totals_NS, *hull, K, chunks, width,
                **sizes, FILL=512, num_warps=1,
            )  # fmt: skip
            width *= 2
        _spread_row[(N, chunks)](
            logits_NK, order_NK, most_N, totals_NS, *hull, loss_NS, out_NK, K, chunks,
            GRADIENT=gradient, **sizes, num_warps=4,
        )  # fmt: skip
    return loss_NS.sum(-1).clamp(min=0).to(logits_NK.dtype)


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
    """Solve for quantised pi: by tiles, or by sorting where levels are so many that tiles would be mostly empty."""
    if validate:
        faults.refuse(faults.level_faults(logits_NK, counts_NK, top_N, size))
    N, K = logits_NK.shape
    groups = triton.next_power_of_2(size + 3)
    if groups > FEW_GROUPS and (groups > MOST_GROUPS or K * groups > TILES * TILE):
        levels = Levels(counts_NK, size, "proportional" if proportional else "top", top_N)
        return solve(logits_NK, levels.dense(logits_NK.dtype, validate=False), gradient, False, scale)
    classes = min(triton.next_power_of_2(K), max(1, TILE // groups))
    splits = min(triton.cdiv(K, TILES * classes), MOST_SPLITS)
    split = triton.cdiv(triton.cdiv(K, classes), splits) * classes
    splits = triton.cdiv(K, split)
    loss_N, out_NK = logits_NK.new_empty(N), torch.empty_like(logits_NK)
    parts = logits_NK.new_empty(2, N * splits * groups if splits > 1 else 0, dtype=torch.float64)
    given = (logits_NK, counts_NK, counts_NK if top_N is None else top_N.contiguous(), parts[0], parts[1])
    sizes = {"CLASSES": classes, "GROUPS": groups, "HAS_TOP": top_N is not None}
    sizes["num_warps"] = _warps(classes * groups // 4)
    with torch.cuda.device_of(logits_NK):
        if splits > 1:
            _measure_row[(N, splits)](*given, K, size, split, **sizes)
        _levels_row[(N, splits)](
            *given, loss_N, out_NK, K, size, split,
            PROPORTIONAL=proportional, GRADIENT=gradient, WHOLE=splits == 1, **sizes,
        )  # fmt: skip
    return loss_N, _scaled(out_NK, scale)


def _warps(numbers: int) -> int:
    """Return how many warps share so many float64 numbers without running out of registers."""
    return 4 if numbers <= 1024 else 8 if numbers <= 2048 else 16


def _scaled(out_NK: Tensor, scale: float) -> Tensor:
    return out_NK if scale == 1 else out_NK.mul_(scale)
