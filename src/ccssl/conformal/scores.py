r"""Nonconformity scores: how badly does a class fit an item, in the eyes of the model?

A score turns the predicted distribution p of an item and a candidate class y into a number alpha(y), large
where y is hard to believe. Conformal p-values depend on the *order* of scores alone, so that any score gives
valid p-values; a good one gives small sets.

====================  ==========================================================  =========================
name                  alpha(y)                                                    origin
====================  ==========================================================  =========================
difference            max_{j != y} p_j  -  p_y                                    eq. (non_conformity)
proportion            max_{j != y} p_j  /  (p_y + gamma)                          eq. (non_conformity2)
hinge                 1 - p_y                                                     inverse probability
cumulative            (mass of the classes more probable than y) + p_y            APS, Romano et al. 2020
randomized-cumulative (mass of the classes more probable than y) + u p_y          APS, u uniform on [0, 1]
====================  ==========================================================  =========================

In every row a more probable class has a score that is no larger. The scores differ in how they compare one
item with another.

How to add a score: write one function

    ``score(probabilities, labels=None) -> scores``

that maps ``probabilities`` (..., K) to the scores of all classes (..., K), and, with ``labels`` (...), to
the scores at the labels (...), *bit for bit* the same numbers: an item met again must tie with itself. Put it
into ``SCORES`` and give it a line in the contract test, which fails until then. Keyword parameters with a
default become options of ``Calibration`` (as ``gamma`` does); a parameter ``uniform`` (...) is filled with
one draw from [0, 1] an item. The functions are the plain mathematics: ``Calibration`` checks what goes in,
and turns half precision into single precision first.

Shapes: ``...`` any leading shape, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

from torch import Tensor

Score = Callable[..., Tensor]


def difference(probabilities: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return max_{j != y} p_j - p_y, in [-1, 1]: by how much the best rival beats the class.

    >>> import torch
    >>> p = torch.tensor([[0.5, 0.25, 0.25]])
    >>> difference(p)
    tensor([[-0.2500,  0.2500,  0.2500]])
    >>> difference(p, torch.tensor([0]))
    tensor([-0.2500])
    """
    own, rival = _own_and_rival(probabilities, labels)
    return rival - own


def proportion(probabilities: Tensor, labels: Tensor | None = None, *, gamma: float = 0.1) -> Tensor:
    """Return max_{j != y} p_j / (p_y + gamma), at least 0: how many times as probable the best rival is.

    A large ``gamma`` damps the influence of p_y; gamma = 0 is the plain ratio. A class with p_y + gamma = 0
    has the score infinity whatever its rival, 0/0 included.

    >>> import torch
    >>> p = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    >>> proportion(p, gamma=0.25)
    tensor([[0.3333, 1.0000, 1.0000],
            [0.0000, 4.0000, 4.0000]])
    >>> proportion(p, gamma=0.0)
    tensor([[0.5000, 2.0000, 2.0000],
            [0.0000,    inf,    inf]])
    """
    if not (isinstance(gamma, Real) and 0 <= gamma < math.inf):
        raise ValueError(f"gamma must be a finite number, at least 0, got {gamma!r}")
    own, rival = _own_and_rival(probabilities, labels)
    damped = own + gamma
    return (rival / damped).masked_fill(damped == 0, math.inf)


def hinge(probabilities: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return 1 - p_y, in [0, 1]: the probability that the class is wrong.

    >>> import torch
    >>> hinge(torch.tensor([[0.5, 0.25, 0.25]]))
    tensor([[0.5000, 0.7500, 0.7500]])
    """
    return 1 - _own(probabilities, labels)


def cumulative(probabilities: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return the mass met until y is reached when classes are taken in descending probability, y included.

    The score of adaptive prediction sets (Romano, Sesia and Candes, 2020) without randomisation. Equally
    probable classes do not come before each other. Unlike the other scores it can *grow* with p_y: the first
    class scores its own probability.

    >>> import torch
    >>> cumulative(torch.tensor([[0.5, 0.3, 0.2]]))
    tensor([[0.5000, 0.8000, 1.0000]])
    """
    return _cumulative(probabilities, labels, None)


def randomized_cumulative(probabilities: Tensor, labels: Tensor | None = None, *, uniform: Tensor) -> Tensor:
    """Return the mass of the classes more probable than y, and the share ``uniform`` (...) of p_y.

    The randomised score of adaptive prediction sets: where the model knows the true conditional
    probabilities, the score at the true label is uniform on [0, 1] for every item, so that coverage is right
    item by item and not only on average.

    >>> import torch
    >>> randomized_cumulative(torch.tensor([[0.5, 0.3, 0.2]]), uniform=torch.tensor([0.5]))
    tensor([[0.2500, 0.6500, 0.9000]])
    """
    return _cumulative(probabilities, labels, uniform)


SCORES: dict[str, Score] = {
    "difference": difference,
    "proportion": proportion,
    "hinge": hinge,
    "cumulative": cumulative,
    "randomized-cumulative": randomized_cumulative,
}


def _own(probabilities: Tensor, labels: Tensor | None) -> Tensor:
    if labels is None:
        return probabilities
    return probabilities.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)


def _own_and_rival(probabilities: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return p_y and max_{j != y} p_j: at the top of a row its second largest, elsewhere its largest."""
    if labels is not None:
        others = probabilities.scatter(-1, labels.long().unsqueeze(-1), -math.inf)
        return _own(probabilities, labels), others.amax(-1)
    first, top = probabilities.max(-1, keepdim=True)
    # Two maxima are seven times as fast as topk(2) at 448 x 100 on a CPU.
    second = probabilities.scatter(-1, top, -math.inf).amax(-1, keepdim=True)
    return probabilities, first.expand_as(probabilities).scatter(-1, top, second)


# Masses are added as integer multiples of 2^-53, the spacing of float64 below 1. Integer sums do not depend
# on the order of their terms, hence not on the shape of the batch, the device, or the path: sort or mask.
_UNITS = 2.0**53


def _units(probabilities: Tensor) -> Tensor:
    # Rounded up, so that a class never scores below a more probable one.
    return (probabilities.double() * _UNITS).ceil_().long()


def _cumulative(probabilities: Tensor, labels: Tensor | None, uniform: Tensor | None) -> Tensor:
    own = _own(probabilities, labels)
    share = own.double()
    if uniform is not None:
        uniform = uniform.double()
        share = share * (uniform if labels is not None else uniform.unsqueeze(-1))
    above = _units_above(probabilities) if labels is None else _units_above_label(probabilities, own)
    return (above.double() / _UNITS + share).to(probabilities.dtype)


def _units_above(probabilities: Tensor) -> Tensor:
    """Return, for every class, the mass of the strictly more probable ones."""
    descending, order = probabilities.sort(-1, descending=True)
    units = _units(descending)
    before = units.cumsum(-1).sub_(units)
    tied = descending[..., 1:] == descending[..., :-1]
    before[..., 1:].masked_fill_(tied, 0)
    # The sums ascend, so a running maximum carries the sum before a run of ties through the run.
    return units.scatter_(-1, order, before.cummax(-1).values)


def _units_above_label(probabilities: Tensor, own: Tensor) -> Tensor:
    units = _units(probabilities)
    return units.masked_fill_(probabilities <= own.unsqueeze(-1), 0).sum(-1)
