"""A folder of pictures as a data set.

::

    FOLDER/train/CLASS/*.png      training images, a folder for each class (jpg, bmp, gif, webp, tif, ... as well)
    FOLDER/test/CLASS/*.png       test images of the same classes
    FOLDER/unlabeled/*.png        optional: training images whose class is unknown, in any depth

Classes are numbered in the alphabetical order of their names. Each picture becomes what it looks like on a
screen: turned as its camera noted, a palette resolved, transparency on white, 16 grey bits cut to 8. The set is
grey if all pictures are, else all become RGB. Pictures must have one size, or are brought to ``size``: the
shorter side by bicubic resampling, the longer one then cut evenly at both ends.

Decoding is slow, so that it is done once (``packed``). What was decoded is known again by ``fingerprint``.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from ccssl.errors import InputError
from ccssl.images.dataset import ImageStream, Part, check_classes, images_per_chunk, unlabeled
from ccssl.images.progress import progress

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"))
LITTER = frozenset(("thumbs.db", "desktop.ini"))  # what file managers leave behind, besides hidden files
GREY_MODES = frozenset(("1", "L", "LA", "La", "I;16", "I;16B", "I;16L", "I;16N"))
ORIENTATION = 0x0112
TURNED = frozenset((5, 6, 7, 8))  # orientations that exchange height and width


class Files(NamedTuple):
    """The pictures of a folder, each part in alphabetical order, and the class of each."""

    class_names: tuple[str, ...]
    train: list[Path]
    train_labels: np.ndarray
    test: list[Path]
    test_labels: np.ndarray
    unlabeled: list[Path]

    def all(self) -> list[Path]:
        """Return every picture."""
        return [*self.train, *self.unlabeled, *self.test]


def is_image_folder(root: Path) -> bool:
    """Tell whether a folder looks like a data set of pictures."""
    return (root / "train").is_dir()


def find_files(root: Path) -> Files:
    """Return the pictures of a folder and what their places say."""
    for part in ("train", "test"):
        if not (root / part).is_dir():
            raise InputError(
                f"{root} has no folder {part!r}: a data set of pictures has them in train/CLASS/ and test/CLASS/."
            )
    class_names = tuple(folder.name for folder in _entries(root / "train") if folder.is_dir())
    check_classes(class_names, root / "train")
    for folder in _entries(root / "test"):
        if folder.is_dir() and folder.name not in class_names:
            raise InputError(f"{folder} is the folder of a class that {root / 'train'} does not have.")
    train, train_labels = _classes(root / "train", class_names)
    test, test_labels = _classes(root / "test", class_names)
    without = [*_pictures(root / "unlabeled")] if (root / "unlabeled").is_dir() else []
    for part, files in (("train", train), ("test", test)):
        if not files:
            raise InputError(f"{root / part} holds no pictures ({', '.join(sorted(SUFFIXES))}).")
    return Files(class_names, train, train_labels, test, test_labels, without)


def fingerprint(root: Path, files: Files, size: int | None) -> str:
    """Return a short name for the pictures as they are now: their places, lengths and times of change."""
    digest = hashlib.sha256(repr(size).encode())
    for file in files.all():
        told = file.stat()
        digest.update(f"{file.relative_to(root).as_posix()}\0{told.st_size}\0{told.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


@contextmanager
def stream_folder(root: Path, size: int | None = None) -> Iterator[ImageStream]:
    """Give the pictures of a folder chunk by chunk, decoded."""
    if size is not None and size < 1:
        raise InputError(f"size must be at least 1 pixel, got {size}.")
    files = find_files(root)
    shape = _common_shape(root, files.all(), size)
    train = [Part(files.train_labels, _decoded(files.train, shape, size))]
    if files.unlabeled:
        train.append(Part(unlabeled(len(files.unlabeled)), _decoded(files.unlabeled, shape, size)))
    yield ImageStream(
        name=root.resolve().name,
        shape=shape,
        class_names=files.class_names,
        train=tuple(train),
        test=Part(files.test_labels, _decoded(files.test, shape, size)),
        flip_told=False,
    )


def _classes(folder: Path, class_names: Sequence[str]) -> tuple[list[Path], np.ndarray]:
    for entry in _entries(folder):
        if not entry.is_dir():
            raise InputError(f"{entry} lies beside the folders of the classes: move it into one of them, or away.")
    files, labels = [], []
    for label, name in enumerate(class_names):
        found = [*_pictures(folder / name)] if (folder / name).is_dir() else []
        files += found
        labels += [label] * len(found)
    return files, np.array(labels, np.int64)


def _pictures(folder: Path) -> Iterator[Path]:
    for entry in _entries(folder):
        if entry.is_dir():
            yield from _pictures(entry)
        elif entry.suffix.lower() in SUFFIXES:
            yield entry
        else:
            raise InputError(
                f"{entry} is not a picture ({', '.join(sorted(SUFFIXES))}): convert it or move it away."
            )


def _entries(folder: Path) -> list[Path]:
    return sorted(
        entry for entry in folder.iterdir() if not entry.name.startswith(".") and entry.name.lower() not in LITTER
    )


def _common_shape(root: Path, files: Sequence[Path], size: int | None) -> tuple[int, int, int]:
    """Return height, width and channels of all pictures, from what they say at their beginning."""
    grey, first = True, None
    with progress("looking at pictures", len(files), "images") as advance:
        for file in files:
            with _picture(file) as image:
                grey = grey and image.mode in GREY_MODES
                width, height = image.size
                if size is None and width != height and image.getexif().get(ORIENTATION) in TURNED:
                    width, height = height, width
            if first is None:
                first = (file, height, width)
            if size is None and (height, width) != first[1:]:
                raise InputError(
                    f"All pictures must have one size, but {first[0]} has {first[2]} x {first[1]} pixels and "
                    f"{file} has {width} x {height}: bring them to one, by "
                    f"`ccssl data pack {root} --out PACKED --size 32` for instance, and use PACKED."
                )
            advance(1)
    assert first is not None  # find_files refuses a folder without pictures
    height, width = first[1:] if size is None else (size, size)
    return height, width, 1 if grey else 3


def _decoded(files: Sequence[Path], shape: tuple[int, int, int], size: int | None) -> Iterator[np.ndarray]:
    # Pictures are small chunks of work: a few hundred at once keep the bar moving.
    step = min(256, images_per_chunk(shape))
    for start in range(0, len(files), step):
        yield np.stack([_decode(file, shape[2], size) for file in files[start : start + step]])


def _decode(file: Path, channels: int, size: int | None) -> np.ndarray:
    """Return a picture as (H, W, channels) uint8."""
    with _picture(file) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        elif image.mode in ("I", "F"):
            raise InputError(f"{file} has 32 bits a pixel, whose range nobody knows: convert it to 8 bits.")
        if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("L" if channels == 1 else "RGB")
        if size is not None:
            image = _cut(image, size)
        return np.asarray(image).reshape(*image.size[::-1], channels)


def _cut(image: Image.Image, size: int) -> Image.Image:
    """Return the middle of a picture whose shorter side was brought to ``size``."""
    width, height = image.size
    scale = size / min(width, height)
    width, height = max(size, round(width * scale)), max(size, round(height * scale))
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


@contextmanager
def _picture(file: Path) -> Iterator[Image.Image]:
    try:
        with warnings.catch_warnings():
            # Pillow only warns of pictures so large that they may be made to exhaust memory.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            warnings.filterwarnings("ignore", category=UserWarning)
            with Image.open(file) as image:
                yield image
    except (Image.UnidentifiedImageError, Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise InputError(f"{file} cannot be decoded: {error}.") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file} cannot be decoded: {error}.") from None
