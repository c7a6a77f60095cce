"""Readers of the files in which the authors of data sets publish them.

Each reader is a context that gives an ``ImageStream`` while its archives are open. Nothing is unpacked to the
disk: members are read out of their archives, by the one name that they must have, and never longer than their
headers say. What was published as a pickle passes an unpickler that knows the few names which arrays of
numbers need, and refuses every other.

=========  ==============================  ==========================================================
data set   archive                         peculiarities
=========  ==============================  ==========================================================
CIFAR      pickles in .tar.gz              images one channel after the other
SVHN       MATLAB 5 files                  pixels with the row running fastest; digit 0 has label 10
STL-10     bytes in .tar.gz                pixels with the row running fastest; labels from 1; folds
MNIST      IDX files in .gz
EMNIST     IDX files in .gz in one .zip    images transposed; the labels of letters from 1
=========  ==============================  ==========================================================
"""

from __future__ import annotations

import gzip
import io
import pickle
import string
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ccssl.errors import InputError
from ccssl.images.dataset import ImageStream, Part, Readable, check_range, in_chunks, read_chunks, unlabeled
from ccssl.images.matlab import Variable, variables

DIGITS = tuple(string.digits)
# EMNIST's merged classes: these lower-case letters look like their capitals.
MERGED = "cijklmopsuvwxyz"
EMNIST_CLASSES = {
    "byclass": tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    "bymerge": tuple(
        string.digits + string.ascii_uppercase + "".join(c for c in string.ascii_lowercase if c not in MERGED)
    ),
    "letters": tuple(string.ascii_uppercase),
    "digits": DIGITS,
    "mnist": DIGITS,
}
EMNIST_CLASSES["balanced"] = EMNIST_CLASSES["bymerge"]

FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

SMALL_MEMBER = 2**20  # labels, names and folds are shorter than that, pickles of images longer
LARGEST_PICKLE = 2**30
STL_SHAPE = (3, 96, 96)  # channel, column, row


@contextmanager
def cifar(
    home: Path, *, archive: str, train: Sequence[str], test: str, meta: str, prefix: str
) -> Iterator[ImageStream]:
    """CIFAR-10 and CIFAR-100: ``prefix`` is "" or "fine_", what stands before "labels" in their pickles."""
    path = home / archive
    with _damaged(path), tarfile.open(path, "r:gz") as tar:
        pickles = {}
        for member in tar:
            if member.name in (*train, test, meta):
                pickles[member.name] = _unpickle(_tar_member(path, tar, member, LARGEST_PICKLE), path, member.name)
    for name in (*train, test, meta):
        if name not in pickles:
            raise InputError(f"{path} lacks {name}: it is not the archive that was published.")
    names = _entry(pickles[meta], f"{prefix}label_names", list, path, meta)
    yield ImageStream(
        name=path.name.partition(".")[0],
        shape=(32, 32, 3),
        class_names=tuple(name.decode("latin1") if isinstance(name, bytes) else str(name) for name in names),
        train=tuple(_cifar_part(pickles[name], f"{prefix}labels", path, name) for name in train),
        test=_cifar_part(pickles[test], f"{prefix}labels", path, test),
    )


def _cifar_part(batch: object, labels_key: str, path: Path, name: str) -> Part:
    pixels = _entry(batch, "data", _Array, path, name).values
    labels = _entry(batch, labels_key, list, path, name)
    if pixels.shape != (len(labels), 3072):
        raise InputError(
            f"{path}: the images in {name} must have the shape ({len(labels)}, 3072), a row a label, "
            f"got shape {pixels.shape}."
        )
    if not all(type(label) is int for label in labels):
        raise InputError(f"{path}: the labels in {name} must be whole numbers.")
    return Part(np.array(labels, np.int64), in_chunks(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)))


def _entry(batch: object, key: str, kind: type, path: Path, name: str) -> Any:
    """Return an entry of a pickled dict, whose keys are bytes where Python 2 wrote it."""
    found = batch.get(key.encode(), batch.get(key)) if isinstance(batch, dict) else None
    if not isinstance(found, kind):
        what = "an array" if kind is _Array else "a list"
        raise InputError(f"{path}: {name} must hold {what} {key}, and does not.")
    return found


@contextmanager
def svhn(home: Path, *, train: Sequence[str], test: str) -> Iterator[ImageStream]:
    """SVHN's cropped digits: the training parts one after the other."""
    yield ImageStream(
        name="svhn",
        shape=(32, 32, 3),
        class_names=DIGITS,
        train=tuple(_svhn_part(home / file) for file in train),
        test=_svhn_part(home / test),
    )


