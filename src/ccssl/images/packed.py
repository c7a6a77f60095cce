"""The packed form of a data set: a folder of plain arrays that are mapped, not read.

Decoding a million pictures takes minutes and holding them takes gigabytes; both are paid once. A packed
folder holds::

    train_images.npy  (N, H, W, C) uint8      test_images.npy  (M, H, W, C) uint8      meta.json
    train_labels.npy  (N,) int64              test_labels.npy  (M,) int64              [folds.npy]

Images lie one after the other without compression, so that opening the folder reads some kilobytes, an image
is found by its number, and the pages that were read belong to the system, which takes them back when memory
is short. ``meta.json`` has the names, and a SHA-256 of each array for ``verify``.

A folder is written under another name and renamed when it is complete: whoever finds one finds all of it. Its
room on the disk is reserved first, because writing to a mapped page that has no room kills the process.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ccssl.errors import InputError
from ccssl.folders import existing
from ccssl.images.dataset import ImageData, ImageStream, Part, check, check_classes, check_images, in_chunks
from ccssl.images.progress import progress

META = "meta.json"
FORMAT = "ccssl packed images"
VERSION = 1
REQUIRED = ("train_images", "train_labels", "test_images", "test_labels")


class Finding(NamedTuple):
    """What the check of a file gave: ``state`` is ok, wrong, missing or no checksum published."""

    file: Path
    state: str
    expected: str | None
    found: str | None


@contextmanager
def create(
    folder: Path,
    *,
    train: int,
    test: int,
    shape: tuple[int, int, int],
    class_names: Iterable[str],
    flip: bool = False,
    name: str | None = None,
    folds: np.ndarray | None = None,
    flip_told: bool = True,
) -> Iterator[ImageData]:
    """Give arrays of ``train`` and ``test`` images of a shape (H, W, C) to fill; then they are the folder.

    All is zero at first. Where the context is left by an error, or labels are out of range, no folder is made.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists already and is not empty: name another folder or remove it.")
    # Filling the arrays can take hours: what can be refused is refused now.
    class_names = tuple(class_names)
    check_classes(class_names, folder)
    check_images(np.dtype(np.uint8), (train, *shape), f"{folder}: train_images")
    check_images(np.dtype(np.uint8), (test, *shape), f"{folder}: test_images")
    plan = {
        "train_images": (np.uint8, (train, *shape)),
        "train_labels": (np.int64, (train,)),
        "test_images": (np.uint8, (test, *shape)),
        "test_labels": (np.int64, (test,)),
    }
    if folds is not None:
        plan["folds"] = (np.int64, folds.shape)
    folder.parent.mkdir(parents=True, exist_ok=True)
    need_room(folder.parent, sum(math.prod(size) * np.dtype(kind).itemsize for kind, size in plan.values()))
    draft = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    draft.mkdir()
    try:
        arrays = {key: _new_array(draft / f"{key}.npy", kind, size) for key, (kind, size) in plan.items()}
        if folds is not None:
            arrays["folds"][:] = folds
        data = ImageData(
            name=name or folder.name, class_names=class_names, flip=flip, flip_told=flip_told, **arrays
        )
        yield data
        check(data, folder)
        for array in arrays.values():
            array.flush()
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "name": data.name,
            "class_names": class_names,
            "flip": flip,
            "flip_told": flip_told,
            "sha256": {key: _sha256(draft / f"{key}.npy") for key in plan},
        }
        (draft / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        try:
            os.replace(draft, folder)
        except OSError:
            if not is_packed(folder):
                raise
            raise InputError(f"{folder} was made by another process meanwhile: name another folder.") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write(stream: ImageStream, folder: Path) -> None:
    """Pack a data set as it comes; no more than a chunk of it is in memory at once."""
    train, test = sum(len(part.labels) for part in stream.train), len(stream.test.labels)
    packing = create(
        folder,
        train=train,
        test=test,
        shape=stream.shape,
        class_names=stream.class_names,
        flip=stream.flip,
        name=stream.name,
        folds=stream.folds,
        flip_told=stream.flip_told,
    )
    with packing as data, progress(f"packing {stream.name}", train + test, "images") as advance:
        _fill(data.train_images, data.train_labels, stream.train, f"{stream.name}: train_images", advance)
        _fill(data.test_images, data.test_labels, (stream.test,), f"{stream.name}: test_images", advance)


def pack(data: ImageData, folder: Path) -> None:
    """Write a data set in packed form into a folder that does not exist yet."""
    check(data, data.name)
    write(as_stream(data), Path(folder))


def as_stream(data: ImageData) -> ImageStream:
    """Give a data set chunk by chunk."""
    return ImageStream(
        name=data.name,
        shape=data.train_images.shape[1:],
        class_names=data.class_names,
        train=(Part(data.train_labels, in_chunks(data.train_images)),),
        test=Part(data.test_labels, in_chunks(data.test_images)),
        flip=data.flip,
        folds=data.folds,
        flip_told=data.flip_told,
    )


def is_packed(folder: Path) -> bool:
    """Tell whether a folder looks like a packed data set."""
    return (folder / META).is_file()


def open_packed(folder: Path) -> ImageData:
    """Return the data set of a packed folder: images mapped read-only, labels in memory."""
    folder = Path(folder)
    meta = _meta(folder)
    arrays = {}
    for key in meta["sha256"]:
        path = folder / f"{key}.npy"
        try:
            mapped = np.load(path, mmap_mode="r" if key.endswith("_images") else None, allow_pickle=False)
        except FileNotFoundError:
            raise InputError(f"{folder} lacks {path.name}: pack the data set again.") from None
        except (ValueError, EOFError) as error:
            raise InputError(f"{path} is damaged ({error}): pack the data set again.") from None
        arrays[key] = mapped
    data = ImageData(
        name=meta["name"],
        class_names=tuple(meta["class_names"]),
        flip=meta["flip"],
        flip_told=meta.get("flip_told", True),
        **arrays,
    )
    return check(data, folder)


def verify(folder: Path) -> list[Finding]:
    """Compare each array of a packed folder with the checksum that was taken when it was packed."""
    findings = []
    for key, expected in _meta(folder)["sha256"].items():
        path = folder / f"{key}.npy"
        found = _sha256(path) if path.exists() else None
        state = "missing" if found is None else "ok" if found == expected else "wrong"
        findings.append(Finding(path, state, expected, found))
    return findings


def need_room(folder: Path, size: int) -> None:
    """Refuse to start on what the disk has no room for."""
    free = shutil.disk_usage(existing(folder)).free
    if size > free:
        raise InputError(_no_room(folder, size, free))


def _no_room(folder: Path, size: int, free: int) -> str:
    return (
        f"The disk of {folder} is too small: {size / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free. "
        "Make room, or set CCSSL_HOME to a folder on another disk."
    )


def _new_array(path: Path, kind: Any, shape: tuple[int, ...]) -> np.memmap:
    array = np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    free = shutil.disk_usage(path.parent).free
                    raise InputError(_no_room(path.parent.parent, array.nbytes, free)) from None
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # the file system cannot reserve room
                    raise
    return array


def _fill(
    images: np.ndarray, labels: np.ndarray, parts: Iterable[Part], what: str, advance: Callable[[int], None]
) -> None:
    start = 0
    for part in parts:
        stop = start + len(part.labels)
        labels[start:stop] = part.labels
        for chunk in part.chunks:
            if chunk.shape[1:] != images.shape[1:] or start + len(chunk) > stop:
                raise InputError(
                    f"{what} must give {stop - start} more images of shape {images.shape[1:]}, got {chunk.shape}."
                )
            images[start : start + len(chunk)] = chunk
            start += len(chunk)
            advance(len(chunk))
        if start < stop:
            raise InputError(f"{what} ended {stop - start} images too early: there are more labels than images.")


def _meta(folder: Path) -> dict[str, Any]:
    path = folder / META
    if not path.is_file():
        raise InputError(f"{folder} is not a packed data set: it has no {META}.")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        right = (
            meta["format"] == FORMAT
            and isinstance(meta["version"], int)
            and isinstance(meta["name"], str)
            and isinstance(meta["flip"], bool)
            and isinstance(meta.get("flip_told", True), bool)
            and isinstance(meta["class_names"], list)
            and all(isinstance(name, str) for name in meta["class_names"])
            and isinstance(meta["sha256"], dict)
            and {*REQUIRED} <= {*meta["sha256"]} <= {*REQUIRED, "folds"}
        )
    except (ValueError, KeyError, TypeError):
        meta, right = {}, False
    if not right:
        raise InputError(f"{path} does not describe a packed data set: pack the data set again.")
    if meta["version"] != VERSION:
        raise InputError(
            f"{folder} was packed in form {meta['version']}, and this ccssl reads form {VERSION}: "
            "pack the data set again."
        )
    return meta


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
