r"""Models that score tails: DistMult, ComplEx and QMult are one formula over three kinds of numbers.

Entities and relations are vectors over an algebra: the real numbers (DistMult), the complex numbers (ComplEx) or the
quaternions (QMult). Multiply head and relation number by number, and compare with the tail as vectors of reals::

    score(h, r, t)  =  < h * r, t >.

Over the complex numbers this is Re(sum_i h_i r_i conj(t_i)); over the quaternions ``*`` is the Hamilton product, which
does not commute. The first can tell apart neither (h, r, t) and (t, r, h), the others can. A vector of ``dim`` real
parameters holds dim, dim/2 or dim/4 numbers, so that equal dimensions are equal sizes of a model.

All tails of a query are scored by one matrix product, ``query(h, r) @ entities.T``.

*Normalisation.* ``"unit"`` divides each complex number or quaternion of a relation by its modulus: relations become
rotations. ``"batch"`` brings the products h * r to mean 0 and variance 1 over a batch (batch norm). *Dropout* sets
shares of the parameters of h and r (``input_dropout``) and of the product (``dropout``) to zero in training.

*The penalty* N3 (T. Lacroix, N. Usunier, G. Obozinski: Canonical tensor decomposition for knowledge base completion.
ICML 2018) of a fact is the sum of the cubed moduli of its numbers, |h_i|^3 + |r_i|^3 + |t_i|^3.

How to bring a scorer of your own: any module whose call takes entities (B,) and relations (B,) and returns the scores
of all tails (B, E). Relations are numbered to 2R - 1: r + R is the inverse of r. With n3 > 0 it needs a ``penalty``.

DistMult: B. Yang et al., ICLR 2015. ComplEx: T. Trouillon et al., ICML 2016. QMult: C. Demir et al., ACML 2021.

Shapes: B queries, E entities, D parameters of a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, embedding

from ccssl.errors import InputError
from ccssl.graphs.config import NORMALIZATIONS


def real_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a * b."""
    return a * b


def complex_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of complex numbers; the first half of the parameters are real parts, the second imaginary.

    >>> complex_product(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))  # (1 + 2i)(3 + 4i)
    tensor([-5., 10.])
    """
    a1, ai = a.chunk(2, -1)
    b1, bi = b.chunk(2, -1)
    return torch.cat([a1 * b1 - ai * bi, a1 * bi + ai * b1], -1)


def hamilton_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of quaternions; the four quarters of the parameters belong to 1, i, j and k.

    >>> i, j = torch.eye(4)[1], torch.eye(4)[2]
    >>> hamilton_product(i, j), hamilton_product(j, i)  # k and -k
    (tensor([0., 0., 0., 1.]), tensor([ 0.,  0.,  0., -1.]))
    """
    a1, ai, aj, ak = a.chunk(4, -1)
    b1, bi, bj, bk = b.chunk(4, -1)
    return torch.cat(
        [
            a1 * b1 - ai * bi - aj * bj - ak * bk,
            a1 * bi + ai * b1 + aj * bk - ak * bj,
            a1 * bj - ai * bk + aj * b1 + ak * bi,
            a1 * bk + ai * bj - aj * bi + ak * b1,
        ],
        -1,
    )


class Algebra(NamedTuple):
    """A kind of numbers: how many real parameters one has, and how two are multiplied."""

    name: str
    parts: int
    product: Callable[[Tensor, Tensor], Tensor]


SCORERS: dict[str, Algebra] = {
    "distmult": Algebra("real numbers", 1, real_product),
    "complex": Algebra("complex numbers", 2, complex_product),
    "qmult": Algebra("quaternions", 4, hamilton_product),
}


class Multiplicative(nn.Module):
    """< h * r, t > over an algebra, for all tails at once.

    >>> scorer = Multiplicative(SCORERS["complex"], entities=5, relations=2, dim=8)
    >>> scorer(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 0])).shape
    torch.Size([3, 5])
    """

    def __init__(
        self,
        algebra: Algebra,
        entities: int,
        relations: int,
        dim: int,
        *,
        normalize: str = "none",
        input_dropout: float = 0.0,
        dropout: float = 0.0,
        scale: float = 0.1,
    ) -> None:
        """Draw the parameters from a normal law with mean 0 and deviation ``scale``."""
        super().__init__()
        if dim < algebra.parts or dim % algebra.parts:
            raise InputError(
                f"dim counts real parameters, {algebra.parts} for each of the {algebra.name}: it must be "
                f"divisible by {algebra.parts}, got {dim}."
            )
        if normalize not in NORMALIZATIONS:
            raise InputError(f"normalize must be one of {', '.join(NORMALIZATIONS)}, got {normalize!r}.")
        if normalize == "unit" and algebra.parts == 1:
            raise InputError("normalize unit would leave only the signs of real numbers: take complex or qmult.")
        self.algebra, self.normalize = algebra, normalize
        self.input_dropout, self.dropout = input_dropout, dropout
        self.entities = nn.Parameter(scale * torch.randn(entities, dim))
        self.relations = nn.Parameter(scale * torch.randn(relations, dim))
        self.norm = nn.BatchNorm1d(dim) if normalize == "batch" else nn.Identity()

    def forward(self, heads: Tensor, relations: Tensor) -> Tensor:
        """Return the scores of all tails (B, E) of queries (B,)."""
        return self.query(heads, relations) @ self.entities.T

    def query(self, heads: Tensor, relations: Tensor) -> Tensor:
        """Return h * r (B, D), with which tails are compared."""
        h_BD, r_BD = embedding(heads, self.entities), self.relation(relations)
        if self.training and self.input_dropout:
            h_BD, r_BD = dropout(h_BD, self.input_dropout), dropout(r_BD, self.input_dropout)
        product_BD = self.norm(self.algebra.product(h_BD, r_BD))
        return dropout(product_BD, self.dropout, self.training) if self.dropout else product_BD

    def relation(self, relations: Tensor) -> Tensor:
        """Return the vectors of relations (B, D)."""
        r_BD = embedding(relations, self.relations)
        return r_BD / self.moduli(r_BD).repeat(1, self.algebra.parts) if self.normalize == "unit" else r_BD

    def score(self, heads: Tensor, relations: Tensor, tails: Tensor) -> Tensor:
        """Return the scores of single facts (B,)."""
        return (self.query(heads, relations) * embedding(tails, self.entities)).sum(-1)

    def moduli(self, vectors: Tensor) -> Tensor:
        """Return the modulus of each number of the vectors: (B, D / parts)."""
        return self._squared_moduli(vectors).sqrt()

    def penalty(self, entities: Tensor, times: Tensor, relations: Tensor, relation_times: Tensor) -> Tensor:
        """Return the N3 penalty of facts that name these entities and relations so many times: a number."""
        cubes = self._squared_moduli(embedding(entities, self.entities)).pow(1.5).sum(-1) @ times
        if self.normalize == "unit":
            return cubes
        return cubes + self._squared_moduli(embedding(relations, self.relations)).pow(1.5).sum(-1) @ relation_times

    def _squared_moduli(self, vectors: Tensor) -> Tensor:
        return vectors.square().unflatten(-1, (self.algebra.parts, -1)).sum(-2)
