"""The figures of a page on link prediction that a page on images has not; drawn like those (``figures``).

Shapes: Q queries of test facts, D significance levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ccssl.credal.polytope import INK, MUTED, PREDICTION, SET
from ccssl.reports import figures

Percent = figures._percent
Canvas = figures._figure

BINS = 14  # of a histogram of set sizes


class Misses(NamedTuple):
    """How often the answer is left out of its set, level by level, and where chance may carry exact calibrations."""

    level: np.ndarray  # (D,) ascending
    missed: np.ndarray  # (D,) share of queries
    low: np.ndarray
    high: np.ndarray


def hits(ranks: Sequence[tuple[np.ndarray, int | None]], entities: int) -> str:
    """Draw the share of answers among the first k, for every k: a line for each array of ranks (Q,)."""
    with Canvas() as (axes, svg):
        for found, place in ranks:
            order = np.sort(found)
            share = np.arange(1, len(order) + 1) / len(order)
            last = np.flatnonzero(np.append(order[1:] != order[:-1], True))  # one point for each rank that occurs
            k, reached = np.append(order[last], entities), np.append(share[last], 1.0)
            k, reached = np.append(1.0, k), np.append((found <= 1).mean(), reached)
            axes.step(k, reached, where="post", color=figures.color(place), lw=2, clip_on=False, zorder=3)
        axes.set_xscale("log")
        axes.set(xlim=(1, entities), ylim=(0, 1))
        axes.xaxis.set_major_formatter(lambda k, _: f"{k:,.0f}")
        axes.xaxis.set_minor_formatter(lambda k, _: "")
        axes.yaxis.set_major_formatter(Percent)
        axes.set_xlabel("k, of all entities", color=MUTED)
        axes.set_ylabel("answers among the first k", color=MUTED)
        axes.grid(axis="y", color=figures.FAINT, lw=0.7)
    return svg.getvalue()


def misses(found: Misses, delta: float, kept: bool) -> str:
    """Draw how often the answer is left out of the prediction set at each level, with the band of chance."""
    with Canvas(height=300) as (axes, svg):
        most = found.level[-1]
        axes.fill_between(found.level, found.low, found.high, color=MUTED, alpha=0.18, lw=0)
        axes.plot([0, most], [0, most], color=INK, lw=1, ls=(0, (4, 3)))
        axes.plot(found.level, found.missed, color=SET if kept else PREDICTION, lw=2, zorder=3)
        axes.axvline(delta, color=figures.FAINT, lw=1, zorder=0)
        axes.set(xlim=(0, most), ylim=(0, max(most, found.high.max(), found.missed.max()) * 1.02))
        axes.set_xlabel("δ", color=MUTED)
        axes.set_ylabel("answers left out of their set", color=MUTED)
        axes.yaxis.set_major_formatter(Percent)
    return svg.getvalue()


def set_sizes(sizes: np.ndarray, entities: int) -> str:
    """Draw how large prediction sets are: the share of queries with a set of about so many entities."""
    from matplotlib.ticker import MaxNLocator

    with Canvas(height=300) as (axes, svg):
        most = max(1, int(sizes.max()))
        width = max(1, -(-(most + 1) // BINS))  # whole entities a bin
        edges = np.arange(0, most + width + 1, width)
        share = np.histogram(sizes, edges)[0] / len(sizes)
        axes.bar(
            edges[:-1], share, width * 0.86, align="edge" if width > 1 else "center", color=SET, alpha=0.85, lw=0
        )
        axes.yaxis.set_major_formatter(Percent)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel(f"entities in the set, of {entities:,}", color=MUTED)
        axes.set_ylabel("share of queries", color=MUTED)
        axes.grid(axis="y", color=figures.FAINT, lw=0.7)
        axes.set_axisbelow(True)
    return svg.getvalue()
