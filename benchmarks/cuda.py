"""The credal loss on a CUDA device, against soft-label cross-entropy; no table where there is none.

Two times are told. What a caller waits for, with autograd's work on the host, at small sizes much longer than the
kernels take; and what the device is busy for, from a captured graph that is replayed. Nothing is judged: no limit was
set for a device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.loss import plausible_logits, problem, real_valued, step
from benchmarks.table import Row, Table, duration
from benchmarks.timing import compare
from ccssl.credal import credal_loss
from ccssl.credal.possibility import Possibility

SHAPES = ((224, 10), (224, 100), (224, 1_000), (64, 10_000), (16, 100_000), (8192, 100), (8192, 1_000))
CALIBRATION_SIZES = (62, 1_000)
REPLAYS = 20  # of a graph in a row, so that waiting for the device costs next to nothing


def run(quick: bool = False) -> list[Table]:
    """Measure on the first CUDA device."""
    if not torch.cuda.is_available():
        return []
    from benchmarks.training import share

    return [against_cross_entropy(quick), share(quick)]


def against_cross_entropy(quick: bool) -> Table:
    """Loss and gradient with conformal levels and with real-valued possibilities."""
    table = Table(
        f"Loss and gradient on {torch.cuda.get_device_name()}",
        "`credal_loss(logits, pi)` with its backward against `cross_entropy(logits, targets)` with soft targets and "
        "its backward, float32. *Call*: until the device is done, seen from the host. *Device*: from a replayed graph.",
        ("rows x classes", "possibilities", "call", "cross-entropy", "ratio", "device", "cross-entropy"),
        "ratio on the device",
    )
    generator = torch.Generator().manual_seed(1)
    for rows, classes in SHAPES[:1] if quick else SHAPES:
        targets = torch.randn(rows, classes, generator=generator).softmax(-1).cuda()
        cases: list[tuple[str, Tensor, Possibility]] = []
        for size in CALIBRATION_SIZES:
            if size * classes <= 10**7:
                cases.append((f"levels, L = {size:,}", *problem(rows, classes, size, generator)))
        logits, _ = plausible_logits(rows, classes, generator)
        cases.append(("real-valued, uniform", logits, real_valued(rows, classes, 1, generator)))
        for kind, logits, pi in cases:
            on_device, degrees = logits.cuda(), pi.to("cuda")
            losses = {
                "ours": lambda z, pi=degrees: credal_loss(z, pi),
                "cross-entropy": lambda z, t=targets: cross_entropy(z, t),
            }
            calls = compare({name: until_done(step(on_device, loss)) for name, loss in losses.items()}, rounds=20)
            busy = compare({name: until_done(replay(on_device, loss)) for name, loss in losses.items()}, rounds=20)
            cells = (
                f"{rows:,} x {classes:,}",
                kind,
                duration(calls.minimum("ours")),
                duration(calls.minimum("cross-entropy")),
                f"{calls.ratio('ours', 'cross-entropy').minima:.2f}",
                duration(busy.minimum("ours") / REPLAYS),
                duration(busy.minimum("cross-entropy") / REPLAYS),
            )
            table.rows.append(Row(cells, busy.ratio("ours", "cross-entropy").minima, None))
    return table


def replay(logits: Tensor, loss: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """Return a function that has the device compute a loss and its gradient ``REPLAYS`` times."""
    leaf = logits.clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            leaf.grad = None
            loss(leaf).backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    leaf.grad = None
    with torch.cuda.graph(graph):
        loss(leaf).backward()

    def run() -> None:
        for _ in range(REPLAYS):
            graph.replay()

    return run


def until_done(function: Callable[[], None]) -> Callable[[], None]:
    """Return a function that waits for the device, too."""

    def run() -> None:
        function()
        torch.cuda.synchronize()

    return run
