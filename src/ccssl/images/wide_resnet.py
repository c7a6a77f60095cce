r"""The Wide ResNet of the literature on semi-supervised image classification: 28 layers, 2 or 8 times as wide.

After a first 3x3 convolution to 16 channels come three groups of four residual units with 16, 32 and 64 times
``width`` channels; the second and the third group halve the resolution. A unit normalises and activates
*before* each convolution (He et al., 2016; Zagoruyko and Komodakis, 2016)::

    a = act(bn(x))          y = x + conv(act(bn(conv(a))))

The first unit of a group changes the number of channels, so that x passes a 1x1 convolution on its shortcut;
in the very first unit the shortcut starts from a. Then act(bn(.)), the mean over all positions, a linear layer.

The details are those of FixMatch (Sohn et al., 2020) and matter for its published figures:

* act is a leaky ReLU of slope 0.1;
* batch norm keeps 0.999 of its running averages at each step (momentum 0.001 as torch counts) and adds 1e-3 to
  variances;
* convolutions start from a normal law of variance 2 / (k^2 * output channels), with no correction for the slope;
  the linear layer from Glorot's normal law and a bias of 0.

Three deliberate choices where implementations differ. Convolutions have no bias, since every path from one leads
into a batch norm that subtracts it. The units that start the second and the third group do normalise and
activate in front of their first convolution, as the paper and its authors' code do; a widespread translation to
PyTorch leaves that out by a slip. Padding is symmetric as everywhere in torch.

Shapes: B items, C channels, K classes.
"""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from ccssl.errors import InputError

_SLOPE = 0.1


class WideResNet(nn.Module):
    """Images (B, C, H, W) to logits (B, K); sides of at least 4 pixels. ``depth`` is 6 n + 4 for n units a group.

    ``size``, the shorter side of the images, changes nothing: the mean over positions takes any.

    >>> sum(parameter.numel() for parameter in WideResNet(classes=10).parameters())
    1467610
    """

    def __init__(self, classes: int, channels: int = 3, size: int = 32, *, depth: int = 28, width: int = 2) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise InputError(f"depth must be 10, 16, 22, 28, ... (6 n + 4), got {depth}")
        widths = (16, 16 * width, 32 * width, 64 * width)
        self.stem = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        units = []
        for group, (before, after) in enumerate(pairwise(widths)):
            units.append(_Unit(before, after, stride=1 if group == 0 else 2, activate_shortcut=group == 0))
            units += [_Unit(after, after) for _ in range((depth - 4) // 6 - 1)]
        self.units = nn.Sequential(*units)
        self.norm = _norm(widths[-1])
        self.head = nn.Linear(widths[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.xavier_normal_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        features = _activate(self.norm(self.units(self.stem(images))))
        return self.head(features.mean((2, 3)))


class _Unit(nn.Module):
    """A residual unit."""

    def __init__(self, before: int, after: int, stride: int = 1, activate_shortcut: bool = False) -> None:
        super().__init__()
        self.norm1 = _norm(before)
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm2 = _norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.shortcut = None if before == after else nn.Conv2d(before, after, 1, stride, bias=False)
        self.activate_shortcut = activate_shortcut

    def forward(self, x: Tensor) -> Tensor:
        a = _activate(self.norm1(x))
        if self.activate_shortcut:
            x = a
        shortcut = x if self.shortcut is None else self.shortcut(x)
        return shortcut + self.conv2(_activate(self.norm2(self.conv1(a))))


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.001)


def _activate(normalized: Tensor) -> Tensor:
    # Batch norm does not need its output for its gradient, so it may be overwritten.
    return F.leaky_relu(normalized, _SLOPE, inplace=True)
