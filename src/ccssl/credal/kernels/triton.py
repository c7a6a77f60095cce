r"""The projection on CUDA: fused programs, no look from the host, no atomics, so the same bits in every run.

Notation of ``ccssl.credal.projection``: classes are sorted by ascending pi, class k with model mass m_k; r = p / q is
the slope of the greatest convex minorant of (m_1 + ... + m_k, pi_k).

*Rows up to ``WHOLE`` classes* (``_levels_row``, ``_real_row``): one launch, a program a row. Classes are sorted in
registers, as integers that hold the possibility and, in their low bits, the class: counts are such integers, and
floats that are not negative are ordered like their bits. A float64 leaves no room for the class and is sorted twice,
by its lower half and then, equal ones keeping their order, by its upper half.

*Longer rows*: ``torch.sort``, of counts in the narrowest integers, since it passes over them byte by byte. Then three
launches. The minorant of a whole has its vertices among those of its parts: ``_chunks_row`` finds the corners of the
minorants of chunks, ``_join_row`` wraps them all at once, ``_spread_row`` hands out the ratios. A chord from one corner
to another spans the chunks in between: its mass is their totals, what follows in the first one's chunk, and what
precedes in the other's.

The hull is found by gift wrapping, as in ``torch.py``, where the recursion is written down: a loop over hull segments
inside the program, so each row stops by itself. In registers the next vertex is the one of least slope t/m, the
farthest among equals (``_lower``, which multiplies crosswise instead of dividing). Where m is 0 a point is the vertex
itself or right above it, and every point of positive mass wins against it. From chunks, the vertex is sought among
the corners that are each chunk's lowest as seen from where the hull has come; these only ever move on.

Masses are float64, and as logarithms where chunks meet; all are sums of positive numbers, nothing is ever subtracted
from a running sum, and nothing cancels. In registers they are relative to the largest logit ahead, taken anew
(``_masses``) when what lies ahead has become less than ``LOST`` of what it was: classes that underflow still decide
where the projection lies. What underflows precedes a mass e^680 times as large; if pi rises before that mass, no hull
has a vertex between the two.

Shapes: N rows, K classes, S chunks of a row, C places for corners.
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

LOST = tl.constexpr(1e-9)
WHOLE = 4096  # the longest row that one program takes; a class must fit into 16 bits
EACH = 8  # classes for a thread
CHUNK = 1024
FILL = 512  # ratios written at once


@triton.jit
def _lower(rise, mass, place, other_rise, other_mass, other_place):
    """Return which of two points is seen at the lower slope, the farther of equals (and of NaN)."""
    steepness, other = rise * other_mass, other_rise * mass
    first = (steepness < other) | ((place > other_place) & ~(other < steepness))
    return (
        tl.where(first, rise, other_rise),
        tl.where(first, mass, other_mass),
        tl.where(first, place, other_place),
    )


@triton.jit
def _masses(z, first, index):
    """Return the largest logit from ``first`` on, the masses from there on relative to it, and their sum."""
    ahead = index >= first
    peak = tl.max(tl.where(ahead, z, float("-inf")), 0).to(tl.float64)
    e = tl.where(ahead, tl.exp(z.to(tl.float64) - peak), 0.0)
    return peak, e, tl.sum(e, 0)


@triton.jit
def _next(e, height, level, first, index):
    """Return the rise to the next vertex, the mass up to there and its place; ``e`` is 0 before ``first``."""
    rise = height - level
    gain, mass, reached = tl.reduce((tl.where(rise > 0, rise, 0.0), tl.cumsum(e, 0), index), 0, _lower)
    return gain, mass, tl.maximum(reached, first)


@triton.jit
def _wrap(logits, loss, out, k, height, faulty, K, index, GRADIENT: tl.constexpr):
    """Solve a row whose classes ``k`` are sorted; behind the last one there is room of height 1."""
    inside = k < K  # where the row is faulty k need not be sorted
    z = tl.load(logits + k, inside, other=float("-inf"))
    faulty |= tl.sum((inside & ~(tl.abs(z) < float("inf"))).to(tl.int32), 0) > 0
    top, e, total = _masses(z, 0, index)
    peak = top
    rest = total
    enough = total * LOST
    level = total * 0
    divergence = total * 0
    p = e * 0
    first = tl.where(faulty, K, 0)
    bend = K
    while first < K:
        if rest < enough:
            peak, e, rest = _masses(z, first, index)
            enough = rest * LOST
        gain, mass, reached = _next(e, height, level, first, index)
        if first == 0:
            bend = reached + 1
        ratio = gain / mass
        divergence += tl.where(
            gain > 0, gain * (tl.log(tl.where(gain > 0, ratio * total, 1.0)) + (top - peak)), 0.0
        )
        taken = tl.where(index <= reached, e, 0.0)
        p += taken * ratio
        e -= taken
        rest -= mass
        level += gain
        first = reached + 1
    free = bend >= K  # a single segment: q lies in Q_pi
    if GRADIENT:
        q = tl.exp(z.to(tl.float64) - top) * (1 / total)
        p = tl.where(free, 0.0, q - p)
    tl.store(out + k, tl.where(faulty, float("nan"), p), inside)
    divergence = tl.where(free | (divergence < 0), 0.0, divergence)
    tl.store(loss, tl.where(faulty, float("nan"), divergence))


@triton.jit(do_not_specialize=["size"])
def _levels_row(
    logits, counts, top, loss, out, K, size,
    HAS_TOP: tl.constexpr, PROPORTIONAL: tl.constexpr, GRADIENT: tl.constexpr,
    KEY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Solve a row of quantised pi: group j holds the classes of count j - 1, the last one the top class."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < K
    size = tl.cast(size, KEY)
    count = tl.load(counts + row * K + index, inside, other=0).to(KEY)
    faulty = tl.sum(((count < -1) | (count > size)).to(tl.int32), 0) > 0
    group = count + 1
    if HAS_TOP:
        raised = tl.load(top + row)
        faulty |= (raised < 0) | (raised >= K)
        group = tl.where(index == raised, size + 2, group)
    most = tl.max(tl.where(inside, group, 0), 0)
    faulty |= most == 0  # no class is possible
    key = tl.sort(tl.where(inside, group, size + 3) * BLOCK + index)
    k = (key & (BLOCK - 1)).to(tl.int32)
    group = key // BLOCK
    if PROPORTIONAL:  # noqa: SIM108 - decided when the kernel is compiled
        unit = most
    else:
        unit = size + 1
    height = tl.where(group >= most, 1.0, group.to(tl.float64) * (1 / unit.to(tl.float64)))
    _wrap(logits + row * K, loss + row, out + row * K, k, height, faulty, K, index, GRADIENT)


@triton.jit
def _real_row(logits, pi, loss, out, K, SLACK: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """Solve a row of real-valued pi."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < K
    height = tl.load(pi + row * K + index, inside, other=1.0)
    wrong = ~((height >= 0) & (height <= 1 + SLACK))
    one = inside & (height >= 1 - SLACK)
    faulty = (tl.sum(wrong.to(tl.int32), 0) > 0) | (tl.sum(one.to(tl.int32), 0) == 0)
    height = tl.where(inside, height, 2.0)
    if pi.dtype.element_ty == tl.float32:
        key = tl.sort((height.to(tl.int32, bitcast=True).to(tl.int64) << 32) | index)
        k = key.to(tl.int32)
        height = (key >> 32).to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
    else:
        low = (height.to(tl.int64, bitcast=True) & 0xFFFFFFFF) << 31
        k = tl.sort(low | index) & 0x7FFFFFFF
        high = tl.load(pi + row * K + k, k < K, other=2.0).to(tl.int64, bitcast=True) >> 32
        k = (tl.sort((high << 32) | (index << 16) | k) & 0xFFFF).to(tl.int32)
        height = tl.load(pi + row * K + k, k < K, other=2.0)
    height = tl.where((index >= K - 1) | (height > 1), 1.0, height)
    _wrap(logits + row * K, loss + row, out + row * K, k, height, faulty, K, index, GRADIENT)


