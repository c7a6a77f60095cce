"""The credal loss and its gradient, against soft-label cross-entropy and against Algorithm 1."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.table import Row, Table, duration, spread
from benchmarks.timing import compare
from ccssl.conformal import Calibration
from ccssl.credal import Levels, credal_loss
from ccssl.credal.possibility import Possibility
from ccssl.credal.reference import credal_loss_reference

# Rows and classes, and how many times the time of cross-entropy the loss may take with conformal levels.
LIMITS = {(224, 10): 2.5, (224, 100): 3.5, (224, 1_000): 2.5, (64, 10_000): 2.5, (16, 100_000): 2.5}
LIMIT_REAL = 6.0
POWERS = {"real-valued, uniform": 1, "real-valued, mostly small": 4}
CALIBRATION_SIZES = (62, 1_000, 5_000)
LARGEST_CALIBRATION = 10**8  # entries of its probabilities: 400 MB
LIMIT_SCALING = 12.0
LIMIT_REFERENCE = 1_000.0


def plausible_logits(rows: int, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return logits of a classifier that is right about four of five times and unsure in the rest, and the labels."""
    labels = torch.randint(classes, (rows,), generator=generator)
    loudest = math.sqrt(2 * math.log(classes))  # what the largest of so many normal numbers comes to
    signal = 5 * loudest * torch.rand(rows, 1, generator=generator)
    logits = torch.randn(rows, classes, generator=generator)
    return logits.scatter_add_(-1, labels.unsqueeze(-1), signal), labels


def problem(rows: int, classes: int, size: int, generator: torch.Generator) -> tuple[Tensor, Levels]:
    """Return the logits of strong views and the possibilities that a calibration gives to the weak views."""
    held_out, labels = plausible_logits(size, classes, generator)
    calibration = Calibration(score="proportion").fit(held_out.softmax(-1), labels)
    weak, _ = plausible_logits(rows, classes, generator)
    strong = weak + torch.randn(rows, classes, generator=generator)
    return strong, calibration.levels(weak.softmax(-1))


def real_valued(rows: int, classes: int, power: int, generator: torch.Generator) -> Tensor:
    """Return possibilities that never tie: uniform numbers to a power; the higher, the more of them are small."""
    pi = torch.rand(rows, classes, generator=generator) ** power
    return pi / pi.amax(-1, keepdim=True)


