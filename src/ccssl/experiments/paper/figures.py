"""The paper's figures, drawn as SVG: curves over training, plots of a table, credal sets.

Lines are means over seeds, bands (and bars) their standard deviations. Colours are told apart under the common kinds of
colour blindness, and lines differ in their dashes, too. Equal numbers give equal bytes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ccssl.experiments.paper.artifacts import METHODS, Artifact, Column, CredalSets, Curves, Table
from ccssl.experiments.paper.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#57606a", "#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#d55e00", "#0072b2", "#000000")
_STYLES: dict[str, dict[str, Any]] = {
    method: {"color": colour, "linestyle": dashes}
    for method, colour, dashes in zip(METHODS, _COLOURS, (":", "-.", "--", "-.", "--", "-", "-", "-"), strict=True)
}


def pictures(artifact: Artifact, results: Results, phase: str = "test") -> Iterator[tuple[str, str]]:
    """Yield the pictures of an artifact, each with an ending of its name; nothing where nothing can be drawn."""
    if isinstance(artifact, CredalSets):
        yield from _credal_sets(artifact)
    elif isinstance(artifact, Curves):
        panels = [c for c in artifact.columns if any(results.runs(artifact, row, c) for row in artifact.rows)]
        if panels:
            yield "", _curves(artifact, panels, results)
    elif isinstance(artifact, Table) and artifact.plot:
        blocks: dict[tuple[str, ...], list[Column]] = {}
        for column in artifact.columns:
            if any(results.runs(artifact, row, column) for row in artifact.rows):
                blocks.setdefault(column.heads[:-1], []).append(column)
        if blocks:
            yield "", _plot(artifact, blocks, results, phase)


def _credal_sets(artifact: CredalSets) -> Iterator[tuple[str, str]]:
    import torch

    from ccssl.credal.polytope import draw

    for pi in artifact.possibilities:
        yield f"-{len(pi)}-classes", draw(torch.tensor(pi, dtype=torch.float64))


def _curves(artifact: Curves, panels: Sequence[Column], results: Results) -> str:
    def draw(axes: Axes, column: Column) -> None:
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

    return _svg(
        artifact.title, [(column.heads[-1], column) for column in panels], draw, artifact.axis, results.scale
    )


def _plot(table: Table, blocks: dict[tuple[str, ...], list[Column]], results: Results, phase: str) -> str:
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

    panels = [(", ".join(heads), columns) for heads, columns in blocks.items()]
    return _svg(table.title, panels, draw, "test accuracy (%)", results.scale)


def _band(means: Sequence[float], deviations: Sequence[float]) -> tuple[list[float], list[float]]:
    pairs = list(zip(means, deviations, strict=True))
    return [mean - deviation for mean, deviation in pairs], [mean + deviation for mean, deviation in pairs]


def _svg(title: str, panels: Sequence[tuple[str, Any]], draw: Any, axis: str, scale: str) -> str:
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.hashsalt": "ccssl",
        "svg.fonttype": "none",
        "font.family": ["sans-serif"],
        "font.size": 9,
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
        figure.legend(
            labels.values(), labels.keys(), loc="outside lower center", ncols=min(4, len(labels)), frameon=False
        )
        figure.suptitle(f"{title} – {scale} scale", fontsize=10)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Title": title, "Date": None, "Creator": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :].replace("<svg", '<svg role="img"', 1)
