"""Data sets in one ``.npz`` archive of plain arrays.

====================  ===========================================================================
key                   array
====================  ===========================================================================
train_images          (N, H, W, C) or, for grey images, (N, H, W); uint8
train_labels          (N,) whole numbers from 0; -1 where the label is unknown
test_images           (M, H, W, C) or (M, H, W); uint8
test_labels           (M,) whole numbers from 0
unlabeled_images      optional: further training images, whose label is unknown
class_names           optional: K strings; without them classes are named by their numbers
flip                  optional: a boolean, whether a mirrored image keeps its class; without it none is mirrored
====================  ===========================================================================

A small archive is read whole. Of a large one the training images are mapped where they lie: ``numpy.savez``
stores arrays without compression, so that they are as good as files. What is both large and compressed has to
be packed once, which reads it chunk by chunk; so has a large one with unlabeled images, which follow the others.
"""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ccssl.errors import InputError
from ccssl.images.dataset import (
    ImageData,
    ImageStream,
    Part,
    check,
    check_images,
    check_labels,
    read_chunks,
    unlabeled,
)

WHOLE_BYTES = 2**30  # archives up to this size are read whole
REQUIRED = ("train_images", "train_labels", "test_images", "test_labels")
IMAGES = ("train_images", "test_images", "unlabeled_images")
LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # what precedes a member of a zip archive, before its name


class Header(NamedTuple):
    """What an array of the archive is, without its values; images are (N, H, W, C) already."""

    member: zipfile.ZipInfo
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # of the values within the member

    @property
    def size(self) -> int:
        """Return the bytes that the values take."""
        return math.prod(self.shape) * self.dtype.itemsize


def open_npz(path: Path) -> ImageData:
    """Return the data set of an archive: in memory where it is small, else mapped."""
    with _archive(path) as archive:
        headers = _headers(path, archive)
        images = {key: headers[key] for key in IMAGES if key in headers}
        small = sum(header.size for header in images.values()) <= WHOLE_BYTES
        if not small:
            reason = (
                "is compressed"
                if any(header.member.compress_type != zipfile.ZIP_STORED for header in images.values())
                else "has unlabeled_images, which have to be joined to train_images,"
                if "unlabeled_images" in images
                else None
            )
            if reason:
                size = sum(header.size for header in images.values()) / 1e9
                raise InputError(
                    f"{path} {reason} and takes {size:.1f} GB: pack it once with "
                    f"`ccssl data pack {path} --out FOLDER` and use FOLDER instead."
                )
        with _damaged(path):
            arrays = {
                key: _values(archive, header) if small else _mapped(path, header) for key, header in images.items()
            }
        train, test, class_names, flip = _rest(path, archive, headers)
        flip_told = "flip" in headers
    train_images = arrays["train_images"]
    if "unlabeled_images" in arrays:
        train_images = np.concatenate([train_images, arrays["unlabeled_images"]])
    data = ImageData(
        path.stem, train_images, train, arrays["test_images"], test, class_names, flip, flip_told=flip_told
    )
    return check(data, path)


@contextmanager
def stream_npz(path: Path) -> Iterator[ImageStream]:
    """Give the data set of an archive chunk by chunk, compressed or not."""
    with _archive(path) as archive:
        headers = _headers(path, archive)
        train, test, class_names, flip = _rest(path, archive, headers)
        labeled = headers["train_labels"].shape[0]
        parts = [Part(train[:labeled], _chunks(path, archive, headers["train_images"]))]
        if "unlabeled_images" in headers:
            parts.append(Part(train[labeled:], _chunks(path, archive, headers["unlabeled_images"])))
        yield ImageStream(
            name=path.stem,
            shape=_image_shape(headers),
            class_names=class_names,
            train=tuple(parts),
            test=Part(test, _chunks(path, archive, headers["test_images"])),
            flip=flip,
            flip_told="flip" in headers,
        )


