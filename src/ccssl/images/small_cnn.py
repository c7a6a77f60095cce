"""A small convolutional network for CPUs: five convolutions, most of them on maps of 7x7 and 4x4.

On a CPU the early layers cost the most: large maps, few channels, little arithmetic for the memory they touch. So the
first convolution steps by two, a pooling follows at once, and the depth comes afterwards, where maps are small. About 6
million multiply-adds for an image of 28x28 or 32x32. Smaller images (8x8 digits) are not reduced before the second
convolution, larger ones (96x96) are reduced twice as much.

The last maps are averaged over each *quarter* of the image, not over the whole of it: what tells a d from a p is where
its strokes are. That costs nothing, and with few labels it is worth points of accuracy. ``studies/small_cnn.md`` tells
how the network was chosen.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from ccssl.errors import InputError

WIDTHS = (24, 64, 128)


class SmallCNN(nn.Module):
    """Images (B, C, H, W) to logits (B, K); ``size`` is the shorter side of the images, at least 8."""

    def __init__(self, classes: int, channels: int = 3, size: int = 32) -> None:
        super().__init__()
        if size < 3:
            raise InputError(f"the small network takes images of 3 x 3 pixels or more, got a side of {size}.")
        first, second, third = WIDTHS
        stride, pool = (1, 1) if size < 16 else (2, 2) if size < 64 else (2, 4)
        self.layers = nn.Sequential(
            *_convolution(channels, first, 5, stride),
            nn.MaxPool2d(pool, ceil_mode=True),
            *_convolution(first, second, 3),
            *_convolution(second, second, 3),
            nn.MaxPool2d(2, ceil_mode=True),
            *_convolution(second, third, 3),
            *_convolution(third, third, 3),
        )
        self.head = nn.Linear(4 * third, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(quarters(self.layers(images)).flatten(1))


def quarters(maps: Tensor) -> Tensor:
    """Return the means over the four quarters of maps (B, C, H, W): (B, C, 2, 2).

    The middle line of an odd side belongs to both halves.

    >>> import torch
    >>> quarters(torch.arange(9.0).view(1, 1, 3, 3))
    tensor([[[[2., 3.],
              [5., 6.]]]])
    """
    height, width = maps.shape[2:]
    return avg_pool2d(maps, ((height + 1) // 2, (width + 1) // 2), (height // 2, width // 2))


def _convolution(before: int, after: int, side: int, stride: int = 1) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(before, after, side, stride, padding=side // 2, bias=False)
    return convolution, nn.BatchNorm2d(after), nn.LeakyReLU(0.1, inplace=True)
