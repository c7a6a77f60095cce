"""The hyperparameters of the methods: values that need no torch, so that the command line can name them at once.

Each class here belongs to a method of the same name, whose file says in its formulas what they do. The paper's search
spaces are told there, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ccssl.errors import InputError

if TYPE_CHECKING:
    from ccssl.credal.possibility import Normalization


@dataclass(frozen=True)
class SupervisedConfig:
    """Nothing to choose."""


@dataclass(frozen=True)
class PseudoLabelConfig:
    """Whom to believe."""

    threshold: float = field(default=0.0, metadata={"help": "confidence that a prediction must reach; 0: none"})

    def __post_init__(self) -> None:
        """Refuse what is no probability."""
        check_number("threshold", self.threshold, 0, 1)


@dataclass(frozen=True)
class UDAConfig:
    """How sharp and how confident."""

    threshold: float = field(default=0.8, metadata={"help": "confidence that a sharpened prediction must reach"})
    temperature: float = field(default=0.5, metadata={"help": "divides the logits; below 1 it sharpens"})

    def __post_init__(self) -> None:
        """Refuse what is no probability, or no temperature."""
        check_number("threshold", self.threshold, 0, 1)
        check_positive("temperature", self.temperature)


@dataclass(frozen=True)
class FixMatchConfig:
    """How confident a prediction must be."""

    threshold: float = field(default=0.95, metadata={"help": "confidence that a prediction must reach"})
    temperature: float = field(
        default=1.0, metadata={"help": "divides the logits before the threshold; below 1 more predictions pass"}
    )

    def __post_init__(self) -> None:
        """Refuse what is no probability, or no temperature."""
        check_number("threshold", self.threshold, 0, 1)
        check_positive("temperature", self.temperature)


@dataclass(frozen=True)
class FixMatchDAConfig(FixMatchConfig):
    """How confident an aligned prediction must be, and how it is used."""

    hard: bool = field(default=False, metadata={"help": "learn the most probable class, not the distribution"})
    memory: int = field(default=128, metadata={"help": "batches in the running mean of the predictions"})

    def __post_init__(self) -> None:
        """Refuse what is no probability, no temperature, or no number of batches."""
        super().__post_init__()
        check_switch("hard", self.hard)
        check_count("memory", self.memory)


@dataclass(frozen=True)
class FlexMatchConfig:
    """The largest threshold, and how it is approached."""

    threshold: float = field(default=0.95, metadata={"help": "cut-off: the threshold of a class learned best"})
    warmup: bool = field(default=True, metadata={"help": "keep thresholds low while most items are unused"})

    def __post_init__(self) -> None:
        """Refuse what is no probability, or no switch."""
        check_number("threshold", self.threshold, 0, 1)
        check_switch("warmup", self.warmup)


@dataclass(frozen=True)
class CSSLConfig:
    """How far targets are opened."""

    least_alpha: float = field(default=1e-3, metadata={"help": "possibility of the other classes, at least"})
    memory: int = field(default=128, metadata={"help": "batches in the running mean of the predictions"})

    def __post_init__(self) -> None:
        """Refuse what is no possibility, or no number of batches."""
        check_number("least_alpha", self.least_alpha, 0, 1)
        check_count("memory", self.memory)


@dataclass(frozen=True)
class CCSSLDiffConfig:
    """How p-values become possibilities."""

    normalization: Normalization = field(
        default="proportional", metadata={"help": "divide p-values by their maximum, or raise the top class to 1"}
    )

    def __post_init__(self) -> None:
        """Refuse an unknown normalisation."""
        from ccssl.credal.possibility import NORMALIZATIONS  # loads torch, which help does without

        if self.normalization not in NORMALIZATIONS:
            raise InputError(
                f"normalization must be one of {', '.join(NORMALIZATIONS)}, got {self.normalization!r}"
            )


@dataclass(frozen=True)
class CCSSLPropConfig(CCSSLDiffConfig):
    """The same, and the sensitivity of the score."""

    gamma: float = field(default=0.1, metadata={"help": "damps the influence of a class's own probability"})

    def __post_init__(self) -> None:
        """Refuse what makes no score."""
        super().__post_init__()
        check_number("gamma", self.gamma, 0)


CONFIGS: dict[str, type] = {
    "supervised": SupervisedConfig,
    "pseudo-label": PseudoLabelConfig,
    "uda": UDAConfig,
    "fixmatch": FixMatchConfig,
    "fixmatch-da": FixMatchDAConfig,
    "flexmatch": FlexMatchConfig,
    "cssl": CSSLConfig,
    "ccssl-diff": CCSSLDiffConfig,
    "ccssl-prop": CCSSLPropConfig,
}


def check_number(name: str, value: float, least: float, most: float = math.inf) -> None:
    """Refuse a hyperparameter that is no finite number in [least, most]."""
    if not _is_number(value) or not (least <= value <= most and abs(value) < math.inf):
        where = f", at least {least:g}" if most == math.inf else f" in [{least:g}, {most:g}]"
        raise InputError(f"{name} must be a finite number{where}, got {value!r}")


def check_positive(name: str, value: float) -> None:
    """Refuse a hyperparameter that is no finite number above 0."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise InputError(f"{name} must be a finite number above 0, got {value!r}")


def check_count(name: str, value: int) -> None:
    """Refuse a hyperparameter that counts nothing: it must be a whole number, at least 1."""
    if not _is_number(value) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} must be a whole number, at least 1, got {value!r}")


def check_switch(name: str, value: bool) -> None:
    """Refuse a hyperparameter that is neither True nor False: a text such as "no" would count as True."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