def _headers(path: Path, archive: zipfile.ZipFile) -> dict[str, Header]:
    members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    for key in REQUIRED:
        if key not in members:
            raise InputError(
                f"{path} lacks the array {key}: it has {', '.join(members) or 'none'}, and must have "
                f"{', '.join(REQUIRED)}."
            )
    known = (*REQUIRED, "unlabeled_images", "class_names", "flip")
    headers = {key: _header(path, archive, key, members[key]) for key in known if key in members}
    for key in IMAGES:
        if key in headers:
            if len(headers[key].shape) == 3:
                headers[key] = headers[key]._replace(shape=(*headers[key].shape, 1))
            check_images(headers[key].dtype, headers[key].shape, f"{path}: {key}")
            if headers[key].shape[1:] != _image_shape(headers):
                raise InputError(
                    f"{path}: {key} must be of the shape of train_images, {_image_shape(headers)}, "
                    f"got {headers[key].shape[1:]}."
                )
    for key in ("train", "test"):
        labels, images = headers[f"{key}_labels"], headers[f"{key}_images"]
        check_labels(labels.dtype, labels.shape, images.shape[0], f"{path}: {key}_labels")
    return headers


def _header(path: Path, archive: zipfile.ZipFile, key: str, member: zipfile.ZipInfo) -> Header:
    with _damaged(path), archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise InputError(f"{path}: {key} is written in form {version} of .npy files: save it as a plain array.")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, columns_first, dtype = read(file)
        start = file.tell()
    if dtype.hasobject:
        raise InputError(f"{path}: {key} holds pickled Python objects, which are never loaded: save a plain array.")
    if columns_first and len(shape) > 1:
        raise InputError(
            f"{path}: {key} is stored with its columns first: save numpy.ascontiguousarray({key}) instead."
        )
    return Header(member, dtype, shape, start)


def _rest(
    path: Path, archive: zipfile.ZipFile, headers: dict[str, Header]
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...], bool]:
    """Return the labels of training and test images, the names of the classes, and whether images may flip."""
    with _damaged(path):
        train = _values(archive, headers["train_labels"]).astype(np.int64)
        test = _values(archive, headers["test_labels"]).astype(np.int64)
        names = _values(archive, headers["class_names"]) if "class_names" in headers else None
        flip = _values(archive, headers["flip"]) if "flip" in headers else np.False_
    if names is None:
        most = int(max(train.max(), test.max()))
        if most >= len(train) + len(test):
            raise InputError(
                f"{path}: a label is {most}, more than there are images: number the classes from 0 without gaps, or "
                "give class_names."
            )
        class_names = tuple(map(str, range(most + 1)))
    elif names.dtype.kind == "U" and names.ndim == 1:
        class_names = tuple(map(str, names))
    else:
        raise InputError(
            f"{path}: class_names must be an array of strings, got {names.dtype} of shape {names.shape}."
        )
    if flip.dtype != np.bool_ or flip.size != 1:
        raise InputError(f"{path}: flip must be one boolean, got {flip.dtype} of shape {flip.shape}.")
    if "unlabeled_images" in headers:
        train = np.concatenate([train, unlabeled(headers["unlabeled_images"].shape[0])])
    return train, test, class_names, bool(flip.item())


def _values(archive: zipfile.ZipFile, header: Header) -> np.ndarray:
    with archive.open(header.member) as file:
        file.read(header.start)
        values = file.read(header.size)
        if len(values) < header.size or file.read(1):
            raise EOFError(f"{header.member.filename} does not have the length that it says")
    # A copy: what is made from bytes cannot be written, and torch warns about that.
    return np.frombuffer(values, header.dtype).reshape(header.shape).copy()


def _mapped(path: Path, header: Header) -> np.ndarray:
    with path.open("rb") as file:
        file.seek(header.member.header_offset)
        fields = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
        if fields[0] != b"PK\3\4":
            raise zipfile.BadZipFile(f"{header.member.filename} is not where the archive says")
        offset = file.tell() + fields[-2] + fields[-1] + header.start
    return np.memmap(path, header.dtype, "r", offset, header.shape)


def _chunks(path: Path, archive: zipfile.ZipFile, header: Header) -> Iterator[np.ndarray]:
    with _damaged(path), archive.open(header.member) as file:
        file.read(header.start)
        yield from read_chunks(file, header.shape[0], header.shape[1:])


def _image_shape(headers: dict[str, Header]) -> tuple[int, int, int]:
    _, height, width, channels = headers["train_images"].shape
    return height, width, channels


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path} is not an .npz archive, as numpy.savez writes it.")
    with _damaged(path):
        archive = zipfile.ZipFile(path)
    with archive:
        yield archive


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except (ValueError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError, struct.error) as error:
        raise InputError(f"{path} is damaged or no .npz archive of plain arrays: {error}.") from None
