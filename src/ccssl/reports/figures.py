"""The figures of a page, as SVG that takes its colours from the page around it.

Matplotlib draws in the colours of ``PAINT``, one for each role; ``embeddable`` turns each into the CSS variable of that
role. So one drawing is right in light, in dark and on paper. Text stays text, in the page's own font. Every figure is
about as wide as a telephone, where its letters have the size they were drawn in; wider screens put several in a row.

Equal input gives equal bytes.

Shapes: K classes, B bins.
"""

from __future__ import annotations

import io
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ccssl.credal.polytope import INK, MUTED, PAPER, PREDICTION, PROJECTION, SET
from ccssl.reports.runs import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ccssl.conformal import Audit
    from ccssl.metrics import Reliability

FAINT, BASELINE = "#d0d7de", "#6e7781"
# Lines of several methods: told apart under the common kinds of colour blindness, and by their dashes.
SERIES = (SET, PREDICTION, PROJECTION, "#a2559b", "#8a6d00", "#3b4cc0", "#b03060", "#2f7f8f")
PAINT = {
    INK: "var(--ink)",
    MUTED: "var(--soft)",
    PAPER: "var(--paper)",
    FAINT: "var(--line)",
    BASELINE: "var(--baseline)",
    **{color: f"var(--series-{i})" for i, color in enumerate(SERIES)},
}
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)))

WIDTH, HEIGHT = 374, 250  # points; CSS pixels on a telephone
MOST_POINTS = 200  # of a line
MOST_NUMBERS = 16  # classes of a confusion matrix whose cells are large enough for a number
DEEPEST = 0.6  # opacity of a cell's blue where the share is 1: letters stay legible on it, in light and in dark

_SVG, _XLINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"


def color(place: int | None) -> str:
    """Return the colour of a group by its place among the methods; None is supervised-only."""
    return BASELINE if place is None else SERIES[place % len(SERIES)]


