"""A whole training step: what conformal credal learning costs in it, and what layout, augmentation and loading bring.

Here two threads work, or as many as there are cores: a training run has the machine to itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.augment import pil_strong, pil_weak
from benchmarks.table import Row, Table, duration, spread
from benchmarks.timing import compare
from ccssl.experiments.config import RunConfig
from ccssl.experiments.run import prepare, split_of
from ccssl.images.dataset import ImageData
from ccssl.images.packed import create, open_packed
from ccssl.methods import unlabeled_loss
from ccssl.training import loop
from ccssl.training.loop import Training

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SHARE = 0.03
LIMIT_DEFAULT = 2.0
LIMIT_LOADING = 1.05
LIMIT_SIZE = 1.10
LIMIT_ANONYMOUS = 2.0  # GB
FEW, MANY = 50_000, 1_000_000
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def images(count: int, classes: int = 10, side: int = 32) -> ImageData:
    """Return random images."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    labels = draw.integers(classes, size=count)
    names = tuple(f"class {k}" for k in range(classes))
    return ImageData("random", pixels, labels, pixels[:100], labels[:100], names, flip=True)


def training(data: ImageData, **settings: Any) -> Training:
    """Return a training of CCSSL at the paper's batch, with 62 calibration items."""
    config = RunConfig(
        **{"dataset": data.name, "labels": 250, "method": "ccssl-prop", "device": DEVICE, **settings}
    )
    return prepare(config, data, split_of(config, data))


def run(quick: bool = False) -> list[Table]:
    """Measure all tables; ``quick`` takes the small network and a step or two."""
    torch.set_num_threads(os.cpu_count() or 1)
    return [share(quick), default_precision(quick), loading(quick), many_images(quick)]


def finish() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def share(quick: bool) -> Table:
    """How much of a step goes into calibration, p-values, projection and loss."""
    table = Table(
        "Share of conformal credal learning in a training step",
        f"CCSSL-prop on random 32x32 images, batch 32, mu 7, 62 calibration items, on {DEVICE}. *Refresh*: copying the "
        "snapshot, predicting weak views of the calibration items and sorting their scores, once in 10 steps; "
        "*target*: p-values and projection; *loss*: the loss on unlabeled images and its gradient with respect to the "
        "logits. The teacher's prediction of weak views, which every method has, is not counted.",
        ("network", "step", "refresh / 10", "target", "loss"),
        "share of the step",
    )
    rounds = 2 if quick else 10
    for network in ("small",) if quick else ("wrn-28-2", "small"):
        ours = training(images(2000), model=network)
        logits = torch.randn(2, 224, 10, device=ours.device)
        batch = ours.batches.at(0)
        assert batch.unlabeled is not None
        places = batch.unlabeled.places
        ours.refresh(0)
        target = ours.method.target(logits[0], logits[1], places)
        leaf = logits[1].clone().requires_grad_()

        def step(ours: Training = ours, batch: Any = batch) -> None:
            ours.steps_done = 1  # between two refreshes
            ours.step(batch)
            finish()

        def refresh(ours: Training = ours) -> None:
            ours.refresh(0)
            finish()

        def aim(ours: Training = ours, logits: Tensor = logits, places: Tensor = places) -> None:
            ours.method.target(logits[0], logits[1], places)
            finish()

        def loss(leaf: Tensor = leaf, target: Any = target) -> None:
            unlabeled_loss(leaf, target).backward()
            finish()

        times = compare({"step": step, "refresh": refresh, "target": aim, "loss": loss}, rounds=rounds)
        parts = [times.median("refresh") / 10, times.median("target"), times.median("loss")]
        whole = times.median("step") + parts[0]
        cells = (network, duration(whole), *(duration(part) for part in parts))
        table.rows.append(Row(cells, sum(parts) / whole, LIMIT_SHARE))
    return table


def default_precision(quick: bool) -> Table:
    """A step as it is by default, against fp32 in contiguous layout with per-image augmentation by PIL."""
    ours_precision = loop.find_precision("auto", torch.device(DEVICE))
    table = Table(
        "A step by default against fp32, contiguous, augmented by PIL",
        f"The same step of CCSSL-prop on random 32x32 images, batch 32, mu 7, on {DEVICE}; by default in "
        f"{ours_precision} here, channels innermost, augmented in batches. PIL gets its draws as Python numbers.",
        ("network", "ours", "peer", "PIL's part of it", "paired ratio"),
        "peer / ours",
    )
    for network in ("small",) if quick else ("wrn-28-2", "small"):
        data = images(2000)
        ours = training(data, model=network)
        peer = training(data, model=network, precision="fp32", channels_last=False)
        host = pil_views(data, peer)
        batch = ours.batches.at(0)

        def step(ours: Training = ours, batch: Any = batch) -> None:
            ours.steps_done = 1
            ours.step(batch)
            finish()

        def views(host: Any = host) -> list[Tensor]:
            return [torch.from_numpy(make()) for make in host]  # type: ignore[arg-type]

        def by_pil(peer: Training = peer, batch: Any = batch, views: Any = views) -> None:
            labeled, weak_u, strong_u = (view.to(peer.device) for view in views())
            peer.steps_done = 1
            with (
                mock.patch.object(loop, "weak", lambda x, _: labeled if len(x) == 32 else weak_u),
                mock.patch.object(loop, "strong", return_value=strong_u),
            ):
                peer.step(batch)
            finish()

        ours.refresh(0)
        peer.refresh(0)
        times = compare({"ours": step, "peer": by_pil, "PIL": views}, rounds=2 if quick else 10)
        ratio = times.ratio("peer", "ours")
        cells = (network, *(duration(times.median(name)) for name in ("ours", "peer", "PIL")), spread(ratio))
        table.rows.append(Row(cells, ratio.median, LIMIT_DEFAULT, "at least"))
    return table


