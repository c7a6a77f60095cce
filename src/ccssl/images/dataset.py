"""A data set of images, at rest and on its way.

``ImageData`` is what every other part of the package is given: uint8 images with whole-number labels, in
memory or mapped from a file. A set may be larger than memory, so that it is never passed on whole while it is
read or converted: an ``ImageStream`` says beforehand how many images of what shape will come, and then gives
them chunk by chunk. A label that nobody knows is -1.

Shapes: N training images, M test images, H x W pixels, C channels (1 or 3), K classes, n images of a chunk.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ccssl.errors import InputError

UNKNOWN = -1
CHUNK_BYTES = 2**22
SAMPLED = 256  # images of a part that a digest looks at


@dataclass(frozen=True, eq=False)
class ImageData:
    """Training and test images with their labels; images may be memory maps, and are then read-only.

    ``train_labels`` is -1 where the label is unknown: STL-10's unlabeled images, a folder's ``unlabeled``.
    ``flip`` says whether a mirrored image keeps its class, which it does not for digits and letters; where nobody
    has said so it is False, and ``flip_told`` too. ``folds`` holds ids of training images, a row for each fold that
    the authors of the data set have drawn.
    """

    name: str
    train_images: np.ndarray  # (N, H, W, C) uint8
    train_labels: np.ndarray  # (N,) int64
    test_images: np.ndarray  # (M, H, W, C) uint8
    test_labels: np.ndarray  # (M,) int64
    class_names: tuple[str, ...]
    flip: bool
    folds: np.ndarray | None = None  # (folds, ids of a fold) int64
    flip_told: bool = True


class Part(NamedTuple):
    """Images that come in chunks (n, H, W, C), and the labels of all of them."""

    labels: np.ndarray
    chunks: Iterable[np.ndarray]


@dataclass(frozen=True, eq=False)
class ImageStream:
    """A data set on its way: the training images part after part, then the test images."""

    name: str
    shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    train: tuple[Part, ...]
    test: Part
    flip: bool = False
    folds: np.ndarray | None = None
    flip_told: bool = True


class Readable(Protocol):
    """Whatever gives bytes: a file, a member of an archive."""

    def read(self, size: int, /) -> bytes:
        """Return ``size`` bytes, fewer only where they end."""
        ...


def check(data: ImageData, origin: object) -> ImageData:
    """Return the data set if it is one; else refuse it, naming the array and what was found in it."""
    shape = data.train_images.shape[1:]
    for key in ("train", "test"):
        images, labels = getattr(data, f"{key}_images"), getattr(data, f"{key}_labels")
        check_images(images.dtype, images.shape, f"{origin}: {key}_images")
        if images.shape[1:] != shape:
            raise InputError(
                f"{origin}: test_images must be of the shape of train_images, {_times(shape)}, "
                f"got {_times(images.shape[1:])}."
            )
        check_labels(labels.dtype, labels.shape, len(images), f"{origin}: {key}_labels")
    check_classes(data.class_names, origin)
    check_range(data.train_labels, len(data.class_names), f"{origin}: train_labels", unknown=True)
    check_range(data.test_labels, len(data.class_names), f"{origin}: test_labels", unknown=False)
    if data.folds is not None:
        labeled = data.train_labels != UNKNOWN
        if data.folds.ndim != 2 or data.folds.dtype.kind not in "iu":
            raise InputError(f"{origin}: folds must hold ids in rows, got {_describe(data.folds)}.")
        if data.folds.min() < 0 or data.folds.max() >= len(labeled) or not labeled[data.folds].all():
            raise InputError(f"{origin}: folds must hold ids of labeled training images, and some are not.")
    return data


def check_images(dtype: np.dtype, shape: tuple[int, ...], what: str) -> None:
    """Refuse what is not uint8 of shape (N, H, W, C) with an image or more and 1 or 3 channels."""
    if dtype.hasobject:
        raise InputError(f"{what} holds pickled Python objects, which are never loaded: save it as plain uint8.")
    if dtype != np.uint8:
        raise InputError(f"{what} must be uint8, grey levels from 0 to 255, got {dtype}.")
    if len(shape) != 4 or shape[3] not in (1, 3):
        raise InputError(
            f"{what} must have the shape (images, height, width, channels) with 1 or 3 channels, got {shape}."
        )
    if 0 in shape:
        raise InputError(f"{what} is empty: its shape is {shape}.")


def check_labels(dtype: np.dtype, shape: tuple[int, ...], images: int, what: str) -> None:
    """Refuse what is not a whole number for each image."""
    if dtype.hasobject:
        raise InputError(f"{what} holds pickled Python objects, which are never loaded: save whole numbers.")
    if dtype.kind not in "iu":
        raise InputError(f"{what} must be whole numbers, got {dtype}.")
    if shape != (images,):
        raise InputError(f"{what} must hold one label an image, shape ({images},), got {shape}.")


def check_classes(class_names: tuple[str, ...], origin: object) -> None:
    """Refuse fewer than two classes, two classes of one name, and names that cannot be written down."""
    if len(class_names) < 2:
        raise InputError(f"{origin}: there must be at least 2 classes, got {len(class_names)}.")
    seen: set[str] = set()
    for name in class_names:
        if name in seen:
            raise InputError(f"{origin}: class_names must differ from each other, got {name!r} twice.")
        if not name.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in name):
            raise InputError(f"{origin}: class_names must be Unicode, got {name!r}: rename the class.")
        seen.add(name)


def check_range(labels: np.ndarray, classes: int, what: str, unknown: bool) -> None:
    """Refuse labels that are no class; -1 is allowed where labels may be unknown."""
    least = UNKNOWN if unknown else 0
    wrong = labels[(labels < least) | (labels >= classes)]
    if len(wrong):
        known = ", or -1 where the class is unknown" if unknown else ""
        raise InputError(f"{what} must be from 0 to {classes - 1}{known}; got {int(wrong[0])}.")


def digest(data: ImageData) -> str:
    """Return a short name for what a data set holds: all labels, and a sample of the images."""
    told = (data.train_images.shape, data.test_images.shape, data.class_names, bool(data.flip))
    found = hashlib.sha256(repr(told).encode(errors="surrogateescape"))
    for images, labels in ((data.train_images, data.train_labels), (data.test_images, data.test_labels)):
        found.update(np.ascontiguousarray(labels, dtype=np.int64).tobytes())
        for i in np.linspace(0, len(images) - 1, min(len(images), SAMPLED)).astype(np.int64):
            found.update(np.ascontiguousarray(images[i]).tobytes())
    return found.hexdigest()[:16]


def unlabeled(count: int) -> np.ndarray:
    """Return the labels of images that have none."""
    return np.full(count, UNKNOWN, np.int64)


def in_chunks(images: np.ndarray) -> Iterator[np.ndarray]:
    """Give the images (N, H, W, C) in slices of at most some megabytes."""
    step = images_per_chunk(images.shape[1:])
    for start in range(0, len(images), step):
        yield images[start : start + step]


def read_chunks(file: Readable, count: int, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Read ``count`` images of a shape, one after the other in the file, in chunks."""
    step, size = images_per_chunk(shape), math.prod(shape)
    for start in range(0, count, step):
        images = min(step, count - start)
        pixels = file.read(images * size)
        if len(pixels) < images * size:
            raise EOFError(f"it ends within image {start + len(pixels) // size} of {count}")
        yield np.frombuffer(pixels, np.uint8).reshape(images, *shape)


def images_per_chunk(shape: tuple[int, ...]) -> int:
    """Return how many images of a shape make a chunk."""
    return max(1, CHUNK_BYTES // max(1, math.prod(shape)))


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _describe(array: np.ndarray) -> str:
    return f"{array.dtype} of shape {array.shape}"