@triton.jit
def _log_slope(rise, log_mass):
    """Return log(rise / mass), -inf where nothing rises, whatever the mass."""
    return tl.where(rise > 0, tl.log(tl.where(rise > 0, rise, 1.0)) - log_mass, float("-inf"))


@triton.jit
def _log_sum(a, b):
    """Return log(exp a + exp b), also of -inf."""
    peak = tl.maximum(tl.maximum(a, b), -1e300)
    return tl.log(tl.exp(a - peak) + tl.exp(b - peak)) + peak


@triton.jit(do_not_specialize=["chunks"])
def _chunks_row(
    logits, pi, order, most, levels, before, after, log_r, places, corners, totals, K, chunks, CHUNK: tl.constexpr
):
    """Wrap a chunk of a sorted row: for each corner of its hull, where that is and what mass lies on either side."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    index = tl.arange(0, CHUNK)
    offset = chunk * CHUNK
    inside = offset + index < K
    k = tl.load(order + row * K + offset + index, inside, other=0)
    z = tl.load(logits + row * K + k, inside, other=float("-inf")).to(tl.float64)
    z -= tl.load(most + row).to(tl.float64)
    height = tl.load(pi + row * K + offset + index, inside, other=1.0).to(tl.float64)
    level = tl.load(pi + row * K + offset - 1, chunk > 0, other=0.0).to(tl.float64)
    width = tl.minimum(K - offset, CHUNK)
    part = row * chunks + chunk
    corner = part * CHUNK
    peak, e, rest = _masses(z, 0, index)
    tl.store(totals + part, tl.log(rest) + peak)
    enough = rest * LOST
    log_before = level + float("-inf")
    first = 0
    while first < width:
        if rest < enough:
            peak, e, rest = _masses(z, first, index)
            enough = rest * LOST
        gain, mass, reached = _next(e, height, level, first, index)
        log_mass = tl.log(mass) + peak
        tl.store(levels + corner, level)
        tl.store(before + corner, log_before)
        tl.store(after + corner, tl.log(rest) + peak)
        tl.store(log_r + corner, _log_slope(gain, log_mass))
        tl.store(places + corner, offset + first)
        log_before = _log_sum(log_before, log_mass)
        e = tl.where(index <= reached, 0.0, e)
        rest = tl.sum(e, 0)
        level += gain
        first = reached + 1
        corner += 1
    tl.store(corners + part, (corner - part * CHUNK).to(tl.int32))


@triton.jit
def _chord(levels, before, corner, real, level, lead):
    """Return the log slope from a point at ``level`` to a corner of each chunk, ``lead`` being the mass in between."""
    log_mass = _log_sum(lead, tl.load(before + corner, real, other=float("-inf")))
    return _log_slope(tl.load(levels + corner, real, other=1.0) - level, log_mass)


@triton.jit(do_not_specialize=["chunks"])
def _join_row(
    levels, before, after, log_r, places, corners, totals, log_totals, ratios, loss, K, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Wrap the corners of all chunks, and give each place its log r; one chunk more stands for the end of the row."""
    row = tl.program_id(0).to(tl.int64)
    levels += row * chunks * CHUNK
    before += row * chunks * CHUNK
    after += row * chunks * CHUNK
    log_r += row * chunks * CHUNK
    places += row * chunks * CHUNK
    totals += row * chunks
    ratios += row * K
    chunk = tl.arange(0, CHUNKS)
    real = chunk < chunks
    low = chunk * CHUNK  # the corner that is seen lowest
    final = low + tl.load(corners + row * chunks + chunk, real, other=1) - 1
    total = tl.load(totals + chunk, real, other=float("-inf"))
    earlier = tl.load(totals + chunk - 1, (chunk > 0) & (chunk <= chunks), other=float("-inf"))
    peak = tl.max(total, 0)
    log_total = tl.log(tl.sum(tl.exp(total - peak), 0)) + peak  # NaN if the row is faulty
    tl.store(log_totals + row, log_total)
    divergence = log_total * 0
    level = tl.cast(0.0, tl.float64)
    own = 0
    corner = 0
    place = 0
    while own < chunks:
        lead = tl.where(chunk == own + 1, tl.load(after + corner), tl.where(chunk > own, earlier, float("-inf")))
        peak = tl.max(lead, 0)
        lead = tl.log(tl.cumsum(tl.exp(lead - peak), 0)) + peak
        # Seen from one vertex after the other, what is lowest in a chunk moves on and never back.
        slope = _chord(levels, before, low, real, level, lead)
        on = real & (chunk > own) & (low < final) & (tl.load(log_r + low, real, other=0.0) < slope)
        while tl.max(on.to(tl.int32), 0) > 0:
            low += on.to(tl.int32)
            slope = _chord(levels, before, low, real, level, lead)
            on = on & (low < final) & (tl.load(log_r + low, real, other=0.0) < slope)
        low = tl.where(chunk == own, corner + 1, low)
        slope = tl.where(chunk == own, tl.load(log_r + corner), slope)
        slope = tl.where((chunk < own) | (chunk > chunks) | (low > final), float("inf"), slope)
        least = tl.min(slope, 0)
        nearest = own + tl.where(tl.max(tl.where(chunk == own, low - final, 0), 0) > 0, 1, 0)
        own = tl.maximum(tl.max(tl.where(slope <= least, chunk, 0), 0), nearest)  # NaN must not stop the walk
        corner = tl.max(tl.where(chunk == own, low, 0), 0)
        end = K
        height = tl.cast(1.0, tl.float64)
        if own < chunks:
            end = tl.load(places + corner)
            height = tl.load(levels + corner)
        ratio = least + log_total
        if (place == 0) & (end == K):
            ratio = divergence  # a single segment: q lies in Q_pi
        divergence += tl.where(height > level, (height - level) * ratio, 0.0)
        for k in range(place, end, FILL):
            tl.store(ratios + k + tl.arange(0, FILL), ratio, k + tl.arange(0, FILL) < end)
        level = height
        place = end
    tl.store(loss + row, tl.where(divergence < 0, 0.0, divergence))


