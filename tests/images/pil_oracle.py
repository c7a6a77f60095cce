"""The views image by image, by PIL: what batched augmentation must equal, and must be faster than.

The operations are called as programs that use PIL call them; ranges are written out once more, not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

Bytes = NDArray[np.uint8]
Operation = tuple[str, int, int]  # name, magnitude, sign


def _affine(*numbers: float) -> Callable[[Image.Image], Image.Image]:
    return lambda image: image.transform(image.size, Image.Transform.AFFINE, numbers)


def _duller(magnitude: int) -> float:
    return float(magnitude) * 0.9 / 10 + 0.05


def _part(magnitude: int) -> float:
    return float(magnitude) * 0.3 / 10


OPERATIONS: dict[str, Callable[[Image.Image, int, int], Image.Image]] = {
    "autocontrast": lambda image, m, sign: ImageOps.autocontrast(image),
    "brightness": lambda image, m, sign: ImageEnhance.Brightness(image).enhance(_duller(m)),
    "color": lambda image, m, sign: ImageEnhance.Color(image).enhance(_duller(m)),
    "contrast": lambda image, m, sign: ImageEnhance.Contrast(image).enhance(_duller(m)),
    "equalize": lambda image, m, sign: ImageOps.equalize(image),
    "identity": lambda image, m, sign: image,
    "posterize": lambda image, m, sign: ImageOps.posterize(image, 4 + m * 4 // 10),
    "rotate": lambda image, m, sign: image.rotate(sign * 3 * m),
    "sharpness": lambda image, m, sign: ImageEnhance.Sharpness(image).enhance(_duller(m)),
    "shear-x": lambda image, m, sign: _affine(1, sign * _part(m), 0, 0, 1, 0)(image),
    "shear-y": lambda image, m, sign: _affine(1, 0, 0, sign * _part(m), 1, 0)(image),
    "solarize": lambda image, m, sign: ImageOps.solarize(image, 256 - m * 256 // 10),
    "translate-x": lambda image, m, sign: _affine(1, 0, int(sign * _part(m) * image.width), 0, 1, 0)(image),
    "translate-y": lambda image, m, sign: _affine(1, 0, 0, 0, 1, int(sign * _part(m) * image.height))(image),
}


@cache
def _border(side: int) -> NDArray[np.intp]:
    return np.pad(np.arange(side), side // 8, mode="reflect")


def to_pil(pixels: Bytes) -> Image.Image:
    """Return an image (H, W, C) as PIL's RGB or L."""
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def to_pixels(image: Image.Image) -> Bytes:
    """Return PIL's image as an array (H, W, C)."""
    return np.asarray(image).reshape(image.height, image.width, -1)


def weak(image: Image.Image, flip: bool, down: int, right: int) -> Image.Image:
    """Mirror, pad by reflection, crop."""
    if flip:
        image = ImageOps.mirror(image)
    width, height = image.size
    padded = Image.fromarray(np.asarray(image)[_border(height)[:, None], _border(width)])
    top, left = height // 8 + down, width // 8 + right
    return padded.crop((left, top, left + width, top + height))


def operate(image: Image.Image, operations: Iterable[Operation]) -> Image.Image:
    """Apply the operations one after another."""
    for name, magnitude, sign in operations:
        image = OPERATIONS[name](image, magnitude, sign)
    return image


def cutout(image: Image.Image, top: int, left: int) -> Image.Image:
    """Draw a grey square of half the shorter side, in place."""
    side = min(image.size) // 2
    grey = 127 if image.mode == "L" else (127, 127, 127)
    ImageDraw.Draw(image).rectangle((left, top, left + side - 1, top + side - 1), grey)
    return image
