"""What the network of a finished run answers, asked once more: on test images, on unlabeled ones, and step by step.

Everything here is computed from the checkpoint and the data, as ``Training`` does it at an evaluation, so that the page
shows what the final figures were taken from. A ``Lesson`` follows one unlabeled image through a training step of a
conformal method.

Shapes: N items, K classes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ccssl.conformal import Audit, Calibration, audit
from ccssl.credal import Levels, credal_loss, project_logits
from ccssl.credal.possibility import Possibility, as_dense
from ccssl.experiments.run import load_run
from ccssl.images.augment import draw_strong, draw_weak, strong, weak
from ccssl.images.dataset import ImageData
from ccssl.images.splits import Split
from ccssl.metrics import DELTAS

if TYPE_CHECKING:
    from pathlib import Path

    from ccssl.training.loop import Training

LESSON_ITEMS = 256  # among which one that shows something is looked for

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]


@dataclass(frozen=True)
class Answers:
    """What a network says of N items."""

    ids: Ints  # (N,) positions among the training or the test images
    probabilities: Floats  # (N, K)
    labels: Ints  # (N,) -1 where nobody knows
    possibility: Floats | None  # (N, K) credal methods

    @property
    def predicted(self) -> Ints:
        """The most probable class of each item."""
        return self.probabilities.argmax(1)

    @property
    def right(self) -> NDArray[np.bool_]:
        """Which items are right."""
        return self.predicted == self.labels

    @property
    def degrees(self) -> Floats:
        """The degrees of possibility, or the probabilities where there are none."""
        return self.probabilities if self.possibility is None else self.possibility


@dataclass(frozen=True)
class Lesson:
    """One unlabeled image in a training step; arrays have an entry for each class."""

    weak: NDArray[np.uint8]  # the view that the teacher sees
    strong: NDArray[np.uint8]  # the view that is learned from
    taught: Floats  # the teacher's probabilities for the weak view
    p_values: Floats
    possibility: Floats
    student: Floats  # the network's probabilities for the strong view
    target: Floats  # their projection onto the credal set
    loss: float
    label: int  # -1 if nobody knows


@dataclass(frozen=True)
class Look:
    """All that was asked of a run."""

    data: ImageData
    split: Split
    test: Answers
    unlabeled: Answers | None  # None where no item is unlabeled
    audit: Audit | None  # conformal methods: of the calibration, on the test images
    lesson: Lesson | None  # conformal methods


@torch.no_grad()
def look(folder: Path, device: str | None = None, data: ImageData | None = None) -> Look:
    """Ask the network of a run; ``data`` spares reading them again."""
    training = load_run(folder, data, device=device)
    probabilities, labels, pi = training.predictions("test")
    conformal = training.method.uses_calibration
    return Look(
        data=training.data,
        split=training.split,
        test=_answers(training.split.test, probabilities, labels, pi),
        unlabeled=_unlabeled(training),
        audit=_audit(training, probabilities, labels) if conformal else None,
        lesson=_lesson(training) if conformal and len(training.split.unlabeled) else None,
    )


def _answers(ids: Ints, probabilities: Tensor, labels: Tensor, pi: Possibility | None) -> Answers:
    # In float64, where a degree of 1/10 is at most 0.1.
    degrees = None if pi is None else as_dense(pi.to("cpu"), torch.float64).numpy()
    return Answers(ids, _numpy(probabilities), labels.cpu().numpy(), degrees)


def _numpy(values: Tensor) -> Floats:
    return values.cpu().double().numpy()


def _unlabeled(training: Training) -> Answers | None:
    if not len(training.split.unlabeled):
        return None
    found = training.pseudo_labels()
    return _answers(found.ids, found.probabilities, found.labels, found.possibility)


def _audit(training: Training, probabilities: Tensor, labels: Tensor) -> Audit:
    """Audit the calibration that belongs to the averaged network: test images are what it has never seen."""
    method = copy.deepcopy(training.method)
    training.calibrate(method, training.ema.network, None)
    calibration = method.get_submodule("calibration")
    assert isinstance(calibration, Calibration)
    return audit(calibration, probabilities, labels, DELTAS)


def _lesson(training: Training) -> Lesson:
    """Return the item with the most to learn about a set that is neither a corner nor a whole edge."""
    ids = training.split.unlabeled[:LESSON_ITEMS]
    images = training.train_images.take(ids)
    n, height, width = images.shape[:3]
    draw = torch.Generator().manual_seed(0)
    flip = training.data.flip
    weak_views = weak(images, draw_weak(n, height, width, flip, draw).to(images.device))
    strong_views = strong(images, draw_strong(n, height, width, flip, draw).to(images.device))
    taught, student = training.teach(weak_views), training.teach(strong_views)
    pi = training.method.possibility(taught)
    assert isinstance(pi, Levels)
    loss_N = credal_loss(student, pi, reduction="none")
    pi_NK = pi.dense()
    second_N = pi_NK.topk(2).values[:, 1]
    row = int((loss_N * second_N * (1 - second_N)).argmax())
    return Lesson(
        weak=weak_views[row].cpu().numpy(),
        strong=strong_views[row].cpu().numpy(),
        taught=_numpy(taught[row].softmax(-1)),
        p_values=_numpy(pi.p_values()[row]),
        possibility=_numpy(pi_NK[row]),
        student=_numpy(student[row].softmax(-1)),
        target=_numpy(project_logits(student, pi)[row]),
        loss=float(loss_N[row]),
        label=int(training.data.train_labels[ids[row]]),
    )
