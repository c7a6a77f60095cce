"""The configuration of a link predictor: data, split, model, training and method, a value that can be saved.

The defaults are the best setting that ``studies/links`` found on validation facts among those whose guarantee holds.

Importing this loads neither torch nor numpy: the command line needs the names of fields and what they mean, and no
more, to answer ``--help`` at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ccssl.errors import InputError, did_you_mean
from ccssl.methods.config import CONFIGS
from ccssl.training.config import TEACHERS, setting

GRAPHS = ("umls", "kinship", "nations")  # in the package
SPLIT_MODES = ("paired", "random", "paper")
METHODS = ("supervised", "pseudo-label", "ccssl-diff", "ccssl-prop")
MODELS = ("distmult", "complex", "qmult")
NORMALIZATIONS = ("none", "unit", "batch")
LOSSES = ("ce", "bce")
BATCHES = ("facts", "queries")
OPTIMIZERS = ("adam", "adagrad")
SCHEDULES = ("constant", "cosine")
SELECTIONS = ("best", "last")
ALL = "all"  # the split that labels every fact
OWN = "own"  # the teacher that the method has by itself


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """Everything that a link predictor depends on."""

    dataset: str = setting("umls", f"graph: {', '.join(GRAPHS)}, a folder of text files, or pykeen:NAME")
    split: str = setting("40:40:20", "training facts labeled:calibration:unlabeled, or labeled:unlabeled, or all")
    split_mode: str = setting("paired", f"how they are divided: {', '.join(SPLIT_MODES)}")
    method: str = setting("ccssl-prop", f"how to learn: {', '.join(METHODS)}")
    options: Mapping[str, Any] = field(default_factory=dict, metadata={"help": "hyperparameters of the method"})
    model: str = setting("complex", f"scorer: {', '.join(MODELS)}")
    dim: int = setting(512, "real parameters of an entity or relation; 2 make a complex number, 4 a quaternion")
    normalize: str = setting("none", f"normalisation: {', '.join(NORMALIZATIONS)}")
    input_dropout: float = setting(0.5, "share of the parameters of entity and relation left out in training")
    dropout: float = setting(0.6, "share of the product of entity and relation left out in training")
    init_scale: float = setting(0.1, "deviation of the initial parameters")
    loss: str = setting("ce", "loss of a fact: ce (cross-entropy over all tails) or bce (binary, of each tail)")
    batch_of: str = setting("queries", "a batch holds facts, or queries with all their known answers")
    batch: int = setting(256, "facts or queries a step")
    epochs: int = setting(200, "passes over the labeled facts, at most")
    optimizer: str = setting("adam", f"optimizer: {', '.join(OPTIMIZERS)}")
    lr: float = setting(0.01, "learning rate")
    schedule: str = setting("constant", f"how the learning rate goes on: {', '.join(SCHEDULES)}")
    n3: float = setting(0.0, "weight of the N3 penalty")
    ema: float = setting(0.995, "decay of the averaged weights, which are those reported; 0: no average")
    lambda_u: float = setting(0.3, "weight of the loss on unlabeled queries")
    ramp_up: int = setting(50, "epochs in which that weight rises from 0")
    mu: float = setting(2.0, "unlabeled queries for each labeled row of a batch, at most; else all once an epoch")
    teacher: str = setting(
        "ema", f"who predicts unlabeled queries: {', '.join(TEACHERS)}, or {OWN}, the method's own"
    )
    calibrate_every: int = setting(1, "epochs between two refreshes of snapshot and calibration")
    per_relation: bool = setting(False, "calibrate each relation and direction by itself")
    min_p_value: float = setting(
        0.0, "conformal methods: leave out unlabeled queries whose largest p-value is below this"
    )
    temperature: float = setting(
        1.0, "conformal methods: divides the scores that are projected; below 1 targets become sharper"
    )
    reuse_calibration: bool = setting(
        False, "learn from calibration queries, too, as from unlabeled ones; their answers stay hidden"
    )
    align: bool = setting(
        True, "correct the teacher by how often unlabeled queries the other way round name an entity"
    )
    exclude_known: bool = setting(True, "answers known from labeled facts are no candidates of further ones")
    eval_every: int = setting(10, "epochs between two evaluations; each is followed by a checkpoint")
    patience: int = setting(6, "stop after so many evaluations without a better validation MRR; 0: never")
    select: str = setting("best", "weights to keep: the best on validation, or the last")
    eval_unlabeled: int = setting(2000, "unlabeled queries whose pseudo-labels are evaluated, at most")
    device: str = setting("auto", "device: auto, cpu, cuda, cuda:1, mps")
    deterministic: bool = setting(False, "refuse operations whose result may change between runs")
    seed: int = setting(0, "seed of everything random")

    def __post_init__(self) -> None:
        """Refuse what nothing can be trained by."""
        for name, known in {
            "split_mode": SPLIT_MODES,
            "method": METHODS,
            "model": MODELS,
            "normalize": NORMALIZATIONS,
            "loss": LOSSES,
            "batch_of": BATCHES,
            "optimizer": OPTIMIZERS,
            "schedule": SCHEDULES,
            "select": SELECTIONS,
        }.items():
            value = getattr(self, name)
            if value not in known:
                raise InputError(
                    f"{name} must be one of {', '.join(known)}, got {value!r}.{did_you_mean(str(value), known)}"
                )
        if self.teacher not in (*TEACHERS, OWN):
            raise InputError(f"teacher must be one of {', '.join((*TEACHERS, OWN))}, got {self.teacher!r}.")
        for name in ("dim", "batch", "epochs", "calibrate_every", "eval_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("lr", "n3", "lambda_u", "init_scale", "seed", "ramp_up", "patience", "eval_unlabeled"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} must be a finite number, at least 0, got {getattr(self, name)}.")
        for name in ("mu", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} must be a finite number above 0, got {getattr(self, name)}.")
        if not 0 <= self.min_p_value <= 1:
            raise InputError(f"min_p_value must lie in [0, 1], got {self.min_p_value}.")
        for name in ("ema", "dropout", "input_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must lie in [0, 1), got {getattr(self, name)}.")
        _ = self.shares
        self.method_config()

    @property
    def shares(self) -> tuple[float, float, float]:
        """The shares of labeled, calibration and unlabeled facts that the split stands for."""
        return shares_of(self.split)

    def method_config(self) -> Any:
        """Return the method's own configuration."""
        known = CONFIGS[self.method]
        names = [f.name for f in fields(known)]
        for name in self.options:
            if name not in names:
                takes = f"takes {', '.join(names)}" if names else "takes no options"
                raise InputError(f"method {self.method} {takes}, got {name!r}.{did_you_mean(name, names)}")
        return known(**self.options)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for YAML and JSON."""
        return {**asdict(self), "options": dict(self.options)}


def shares_of(ratio: str) -> tuple[float, float, float]:
    """Return the shares of labeled, calibration and unlabeled facts that a ratio stands for.

    >>> shares_of("40:40:20"), shares_of("1:1"), shares_of("all")
    ((0.4, 0.4, 0.2), (0.5, 0.0, 0.5), (1.0, 0.0, 0.0))
    """
    if ratio == ALL:
        return 1.0, 0.0, 0.0
    try:
        numbers = [float(number) for number in ratio.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) == 2:
        numbers.insert(1, 0.0)
    if len(numbers) != 3 or not all(0 <= number < float("inf") for number in numbers) or not numbers[0]:
        raise InputError(
            f"split must be all, or numbers such as 40:40:20 (labeled, calibration, unlabeled) or 40:60 "
            f"(labeled, unlabeled), got {ratio!r}."
        )
    labeled, calibration, unlabeled = (number / sum(numbers) for number in numbers)
    return labeled, calibration, unlabeled