def pil_views(data: ImageData, peer: Training) -> list[Any]:
    """Return functions that make the three kinds of views of a batch by PIL."""
    from ccssl.images.augment import draw_strong, draw_weak

    generator = torch.Generator().manual_seed(0)
    labeled, unlabeled = (torch.from_numpy(data.train_images[ids]) for ids in peer.batches.ids(0))
    return [
        pil_weak(labeled, draw_weak(len(labeled), 32, 32, True, generator)),
        pil_weak(unlabeled, draw_weak(len(unlabeled), 32, 32, True, generator)),
        pil_strong(unlabeled, draw_strong(len(unlabeled), 32, 32, True, generator)),
    ]


def loading(quick: bool) -> Table:
    """Steps with batches as they are loaded, against steps on batches that are there."""
    steps = 4 if quick else 60
    table = Table(
        "Loading",
        f"{steps} steps of CCSSL-prop from a packed, memory-mapped set of {FEW // 10:,} 32x32 images, drawing and "
        f"gathering included, in turns with as many steps on batches that are on the device already ({DEVICE}).",
        ("network", "loaded", "there already", "paired ratio"),
        "loaded / there",
    )
    with tempfile.TemporaryDirectory() as folder:
        data = packed(Path(folder) / "set", FEW // 10)
        ours = training(data, model="small", steps=10**6)
        ours.refresh(0)
        ready = [ours.batches.at(step) for step in range(steps)]

        def loaded() -> None:
            ours.steps_done = 0
            for _ in ours.run(steps):
                pass
            finish()

        def there() -> None:
            ours.steps_done = 0
            for batch in ready:
                ours.step(batch)
            finish()

        times = compare({"loaded": loaded, "there": there}, rounds=2 if quick else 9)
        ratio = times.ratio("loaded", "there")
        cells = ("small", *(duration(times.median(name) / steps) for name in ("loaded", "there")), spread(ratio))
        table.rows.append(Row(cells, ratio.median, LIMIT_LOADING))
    return table


def many_images(quick: bool) -> Table:
    """Steps and memory with a million images, against fifty thousand."""
    few, many = (500, 2_000) if quick else (FEW, MANY)
    steps = 4 if quick else 100
    table = Table(
        f"{many:,} images, memory-mapped",
        f"{steps} steps of CCSSL-prop with the small network from a packed set of random 32x32x3 images, each set in a "
        "process of its own, in turns; anonymous memory is RssAnon of Linux at the end: what the process holds beyond "
        "mapped files, torch included.",
        ("images", "step", "anonymous memory"),
        "figure",
    )
    with tempfile.TemporaryDirectory() as folder:
        sizes = {count: Path(folder) / str(count) for count in (few, many)}
        for count, path in sizes.items():
            packed(path, count)
        found: dict[int, list[dict[str, float]]] = {count: [] for count in sizes}
        for _ in range(1 if quick else 3):
            for count, path in sizes.items():
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.training", str(path), str(steps)],
                    cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
                )  # fmt: skip
                found[count].append(json.loads(done.stdout))
        seconds = {count: min(one["seconds"] for one in runs) for count, runs in found.items()}
        memory = {count: max(one["anonymous"] for one in runs) / 1e9 for count, runs in found.items()}
        rows = {count: (f"{count:,}", duration(seconds[count]), f"{memory[count]:.2f} GB") for count in sizes}
        table.rows.append(Row((*rows[many][:2], "GB of anonymous memory"), memory[many], LIMIT_ANONYMOUS))
        table.rows.append(Row((*rows[few][:2], "GB of anonymous memory"), memory[few], None))
        ratio = seconds[many] / seconds[few]
        table.rows.append(Row((f"{many:,} / {few:,}", "", "ratio of steps"), ratio, LIMIT_SIZE))
    return table


def packed(folder: Path, count: int) -> ImageData:
    """Write and open a packed set of random images, a few at a time."""
    draw = np.random.default_rng(0)
    names = [f"class {k}" for k in range(10)]
    with create(folder, train=count, test=100, shape=(32, 32, 3), class_names=names, flip=True) as data:
        for start in range(0, count, 10_000):
            part = data.train_images[start : start + 10_000]
            part[:] = draw.integers(0, 256, part.shape, dtype=np.uint8)
        data.train_labels[:] = draw.integers(10, size=count)
        data.test_labels[:] = draw.integers(10, size=100)
    return open_packed(folder)


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Measure the seconds of a block."""
    seconds: list[float] = []
    start = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - start)


def main(folder: str, steps: str) -> None:
    """Print the seconds a step and the anonymous memory of training from a packed set."""
    torch.set_num_threads(os.cpu_count() or 1)
    ours = training(open_packed(Path(folder)), model="small", steps=10**6)
    warm = 3
    for _ in ours.run(warm):
        pass
    with stopwatch() as seconds:
        for _ in ours.run(warm + int(steps)):
            pass
        finish()
    status = Path("/proc/self/status").read_text().splitlines()
    anonymous = next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
    print(json.dumps({"seconds": seconds[0] / int(steps), "anonymous": anonymous}))


if __name__ == "__main__":
    main(*sys.argv[1:])
