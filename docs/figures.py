"""Draw the figures of these pages; ``conf.py`` does so at every build, into ``_build/figures``.

The README's picture is committed. To draw it anew::

    python docs/figures.py docs/images credal-set
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from ccssl.conformal import Calibration, audit
from ccssl.credal.polytope import INK, MUTED, PREDICTION, PROJECTION, SET, draw

# The worked example of theory.md: classes A, B and C.
PI, PREDICTED = torch.tensor([0.4, 1.0, 0.2]), torch.tensor([0.7, 0.2, 0.1])


def credal_set(path: Path) -> None:
    """Draw the credal set of the worked example, the prediction and its projection."""
    path.write_text(draw(PI, PREDICTED, labels="ABC"), encoding="utf-8")


def hull(path: Path) -> None:
    """Draw the points (sum of q, pi) of the worked example and their greatest convex minorant."""
    figure = _figure(5.6, 4.0)
    axes = figure.add_subplot(xlim=(0, 1.02), ylim=(0, 1.04))
    axes.plot([0, 1], [0, 1], color=MUTED, lw=1, ls=(0, (4, 3)), label="diagonal: p = q")
    axes.plot([0, 0.1, 0.8], [0, 0.2, 0.4], color=MUTED, lw=1, ls=":")
    axes.plot([0, 0.8, 1], [0, 0.4, 1], color=PROJECTION, lw=2, label="greatest convex minorant")
    axes.plot([0, 0.1, 0.8, 1], [0, 0.2, 0.4, 1], "o", color=SET, ms=6, label="points (Q, π)", zorder=3)
    axes.plot([0.1], [0.05], "s", color=PREDICTION, ms=6, label="what C receives: below its bound", zorder=3)
    for text, x, y in (("C", 0.1, 0.23), ("A", 0.78, 0.45), ("B", 0.96, 0.98)):
        axes.text(x, y, text, color=SET, weight="bold", ha="center")
    axes.text(0.44, 0.15, "slope ½", color=PROJECTION)
    axes.text(0.92, 0.6, "slope 3", color=PROJECTION)
    axes.set_xlabel("model mass, classes in ascending order of π", color=INK)
    axes.set_ylabel("possibility", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left", labelcolor=INK)
    _save(figure, path)


def realised_error(path: Path) -> None:
    """Draw the Beta law of the error that a calibration set of a given size brings, at delta = 0.1."""
    from scipy.stats import beta

    figure = _figure(5.6, 3.2)
    axes = figure.add_subplot(xlim=(0, 0.24), ylim=(0, None))
    error = torch.linspace(0.001, 0.24, 480).numpy()
    for size, color in ((50, PREDICTION), (200, SET), (1000, PROJECTION)):
        rank = int(0.1 * (size + 1))
        axes.plot(error, beta.pdf(error, rank, size + 1 - rank), color=color, lw=1.8, label=f"L = {size:,}")
    axes.axvline(0.1, color=INK, lw=1, ls=(0, (4, 3)))
    axes.text(0.102, 40, "δ", color=INK)
    axes.set_xlabel("share of errors in the long run, once the calibration set is drawn", color=INK)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    _save(figure, path)


def audit_picture(path: Path) -> None:
    """Draw the audit of a sound calibration beside nothing else: the example of the guide."""
    draw_ = torch.Generator().manual_seed(0)
    probabilities = (2 * torch.randn(2200, 5, generator=draw_)).softmax(-1)
    labels = probabilities.multinomial(1, generator=draw_).squeeze(-1)
    calibration = Calibration("proportion").fit(probabilities[:200], labels[:200])
    audit(calibration, probabilities[200:], labels[200:]).plot(path)


FIGURES: dict[str, Callable[[Path], None]] = {
    "credal-set": credal_set,
    "hull": hull,
    "realised-error": realised_error,
    "audit": audit_picture,
}


def draw_all(folder: Path, names: list[str] | None = None) -> None:
    """Draw the named figures, or all, as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or FIGURES:
        FIGURES[name](folder / f"{name}.svg")


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasSVG(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    with mpl.rc_context({"svg.hashsalt": "ccssl"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]), sys.argv[2:])
