"""The paper's figures, drawn as SVG: curves over training, plots of a table, credal sets.

Lines are means over seeds, bands (and bars) their standard deviations. Colours are told apart under the common kinds of
colour blindness, and lines differ in their dashes, too. Ink and paper are those of ``ccssl.credal.polytope``: by them a
page knows what to turn around in the dark. Equal numbers give equal bytes.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ccssl.credal.polytope import INK, MUTED
from ccssl.experiments.paper.artifacts import METHODS, Artifact, Column, CredalSets, Curves, Table
from ccssl.experiments.paper.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#57606a", "#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#d55e00", "#0072b2", INK)
_STYLES: dict[str, dict[str, Any]] = {
    method: {"color": colour, "linestyle": dashes}
    for method, colour, dashes in zip(METHODS, _COLOURS, (":", "-.", "--", "-.", "--", "-", "-", "-"), strict=True)
}


Panel = tuple[str, list[Column]]  # its heading, and what is drawn in it


def pictures(artifact: Artifact, results: Results, phase: str = "test") -> Iterator[tuple[str, str]]:
    """Yield the pictures of an artifact, each with an ending of its name; nothing where nothing can be drawn."""
    if isinstance(artifact, CredalSets):
        yield from _credal_sets(artifact)
    elif isinstance(artifact, Curves | Table) and (panels := _panels(artifact, results)):
        yield "", _drawn(artifact, panels, results, phase, f"{artifact.title} – {results.scale} scale")


def single_pictures(artifact: Artifact, results: Results, phase: str = "test") -> Iterator[tuple[str, str]]:
    """Yield what ``pictures`` does, but a picture a panel, without the title; each with what it shows in words."""
    if isinstance(artifact, CredalSets):
        for degrees, (_, svg) in zip(artifact.possibilities, _credal_sets(artifact), strict=True):
            yield f"{artifact.title}: {len(degrees)} classes", svg
    elif isinstance(artifact, Curves | Table):
        for head, columns in _panels(artifact, results):
            yield f"{artifact.title}: {head}", _drawn(artifact, [(head, columns)], results, phase)


def _panels(artifact: Curves | Table, results: Results) -> list[Panel]:
    """Return the panels that something can be drawn in: of curves a column each, of a plot those with common heads."""
    run = [c for c in artifact.columns if any(results.runs(artifact, row, c) for row in artifact.rows)]
    if isinstance(artifact, Curves):
        return [(column.heads[-1], [column]) for column in run]
    blocks: dict[str, list[Column]] = {}
    for column in run if artifact.plot else ():
        blocks.setdefault(", ".join(column.heads[:-1]), []).append(column)
    return list(blocks.items())


def _drawn(artifact: Curves | Table, panels: Sequence[Panel], results: Results, phase: str, title: str = "") -> str:
    if isinstance(artifact, Curves):
        return _curves(artifact, panels, results, title)
    return _plot(artifact, panels, results, phase, title)


def _credal_sets(artifact: CredalSets) -> Iterator[tuple[str, str]]:
    import torch

    from ccssl.credal.polytope import draw

    for pi in artifact.possibilities:
        yield f"-{len(pi)}-classes", draw(torch.tensor(pi, dtype=torch.float64))


def _curves(artifact: Curves, panels: Sequence[Panel], results: Results, title: str) -> str:
    def draw(axes: Axes, columns: list[Column]) -> None:
        (column,) = columns
        for row in artifact.rows:
            points = results.curve(artifact, row, column)
            if not points:
                continue
            steps = [point.step for point in points]
            means = [point.ours.mean * artifact.factor for point in points]
            deviations = [(point.ours.deviation or 0) * artifact.factor for point in points]
            axes.plot(steps, means, label=row.head, **_STYLES[row.head])
            low, high = _band(means, deviations)
            axes.fill_between(steps, low, high, color=_STYLES[row.head]["color"], alpha=0.12, linewidth=0)
        axes.set_xlabel("step")

    return _svg(title, panels, draw, artifact.axis)


def _plot(table: Table, panels: Sequence[Panel], results: Results, phase: str, title: str) -> str:
    def draw(axes: Axes, columns: list[Column]) -> None:
        places = range(len(columns))
        for row in table.rows:
            found = [results.figure(table, row, column, phase) for column in columns]
            if any(found):
                means = [ours.mean * table.factor if ours else float("nan") for ours in found]
                deviations = [(ours.deviation or 0) * table.factor if ours else float("nan") for ours in found]
                axes.errorbar(places, means, deviations, label=row.head, marker="o", capsize=3, **_STYLES[row.head])
        axes.set_xticks(list(places), [column.heads[-1] for column in columns])
        axes.set_xlabel(table.plot)

    return _svg(title, panels, draw, "test accuracy (%)")


def _band(means: Sequence[float], deviations: Sequence[float]) -> tuple[list[float], list[float]]:
    pairs = list(zip(means, deviations, strict=True))
    return [mean - deviation for mean, deviation in pairs], [mean + deviation for mean, deviation in pairs]


def _svg(title: str, panels: Sequence[Panel], draw: Callable[[Axes, list[Column]], None], axis: str) -> str:
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.hashsalt": "ccssl",
        "svg.fonttype": "none",
        "font.family": ["sans-serif"],
        "font.size": 9,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(1 + 3.6 * len(panels), 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (head, content) in zip(all_axes, panels, strict=True):
            draw(axes, content)
            axes.set_title(head, fontsize=10)
            axes.grid(alpha=0.25)
        all_axes[0].set_ylabel(axis)
        labels = dict(
            pair[::-1] for axes in all_axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)
        )
        lines = math.ceil(len(labels) / (4 if len(panels) > 1 else 3))  # of as many as the width has room for
        figure.legend(
            labels.values(),
            labels.keys(),
            loc="outside lower center",
            ncols=math.ceil(len(labels) / lines),
            frameon=False,
        )
        if title:
            figure.suptitle(textwrap.fill(title, 55 * len(panels)), fontsize=10)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Title": title, "Date": None, "Creator": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :].replace("<svg", '<svg role="img"', 1)