@triton.jit
def _spread_row(logits, order, most, log_totals, ratios, out, K, GRADIENT: tl.constexpr, CHUNK: tl.constexpr):
    """Give each class of a part of a row its p or q - p."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = place < K
    k = tl.load(order + row * K + place, inside, other=0)
    z = tl.load(logits + row * K + k, inside, other=float("-inf")).to(tl.float64)
    log_q = z - tl.load(most + row).to(tl.float64) - tl.load(log_totals + row)
    result = tl.exp(log_q + tl.load(ratios + row * K + place, inside, other=0.0))
    if GRADIENT:
        result = tl.exp(log_q) - result
    tl.store(out + row * K + k, result, inside)


def solve(
    logits_NK: Tensor, pi_NK: Tensor, gradient: bool, validate: bool, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Solve for real-valued pi."""
    if validate:
        faults.refuse(faults.real_faults(logits_NK, pi_NK))
    N, K = logits_NK.shape
    slack = faults.SLACK * torch.finfo(pi_NK.dtype).eps
    if K > WHOLE:
        height_NK, order_NK = pi_NK.sort(-1)
        # Sorting has put what is below 0, above 1 or NaN at one of the ends.
        good_N = (height_NK[:, 0] >= 0) & ((height_NK[:, -1] - 1).abs() <= slack)
        height_NK.clamp_(max=1)[:, -1] = 1
        return _solve_long(logits_NK, height_NK, order_NK, good_N, gradient, scale)
    block = triton.next_power_of_2(K)
    loss_N, out_NK = logits_NK.new_empty(N), torch.empty_like(logits_NK)
    with torch.cuda.device_of(logits_NK):
        _real_row[(N,)](
            logits_NK,
            pi_NK,
            loss_N,
            out_NK,
            K,
            SLACK=slack,
            GRADIENT=gradient,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return loss_N, _scaled(out_NK, scale)


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
    """Solve for quantised pi."""
    if validate:
        faults.refuse(faults.level_faults(logits_NK, counts_NK, top_N, size))
    N, K = logits_NK.shape
    if K > WHOLE:
        return _solve_long(logits_NK, *_sort_levels(counts_NK, top_N, size, proportional), gradient, scale)
    loss_N, out_NK = logits_NK.new_empty(N), torch.empty_like(logits_NK)
    block = triton.next_power_of_2(K)
    with torch.cuda.device_of(logits_NK):
        _levels_row[(N,)](
            logits_NK, counts_NK, counts_NK if top_N is None else top_N.contiguous(), loss_N, out_NK, K, size,
            HAS_TOP=top_N is not None, PROPORTIONAL=proportional, GRADIENT=gradient,
            KEY=tl.int32 if (size + 4) * block < 2**31 else tl.int64, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return loss_N, _scaled(out_NK, scale)


def _warps(block: int) -> int:
    """Return how many warps share a row of so many classes."""
    return min(max(block // (32 * EACH), 1), 32)


def _sort_levels(
    counts_NK: Tensor, top_N: Tensor | None, size: int, proportional: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the possibilities of rows in ascending order, the order, and which rows are without fault."""
    least_N, most_N = counts_NK.aminmax(dim=-1)
    good_N = (least_N >= -1) & (most_N <= size)
    narrow = next(dtype for dtype in (torch.int8, torch.int16, torch.int64) if size < torch.iinfo(dtype).max)
    key_NK = counts_NK.clamp(-1, size).to(narrow)
    if top_N is None:
        good_N &= most_N >= 0
    else:
        good_N &= (top_N >= 0) & (top_N < counts_NK.shape[-1])
        key_NK.scatter_(-1, top_N.long().clamp(0, counts_NK.shape[-1] - 1).unsqueeze(-1), size + 1)
    key_NK, order_NK = key_NK.sort(-1)
    unit = most_N.unsqueeze(-1) + 1 if proportional else size + 1
    height_NK = (key_NK.double() + 1) / unit
    return height_NK.masked_fill_(key_NK == key_NK[:, -1:], 1), order_NK, good_N


def _solve_long(
    logits_NK: Tensor, height_NK: Tensor, order_NK: Tensor, good_N: Tensor, gradient: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Solve rows that are sorted, and too long for one program."""
    N, K = logits_NK.shape
    chunks = triton.cdiv(K, CHUNK)
    least_N, most_N = logits_NK.aminmax(dim=-1)
    most_N = most_N.masked_fill(~(good_N & least_N.isfinite() & most_N.isfinite()), torch.nan)
    levels_NC, before_NC, after_NC, log_r_NC = logits_NK.new_empty(4, N, chunks * CHUNK, dtype=torch.float64)
    places_NC = logits_NK.new_empty(N, chunks * CHUNK, dtype=torch.int32)
    corners_NS = logits_NK.new_empty(N, chunks, dtype=torch.int32)
    totals_NS = logits_NK.new_empty(N, chunks, dtype=torch.float64)
    hulls = (levels_NC, before_NC, after_NC, log_r_NC, places_NC, corners_NS, totals_NS)
    log_total_N = logits_NK.new_empty(N, dtype=torch.float64)
    ratio_NK = logits_NK.new_empty(N, K, dtype=torch.float64)
    loss_N, out_NK = logits_NK.new_empty(N), torch.empty_like(logits_NK)
    with torch.cuda.device_of(logits_NK):
        _chunks_row[(N, chunks)](
            logits_NK, height_NK, order_NK, most_N, *hulls, K, chunks, CHUNK=CHUNK, num_warps=_warps(CHUNK)
        )
        _join_row[(N,)](
            *hulls, log_total_N, ratio_NK, loss_N, K, chunks,
            CHUNK=CHUNK, CHUNKS=triton.next_power_of_2(chunks + 1), FILL=FILL, num_warps=4,
        )  # fmt: skip
        _spread_row[(N, chunks)](
            logits_NK, order_NK, most_N, log_total_N, ratio_NK, out_NK, K,
            GRADIENT=gradient, CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip
    return loss_N, _scaled(out_NK, scale)


def _scaled(out_NK: Tensor, scale: float) -> Tensor:
    return out_NK if scale == 1 else out_NK.mul_(scale)
