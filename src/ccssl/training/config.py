"""How a network is trained, whatever the data and the method: a value, which needs no torch to be read or written."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ccssl.errors import InputError, did_you_mean

TEACHERS = ("model", "snapshot", "ema")
PRECISIONS = ("fp64", "fp32", "bf16", "fp16")


def one_of(name: str, value: str, known: Iterable[str]) -> None:
    """Refuse a name that is not in a table."""
    if value not in known:
        raise InputError(f"{name} must be one of {', '.join(known)}, got {value!r}.{did_you_mean(value, known)}")


def setting(default: Any, text: str) -> Any:
    """Return a field of a configuration, with the text that explains it on the command line."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a network is trained, whatever the data and the method."""

    steps: int = setting(2**18, "training steps")
    batch: int = setting(32, "labeled images a step, over all devices")
    mu: int = setting(7, "unlabeled images for each labeled one")
    lambda_u: float = setting(1.0, "weight of the loss on unlabeled images")
    lr: float = setting(0.03, "initial learning rate; it falls along a cosine")
    momentum: float = setting(0.9, "Nesterov momentum of SGD")
    weight_decay: float = setting(5e-4, "weight decay, on all weights but biases and norms")
    ema: float = setting(0.999, "decay of the averaged network, which is the one reported")
    ema_ramp: bool = setting(True, "begin with a smaller decay, so that the average forgets the initial weights")
    teacher: str | None = setting(
        None, f"who predicts weak views: {', '.join(TEACHERS)}; the method's own if not given"
    )
    calibrate_every: int | None = setting(
        None,
        "steps between two refreshes of a snapshot with its calibration; the method's own, 10, if not given; with "
        "another teacher a calibration is made at every step",
    )
    eval_every: int = setting(1024, "steps between two evaluations; each is followed by a checkpoint")
    eval_batch: int = setting(512, "images predicted at once in evaluations")
    eval_unlabeled: int = setting(10_000, "unlabeled images whose pseudo-labels are evaluated, at most")
    device: str = setting("auto", "device: auto, cpu, cuda, cuda:1, mps")
    precision: str = setting("auto", f"precision of the networks: auto, {', '.join(PRECISIONS)}")
    channels_last: bool = setting(True, "memory layout of images, channels innermost")
    compile: bool = setting(False, "compile the network with torch.compile")
    deterministic: bool = setting(False, "refuse operations whose result may change between runs")
    seed: int = setting(0, "seed of everything random")

    def __post_init__(self) -> None:
        """Refuse numbers that no training can have."""
        for name in ("steps", "batch", "mu", "calibrate_every", "eval_every", "eval_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}.")
        for name in ("lr", "lambda_u", "weight_decay", "seed", "eval_unlabeled"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} must be a finite number, at least 0, got {getattr(self, name)}.")
        for name in ("momentum", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be a decay in [0, 1), got {getattr(self, name)}.")
        if self.teacher is not None:
            one_of("teacher", self.teacher, TEACHERS)
        one_of("precision", self.precision, ("auto", *PRECISIONS))
        if self.seed >= 2**63:
            raise InputError(f"seed must be below 2^63, got {self.seed}.")
