"""Random projection problems, from easy to nasty: what the tests of the credal room draw from."""

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from ccssl.credal import Levels, possibility


def logits_and_pi(rows: int, classes: int, scale: float, seed: int) -> tuple[Tensor, Tensor]:
    """Random float64 logits of a scale and real-valued possibilities, some tied, some 0."""
    g = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, classes, generator=g, dtype=torch.float64)
    pi = torch.rand(rows, classes, generator=g, dtype=torch.float64) ** 2
    coarse = (pi * 4).round() / 4  # ties, zeros and ones
    pi = torch.where(torch.rand(rows, 1, generator=g, dtype=torch.float64) < 0.5, pi, coarse)
    pi[torch.arange(rows), torch.randint(classes, (rows,), generator=g)] = 1.0
    return logits, possibility(pi)


def levels(rows: int, classes: int, size: int, normalization: str, seed: int, with_top: bool = False) -> Levels:
    """Random counts, most of them small, as a confident model's are, with some classes ruled out."""
    g = torch.Generator().manual_seed(seed)
    skewed = torch.rand(rows, classes, generator=g) ** 4
    counts = (skewed * (size + 2)).long().clamp(max=size + 1) - 1
    counts[torch.arange(rows), torch.randint(classes, (rows,), generator=g)] = torch.randint(
        0, size + 1, (rows,), generator=g
    )
    top = torch.randint(classes, (rows,), generator=g) if with_top else None
    return Levels(counts.int(), size, normalization, top)


@st.composite
def problems(draw: st.DrawFn, max_classes: int = 12) -> tuple[Tensor, Tensor]:
    """One row of logits and one of pi, with ties, zeros, ones and extreme logits as hypothesis likes them."""
    K = draw(st.integers(2, max_classes))
    logit = st.one_of(st.floats(-8, 8), st.sampled_from([0.0, 30.0, -30.0, 800.0, -800.0]))
    degree = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 0.5, 0.25, 0.05, 1e-9]))
    logits = draw(st.lists(logit, min_size=K, max_size=K))
    pi = draw(st.lists(degree, min_size=K, max_size=K))
    pi[draw(st.integers(0, K - 1))] = 1.0
    return torch.tensor([logits], dtype=torch.float64), torch.tensor([pi], dtype=torch.float64)


def kl(p: Tensor, logits: Tensor) -> Tensor:
    """KL(p || softmax(logits)), from logarithms."""
    return (torch.special.xlogy(p, p) - (p * logits.log_softmax(-1)).where(p > 0, 0)).sum(-1)


def isotonic_projection(q: np.ndarray, pi: np.ndarray) -> np.ndarray:
    """Project one row with SciPy: q times the isotonic regression of (increments of pi) / q, weighted by q."""
    from scipy.optimize import isotonic_regression

    order = np.argsort(pi, kind="stable")
    rise = np.diff(pi[order], prepend=0.0)
    p = np.empty_like(q)
    p[order] = q[order] * isotonic_regression(rise / q[order], weights=q[order]).x
    return p
