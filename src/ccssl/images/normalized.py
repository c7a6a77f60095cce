"""A network that takes images as they are stored: uint8 in, logits out."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

SAMPLE = 10_000  # images from which mean and deviation are taken


class Normalized(nn.Module):
    """A network behind the normalisation of its inputs, to mean 0 and deviation 1 of each channel.

    Mean and deviation, taken from (evenly spaced) training images, are buffers: whoever has the weights has them, too.
    """

    mean: Tensor  # (C, 1, 1)
    scale: Tensor  # (C, 1, 1), one over the deviation

    def __init__(self, network: nn.Module, images_NHWC: np.ndarray, ids: np.ndarray) -> None:
        super().__init__()
        self.network = network
        counts_CV = histogram(images_NHWC, ids[:: max(1, len(ids) // SAMPLE)])
        share_CV = counts_CV / counts_CV.sum(1, keepdims=True)
        values = np.arange(256)
        mean = share_CV @ values
        variance = (share_CV * (values - mean[:, None]) ** 2).sum(1)
        deviation = np.sqrt(np.maximum(variance, 1.0))  # a constant channel stays finite
        self.register_buffer("mean", torch.from_numpy(mean).float()[:, None, None])
        self.register_buffer("scale", torch.from_numpy(1 / deviation).float()[:, None, None])

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """Return the logits of uint8 images."""
        return self.network((images_NCHW.to(self.mean.dtype) - self.mean) * self.scale)


def histogram(images_NHWC: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return how often each value 0, ..., 255 stands in each channel (C, 256), a few images at a time."""
    counts_CV = np.zeros((images_NHWC.shape[-1], 256), np.int64)
    for part in np.array_split(ids, max(1, len(ids) // 256)):
        images = images_NHWC[part]
        for channel, counts_V in enumerate(counts_CV):
            counts_V += np.bincount(images[..., channel].ravel(), minlength=256)
    return counts_CV
