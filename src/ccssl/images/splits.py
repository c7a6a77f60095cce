r"""Which items are labeled, calibrated with, unlabeled, validated and tested on: decided once, by item id.

A run may use the labels of few items and the images of all. What it learns from and what it is measured with
must not mix: a calibration item that was also trained on voids the guarantee of conformal prediction, silently
(its score is too good), and a validation item in the unlabeled pool has been seen. So the *ids*, positions in
the official order of the data, are divided before anything repeats, shuffles or augments them, and the
division is checked when it is made and again whenever it is read::

    training images = labeled + calibration + unlabeled + validation        (no overlap, nothing left over)

*Labels.* ``sampling="balanced"`` takes floor(labels / classes) items of every class, as the literature on
semi-supervised learning does: 250 labels on 62 classes are 4 a class, 248. ``"iid"`` draws from all items whose
label is known. The unlabeled pool keeps its imbalance either way.

*Calibration items* are taken from the labels, round(fraction * labels) of them. The guarantee holds for fresh
items that are exchangeable with the calibration items, which decides how they are chosen:

* ``"iid"``: at random. The labels are a random sample of the data, and so is a random part of them; then the
  guarantee is exact. Stratifying would destroy this: two calibration items would be of the same class more
  rarely than a calibration item and a fresh one.
* ``"balanced"``: stratified by largest remainder. The labels are no sample of the data to begin with, and
  equal shares waste the least on so few items. Class c with n_c of n labels is due C n_c / n of C calibration
  items; it gets the integer part, and what is left goes to the largest fractional parts, ties by lot. The
  guarantee now speaks of classes drawn with equal chances: right, but for the strata, where the pool is
  balanced; where it is not, a notice says so.

*Unlabeled.* All other training items, also those whose label nobody knows (-1). In the literature the pool holds
the labeled items, too, their labels hidden; ``include_labeled=True`` does that with those trained on. Items of
calibration and validation are never in it.

*Validation items* are drawn at random from the remaining items with a known label, as test items are.

*Repeatable and comparable.* Everything is a function of the labels, the settings and the seed, with one stream
of random numbers for each purpose. Hence methods are compared on the same labels: those of a seed do not depend
on the calibration fraction nor on the size of the validation set, and fewer labels are a part of more.

Shapes: N training items.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from ccssl.errors import InputError

Ids = NDArray[np.int64]
Sampling = Literal["balanced", "iid"]
SAMPLINGS: tuple[str, ...] = get_args(Sampling)

_TRAINING = ("labeled", "calibration", "unlabeled", "validation")
_ROLES = (*_TRAINING, "test")
_IMBALANCE = 1.5  # largest to smallest class, from which on balanced labels are no sample of the pool
_LABELS, _CALIBRATION, _VALIDATION = range(3)  # streams of random numbers


@dataclass(frozen=True, eq=False)
class Split:
    """The ids of items by their role, ascending: positions among the training (``test``: the test) images."""

    labeled: Ids  # those trained on with their labels: without the calibration items
    calibration: Ids
    unlabeled: Ids
    validation: Ids
    test: Ids
    train_size: int  # how many training images there are
    test_size: int
    include_labeled: bool = False  # whether the labeled items are in the unlabeled pool, too
    notices: tuple[str, ...] = ()  # what the user should know, a sentence each

    def check(self) -> None:
        """Raise InputError, naming the offending ids, unless each is in range and has no two roles."""
        for role in _ROLES:
            ids, size = getattr(self, role), self.test_size if role == "test" else self.train_size
            if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.signedinteger):
                raise InputError(f"{role} must be a list of ids, integers, got {ids.dtype} of shape {ids.shape}")
            _refuse(ids[(ids < 0) | (ids >= size)], f"{role} has ids outside 0..{size - 1}")
            _refuse(ids[1:][np.diff(ids) <= 0], f"{role} must be ascending without repetition; out of place")
        for one, other in combinations(_TRAINING, 2):
            both = np.intersect1d(getattr(self, one), getattr(self, other), assume_unique=True)
            if self.include_labeled and (one, other) == ("labeled", "unlabeled"):
                _refuse(np.setdiff1d(self.labeled, both), "unlabeled should include all labeled items, but lacks")
            else:
                _refuse(both, f"{one} and {other} overlap, which would make every figure of the run worthless")

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, numbers and strings.

        >>> split = make_split(np.array([0, 1, 0, 1]), test_size=1, classes=2, labels=2, seed=0)
        >>> Split.from_json(split.to_json()).unlabeled.size
        2
        """
        return {
            **{role: getattr(self, role).tolist() for role in _ROLES},
            "train_size": self.train_size,
            "test_size": self.test_size,
            "include_labeled": self.include_labeled,
            "notices": list(self.notices),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return what ``to_json`` described, after ``check``."""
        if missing := sorted({field.name for field in fields(cls)} - set(content)):
            raise InputError(f"the split lacks {', '.join(missing)}; it is not one that this program wrote")
        for role in _ROLES:
            # numpy would round floats and read strings.
            if not isinstance(content[role], list) or not all(type(i) is int for i in content[role]):
                raise InputError(f"{role} of the split must be a list of integers")
        for name in ("train_size", "test_size"):
            if type(content[name]) is not int:
                raise InputError(f"{name} of the split must be an integer, got {content[name]!r}")
        split = cls(
            **{role: np.array(content[role], dtype=np.int64) for role in _ROLES},
            train_size=content["train_size"],
            test_size=content["test_size"],
            include_labeled=bool(content["include_labeled"]),
            notices=tuple(content["notices"]),
        )
        split.check()
        return split


def make_split(
    train_labels: NDArray[np.integer],
    test_size: int,
    classes: int,
    labels: int,
    seed: int,
    sampling: Sampling = "balanced",
    calibration_fraction: float = 0.0,
    validation: int = 0,
    include_labeled: bool = False,
) -> Split:
    """Divide the items: ``train_labels`` (N,), -1 where unknown; ``labels`` counts the calibration items, too.

    A method that calibrates takes a fraction of 0.25 unless told otherwise; the rest needs none.

    >>> classes_N = np.arange(1000) % 10
    >>> split = make_split(classes_N, 100, classes=10, labels=40, seed=0, calibration_fraction=0.1)
    >>> len(split.labeled), len(split.calibration), len(split.unlabeled)
    (36, 4, 960)
    >>> split.notices
    ('Classes without a calibration item: 0, 2, 3, 4, 6, 9 (4 items, 10 classes).',)
    """
    label_N = _checked_labels(train_labels, classes)
    if sampling not in SAMPLINGS:
        raise InputError(f"sampling must be one of {', '.join(SAMPLINGS)}, got {sampling!r}")
    if labels < 1:
        raise InputError(f"labels must be at least 1, got {labels}")
    if seed < 0:
        raise InputError(f"seed must be at least 0, got {seed}")
    if validation < 0 or test_size < 0:
        raise InputError(f"validation and test_size must be at least 0, got {validation} and {test_size}")
    if not 0 <= calibration_fraction < 1:
        raise InputError(
            f"calibration_fraction must be in [0, 1), to leave labels for training, got {calibration_fraction}"
        )

    known = np.flatnonzero(label_N >= 0)
    if sampling == "balanced":
        chosen = _balanced(label_N, classes, labels, _stream(seed, _LABELS))
    else:
        chosen = _iid(known, labels, _stream(seed, _LABELS))
    calibration = _calibration(label_N, chosen, calibration_fraction, sampling, _stream(seed, _CALIBRATION))
    labeled = np.setdiff1d(chosen, calibration)

    rest = np.setdiff1d(known, chosen)
    if validation > len(rest):
        raise InputError(
            f"validation asks for {validation:,} items, but only {len(rest):,} with a known label are left beside "
            f"the {len(chosen):,} labels; ask for fewer"
        )
    validated = np.sort(_stream(seed, _VALIDATION).permutation(rest)[:validation])

    own_roles = [calibration, validated] if include_labeled else [calibration, validated, labeled]
    unlabeled = np.setdiff1d(np.arange(len(label_N)), np.concatenate(own_roles))
    split = Split(
        labeled=labeled,
        calibration=calibration,
        unlabeled=unlabeled,
        validation=validated,
        test=np.arange(test_size),
        train_size=len(label_N),
        test_size=test_size,
        include_labeled=include_labeled,
        notices=tuple(_notices(label_N, classes, labels, sampling, labeled, calibration, unlabeled)),
    )
    split.check()
    return split


def _balanced(label_N: Ids, classes: int, labels: int, generator: Generator) -> Ids:
    """Return floor(labels / classes) items of each class."""
    each = labels // classes
    if each < 1:
        raise InputError(
            f"{labels} labels are fewer than the {classes} classes; take at least {classes}, or draw them at "
            "random with --label-sampling iid"
        )
    # Every class draws from one shuffled order: the first items of each are then the same for any number.
    order = generator.permutation(len(label_N))
    members = _by_class(order[label_N[order] >= 0], label_N, classes)
    scarce = {c: len(ids) for c, ids in enumerate(members) if len(ids) < each}
    if scarce:
        c, count = min(scarce.items(), key=lambda entry: entry[1])
        advice = f"take at most {count * classes} labels" if count else "leave the class out"
        raise InputError(
            f"class {c} has {count} items with a known label, but {labels} balanced labels need {each} of each of "
            f"{classes} classes; {advice}, or draw them at random with --label-sampling iid"
        )
    return np.sort(np.concatenate([ids[:each] for ids in members]))


def _iid(known: Ids, labels: int, generator: Generator) -> Ids:
    if labels > len(known):
        raise InputError(f"{labels:,} labels are more than the {len(known):,} items whose label is known")
    return np.sort(generator.permutation(known)[:labels])


def _calibration(label_N: Ids, chosen: Ids, fraction: float, sampling: Sampling, generator: Generator) -> Ids:
    """Return the chosen items to calibrate with."""
    if fraction == 0:
        return np.empty(0, dtype=np.int64)
    total = len(chosen)
    count = round(fraction * total)
    if count < 1:
        raise InputError(
            f"calibration_fraction {fraction} of {total} labels leaves no calibration item; take at least "
            f"{1 / total:.3g}, or more labels"
        )
    if count >= total:
        raise InputError(
            f"calibration_fraction {fraction} of {total} labels leaves none to train on; take a smaller fraction, "
            "or more labels"
        )
    order = generator.permutation(chosen)
    if sampling == "iid":
        return np.sort(order[:count])
    members = _by_class(order, label_N, int(label_N.max()) + 1)
    share = apportion(np.array([len(ids) for ids in members]), count, generator)
    return np.sort(np.concatenate([ids[:n] for ids, n in zip(members, share, strict=True)]))


def apportion(sizes: NDArray[np.integer], count: int, generator: Generator) -> Ids:
    """Divide ``count`` in proportion to ``sizes`` by largest remainder, equal remainders by lot.

    >>> apportion(np.array([5, 3, 2]), 4, np.random.default_rng(0))
    array([2, 1, 1])
    """
    total = int(sizes.sum())
    share_c, remainder_c = np.divmod(count * sizes.astype(np.int64), total)  # in integers, so that ties are ties
    lot_c = generator.permutation(len(sizes))
    first = np.lexsort((lot_c, -remainder_c))[: count - share_c.sum()]
    share_c[first] += 1
    return share_c


def _notices(
    label_N: Ids, classes: int, labels: int, sampling: Sampling, labeled: Ids, calibration: Ids, unlabeled: Ids
) -> Iterator[str]:
    """Say what may surprise."""
    used = len(labeled) + len(calibration)
    if used != labels:
        yield f"{used} labels are used, {used // classes} a class: {labels} cannot be shared by {classes} classes."
    for role, ids in (("labeled training", labeled), ("calibration", calibration)):
        absent = np.setdiff1d(np.arange(classes), label_N[ids])
        if ids.size and absent.size:
            yield f"Classes without a {role} item: {_listed(absent)} ({ids.size} items, {classes} classes)."
    if len(calibration) and sampling == "balanced":
        count_c = np.bincount(label_N[label_N >= 0], minlength=classes)
        if count_c.max() > _IMBALANCE * count_c.min():
            yield (
                f"The classes are unequal, from {count_c.min():,} to {count_c.max():,} items, but calibration items "
                "are balanced: what they guarantee holds for classes drawn with equal chances. With "
                "--label-sampling iid it holds for items of the pool."
            )
    if len(unlabeled) == 0:
        yield "No item is left unlabeled: only the supervised method can be used."


def _checked_labels(train_labels: NDArray[np.integer], classes: int) -> Ids:
    label_N = np.asarray(train_labels)
    if label_N.ndim != 1 or not np.issubdtype(label_N.dtype, np.integer):
        raise InputError(f"train_labels must be a list of integers, got {label_N.dtype} of shape {label_N.shape}")
    if classes < 2:
        raise InputError(f"classes must be at least 2, got {classes}")
    label_N = label_N.astype(np.int64)
    bad = np.flatnonzero((label_N < -1) | (label_N >= classes))
    if bad.size:
        raise InputError(
            f"train_labels must be in 0..{classes - 1}, or -1 where unknown; item {bad[0]} has {label_N[bad[0]]}"
        )
    return label_N


def _by_class(ids: Ids, label_N: Ids, classes: int) -> list[Ids]:
    """Return the ids of each class, in the order in which they come."""
    class_n = label_N[ids]
    ends = np.bincount(class_n, minlength=classes).cumsum()
    return np.split(ids[class_n.argsort(kind="stable")], ends[:-1])


def _stream(seed: int, purpose: int) -> Generator:
    return Generator(PCG64([seed, purpose]))


def _refuse(ids: Ids, finding: str) -> None:
    if ids.size:
        raise InputError(f"{finding}: {_listed(ids)}")


def _listed(ids: Ids) -> str:
    return ", ".join(map(str, ids[:10].tolist())) + (f" and {ids.size - 10:,} more" if ids.size > 10 else "")
