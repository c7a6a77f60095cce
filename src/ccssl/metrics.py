r"""How good are predicted distributions? Accuracy, calibration error, Brier score, log-likelihood.

A prediction is a distribution p on K classes. N of them are judged by their labels y; the first figure should be
large, the others small::

    accuracy  =  mean of [ argmax_k p_k = y ]
    ece       =  sum_b  n_b / N  | accuracy within b  -  mean confidence within b |
    brier     =  mean of sum_k ( p_k - [k = y] )^2                                       in [0, 2]
    nll       =  mean of -log p_y

The *expected calibration error* sorts items by their confidence max_k p_k into bins of equal width,
((b-1)/B, b/B] with B = 15, and compares within each how sure the model is with how often it is right. It says
whether to trust the confidence, not whether the model knows anything. Brier score and negative log-likelihood
are *proper*: no prediction does better on average than the true probabilities.

A possibility distribution beside p adds its validity errors and its efficiency (``ccssl.conformal.validity``).

Sums are taken in float64 on the device of the probabilities, a piece at a time, which bounds the extra memory;
``evaluate`` reads all figures in one transfer.

Shapes: N items, K classes, B bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ccssl.conformal import efficiency, validity_error
from ccssl.conformal.calibration import check_labels, check_probabilities
from ccssl.credal.possibility import Possibility, as_dense

DELTAS = (0.05, 0.1, 0.25)  # significance levels whose validity error is reported

_CHUNK = 2**20  # entries of an (N, K) array worked on at once


def accuracy(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the share of items whose most probable class is the label.

    >>> accuracy(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]))
    tensor(0.5000, dtype=torch.float64)
    """
    labels = _checked(probabilities, labels)
    return (probabilities.argmax(-1) == labels).double().mean()


def ece(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    """Return the expected calibration error: how far confidence and accuracy are apart, in bins of equal width.

    Two items with confidence 0.75, one of them right:

    >>> ece(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]))
    tensor(0.2500, dtype=torch.float64)
    """
    sums = _binned(probabilities, labels, bins)
    return (sums.accuracy - sums.confidence).abs().sum() / len(labels)


def brier(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the mean squared distance between the prediction and the label's one-hot vector, in [0, 2].

    >>> brier(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]))
    tensor(0.6250, dtype=torch.float64)
    """

    def distance(p_NK: Tensor, label_N: Tensor) -> Tensor:
        one_hot_NK = torch.zeros_like(p_NK).scatter_(-1, label_N.unsqueeze(-1), 1)
        return (p_NK - one_hot_NK).square().sum(-1)

    return _mean(distance, probabilities, labels)


def nll(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the mean negative log-likelihood, in nats.

    A label whose probability underflowed to 0 counts as the least normal number of the type (87 nats in
    float32, 708 in float64): a lower bound, where infinity would say nothing about the other items.

    >>> nll(torch.tensor([[0.75, 0.25], [0.25, 0.75]]), torch.tensor([0, 1]))
    tensor(0.2877, dtype=torch.float64)
    """
    least = torch.finfo(probabilities.dtype).tiny

    def surprise(p_NK: Tensor, label_N: Tensor) -> Tensor:
        return -p_NK.gather(-1, label_N.unsqueeze(-1)).squeeze(-1).clamp_min(least).log()

    return _mean(surprise, probabilities, labels)


class Reliability(NamedTuple):
    """What a reliability diagram shows: one entry a bin, NaN where a bin is empty."""

    confidence: Tensor  # (B,) mean confidence
    accuracy: Tensor  # (B,) share of items that are right
    items: Tensor  # (B,) how many


