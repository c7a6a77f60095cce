r"""Which items a step learns from, how they look, and how they reach the device.

Everything random in a batch is a *function of the seed and the step*: there is no generator whose state would have to
be kept. ``generator(seed, step, purpose)`` is a fresh one for each purpose of each step, and ``Stream`` says which item
stands at a position of an endless sequence of shuffled passes over the data. So a run resumes where it stopped by
knowing its step, a step's items can be named afterwards, and many devices draw the same global batch, of which each
takes its share: rank r of W the rows r B / W to (r + 1) B / W.

Images are uint8. Small sets live on the device; large ones stay where they are, memory-mapped, and a thread gathers
the next batch while the device works on this one.

Shapes: B items a batch, H x W pixels, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ccssl.images.augment import StrongDraw, WeakDraw, draw_strong, draw_weak

# What a generator is for: one number each, so that no two purposes share their draws.
LABELED, UNLABELED, LABELED_VIEW, WEAK_VIEW, STRONG_VIEW, CALIBRATION_VIEW, EVALUATION_VIEW = range(7)

RESIDENT_BYTES = 2 * 10**9  # image sets up to this size live on an accelerator


def generator(seed: int, step: int, purpose: int) -> torch.Generator:
    """Return the generator of one purpose at one step."""
    mixed = np.random.SeedSequence((seed, step, purpose)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(mixed))


class Stream:
    """Shuffled passes over 0, ..., size - 1, one after another, without end.

    >>> stream = Stream(4, seed=0, purpose=0)
    >>> sorted(stream.at(4, 4).tolist())  # the second pass
    [0, 1, 2, 3]
    """

    def __init__(self, size: int, seed: int, purpose: int) -> None:
        self.size, self.seed, self.purpose = size, seed, purpose
        self._passes: dict[int, np.ndarray] = {}

    def at(self, start: int, count: int) -> np.ndarray:
        """Return the items at positions start, ..., start + count - 1."""
        parts = []
        while count > 0:
            number, offset = divmod(start, self.size)
            part = self._pass(number)[offset : offset + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return np.concatenate(parts)

    def _pass(self, number: int) -> np.ndarray:
        if number not in self._passes:
            draw = np.random.Generator(np.random.PCG64((self.seed, self.purpose, number)))
            self._passes = {n: order for n, order in self._passes.items() if n >= number - 1}
            self._passes[number] = draw.permutation(self.size)
        return self._passes[number]


class Images:
    """A set of uint8 images (N, H, W, C) of which rows can be had on the device."""

    def __init__(self, images: np.ndarray, device: torch.device, resident_bytes: int = RESIDENT_BYTES) -> None:
        self.shape = images.shape
        self.device = device
        self._images = images
        self._resident: Tensor | None = None
        if device.type != "cpu" and images.nbytes <= resident_bytes:
            # A copy: what is memory-mapped cannot be written, which torch would warn of.
            self._resident = torch.from_numpy(np.array(images)).to(device)

    def take(self, rows: np.ndarray) -> Tensor:
        """Return some images (len(rows), H, W, C)."""
        if self._resident is not None:
            return self._resident.index_select(0, to_device(torch.from_numpy(rows), self.device))
        return to_device(torch.from_numpy(np.take(self._images, rows, axis=0)), self.device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor without making the host wait."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Labeled(NamedTuple):
    """One rank's share of a labeled batch."""

    images: Tensor  # (B, H, W, C) uint8
    labels: Tensor  # (B,)
    view: WeakDraw


class Unlabeled(NamedTuple):
    """One rank's share of an unlabeled batch."""

    images: Tensor  # (B, H, W, C) uint8
    places: Tensor  # (B,) in the unlabeled pool
    weak: WeakDraw
    strong: StrongDraw


class Batch(NamedTuple):
    """What a step learns from."""

    labeled: Labeled
    unlabeled: Unlabeled | None


class Batches:
    """The batches of a run, as a function of the step.

    ``labeled`` and ``unlabeled`` hold ids of training images; the pool may be None for methods without one.
    """

    def __init__(
        self,
        images: Images,
        labels: np.ndarray,
        labeled: np.ndarray,
        unlabeled: np.ndarray | None,
        *,
        batch: int,
        mu: int,
        flip: bool,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.images, self.labels = images, labels
        self.labeled, self.unlabeled = labeled, unlabeled
        self.batch, self.mu, self.flip, self.seed = batch, mu, flip, seed
        self._labeled_stream = Stream(len(labeled), seed, LABELED)
        self._unlabeled_stream = None if unlabeled is None else Stream(len(unlabeled), seed, UNLABELED)
        self._share = slice(rank * batch // world, (rank + 1) * batch // world)
        self._unlabeled_share = slice(rank * mu * batch // world, (rank + 1) * mu * batch // world)

    def ids(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of the global batch at a step, labeled and unlabeled."""
        labeled = self.labeled[self._labeled_stream.at(step * self.batch, self.batch)]
        if self._unlabeled_stream is None or self.unlabeled is None:
            return labeled, labeled[:0]
        size = self.batch * self.mu
        return labeled, self.unlabeled[self._unlabeled_stream.at(step * size, size)]

    def at(self, step: int) -> Batch:
        """Return this rank's share of the batch at a step, on the device."""
        device, (height, width) = self.images.device, self.images.shape[1:3]
        ids = self.labeled[self._labeled_stream.at(step * self.batch, self.batch)[self._share]]
        view = draw_weak(self.batch, height, width, self.flip, generator(self.seed, step, LABELED_VIEW))
        labeled = Labeled(
            self.images.take(ids),
            to_device(torch.from_numpy(self.labels[ids]), device),
            view[self._share].to(device, non_blocking=True),
        )
        if self._unlabeled_stream is None or self.unlabeled is None:
            return Batch(labeled, None)
        size, share = self.batch * self.mu, self._unlabeled_share
        places = self._unlabeled_stream.at(step * size, size)[share]
        weak = draw_weak(size, height, width, self.flip, generator(self.seed, step, WEAK_VIEW))
        strong = draw_strong(size, height, width, self.flip, generator(self.seed, step, STRONG_VIEW))
        unlabeled = Unlabeled(
            self.images.take(self.unlabeled[places]),
            to_device(torch.from_numpy(places), device),
            weak[share].to(device, non_blocking=True),
            strong[share].to(device, non_blocking=True),
        )
        return Batch(labeled, unlabeled)

    def ahead(self, start: int, end: int) -> Iterator[Batch]:
        """Yield the batches of steps start, ..., end - 1; a thread prepares the next while one is worked on."""
        with ThreadPoolExecutor(1, thread_name_prefix="ccssl-batches") as thread:
            coming: Future[Batch] | None = thread.submit(self.at, start) if start < end else None
            for step in range(start, end):
                assert coming is not None
                batch = coming.result()
                coming = thread.submit(self.at, step + 1) if step + 1 < end else None
                yield batch
