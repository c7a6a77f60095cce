"""Extra memory of the loss and of p-values: the peak of a process's resident memory over what it held before.

Each case runs in a fresh process, which prints one number. It warms up with the same call, so that code is loaded
and compiled; then Linux is told to forget the peak so far (``/proc/self/clear_refs``), and after one more call the
new peak is read. The C library is told to give back every block of a page or more at once, so that freed memory of
the warm-up cannot hide what the call needs. What torch, numpy and numba's own code allocate counts alike.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.table import Row, Table, number
from benchmarks.timing import Function

LIMIT_LOSS = 3.0  # times the logits
LIMIT_P_VALUES = 4.0  # times the output
ROOT = Path(__file__).resolve().parent.parent
PEAK = Path("/proc/self/clear_refs")
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_TRIM_THRESHOLD_": "4096", "MALLOC_TOP_PAD_": "0"}

# Call, rows, classes, limit.
Case = tuple[str, int, int, float | None]
SHAPES = ((224, 1_000), (64, 10_000), (16, 100_000), (160, 100_000))
LOSSES = {"credal_loss, levels": LIMIT_LOSS, "credal_loss, real-valued": LIMIT_LOSS, "cross_entropy": None}
CASES: list[Case] = [(call, *shape, limit) for shape in SHAPES for call, limit in LOSSES.items()]
CASES += [
    (f"p_values, {score}", n, 100, LIMIT_P_VALUES) for n in (448, 44_800) for score in ("difference", "proportion")
]
QUICK: list[Case] = [
    ("credal_loss, levels", 16, 2_000, LIMIT_LOSS),
    ("p_values, difference", 40, 100, LIMIT_P_VALUES),
]

Make = Callable[[], Function]  # makes a call that holds its inputs, but none of its results


def run(quick: bool = False) -> list[Table]:
    """Measure the table; ``quick`` makes it tiny and its figures meaningless."""
    table = Table(
        "Extra memory",
        "Peak of resident memory over what the process held before the call, in a fresh process after a warm-up, "
        "one thread, float32. The loss includes its backward pass and the gradient that it leaves, its unit is the "
        "logits; the unit of p-values is their output. Other functions are told for comparison.",
        ("call", "shape", "unit", "extra"),
        "extra / unit",
    )
    if not PEAK.exists():
        return [table]  # only Linux tells
    for call, rows, classes, limit in QUICK if quick else [*CASES, *peer_cases()]:
        unit, extra = 4 * rows * classes, measured(call, rows, classes)
        cells = (call, f"{rows:,} x {classes:,}", megabytes(unit), megabytes(extra))
        table.rows.append(Row(cells, extra / unit, limit))
    return [table]


def measured(call: str, rows: int, classes: int) -> int:
    """Return the bytes that a case needs, found out in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", call, str(rows), str(classes)],
        cwd=ROOT,
        env={**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return int(done.stdout)


def extra_bytes(make: Make) -> int:
    """Return how far a call drives this process's resident memory up."""
    for _ in range(2):
        warm = make()
        warm()
        del warm
    gc.collect()
    call = make()
    PEAK.write_text("5")
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(what: str) -> int:
    """Return VmRSS, the resident memory, or VmHWM, its peak, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(what))
    return int(line.split()[1]) * 1024


def loss_case(kind: str, rows: int, classes: int) -> Make:
    """Make calls of a loss and its gradient."""
    import torch
    from torch.nn.functional import cross_entropy

    from benchmarks.loss import plausible_logits, problem, real_valued, step
    from ccssl.credal import credal_loss

    generator = torch.Generator().manual_seed(5)
    if kind == "levels":
        logits, levels = problem(rows, classes, 62, generator)
        return lambda: step(logits, lambda z: credal_loss(z, levels))
    logits, _ = plausible_logits(rows, classes, generator)
    if kind == "real-valued":
        pi = real_valued(rows, classes, 1, generator)
        return lambda: step(logits, lambda z: credal_loss(z, pi))
    targets = torch.randn(logits.shape, generator=generator).softmax(-1)
    return lambda: step(logits, lambda z: cross_entropy(z, targets))


def p_values_case(kind: str, rows: int, classes: int) -> Make:
    """Make calls that compute p-values from 5,000 calibration items."""
    import torch

    from benchmarks.loss import plausible_logits
    from benchmarks.p_values import CALIBRATION, PEERS
    from ccssl.conformal import Calibration

    generator = torch.Generator().manual_seed(6)
    held_out, labels = plausible_logits(CALIBRATION, classes, generator)
    held_out = held_out.softmax(-1)
    probabilities = plausible_logits(rows, classes, generator)[0].softmax(-1)
    if kind in PEERS:
        function = next(iter(PEERS[kind](held_out, labels, probabilities).values()))
        return lambda: lambda: function()
    calibration = Calibration(score=kind).fit(held_out, labels)
    return lambda: lambda: calibration.p_values(probabilities)


def peer_cases() -> list[Case]:
    """Return the p-values of the peers that are installed here."""
    from importlib.util import find_spec

    from benchmarks.p_values import PEERS

    return [(f"p_values, {peer}", 448, 100, None) for peer in PEERS if find_spec(peer) is not None]


def megabytes(size: int) -> str:
    """Return a number of bytes in MB.

    >>> megabytes(2_500_000)
    '2.50 MB'
    """
    return f"{number(size / 1e6)} MB"


def main(call: str, rows: str, classes: str) -> None:
    """Print the bytes that one case needs."""
    what, _, kind = call.partition(", ")
    case = p_values_case if what == "p_values" else loss_case
    print(extra_bytes(case(kind, int(rows), int(classes))))


if __name__ == "__main__":
    main(*sys.argv[1:])
