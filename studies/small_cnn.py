"""Candidates for the small network, compared on validation images: the table of small_cnn.md.

    python studies/small_cnn.py emnist_byclass.npz OUT --workers 16

One process and one thread a run. Prints a line a run; test images are not looked at.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import nn

from ccssl.experiments.config import RunConfig
from ccssl.experiments.run import train

# A number is a convolution with so many channels (5x5 and stride 2 as "24s2", else 3x3), "|" a pooling. The last maps
# are averaged over the image, or where it says so over each of its quarters, or not at all.
CANDIDATES = (
    "24s2 | 64 64 | 128 128",
    "24s2 | 64 64 | 128 128 quarters",
    "24s2 | 64 64 | 128 128 flat",
    "16s2 | 48 48 | 96 96",
    "32s2 | 48 48 | 96 96",
    "24s2 | 64 | 128 128",
    "mean 24 | 48 48 | 96 96",
    "32s2 64s2 64 128s2 128",
)
METHODS = ("cssl", "ccssl-prop", "fixmatch", "supervised")


def network(text: str, channels: int, classes: int) -> nn.Module:
    """Return the network that a line of ``CANDIDATES`` describes."""
    layers: list[nn.Module] = []
    first = True
    words = text.split()
    side = {"quarters": 2, "flat": 4}.get(words[-1], 1)
    for word in words if side == 1 else words[:-1]:
        if word == "|":
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        elif word == "mean":
            layers.append(nn.AvgPool2d(2))
        else:
            width, stride = int(word.removesuffix("s2")), 2 if word.endswith("s2") else 1
            kernel = 5 if first and stride == 2 else 3
            layers.append(nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False))
            layers += [nn.BatchNorm2d(width), nn.LeakyReLU(0.1, inplace=True)]
            channels, first = width, False
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(side), nn.Flatten(), nn.Linear(channels * side**2, classes))


def job(dataset: str, out: Path, candidate: str, method: str, seed: int) -> str:
    """Train one candidate and return its line."""
    torch.set_num_threads(1)
    config = RunConfig(
        dataset=dataset,
        labels=250,
        method=method,
        steps=1000,
        eval_every=500,
        seed=seed,
        validation=4000,
        device="cpu",
    )
    torch.manual_seed(seed)
    started = time.monotonic()
    folder = out / f"{candidate.replace(' ', '').replace('|', '-')}-{method}-{seed}"
    result = train(config, folder, network=network(candidate, 1, 62), resume=True, quiet=True)
    accuracy, seconds = result["validation"]["accuracy"], time.monotonic() - started
    return f"{candidate:32} {method:12} seed {seed}: {accuracy:.4f} {seconds:4.0f} s"


def main() -> None:
    """Run what the table shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    with ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [
            pool.submit(job, args.dataset, args.out, candidate, method, seed)
            for seed in (0, 1)
            for candidate in CANDIDATES
            for method in METHODS
        ]
        for done in jobs:
            print(done.result(), flush=True)


if __name__ == "__main__":
    main()
