"""Arrays of numbers in MATLAB 5 files, read piece by piece.

SVHN comes as ``.mat`` files, whose largest holds half a million images in one compressed array. Whole-file
readers need twice its size in memory; here it is inflated as it is read.

A file is a header of 128 bytes and a row of elements. An element is a tag, its type and its length in bytes,
followed by as much content, padded to a multiple of 8; up to 4 bytes of content may lie in the tag itself,
whose upper half of the type is the length then. A variable is an element of type "matrix", or one of type
"compressed" that inflates to such. Its parts are elements again: flags, dimensions, name, values. Values lie
with the first index running fastest, in the smallest type that holds them all.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ccssl.errors import InputError
from ccssl.images.dataset import Readable

MATRIX, COMPRESSED = 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
NUMERIC_CLASSES = range(6, 16)  # double, single, int8, ..., uint64: no text, no cells, no objects
COMPLEX = 0x0800
BLOCK = 2**16


@dataclass(frozen=True)
class Variable:
    """A numeric array of a file, found but not read."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype  # in which the values are stored
    compressed: bool
    offset: int  # of the element's content in the file
    start: int  # of the values in the content, inflated where it is compressed

    @contextmanager
    def open(self) -> Iterator[Readable]:
        """Give the bytes of the values, from the first on; what runs fastest in them is the first index."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            content = _Inflated(file) if self.compressed else file
            content.read(self.start)
            yield content

    def values(self) -> np.ndarray:
        """Return the whole array."""
        count = math.prod(self.shape)
        with self.open() as content:
            raw = content.read(count * self.dtype.itemsize)
        return np.frombuffer(raw, self.dtype, count).reshape(self.shape, order="F")


def variables(path: Path) -> dict[str, Variable]:
    """Return the numeric arrays of a file by name; whatever else it holds is passed over."""
    found = {}
    with path.open("rb") as file:
        order = {b"IM": "<", b"MI": ">"}.get(file.read(128)[126:128])
        if order is None:
            raise InputError(f"{path} is no MATLAB 5 file.")
        while tag := file.read(8):
            kind, length = _unpack(f"{order}II", tag)
            offset = file.tell()
            compressed = kind == COMPRESSED
            content: Readable = file
            if compressed:
                content = _Inflated(file)
                kind, _ = _unpack(f"{order}II", content.read(8))
            if kind == MATRIX:
                # Where the content is compressed, the tag of the matrix comes before it.
                named = _matrix(content, order, 8 if compressed else 0)
                if named is not None:
                    name, shape, dtype, start = named
                    found[name] = Variable(path, shape, dtype, compressed, offset, start)
            file.seek(offset + length)
    return found


def _matrix(content: Readable, order: str, start: int) -> tuple[str, tuple[int, ...], np.dtype, int] | None:
    """Return name, shape and type of a matrix and where its values begin; None if it is not of real numbers."""
    flags, start = _element(content, order, start)
    flag, _ = _unpack(f"{order}II", flags)
    if flag & 0xFF not in NUMERIC_CLASSES or flag & COMPLEX:
        return None
    dimensions, start = _element(content, order, start)
    name, start = _element(content, order, start)
    kind, _ = _unpack(f"{order}II", content.read(8))
    if small := kind >> 16:
        kind &= 0xFFFF
    if kind not in NUMBERS:
        raise EOFError(f"an array has values of the unknown type {kind}")
    shape = tuple(np.frombuffer(dimensions, f"{order}i4").tolist())
    return name.decode("latin1"), shape, np.dtype(order + NUMBERS[kind]), start + (4 if small else 8)


def _element(content: Readable, order: str, start: int) -> tuple[bytes, int]:
    """Return the content of the element that begins here, and where the next one does."""
    tag = content.read(8)
    kind, length = _unpack(f"{order}II", tag)
    if small := kind >> 16:
        return tag[4 : 4 + small], start + 8
    if length > BLOCK:
        raise EOFError(f"a description takes {length} bytes")
    padded = -(-length // 8) * 8
    return content.read(padded)[:length], start + 8 + padded


def _unpack(form: str, raw: bytes) -> tuple[int, ...]:
    if len(raw) != struct.calcsize(form):
        raise EOFError("it ends within an array")
    return struct.unpack(form, raw)


class _Inflated:
    """The content of a compressed element, from where the file stands."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._inflate = zlib.decompressobj()

    def read(self, size: int, /) -> bytes:
        """Return ``size`` bytes, fewer only where they end."""
        pieces, left = [], size
        while left and not self._inflate.eof:
            raw = self._inflate.unconsumed_tail or self._file.read(BLOCK)
            piece = self._inflate.decompress(raw, left)
            if not raw and not piece:
                break
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)
