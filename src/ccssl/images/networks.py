"""The networks that can be named: each is built from the number of classes, channels and the side of the images.

Any other ``nn.Module`` that turns (B, C, H, W) into logits (B, K) may stand in their place. Torch is loaded when one is
built: the command line only needs their names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def _small(classes: int, channels: int, size: int) -> nn.Module:
    from ccssl.images.small_cnn import SmallCNN

    return SmallCNN(classes, channels, size)


def _wide_resnet(classes: int, channels: int, size: int, width: int) -> nn.Module:
    from ccssl.images.wide_resnet import WideResNet

    return WideResNet(classes, channels, size, width=width)


# (classes, channels, size) -> network; size is the shorter side of the images in pixels.
NETWORKS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "small": _small,
    "wrn-28-2": partial(_wide_resnet, width=2),
    "wrn-28-8": partial(_wide_resnet, width=8),
}