def reliability(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Reliability:
    """Return confidence, accuracy and number of items in ``bins`` bins of equal width, ((b-1)/B, b/B].

    >>> p = torch.tensor([[0.75, 0.25], [0.75, 0.25], [1.0, 0.0]])
    >>> diagram = reliability(p, torch.tensor([0, 1, 0]), bins=2)
    >>> diagram.accuracy
    tensor([   nan, 0.6667], dtype=torch.float64)
    >>> diagram.items
    tensor([0, 3])
    """
    sums = _binned(probabilities, labels, bins)
    return Reliability(sums.confidence / sums.items, sums.accuracy / sums.items, sums.items)


def confusion(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return how often each label (row) met each prediction (column); items with label -1 are left out.

    >>> confusion(torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 0, -1]), classes=2)
    tensor([[1, 1],
            [0, 1]])
    """
    cell_N = torch.where(labels < 0, classes**2, labels * classes + predicted)
    return cell_N.bincount(minlength=classes**2 + 1)[:-1].reshape(classes, classes)


FIGURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "accuracy": accuracy,
    "ece": ece,
    "brier": brier,
    "nll": nll,
}


def evaluate(probabilities: Tensor, labels: Tensor, pi: Possibility | None = None) -> dict[str, float]:
    """Return all figures: those of ``FIGURES``, and with ``pi`` (N, K) its validity errors and its efficiency.

    Items with label -1 are left out. Where no label is known at all, what needs none remains: the efficiency,
    over all items, or nothing.

    >>> p, y = torch.tensor([[0.75, 0.25], [0.25, 0.75], [0.5, 0.5]]), torch.tensor([0, 0, -1])
    >>> for name, figure in evaluate(p, y, pi=p / p.amax(-1, keepdim=True)).items():
    ...     print(f"{name} {figure:.4f}")
    accuracy 0.5000
    ece 0.2500
    brier 0.6250
    nll 0.8370
    validity_error@0.05 0.0000
    validity_error@0.1 0.0000
    validity_error@0.25 0.0000
    efficiency 0.6667
    """
    check_probabilities(probabilities, look=False)
    if pi is not None and pi.shape != probabilities.shape:
        raise ValueError(
            f"pi must have the shape of the probabilities, {tuple(probabilities.shape)}, got {tuple(pi.shape)}"
        )
    known_N = labels != -1
    known = int(known_N.sum())
    if known == 0:
        return {} if pi is None else {"efficiency": float(_efficiency(pi))}
    if known < len(labels):
        probabilities, labels = probabilities[known_N], labels[known_N]
        pi = None if pi is None else pi[known_N]
    figures = {name: figure(probabilities, labels) for name, figure in FIGURES.items()}
    if pi is not None:
        for delta in DELTAS:
            # A share of so many items: the quotient in float64.
            errors = (validity_error(pi, labels, delta).double() * known).round()
            figures[f"validity_error@{delta:g}"] = errors / known
        figures["efficiency"] = _efficiency(pi)
    return dict(zip(figures, torch.stack(list(figures.values())).tolist(), strict=True))


def _binned(probabilities: Tensor, labels: Tensor, bins: int) -> Reliability:
    """Return the sums over the items of each bin."""
    labels = _checked(probabilities, labels)
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    confidence_N, predicted_N = probabilities.max(-1)
    edges = torch.arange(1, bins, dtype=torch.float64, device=probabilities.device) / bins
    bin_N = torch.bucketize(confidence_N.double(), edges)  # an edge belongs to the bin below it

    def total(values_N: Tensor) -> Tensor:
        return values_N.new_zeros(bins).index_add_(0, bin_N, values_N)

    return Reliability(
        confidence=total(confidence_N.double()),
        accuracy=total((predicted_N == labels).double()),
        items=total(torch.ones_like(labels)),
    )


def _mean(figure: Callable[[Tensor, Tensor], Tensor], probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of ``figure`` (n, K), (n,) -> (n,) over all items."""
    labels = _checked(probabilities, labels)
    sums = [figure(probabilities[rows].double(), labels[rows]).sum() for rows in _pieces(probabilities.shape)]
    return torch.stack(sums).sum() / len(labels)


def _efficiency(pi: Possibility) -> Tensor:
    sums = [
        efficiency(as_dense(pi[rows], torch.float64)).overall * (rows.stop - rows.start)
        for rows in _pieces(pi.shape)
    ]
    return torch.stack(sums).sum() / pi.shape[0]


def _pieces(shape: torch.Size) -> Iterator[slice]:
    """Return slices of the N rows of (N, K)."""
    step = max(1, _CHUNK // shape[1])
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def _checked(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the labels as int64 after a look at both, at their values on the CPU only: a look is a transfer."""
    look = probabilities.device.type == "cpu"
    check_probabilities(probabilities, look)
    check_labels(labels, probabilities, look)
    return labels.long()
