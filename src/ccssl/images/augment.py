"""Weak and strong views of images: a draw for each image, made on the CPU, applied to whole batches anywhere.

Consistency methods compare a model's answers on two views of an image (FixMatch: Sohn et al., 2020):

* the *weak* view is flipped from left to right by a coin, where a mirrored image is still one of its class (never
  for digits and letters), and shifted by up to an eighth of its sides, the border being reflected;
* the *strong* view is a weak view, with a draw of its own, after RandAugment (``randaugment``) and cutout: a grey
  square, half as wide as the shorter side, hides a part.

Drawing and applying are two steps. A draw is made for the *global* batch from an explicit generator on the CPU, so it
does not depend on the device or on how many processes share the batch: a process takes the rows it needs and moves
them. Applying is arithmetic on uint8 tensors with one draw an image; it reads nothing back from the device, and an
image's view does not depend on the other images.

The square follows the widely used PyTorch program: with (u, v) uniform over the image and a width of w, its upper
left pixel is floor(max(0, v - w/2), max(0, u - w/2)), so it is w pixels wide at the upper and the left border and is
cut off at the lower and right ones; its grey is 127. (There it covers one row and one column more, because PIL's
rectangles include their far edges. The original program cuts the square off on all sides.)

Shapes: N images, H height, W width, C channels (1 or 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ccssl.images.randaugment import OperationDraw, draw_operations, randaugment

_GREY = 127


@dataclass(frozen=True, eq=False)
class WeakDraw:
    """How n images of one size are flipped and shifted."""

    size: tuple[int, int]  # H, W
    flip: Tensor  # (N,) bool
    shift: Tensor  # (N, 2) how many pixels down and right of a pixel its source is

    def __len__(self) -> int:
        return len(self.flip)

    def __getitem__(self, rows: slice | Tensor) -> WeakDraw:
        """Select images."""
        return WeakDraw(self.size, self.flip[rows], self.shift[rows])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> WeakDraw:
        """Return the same draw on another device."""
        flip, shift = (tensor.to(device, non_blocking=non_blocking) for tensor in (self.flip, self.shift))
        return WeakDraw(self.size, flip, shift)


@dataclass(frozen=True, eq=False)
class StrongDraw:
    """A weak draw, the operations of RandAugment, and where the square is put."""

    weak: WeakDraw
    operations: OperationDraw
    corner: Tensor  # (N, 2) row and column of the square's upper left pixel

    def __len__(self) -> int:
        return len(self.corner)

    def __getitem__(self, rows: slice | Tensor) -> StrongDraw:
        """Select images; on the CPU, before the draw moves."""
        return StrongDraw(self.weak[rows], self.operations[rows], self.corner[rows])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> StrongDraw:
        """Return the same draw on another device."""
        return StrongDraw(
            self.weak.to(device, non_blocking),
            self.operations.to(device, non_blocking),
            self.corner.to(device, non_blocking=non_blocking),
        )


def draw_weak(n: int, height: int, width: int, flip: bool, generator: torch.Generator) -> WeakDraw:
    """Draw the flips, if ``flip``, and shifts of n images, from a generator on the CPU.

    >>> draw = draw_weak(3, 32, 32, flip=True, generator=torch.Generator().manual_seed(0))
    >>> draw.flip.shape, draw.shift.shape, bool(draw.shift.abs().max() <= 4)
    (torch.Size([3]), torch.Size([3, 2]), True)
    """
    coin = torch.randint(2, (n,), generator=generator) == 1
    shifts = [torch.randint(-(side // 8), side // 8 + 1, (n,), generator=generator) for side in (height, width)]
    return WeakDraw((height, width), coin & flip, torch.stack(shifts, 1))


def draw_strong(
    n: int,
    height: int,
    width: int,
    flip: bool,
    generator: torch.Generator,
    operations: int = 2,
    magnitude: int = 10,
) -> StrongDraw:
    """Draw n strong views: a weak draw, ``operations`` with magnitudes up to ``magnitude``, a square each."""
    weak_draw = draw_weak(n, height, width, flip, generator)
    operation_draw = draw_operations(n, generator, operations, magnitude)
    middle = torch.rand(n, 2, generator=generator, dtype=torch.float64) * torch.tensor([height, width])
    corner = (middle - _hole(height, width) / 2).clamp_(min=0).long()
    return StrongDraw(weak_draw, operation_draw, corner)


def weak(images_NHWC: Tensor, draw: WeakDraw) -> Tensor:
    """Return the weak views of uint8 images."""
    _check(images_NHWC, draw)
    n, height, width, channels = images_NHWC.shape
    device = images_NHWC.device
    row_NH = _reflect(torch.arange(height, device=device) + draw.shift[:, :1], height)
    column_NW = _reflect(torch.arange(width, device=device) + draw.shift[:, 1:], width)
    column_NW = torch.where(draw.flip.unsqueeze(1), width - 1 - column_NW, column_NW)
    # Rows are copied whole; what is left is a gather along rows, by the byte, which is quicker than by the pixel.
    first_N1 = torch.arange(0, n * height, height, device=device).unsqueeze(1)
    rows = images_NHWC.reshape(n * height, width * channels).index_select(0, (row_NH + first_N1).flatten())
    byte_NWC = column_NW.unsqueeze(2) * channels + torch.arange(channels, device=device)
    byte_NHB = byte_NWC.view(n, 1, width * channels).expand(-1, height, -1)
    return rows.view(n, height, width * channels).gather(2, byte_NHB).view(images_NHWC.shape)


def strong(images_NHWC: Tensor, draw: StrongDraw) -> Tensor:
    """Return the strong views of uint8 images."""
    return _cutout(randaugment(weak(images_NHWC, draw.weak), draw.operations), draw.corner)


def _cutout(images_NHWC: Tensor, corner_N2: Tensor) -> Tensor:
    """Hide a square of the images, in place."""
    n, height, width, channels = images_NHWC.shape
    images_NHB = images_NHWC.view(n, height, width * channels)
    hole = _hole(height, width)

    def hidden(indices: Tensor, corner_N1: Tensor) -> Tensor:
        distance = indices - corner_N1
        return ((distance >= 0) & (distance < hole)).to(torch.uint8) * 255

    down_NH = hidden(torch.arange(height, device=images_NHWC.device), corner_N2[:, :1])
    along_NB = hidden(torch.arange(width * channels, device=images_NHWC.device) // channels, corner_N2[:, 1:])
    # Masks of 0 and 255 combined bitwise: ten times as fast on a CPU as filling where a boolean mask is true.
    hidden_NHB = down_NH.unsqueeze(2) & along_NB.unsqueeze(1)
    images_NHB.bitwise_or_(hidden_NHB).bitwise_xor_(hidden_NHB & (255 ^ _GREY))
    return images_NHWC


def _reflect(index: Tensor, side: int) -> Tensor:
    """Fold indices that are at most side - 1 outside back into 0..side - 1; the border itself is not repeated."""
    return (side - 1) - ((side - 1) - index.abs()).abs()


def _hole(height: int, width: int) -> int:
    return min(height, width) // 2


def _check(images: Tensor, draw: WeakDraw) -> None:
    if images.dtype != torch.uint8:
        raise ValueError(f"images must be uint8, got {images.dtype}")
    if images.ndim != 4 or images.shape[3] not in (1, 3):
        raise ValueError(f"images must have the shape (N, H, W, 1 or 3), got {tuple(images.shape)}")
    if (len(images), *images.shape[1:3]) != (len(draw), *draw.size):
        raise ValueError(
            f"the draw is for {len(draw)} images of {draw.size[0]} x {draw.size[1]} pixels, "
            f"got images of shape {tuple(images.shape)}"
        )
    if images.device != draw.flip.device:
        raise ValueError(f"the draw must be on {images.device} like the images, got {draw.flip.device}")
