"""Weak and strong views of a batch, against PIL doing the same image by image."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from benchmarks.table import Row, Table, duration, number, spread
from benchmarks.timing import compare
from ccssl.images.augment import StrongDraw, WeakDraw, draw_strong, draw_weak, strong, weak
from ccssl.images.randaugment import SETTINGS
from tests.images import pil_oracle as pil

# Height, width and channels, and how many times as many images a second as PIL weak and strong views must make.
SIZES = {(32, 32, 3): 4.0, (28, 28, 1): 4.0, (96, 96, 3): None}
BATCH = 224


def pil_weak(images: torch.Tensor, draw: WeakDraw) -> Callable[[], object]:
    """Return a function that makes the views by PIL, from array to array; its draws are numbers beforehand."""
    arrays = list(images.numpy())
    draws = list(zip(draw.flip.tolist(), draw.shift.tolist(), strict=True))

    def run() -> object:
        views = [pil.weak(pil.to_pil(a), flip, *shift) for a, (flip, shift) in zip(arrays, draws, strict=True)]
        return np.stack([pil.to_pixels(view) for view in views])

    return run


def pil_strong(images: torch.Tensor, draw: StrongDraw) -> Callable[[], object]:
    """Return a function that makes the views by PIL, likewise."""
    arrays = list(images.numpy())
    operations = [[SETTINGS[i] for i in row] for row in draw.operations.setting.tolist()]
    draws = list(
        zip(draw.weak.flip.tolist(), draw.weak.shift.tolist(), operations, draw.corner.tolist(), strict=True)
    )

    def run() -> object:
        views = []
        for a, (flip, shift, chain, corner) in zip(arrays, draws, strict=True):
            view = pil.operate(pil.weak(pil.to_pil(a), flip, *shift), chain)
            views.append(pil.to_pixels(pil.cutout(view, *corner)))
        return np.stack(views)

    return run


def run(quick: bool = False) -> list[Table]:
    """Measure all tables; ``quick`` makes them tiny, to see that they work."""
    table = Table(
        "Augmentation against PIL",
        "Weak views (flip, shift) and strong ones (flip, shift, two operations of RandAugment, cutout), one thread, "
        "from array to array. Our time includes drawing; PIL is given its draws as Python numbers. Both apply the same "
        "draws and make the same pixels.",
        ("images", "view", "ours", "PIL", "our images/s", "PIL's images/s", "paired ratio"),
        "PIL / ours",
    )
    generator = torch.Generator().manual_seed(1)
    n = 8 if quick else BATCH
    for (height, width, channels), limit in ({(8, 8, 1): None} if quick else SIZES).items():
        images = torch.randint(256, (n, height, width, channels), dtype=torch.uint8, generator=generator)
        size = (n, height, width, channels == 3, generator)
        weakly, strongly = draw_weak(*size), draw_strong(*size)
        cases: dict[str, dict[str, Callable[[], object]]] = {
            "weak": {
                "ours": lambda x=images, d=weakly, s=size: (draw_weak(*s), weak(x, d)),
                "PIL": pil_weak(images, weakly),
            },
            "strong": {
                "ours": lambda x=images, d=strongly, s=size: (draw_strong(*s), strong(x, d)),
                "PIL": pil_strong(images, strongly),
            },
        }
        for view, competitors in cases.items():
            times = compare(competitors, rounds=3 if quick else 40)
            ratio = times.ratio("PIL", "ours")
            ours, others = times.minimum("ours"), times.minimum("PIL")
            cells = (
                f"{n} x {height} x {width} x {channels}",
                view,
                duration(ours),
                duration(others),
                number(n / ours),
                number(n / others),
                spread(ratio),
            )
            table.rows.append(Row(cells, ratio.minima, limit, "at least"))
    return [table]
