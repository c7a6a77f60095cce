"""Unlabeled images worth a look: those the method is most certain of, those it leaves most open, and its worst errors.

*Certain* and *open* are measured by the mean possibility of the classes (``efficiency`` of one item): 1/K when one
class alone is possible, 1 when anything is. *Confidently wrong* are items whose class is in truth another one than
the most probable; first come those whose true class was deemed least possible. Degrees of possibility tie, so the
highest probability decides second. Methods without degrees of possibility are judged by probabilities alone.

What a method is most certain of is often one easy class, and its worst errors one confusion, many times over. So they
take turns: first the most telling item of each predicted class (of each pair of true and predicted class), then the
second of each.

Shapes: N unlabeled items, K classes.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ccssl.reports.answers import Answers, Floats, Ints

if TYPE_CHECKING:
    from ccssl.images.dataset import ImageData

KINDS = ("certain", "ambiguous", "wrong")
LARGEST_SIDE = 96  # pixels of an embedded picture
MOST_BARS = 10


@dataclass(frozen=True)
class Bar:
    """The degree of one class."""

    name: str
    degree: float
    true: bool
    predicted: bool


@dataclass(frozen=True)
class Example:
    """An image with what was said of it."""

    image: str  # a data URI
    predicted: str
    confidence: float
    truth: str | None
    bars: tuple[Bar, ...]
    others: tuple[int, float] | None  # classes without a bar: how many, and the largest degree among them


def choose(answers: Answers, count: int) -> dict[str, list[int]]:
    """Return for each of ``KINDS`` the rows of at most ``count`` items, the most telling one first.

    >>> pi = np.array([[1, 0.1], [0.9, 1], [0.2, 1]])
    >>> choose(Answers(np.arange(3), pi / pi.sum(1, keepdims=True), np.array([0, 0, 0]), pi), 1)
    {'certain': [0], 'ambiguous': [1], 'wrong': [2]}
    """
    top_N = answers.probabilities.max(1)
    predicted_N = answers.probabilities.argmax(1)
    openness_N = -top_N if answers.possibility is None else answers.possibility.mean(1)
    known_N = answers.labels >= 0
    truth_N = np.where(known_N, answers.labels, 0)
    at_truth_N = np.take_along_axis(answers.degrees, truth_N[:, None], 1)[:, 0]
    wrong = np.flatnonzero(known_N & (predicted_N != answers.labels))
    worst = wrong[np.lexsort((-top_N[wrong], at_truth_N[wrong]))]
    return {
        "certain": _by_turns(np.lexsort((-top_N, openness_N)), predicted_N)[:count],
        "ambiguous": np.lexsort((top_N, -openness_N))[:count].tolist(),
        "wrong": _by_turns(worst, predicted_N * answers.degrees.shape[1] + truth_N)[:count],
    }


def _by_turns(order: Ints, kind_N: Ints) -> list[int]:
    """Return rows in their order, but the first of each kind before the second of any.

    >>> _by_turns(np.array([3, 1, 0, 2]), np.array([7, 5, 7, 5]))
    [3, 0, 1, 2]
    """
    met: dict[int, int] = {}
    turns = []
    for row in order.tolist():
        kind = int(kind_N[row])
        turns.append(met.get(kind, 0))
        met[kind] = turns[-1] + 1
    return order[np.argsort(turns, kind="stable")].tolist()


def example(row: int, answers: Answers, data: ImageData) -> Example:
    """Return one item, ready to be shown."""
    probability_K, degree_K = answers.probabilities[row], answers.degrees[row]
    label, predicted = int(answers.labels[row]), int(probability_K.argmax())
    names = data.class_names
    shown = _classes_shown(degree_K, probability_K, label)
    hidden = np.setdiff1d(np.arange(len(names)), shown)
    return Example(
        image=data_uri(data.train_images[answers.ids[row]]),
        predicted=names[predicted],
        confidence=float(probability_K[predicted]),
        truth=None if label < 0 else names[label],
        bars=tuple(Bar(names[k], float(degree_K[k]), k == label, k == predicted) for k in shown),
        others=(len(hidden), float(degree_K[hidden].max())) if len(hidden) else None,
    )


def _classes_shown(degree_K: Floats, probability_K: Floats, label: int) -> Sequence[int]:
    """All classes in their order where they are few; else those with the largest degrees, and the true one."""
    if len(degree_K) <= MOST_BARS:
        return range(len(degree_K))
    shown = np.lexsort((-probability_K, -degree_K))[:MOST_BARS].tolist()
    if label >= 0 and label not in shown:
        shown[-1] = label
    return shown


def data_uri(image_HWC: NDArray[np.uint8]) -> str:
    """Return an image as PNG in a data URI, made smaller where it is large."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(image_HWC.squeeze(-1) if image_HWC.shape[-1] == 1 else image_HWC))
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