def step(logits: Tensor, loss: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """Return a function that computes a loss and its gradient through autograd."""
    leaf = logits.clone().requires_grad_()

    def run() -> None:
        leaf.grad = None
        loss(leaf).backward()

    return run


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the textbook's expression, which torch's own function must not lose against unnoticed."""
    return -(target * logits.log_softmax(-1)).sum(-1).mean()


def run(quick: bool = False) -> list[Table]:
    """Measure all tables; ``quick`` makes them tiny, to see that they work."""
    return [against_cross_entropy(quick), scaling(quick), against_algorithm_1(quick)]


def against_cross_entropy(quick: bool) -> Table:
    """Loss and gradient with conformal levels and with real-valued possibilities."""
    table = Table(
        "Loss and gradient against soft-label cross-entropy",
        "`loss = credal_loss(logits, pi); loss.backward()` against `cross_entropy(logits, targets)` with soft targets "
        "and its backward, float32, CPU time of one thread. Levels come from a `Calibration` with L items; real-valued "
        "possibilities have no ties. The textbook column divides by the time of "
        "`-(targets * logits.log_softmax(-1)).sum(-1).mean()` instead.",
        ("rows x classes", "possibilities", "ours", "cross-entropy", "paired ratio", "textbook"),
        "ratio of minima",
    )
    generator = torch.Generator().manual_seed(1)
    shapes = {(8, 5): 2.5, (4, 40): 2.5} if quick else LIMITS
    for (rows, classes), limit in shapes.items():
        cases: list[tuple[str, Tensor, Possibility, float]] = []
        for size in (9, 70) if quick else CALIBRATION_SIZES:
            if size * classes <= LARGEST_CALIBRATION:
                logits, levels = problem(rows, classes, size, generator)
                cases.append((f"levels, L = {size:,}", logits, levels, limit))
        for kind, power in POWERS.items():
            logits, _ = plausible_logits(rows, classes, generator)
            cases.append((kind, logits, real_valued(rows, classes, power, generator), LIMIT_REAL))
        for kind, logits, pi, bound in cases:
            targets = torch.randn(logits.shape, generator=generator).softmax(-1)
            times = compare(
                {
                    "ours": step(logits, lambda z, pi=pi: credal_loss(z, pi)),
                    "cross-entropy": step(logits, lambda z, t=targets: cross_entropy(z, t)),
                    "textbook": step(logits, lambda z, t=targets: soft_cross_entropy(z, t)),
                },
                rounds=3 if quick else 60,
                clock=time.process_time,
            )
            ratio = times.ratio("ours", "cross-entropy")
            cells = (
                f"{rows} x {classes:,}",
                kind,
                duration(times.minimum("ours")),
                duration(times.minimum("cross-entropy")),
                spread(ratio),
                f"{times.ratio('ours', 'textbook').minima:.2f}",
            )
            table.rows.append(Row(cells, ratio.minima, bound))
    return table


def scaling(quick: bool) -> Table:
    """Cost of ten times the classes."""
    few, many = (30, 300) if quick else (10_000, 100_000)
    table = Table(
        "Growth with the number of classes",
        f"Loss and gradient of 16 rows with {many:,} classes against 16 rows with {few:,}, float32, CPU time of one "
        "thread; the levels come from L = 62 calibration items.",
        ("possibilities", f"K = {few:,}", f"K = {many:,}", "paired ratio"),
        "ratio of minima",
    )
    generator = torch.Generator().manual_seed(2)
    for kind in ("levels", *POWERS):
        steps = {}
        for classes in (few, many):
            logits, pi = problem(16, classes, 62, generator)
            if kind in POWERS:
                pi = real_valued(16, classes, POWERS[kind], generator)
            steps[f"{classes}"] = step(logits, lambda z, pi=pi: credal_loss(z, pi))
        times = compare(steps, rounds=3 if quick else 40, clock=time.process_time)
        ratio = times.ratio(f"{many}", f"{few}")
        cells = (kind, duration(times.minimum(f"{few}")), duration(times.minimum(f"{many}")), spread(ratio))
        table.rows.append(Row(cells, ratio.minima, LIMIT_SCALING))
    return table


def against_algorithm_1(quick: bool) -> Table:
    """The speed-up over the algorithm that the paper prints, and a loss of another family for orientation."""
    table = Table(
        "Speed-up over Algorithm 1",
        "`credal_loss` with its gradient against `credal_loss_reference`, the paper's algorithm row by row in "
        "Python, which has no gradient; float32, CPU time of one thread. How long Algorithm 1 takes depends on the "
        "problem: it tries one face after another. Possibilities without ties make it work. With conformal levels of a "
        "good classifier most classes share the count 0 and few faces are left to try; a speed-up of 1,000 would there "
        "ask for less time than cross-entropy takes, so those rows are told without a limit. For orientation, where "
        "it is installed: 1.5-entmax's loss and gradient on hard labels, from the `entmax` package.",
        ("rows x classes", "possibilities", "ours", "other", "time of the other", "paired ratio"),
        "other / ours",
    )
    generator = torch.Generator().manual_seed(3)
    for rows, classes in [(8, 10)] if quick else [(224, 10), (224, 100)]:
        logits, levels = problem(rows, classes, 62, generator)
        cases: dict[str, Possibility] = {"levels, L = 62": levels}
        for kind, power in POWERS.items():
            cases[kind] = real_valued(rows, classes, power, generator)
        for kind, pi in cases.items():
            competitors: dict[str, Callable[[], object]] = {
                "ours": step(logits, lambda z, pi=pi: credal_loss(z, pi)),
                "Algorithm 1": lambda z=logits, pi=pi: credal_loss_reference(z, pi),
            }
            if find_spec("entmax") and kind.startswith("levels"):
                competitors["entmax"] = step(logits, entmax_loss(logits.argmax(-1)))
            times = compare(competitors, rounds=3 if quick else 5, clock=time.process_time)
            for other in list(competitors)[1:]:
                judged = other == "Algorithm 1" and kind in POWERS and classes == 100
                ratio = times.ratio(other, "ours")
                cells = (
                    f"{rows} x {classes}",
                    kind,
                    duration(times.minimum("ours")),
                    other,
                    duration(times.minimum(other)),
                    spread(ratio),
                )
                limit = LIMIT_REFERENCE if judged else None
                table.rows.append(Row(cells, ratio.minima, limit, "at least"))
    return table


def entmax_loss(labels: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the mean of the entmax package's 1.5-entmax loss on hard labels."""
    entmax15_loss = import_module("entmax").entmax15_loss
    return lambda z: entmax15_loss(z, labels).mean()
