"""A small problem for tests of training: noisy 8x8 patterns, one a class, and networks that learn it in seconds."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ccssl.experiments.config import RunConfig
from ccssl.images.dataset import ImageData

CLASSES = 4


def toy_data(train: int = 240, test: int = 80, seed: int = 0, noise: float = 30.0) -> ImageData:
    """Return images of four fixed random patterns under noise, in equal numbers."""
    draw = np.random.default_rng(seed)
    patterns = np.random.default_rng(99).integers(60, 196, (CLASSES, 8, 8, 1))

    def images(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = draw.permutation(np.arange(count) % CLASSES)
        pixels = patterns[labels] + noise * draw.standard_normal((count, 8, 8, 1))
        return pixels.clip(0, 255).astype(np.uint8), labels.astype(np.int64)

    return ImageData("toy", *images(train), *images(test), tuple("abcd"), flip=False)


class Flat(nn.Module):
    """A network without batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class Normed(Flat):
    """A network with batch statistics and with dropout, which draws from torch's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(2, nn.BatchNorm1d(32))
        self.layers.insert(4, nn.Dropout(0.2))


def toy_config(**changes: Any) -> RunConfig:
    """Return a configuration of a second or so."""
    small = {
        "dataset": "toy",
        "labels": 24,
        "steps": 12,
        "batch": 8,
        "mu": 2,
        "eval_every": 5,
        "calibrate_every": 3,
        "precision": "fp32",  # auto depends on the machine
    }
    return RunConfig(**{**small, **changes})


def make(kind: type[nn.Module], seed: int = 0) -> nn.Module:
    """Return a network with seeded weights."""
    torch.manual_seed(seed)
    return kind()