def dash(place: int | None) -> Any:
    """Return the dashes of a group."""
    return "-" if place is None else DASHES[place // len(SERIES) % len(DASHES)]


def over_time(
    groups: Sequence[tuple[Group, int | None]],
    figure: str,
    phases: Sequence[str] = ("test",),
    *,
    share: bool = True,
    floor: float | None = None,
    bound: tuple[float, float | None] | None = None,
) -> str:
    """Draw a figure over training: a line a group, its first phase solid, a second one dotted.

    Where a group has several runs the line is their mean, and a band reaches from the least to the largest. ``bound``
    is what validity allows and, where it is known, up to where chance may carry a valid method.
    """
    with _figure() as (axes, svg):
        highest = 0.0
        for group, place in groups:
            for phase, style in zip(phases, (dash(place), (0, (1, 1.6))), strict=False):
                steps, mean, low, high = (_thinned(line) for line in group.over_time(phase, figure))
                if not steps:
                    continue
                marker = "o" if len(steps) == 1 else ""
                axes.plot(steps, mean, color=color(place), ls=style, lw=1.8, marker=marker, clip_on=False, zorder=3)
                if len(group.runs) > 1:
                    axes.fill_between(steps, low, high, color=color(place), alpha=0.15, lw=0)
                highest = max(highest, *high)
        if bound is not None:
            delta, reach = bound
            if reach is not None:
                axes.axhspan(0, reach, color=MUTED, alpha=0.12, lw=0, zorder=0)
            axes.axhline(delta, color=INK, lw=1, ls=(0, (4, 3)))
            axes.set_ylim(0, 1.18 * max(delta, reach or 0, highest))
            axes.annotate(
                f"δ = {delta:g}", (1, delta), (-4, 3), xycoords=("axes fraction", "data"), ha="right",
                textcoords="offset points", color=INK, va="bottom", zorder=4,
                bbox={"facecolor": PAPER, "alpha": 0.7, "lw": 0, "pad": 1},
            )  # fmt: skip
        if floor is not None:
            axes.axhline(floor, color=INK, lw=1, ls=(0, (4, 3)))
            axes.set_ylim(0, 1.05)
        if share:
            axes.yaxis.set_major_formatter(_percent)
        axes.set_xlabel("training steps", color=MUTED)
        axes.xaxis.set_major_formatter(lambda step, _: f"{step / 1000:g}k" if step >= 10_000 else f"{step:,.0f}")
        axes.set_xlim(0, None)
    return svg.getvalue()


def accuracies(groups: Sequence[tuple[Group, int | None]]) -> str:
    """Draw the test accuracy of each group: a dot a run, a line at the mean."""
    with _figure(height=58 + 26 * len(groups)) as (axes, svg):
        for row, (group, place) in enumerate(groups):
            values = [run.result["test"]["accuracy"] for run in group.runs]
            axes.plot(values, [row] * len(values), "o", color=color(place), ms=6, alpha=0.8, mew=0)
            axes.plot([np.mean(values)] * 2, [row - 0.3, row + 0.3], color=color(place), lw=2)
        axes.set_yticks(range(len(groups)), [_short(group.name) for group, _ in groups])
        axes.set_ylim(len(groups) - 0.4, -0.6)
        axes.grid(axis="x", color=FAINT, lw=0.7)
        axes.xaxis.set_major_formatter(_percent)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    return svg.getvalue()


def reliability(diagrams: Sequence[tuple[Reliability, int | None]]) -> str:
    """Draw accuracy against confidence: a dot a bin, as large as the bin is full."""
    with _figure(height=300) as (axes, svg):
        axes.plot([0, 1], [0, 1], color=INK, lw=1, ls=(0, (4, 3)))
        for diagram, place in diagrams:
            items = diagram.items.cpu().numpy()
            full = items > 0
            confidence, accuracy = diagram.confidence.cpu().numpy()[full], diagram.accuracy.cpu().numpy()[full]
            axes.plot(confidence, accuracy, color=color(place), lw=1.5)
            area = 8 + 260 * items[full] / items.sum()
            axes.scatter(confidence, accuracy, area, color=color(place), alpha=0.75, lw=0, clip_on=False, zorder=3)
        axes.set(xlim=(0, 1), ylim=(0, 1))
        axes.set_xlabel("confidence of the prediction", color=MUTED)
        axes.set_ylabel("share that is right", color=MUTED)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(_percent)
    return svg.getvalue()


def p_value_law(audit: Audit) -> str:
    """Draw how often the true class gets at most a given p-value, with the band of a valid calibration."""
    with _figure(height=300) as (axes, svg):
        threshold, error, low, high = (
            (0.0, *line) for line in (audit.curve.threshold, audit.curve.error, audit.curve.low, audit.curve.high)
        )
        axes.fill_between(threshold, low, high, step="post", color=MUTED, alpha=0.18, lw=0)
        axes.plot([0, 1], [0, 1], color=INK, lw=1, ls=(0, (4, 3)))
        axes.step(threshold, error, where="post", color=SET if audit.valid else PREDICTION, lw=2)
        axes.set(xlim=(0, 1), ylim=(0, 1))
        axes.set_xlabel("p-value", color=MUTED)
        axes.set_ylabel("true classes with at most this", color=MUTED)
        axes.yaxis.set_major_formatter(_percent)
    return svg.getvalue()


def confusion(counts_KK: np.ndarray, names: Sequence[str]) -> str:
    """Draw how often each class (row) was called which (column); the deeper the blue, the larger the share."""
    from matplotlib.colors import to_rgb

    K = len(counts_KK)
    share_KK = counts_KK / counts_KK.sum(1, keepdims=True).clip(min=1)
    numbered = K <= MOST_NUMBERS
    with _figure(height=WIDTH) as (axes, svg):
        # Opaque where the share is large, so that the page's own paper shows through elsewhere.
        rgba_KK4 = np.zeros((K, K, 4))
        rgba_KK4[..., :3] = to_rgb(SET)
        rgba_KK4[..., 3] = np.sqrt(share_KK) * DEEPEST
        axes.imshow(rgba_KK4, interpolation="none")
        if numbered:
            for true, called in np.argwhere(counts_KK > 0).tolist():
                number = f"{counts_KK[true, called]:,}"
                axes.text(called, true, number, color=INK, ha="center", va="center_baseline")
            labels = [_short(name, 8) for name in names]
            axes.set_xticks(range(K), labels, rotation=90 if max(map(len, labels)) > 2 else 0)
            axes.set_yticks(range(K), labels)
            axes.tick_params(length=0)
        axes.spines[:].set_visible(True)
        axes.set_xlabel("predicted class", color=MUTED)
        axes.set_ylabel("true class", color=MUTED)
    return svg.getvalue()


def embeddable(svg: str, prefix: str, label: str) -> str:
    """Return a drawing of matplotlib ready to stand in a page: no fixed size, no font, ids with a prefix of their own.

    ``label`` tells what it is to those who cannot see it. Only attributes are touched; text, such as the name of a
    class, stays as it is.
    """
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK[1:].partition("}")[0])
    root = ET.fromstring(svg)
    parents = {child: parent for parent in root.iter() for child in parent}
    for element in list(root.iter()):
        if element.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style", f"{{{_SVG}}}title"):
            parents[element].remove(element)
            continue
        if "id" in element.attrib:
            element.set("id", prefix + element.attrib["id"])
        for name, value in element.attrib.items():
            if name == _XLINK and value.startswith("#"):
                element.set(name, f"#{prefix}{value[1:]}")
            elif name in ("style", "clip-path", "fill", "stroke"):
                value = re.sub(r"url\(#", f"url(#{prefix}", value)
                value = re.sub(r"#[0-9a-f]{6}\b", lambda found: PAINT.get(found[0], found[0]), value)
                element.set(name, re.sub(r"font-family:[^;]*;?", "", value))
    for name in ("width", "height"):
        del root.attrib[name]
    root.set("role", "img")
    root.set("aria-label", label)
    return ET.tostring(root, encoding="unicode")


@contextmanager
def _figure(height: float = HEIGHT) -> Iterator[tuple[Axes, io.StringIO]]:
    """Yield axes to draw into, and where the drawing will stand once the context is left."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.hashsalt": "ccssl",  # equal pictures get equal ids
        "svg.fonttype": "none",
        "font.family": ["sans-serif"],
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 11,
        "text.usetex": False,
        "text.parse_math": False,  # names of classes are no formulas
        "axes.edgecolor": MUTED,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    svg = io.StringIO()
    with mpl.rc_context(style), warnings.catch_warnings():
        # What the measuring font lacks, the reader's own font will draw.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, facecolor="none", layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot(facecolor="none")
        axes.locator_params(nbins=5)
        yield axes, svg
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})


def _thinned(line: Sequence[Any]) -> Sequence[Any]:
    """Leave out points that no eye would miss; the last one stays."""
    if len(line) <= MOST_POINTS:
        return line
    return [line[i] for i in np.linspace(0, len(line) - 1, MOST_POINTS).astype(int).tolist()]


def _percent(value: float, _: object) -> str:
    return f"{100 * value:.3g}%"


def _short(name: str, length: int = 28) -> str:
    clean = "".join(c if c.isprintable() else " " for c in name)
    return clean if len(clean) <= length else clean[: length - 1] + "…"
