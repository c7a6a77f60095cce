r"""Few facts: a training part divided into labeled, calibration and unlabeled facts.

A ratio such as 40:40:20 says what share of the training facts is learned from (*labeled*), is kept aside for conformal
p-values (*calibration*), and is stripped of its answers (*unlabeled*): only the queries (h, r, ?) and (?, r, t) are
kept of the last. Two numbers, 40:60, are labeled and unlabeled; ``all`` makes every fact a labeled one. What is in no
part of a run stays out of it: a method without calibration leaves those facts alone.

How the facts are divided (N of them, R relations, r + R the inverse of r):

``paired``   the N facts are shuffled and divided, then each gets its inverse. Both queries of a fact are in the same
             part, and a labeled fact tells nothing of an unlabeled one directly. Calibration and unlabeled facts are
             exchangeable, as conformal prediction asks. The default.
``random``   the 2N queries, inverses included, are shuffled and divided: one query of a fact may be labeled and the
             other one unlabeled, whose answer a symmetric model then knows.
``paper``    the 2N queries are divided in order, the N facts first and their inverses after them, as in the published
             experiments on UMLS and KINSHIP. An artefact: the first half holds no inverse at all, so that with 40:40:20
             no head query is ever learned from, and the calibration queries (a quarter of them tail queries) are not
             of the kind of the unlabeled ones (head queries all): p-values guarantee nothing. It is here to compare
             with what was published.

Shapes: N training facts; a row of the doubled list is a fact (first N) or its inverse (last N).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ccssl.errors import InputError
from ccssl.graphs.config import SPLIT_MODES, shares_of
from ccssl.graphs.triples import Graph


@dataclass(frozen=True, eq=False)
class GraphSplit:
    """Which rows of the doubled list of training facts are in which part, each ascending."""

    mode: str
    facts: int  # N
    labeled: np.ndarray
    calibration: np.ndarray
    unlabeled: np.ndarray

    def rows(self, graph: Graph, part: str) -> np.ndarray:
        """Return the facts and inverses (n, 3) of a part."""
        return graph.both_ways(graph.train)[getattr(self, part)]

    def to_json(self) -> dict[str, Any]:
        """Return, for each part, the numbers of the training facts whose tail and whose head is asked for."""
        told: dict[str, Any] = {"mode": self.mode, "facts": self.facts}
        for part in ("labeled", "calibration", "unlabeled"):
            rows = getattr(self, part)
            told[part] = {
                "tail": rows[rows < self.facts].tolist(),
                "head": (rows[rows >= self.facts] - self.facts).tolist(),
            }
        return told


def split_of(graph: Graph, ratio: str, mode: str = "paired", seed: int = 0) -> GraphSplit:
    """Divide the training facts of a graph.

    >>> from ccssl.graphs.files import load_graph
    >>> split = split_of(load_graph("nations"), "40:40:20")
    >>> len(split.labeled) / 2, len(split.calibration) / 2, len(split.unlabeled) / 2
    (637.0, 637.0, 318.0)
    """
    if mode not in SPLIT_MODES:
        raise InputError(f"split_mode must be one of {', '.join(SPLIT_MODES)}, got {mode!r}.")
    shares, facts = shares_of(ratio), len(graph.train)
    order = np.arange(facts if mode == "paired" else 2 * facts)
    if mode != "paper":
        order = np.random.default_rng((seed, len(order))).permutation(order)
    cuts = [round(sum(shares[:end]) * len(order)) for end in (1, 2)]
    parts = np.split(order, cuts)
    if mode == "paired":
        parts = [np.concatenate([part, part + facts]) for part in parts]
    labeled, calibration, unlabeled = (np.sort(part) for part in parts)
    if not len(labeled):
        raise InputError(f"split {ratio} leaves none of {facts} facts to learn from: raise its first number.")
    return GraphSplit(mode, facts, labeled, calibration, unlabeled)
