"""Algorithm 1 of the paper, row by row, as printed: the oracle of the tests and the baseline of the benchmarks.

    Require: predicted distribution q, normalised possibility distribution pi
    if q in Q_pi: return KL(q || q) = 0
    Y = all classes
    while Y is not empty:
        find y* in Y with the highest pi(y*) such that

            p(y) = (pi(y*) - sum of p^r over classes outside Y) * q(y) / sum of q over Y'

        for y in Y' = {y in Y : pi(y) <= pi(y*)} violates none of the constraints
        p^r(y) = p(y) on Y';   Y = Y without Y'
    return KL(p^r || q)

The classes outside Y are always the least possible ones, so the constraints to check for a candidate y* are the
partial sums, in ascending order of pi, over what is assigned plus Y'. Worst case O(K^3). It expects q > 0 and
computes in Python's float64. Never the fast path: see ``ccssl.credal.projection``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ccssl.credal.faults import Fault, check_classes, refuse
from ccssl.credal.possibility import Possibility, as_dense, check_possibility

SLACK = 1e-12  # rounding allowed when a constraint is checked


def project_reference(q: Tensor, pi: Possibility) -> Tensor:
    """Return the projection of q (N, K) onto Q_pi (N, K) in float64."""
    _check(q, pi)
    rows = zip(q.double().tolist(), as_dense(pi, torch.float64).tolist(), strict=True)
    return torch.tensor([_project_row(q_K, pi_K) for q_K, pi_K in rows], dtype=torch.float64)


def credal_loss_reference(logits: Tensor, pi: Possibility) -> Tensor:
    """Return KL(p^r || softmax(logits)) of each row of logits (N, K) in float64."""
    check_classes(logits, "logits")
    q_NK = logits.double().softmax(-1)
    p_NK = project_reference(q_NK, pi)
    return torch.tensor(
        [
            sum(p * math.log(p / q) for p, q in zip(p_K, q_K, strict=True) if p > 0)
            for p_K, q_K in zip(p_NK.tolist(), q_NK.tolist(), strict=True)
        ],
        dtype=torch.float64,
    )


def _check(q: Tensor, pi: Possibility) -> None:
    check_classes(q, "q")
    check_possibility(pi, validate=True)
    if q.ndim != 2 or q.shape != pi.shape:
        raise ValueError(
            f"q and pi must have the same shape (rows, classes), got {tuple(q.shape)} and {tuple(pi.shape)}"
        )
    refuse([Fault(~(q > 0), q, "q must be positive, as Algorithm 1 divides by it")])


def _project_row(q_K: list[float], pi_K: list[float]) -> list[float]:
    ascending = sorted(range(len(pi_K)), key=lambda y: pi_K[y])
    if not _violates(ascending, q_K, pi_K, 0.0):
        return list(q_K)
    p_K = [0.0] * len(pi_K)
    Y = ascending
    while Y:
        assigned = sum(p_K)
        for y_star in reversed(Y):
            Y_prime = [y for y in Y if pi_K[y] <= pi_K[y_star]]
            mass = sum(q_K[y] for y in Y_prime)
            candidate = {y: (pi_K[y_star] - assigned) * q_K[y] / mass for y in Y_prime}
            if not _violates(Y_prime, candidate, pi_K, assigned):
                break
        else:
            raise ArithmeticError("no face found: pi is not a normalised possibility distribution")
        for y in Y_prime:
            p_K[y] = candidate[y]
        Y = Y[len(Y_prime) :]
    return p_K


def _violates(classes: list[int], p: list[float] | dict[int, float], pi_K: list[float], assigned: float) -> bool:
    """Tell whether a partial sum, in ascending order of pi, exceeds its bound."""
    total = assigned
    for y in classes:
        total += p[y]
        if total > pi_K[y] + SLACK:
            return True
    return False