def _svhn_part(path: Path) -> Part:
    with _damaged(path):
        found = variables(path)
        for name in ("X", "y"):
            if name not in found:
                raise InputError(f"{path} lacks the array {name}: it has {', '.join(found) or 'none'}.")
        images, labels = found["X"], found["y"].values().ravel()
    if images.dtype != np.uint8 or images.shape != (32, 32, 3, len(labels)):
        raise InputError(
            f"{path}: X must be uint8 of shape (32, 32, 3, {len(labels)}), an image a label, "
            f"got {images.dtype} of shape {images.shape}."
        )
    check_range(labels - 1, 10, f"{path}: y - 1", unknown=False)
    return Part(labels.astype(np.int64) % 10, _svhn_chunks(path, images))


def _svhn_chunks(path: Path, images: Variable) -> Iterator[np.ndarray]:
    rows, columns, channels, count = images.shape
    with _damaged(path), images.open() as file:
        for chunk in read_chunks(file, count, (channels, columns, rows)):
            yield chunk.transpose(0, 3, 2, 1)


@contextmanager
def stl10(home: Path, *, archive: str, folder: str = "stl10_binary") -> Iterator[ImageStream]:
    """STL-10: 5,000 labeled training images, the unlabeled ones after them, and the ten folds of the authors."""
    path = home / archive
    size = int(np.prod(STL_SHAPE))
    with ExitStack() as stack:
        with _damaged(path):
            tar = stack.enter_context(tarfile.open(path, "r:gz"))
            members, small = {}, {}
            # One pass over gigabytes finds all members and reads the small ones on the way.
            for member in tar:
                name = member.name.removeprefix(f"{folder}/")
                members[name] = member
                if member.isreg() and member.size < SMALL_MEMBER and not name.endswith("_X.bin"):
                    small[name] = _tar_member(path, tar, member, SMALL_MEMBER)
        for name in ("train_X.bin", "test_X.bin", "unlabeled_X.bin"):
            if name not in members or not members[name].isreg():
                raise InputError(f"{path} lacks {folder}/{name}: it is not the archive that was published.")
            if members[name].size % size:
                raise InputError(f"{path}: the length of {name} is no multiple of an image, {size} bytes.")
        for name in ("train_y.bin", "test_y.bin", "class_names.txt", "fold_indices.txt"):
            if name not in small:
                raise InputError(f"{path} lacks {folder}/{name}: it is not the archive that was published.")

        def part(name: str, labels: np.ndarray) -> Part:
            return Part(labels, _stl_chunks(path, tar, members[name]))

        yield ImageStream(
            name="stl10",
            shape=(96, 96, 3),
            class_names=tuple(small["class_names.txt"].decode().split()),
            train=(
                part("train_X.bin", _stl_labels(small["train_y.bin"])),
                part("unlabeled_X.bin", unlabeled(members["unlabeled_X.bin"].size // size)),
            ),
            test=part("test_X.bin", _stl_labels(small["test_y.bin"])),
            folds=_stl_folds(path, small["fold_indices.txt"]),
        )


def _stl_labels(raw: bytes) -> np.ndarray:
    return np.frombuffer(raw, np.uint8).astype(np.int64) - 1


def _stl_folds(path: Path, raw: bytes) -> np.ndarray:
    try:
        return np.array(
            [[int(word) for word in line.split()] for line in raw.splitlines() if line.strip()], np.int64
        )
    except ValueError:
        raise InputError(f"{path}: fold_indices.txt must hold equally many whole numbers in each line.") from None


def _stl_chunks(path: Path, tar: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[np.ndarray]:
    with _damaged(path):
        file = tar.extractfile(member)
        assert file is not None  # a regular file
        for chunk in read_chunks(file, member.size // int(np.prod(STL_SHAPE)), STL_SHAPE):
            yield chunk.transpose(0, 3, 2, 1)


@contextmanager
def mnist(home: Path, *, class_names: tuple[str, ...] = DIGITS) -> Iterator[ImageStream]:
    """MNIST and whatever was published in its four files."""

    def part(prefix: str) -> Part:
        images, labels = (home / f"{prefix}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
        return _idx_part(lambda: gzip.open(images), images, lambda: gzip.open(labels), labels)

    train = part("train")
    yield ImageStream(
        "mnist", (*_idx_shape(home / "train-images-idx3-ubyte.gz"), 1), class_names, (train,), part("t10k")
    )


@contextmanager
def emnist(home: Path, *, archive: str, split: str) -> Iterator[ImageStream]:
    """One of EMNIST's splits, out of the archive that holds them all."""
    path = home / archive
    with ExitStack() as stack:
        with _damaged(path):
            bundle = stack.enter_context(zipfile.ZipFile(path))
        first = 1 if split == "letters" else 0

        def member(part: str, kind: str) -> str:
            name = f"gzip/emnist-{split}-{part}-{kind}-ubyte.gz"
            if name not in bundle.namelist():
                raise InputError(f"{path} lacks {name}: it is not the archive that was published.")
            return name

        def part(prefix: str) -> Part:
            images, labels = member(prefix, "images-idx3"), member(prefix, "labels-idx1")
            return _idx_part(
                lambda: _gzip_in_zip(bundle, images),
                f"{path}: {images}",
                lambda: _gzip_in_zip(bundle, labels),
                f"{path}: {labels}",
                transposed=True,
                first=first,
            )

        yield ImageStream(f"emnist-{split}", (28, 28, 1), EMNIST_CLASSES[split], (part("train"),), part("test"))


@contextmanager
def _gzip_in_zip(bundle: zipfile.ZipFile, member: str) -> Iterator[Readable]:
    with bundle.open(member) as raw, gzip.open(raw) as file:
        yield file


def _idx_shape(path: Path) -> tuple[int, int]:
    """Return height and width of the images in a file."""
    with _damaged(path), gzip.open(path) as file:
        _, height, width = _idx_header(file, 3)
    return height, width


def _idx_part(
    open_images: Callable[[], AbstractContextManager[Readable]],
    images: object,
    open_labels: Callable[[], AbstractContextManager[Readable]],
    labels: object,
    transposed: bool = False,
    first: int = 0,
) -> Part:
    with _damaged(labels), open_labels() as file:
        (count,) = _idx_header(file, 1)
        values = np.frombuffer(_to_the_end(file, count), np.uint8).astype(np.int64) - first
    with _damaged(images), open_images() as file:
        pictures, *_ = _idx_header(file, 3)
    if pictures != count:
        raise InputError(f"{images} holds {pictures} images, and {labels} {count} labels.")

    def chunks() -> Iterator[np.ndarray]:
        with _damaged(images), open_images() as file:
            _, height, width = _idx_header(file, 3)
            for chunk in read_chunks(file, count, (height, width, 1)):
                yield chunk.transpose(0, 2, 1, 3) if transposed else chunk
            _to_the_end(file, 0)

    return Part(values, chunks())


def _idx_header(file: Readable, dimensions: int) -> tuple[int, ...]:
    magic = file.read(4)
    if magic != bytes((0, 0, 8, dimensions)):
        raise EOFError(f"an IDX file of bytes in {dimensions} dimensions begins otherwise than with {magic.hex()}")
    return struct.unpack(f">{dimensions}I", file.read(4 * dimensions))


def _to_the_end(file: Readable, size: int) -> bytes:
    """Return the last ``size`` bytes of a file; reading past them is also what checks its own checksum."""
    raw = file.read(size)
    if len(raw) < size or file.read(1):
        raise EOFError("it does not have the length that it says")
    return raw


def _tar_member(path: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, limit: int) -> bytes:
    if not member.isreg() or member.size > limit:
        raise InputError(f"{path}: {member.name} is no file, or larger than {limit} bytes.")
    file = tar.extractfile(member)
    assert file is not None  # a regular file
    return file.read()


class _ArrayUnpickler(pickle.Unpickler):
    """Lists, dicts, strings and numbers need no name in a pickle; arrays need those below, and no other passes."""

    def find_class(self, module: str, name: str, /) -> Any:
        """Return what stands here for a name in the pickle."""
        if (module, name) not in _PICKLED_NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no data set needs")
        return _PICKLED_NAMES[module, name]


class _Type:
    """Stands for ``numpy.dtype``, and is only ever that of bytes."""

    def __init__(self, kind: object, *_: object) -> None:
        if kind not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"it holds an array of {kind!r}, expected u1")

    def __setstate__(self, state: object) -> None:
        pass  # the order of bytes, of which there is but one


class _Array:
    """Stands for ``numpy.ndarray``: numpy's own way to restore one is not made for hostile states."""

    values = np.zeros(0, np.uint8)

    def __setstate__(self, state: tuple) -> None:
        _, shape, kind, columns_first, raw = state
        if not (isinstance(kind, _Type) and isinstance(raw, bytes)):
            raise pickle.UnpicklingError("it holds an array of other things than bytes")
        self.values = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if columns_first else "C")


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _encode(text: str, encoding: str) -> bytes:
    """Return the bytes that Python 3 wraps into a string when it writes pickles for Python 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding}")
    return text.encode("latin1")


_PICKLED_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
}


def _unpickle(raw: bytes, path: Path, name: str) -> object:
    try:
        return _ArrayUnpickler(io.BytesIO(raw), encoding="bytes").load()
    except Exception as error:  # damaged pickles raise whatever their instructions run into
        raise InputError(f"{path}: {name} is not read: {error}.") from None


@contextmanager
def _damaged(what: object) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{what} is missing: fetch it with `ccssl data fetch`.") from None
    except (
        EOFError,
        gzip.BadGzipFile,
        zlib.error,
        tarfile.TarError,
        zipfile.BadZipFile,
        struct.error,
        UnicodeDecodeError,
    ) as error:
        raise InputError(f"{what} is damaged: {error}. Fetch it again.") from None
