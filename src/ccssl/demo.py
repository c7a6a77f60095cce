r"""The demonstration: conformal credal labels on a problem small enough to be drawn.

Three overlapping clouds of points in the plane, A, B and C. A softmax regression learns from thirty labels,
``Calibration`` compares it with a hundred others, and three of the many unlabeled points show what follows:
p-values, possibility degrees, the credal set in its triangle, the model's prediction and its projection.
Two thousand fresh points audit the promise behind it.

``run_demo`` computes and writes the page, ``terminal_table`` puts the figures in plain text. Equal seeds give
equal pages.

Shapes: N points, K = 3 classes.
"""

from __future__ import annotations

import base64
import html
import string
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ccssl._version import __version__
from ccssl.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from ccssl.conformal import Audit

CLASSES = ("A", "B", "C")
LABELED, CALIBRATION, UNLABELED, FRESH = 30, 100, 300, 2000
DELTA = 0.1


@dataclass(frozen=True)
class Item:
    """What is known of one unlabeled point; each tuple has a number for each class."""

    point: tuple[float, ...]
    prediction: tuple[float, ...]
    p_values: tuple[float, ...]
    possibility: tuple[float, ...]
    target: tuple[float, ...]  # the projection of the prediction onto the credal set
    loss: float


@dataclass(frozen=True)
class Demo:
    """All that the demonstration found."""

    page: Path
    seed: int
    accuracy: float
    efficiency: float
    items: dict[str, Item]  # by the name of what they show
    audit: Audit

    def figures(self) -> dict[str, Any]:
        """Return the figures, ready for JSON."""
        return {
            "page": str(self.page),
            "seed": self.seed,
            "labels": {"training": LABELED, "calibration": CALIBRATION},
            "accuracy": self.accuracy,
            "efficiency": self.efficiency,
            "errors": {f"{row.delta:g}": row.error for row in self.audit.rows},
            "valid": self.audit.valid,
            "verdict": self.audit.verdict,
            "items": {name: vars(item) for name, item in self.items.items()},
        }


def run_demo(folder: Path, seed: int = 0) -> Demo:
    """Compute everything, write ``folder``/index.html and return what was found."""
    import torch

    from ccssl.conformal import Calibration, audit, efficiency
    from ccssl.credal import credal_loss, project_logits

    page = folder / "index.html"
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out must name a folder, but {folder} is a file.")
    generator = torch.Generator().manual_seed(seed)
    training, training_labels = _points(torch.arange(LABELED) % len(CLASSES), generator)
    # Only items that are drawn alike may be compared: these labels come as they come, not in equal numbers.
    held_out, held_out_labels = _points(_random_labels(CALIBRATION, generator), generator)
    unlabeled, _ = _points(_random_labels(UNLABELED, generator), generator)
    fresh, fresh_labels = _points(_random_labels(FRESH, generator), generator)

    weights = _fit(training, training_labels)
    calibration = Calibration("proportion").fit(_logits(held_out, weights).softmax(-1), held_out_labels)

    logits_NK = _logits(unlabeled, weights)
    q_NK = logits_NK.softmax(-1)
    levels = calibration.levels(q_NK)
    target_NK = project_logits(logits_NK, levels)
    loss_N = credal_loss(logits_NK, levels, reduction="none")
    p_values_NK, pi_NK = levels.p_values(), levels.dense()

    def item(index: int) -> Item:
        parts = (unlabeled, q_NK, p_values_NK, pi_NK, target_NK)
        return Item(*(tuple(part[index].tolist()) for part in parts), loss=float(loss_N[index]))

    ordered_NK = pi_NK.sort(-1).values
    gap_N = ordered_NK[:, 1] - ordered_NK[:, 0]
    items = {
        "taught": item(int((loss_N * gap_N).argmax())),
        "torn": item(int(gap_N.argmax())),
        "settled": item(int(pi_NK.sum(-1).argmin())),
    }
    fresh_logits = _logits(fresh, weights)
    demo = Demo(
        page=page,
        seed=seed,
        accuracy=float((fresh_logits.argmax(-1) == fresh_labels).double().mean()),
        efficiency=float(efficiency(calibration.levels(fresh_logits.softmax(-1))).overall),
        items=items,
        audit=audit(calibration, fresh_logits.softmax(-1), fresh_labels),
    )
    text = _page(demo, (training, training_labels), (held_out, held_out_labels), unlabeled, weights)
    folder.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    return demo


def terminal_table(demo: Demo) -> str:
    """Return the figures as a table in plain text."""
    lines = []
    for number, (name, item) in enumerate(demo.items.items(), start=1):
        lines.append(f"unlabeled point {number} ({name}), loss {item.loss:.3f}")
        lines.append(" " * 14 + "".join(f"{label:>8}" for label in CLASSES))
        for title, values in _rows(item):
            lines.append(f"  {title:<12}" + "".join(f"{value:8.3f}" for value in values))
        lines.append("")
    lines.append(f"accuracy on {FRESH:,} fresh points    {demo.accuracy:.3f}")
    lines.append(f"efficiency (mean possibility)     {demo.efficiency:.3f}")
    for row in demo.audit.rows:
        lines.append(f"errors at delta {row.delta:<5g}             {row.error:.3f}")
    verdict = textwrap.fill(demo.audit.verdict, 80)
    return "\n".join([*lines, "", verdict, "", f"The page with the pictures: {demo.page}"])


def _rows(item: Item) -> list[tuple[str, tuple[float, ...]]]:
    return [
        ("prediction", item.prediction),
        ("p-value", item.p_values),
        ("possibility", item.possibility),
        ("target", item.target),
    ]


def _random_labels(number: int, generator: Any) -> Tensor:
    import torch

    return torch.randint(len(CLASSES), (number,), generator=generator)


def _points(labels: Tensor, generator: Any) -> tuple[Tensor, Tensor]:
    """Return a point (N, 2) of the cloud of each label, and the labels."""
    import torch

    centres = torch.tensor([[-1.75, -1.0], [1.75, -1.0], [0.0, 2.0]])
    return centres[labels] + 1.4 * torch.randn(len(labels), 2, generator=generator), labels


def _logits(points: Tensor, weights: Tensor) -> Tensor:
    return points @ weights[:2] + weights[2]


def _fit(points: Tensor, labels: Tensor) -> Tensor:
    """Return the weights (3, K) of a softmax regression, the constant in the last row.

    In numpy: for so little data torch would spend its time on waking its threads.
    """
    import numpy as np
    import torch

    x_N3 = np.c_[points.numpy(), np.ones(len(points))]
    target_NK = np.eye(len(CLASSES))[labels.numpy()]
    penalty_3K = np.array([[0.6], [0.6], [0.0]])  # on the slopes alone
    weights_3K = np.zeros((3, len(CLASSES)))
    for _ in range(300):
        e_NK = np.exp(x_N3 @ weights_3K)
        residual_NK = e_NK / e_NK.sum(-1, keepdims=True) - target_NK
        weights_3K -= 0.2 * (x_N3.T @ residual_NK / len(points) + penalty_3K * weights_3K)
    return torch.from_numpy(weights_3K).float()


# The page. Nothing in it is fetched from anywhere: pictures are data in the page itself.


def _page(
    demo: Demo,
    training: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    unlabeled: Tensor,
    weights: Tensor,
) -> str:
    import torch

    from ccssl.credal.polytope import draw

    triangle = {
        name: draw(
            torch.tensor(item.possibility),
            torch.tensor(item.prediction),
            torch.tensor(item.target),
            labels=CLASSES,
        )
        for name, item in demo.items.items()
    }
    taught, torn, settled = (demo.items[name] for name in ("taught", "torn", "settled"))
    likely, second = (CLASSES[k] for k in sorted(range(3), key=lambda k: -torn.possibility[k])[:2])
    row = next(row for row in demo.audit.rows if row.delta == DELTA)
    first = CLASSES[max(range(3), key=lambda k: taught.possibility[k])]
    values = {
        "version": __version__,
        "seed": demo.seed,
        "labeled": LABELED,
        "calibration": CALIBRATION,
        "unlabeled": UNLABELED,
        "fresh": f"{FRESH:,}",
        "accuracy": f"{demo.accuracy:.0%}",
        "floor": f"1/{CALIBRATION + 1}",
        "taught_class": first,
        "taught_before": f"{taught.prediction[CLASSES.index(first)]:.2f}",
        "taught_after": f"{taught.target[CLASSES.index(first)]:.2f}",
        "taught_loss": f"{taught.loss:.3f}",
        "torn_classes": f"{likely} and {second}",
        "torn_loss": f"{torn.loss:.3f}",
        "settled_class": CLASSES[max(range(3), key=lambda k: settled.possibility[k])],
        "delta": f"{row.delta:.0%}",
        "error": f"{row.error:.1%}",
        "efficiency": f"{demo.efficiency:.2f}",
        "verdict": demo.audit.verdict,
    }
    escaped = {name: html.escape(str(value)) for name, value in values.items()}
    markup = {
        "scatter": _image(
            _scatter(demo, training, held_out, unlabeled, weights),
            "Points in the plane: three clouds, few of them labeled, and the model's decisions",
        ),
        "table": _table(taught),
        "triangle_taught": _image(
            triangle["taught"], "Credal set of point 1, with an arrow from prediction to target"
        ),
        "triangle_torn": _image(triangle["torn"], "Credal set of point 2, large along one edge"),
        "triangle_settled": _image(triangle["settled"], "Credal set of point 3, small in one corner"),
        "audit": _image(
            demo.audit.svg(), "Distribution of the p-values of true labels, and errors, with their bands"
        ),
    }
    return string.Template(_TEMPLATE).substitute(escaped | markup)


def _image(svg: str, description: str) -> str:
    """Return an <img> that holds the picture itself: its ids and styles stay inside."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{html.escape(description)}" src="data:image/svg+xml;base64,{data}">'


def _table(item: Item) -> str:
    """Return an HTML table with a bar under each number."""
    head = "".join(f"<th scope=col>{title}</th>" for title, _ in _rows(item))
    body = ""
    for k, label in enumerate(CLASSES):
        cells = "".join(
            f'<td>{values[k]:.2f}<i style="--share:{values[k]:.3f}"></i></td>' for _, values in _rows(item)
        )
        body += f"<tr><th scope=row>{html.escape(label)}</th>{cells}</tr>"
    return f"<table><thead><tr><th>class</th>{head}</tr></thead><tbody>{body}</tbody></table>"


def _scatter(
    demo: Demo,
    training: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    unlabeled: Tensor,
    weights: Tensor,
) -> str:
    """Draw the points and the model's borders."""
    import io

    import matplotlib as mpl
    import torch
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    colours, markers = ("#56b4e9", "#e69f00", "#cc79a7"), ("o", "s", "^")
    style: dict[Any, Any] = {
        "svg.hashsalt": "ccssl",
        "svg.fonttype": "none",
        "font.family": ["sans-serif"],
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 11,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(5.9, 5.1), dpi=72, facecolor="white")
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.0, 0.17, 1.0, 0.83), aspect="equal")
        left, right, bottom, top = -7.9, 7.9, -5.2, 6.1
        axes.set(xlim=(left, right), ylim=(bottom, top), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        sides = torch.linspace(left, right, 300), torch.linspace(bottom, top, 200)
        x, y = torch.meshgrid(*sides, indexing="xy")
        choice = _logits(torch.stack([x.flatten(), y.flatten()], -1), weights).argmax(-1).view_as(x)
        axes.contourf(
            x.numpy(), y.numpy(), choice.numpy(), levels=[-0.5, 0.5, 1.5, 2.5], colors=colours, alpha=0.12
        )
        axes.plot(*unlabeled.T.numpy(), ".", color="#8c959f", markersize=3.5, label="unlabeled")
        for k, name in enumerate(CLASSES):
            for (points, labels), fill, what in (
                (held_out, "white", "to calibrate"),
                (training, colours[k], "to learn"),
            ):
                axes.plot(
                    *points[labels == k].T.numpy(),
                    markers[k],
                    markersize=5 if fill == "white" else 8,
                    markerfacecolor=fill,
                    markeredgecolor=colours[k] if fill == "white" else "#1f2328",
                    markeredgewidth=1.2 if fill == "white" else 0.8,
                    label=f"{name}, {what}",
                )
        for number, item in enumerate(demo.items.values(), start=1):
            axes.plot(*item.point, "o", markersize=17, color="#1f2328", zorder=5)
            x_item, y_item = item.point
            axes.text(
                x_item,
                y_item,
                str(number),
                color="white",
                weight="bold",
                ha="center",
                va="center_baseline",
                zorder=6,
            )
        handles, names = axes.get_legend_handles_labels()
        order = [2, 1, 0, 4, 3, 6, 5]  # columns: a class each
        figure.legend(
            [handles[i] for i in order],
            [names[i] for i in order],
            loc="lower center",
            ncols=3,
            frameon=False,
            fontsize=10,
            columnspacing=1.4,
            handletextpad=0.3,
        )
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Conformal credal labels: a demonstration</title>
<style>
:root { --paper: #ffffff; --ink: #1f2328; --soft: #57606a; --line: #d0d7de; --bar: #0072b2; --note: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0f1318; --ink: #e6e9ed; --soft: #9aa4af; --line: #30363d; --bar: #58a6d8;
    --note: #171c23; }
  /* Turn white into black but keep hues; black then lets the page through. */
  img { filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 3rem; max-width: 46rem; background: var(--paper);
  color: var(--ink); font: 1.0625rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: .5rem 0 1rem; text-wrap: balance; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 2.75rem 0 .5rem; }
p { margin: .75rem 0; }
.lead, figcaption, footer { color: var(--soft); }
figure { margin: 1.25rem 0; break-inside: avoid; }
figcaption { font-size: .9375rem; margin-top: .5rem; }
img { display: block; width: 100%; height: auto; max-width: 36rem; margin: 0 auto; }
.wide { overflow-x: auto; }
.wide img { max-width: none; min-width: 40rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 1rem 2rem; }
.pair figure { margin: 0; }
@media (min-width: 64rem) { .pair { margin-inline: -6rem; } }
table { width: 100%; table-layout: fixed; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th:first-child { width: 3.5rem; }
th, td { padding: .4rem .5rem .4rem 0; text-align: left; border-bottom: 1px solid var(--line);
  font-weight: 400; }
thead th { color: var(--soft); font-size: .875rem; }
tbody th { font-weight: 600; }
td i { display: block; height: .375rem; margin-top: .15rem; border-radius: .2rem; min-width: 1px;
  width: calc(var(--share) * 100%); background: var(--bar); print-color-adjust: exact; }
.verdict { background: var(--note); border-left: .25rem solid var(--bar); padding: .75rem 1rem; }
code { white-space: nowrap; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: .75rem; font-size: .875rem; }
@media (max-width: 30rem) { figure:not(.wide) > img { width: calc(100% + 2rem); margin-inline: -1rem; }
  thead th { font-size: .75rem; } th:first-child { width: 2.5rem; } }
@media print { body { max-width: none; font-size: 11pt; padding: 0; } .wide img { min-width: 0; } }
</style>
</head>
<body>
<main>
<h1>Labels that say how far they can be trusted</h1>
<p class="lead">A model has learned from few labels and guesses the rest. Should it learn from its own
guesses? Only as far as they deserve it. This page follows three unlabeled points through the method.</p>

<h2>The problem: few labels, many points</h2>
<figure>$scatter
<figcaption>Shades: what the model would answer where. Filled marks: the labels it learned from. Hollow
marks: labels kept aside. Grey dots: points without a label. 1, 2, 3: the points looked at
below.</figcaption></figure>
<p>Each point belongs to one of three overlapping clouds, A, B or C. The model saw only $labeled labels; its
answer is right for $accuracy of fresh points. It gives every point three probabilities, but nothing
guarantees that they mean anything. So $calibration further labels were kept aside: on them one can see how
the model errs.</p>

<h2>Point 1: from a guess to a label</h2>
<figure>$table</figure>
<p>The <b>prediction</b> is what the model says. The <b>p-value</b> of a class asks: if this class were the
true one, how usual would a prediction like this be, compared with those for the labels kept aside? A small
p-value speaks against the class; it cannot fall below $floor here. Divided by the largest of them, p-values
become degrees of <b>possibility</b>: 1 for the best class, and for each other class the highest probability
that it may be given.</p>
<figure>$triangle_taught
<figcaption>Each place in the triangle is a way to share probability among A, B and C; a corner is
certainty. Beside each dot: its probabilities for A, B and C.</figcaption></figure>
<p>The blue area holds all ways of sharing probability that respect the degrees of possibility: the
<b>credal set</b>. It is the label of this point. Not one class, nor one distribution, but all those that
the evidence leaves open. The prediction lies outside, so there is something to learn: the <b>target</b> is
its projection, the member of the set with the least Kullback-Leibler divergence from it, and that divergence,
$taught_loss, is the loss. Learning moves the probability of $taught_class from $taught_before towards
$taught_after, and not further.</p>

<h2>Points 2 and 3: doubt and certainty</h2>
<div class="pair">
<figure>$triangle_torn
<figcaption><b>Point 2</b> lies between two clouds. Both $torn_classes remain possible, the set is large,
and the loss is $torn_loss: the model is not pushed to a decision that might be wrong.</figcaption></figure>
<figure>$triangle_settled
<figcaption><b>Point 3</b> is clear. The set has shrunk to a small corner at $settled_class: almost as good
as a label given by hand.</figcaption></figure>
</div>
<p>This is the difference from ordinary pseudo-labels, which would treat both points alike: the most
probable class, taken for true.</p>

<h2>Is the promise kept?</h2>
<p>The promise: at any level, say $delta, the true class is called so implausible in at most $delta of all
cases, however good or bad the model is. It holds on average over the labels that happen to be kept aside.
Here $fresh fresh points, never used before, put it to the test.</p>
<figure class="wide">$audit</figure>
<p>Left: how often the true class got at most a given p-value. A line that keeps to the dashed diagonal or
below it keeps the promise; the band shows what chance allows, for only $calibration labels were kept aside.
Right: the same at three levels, called delta. At $delta, the errors were $error. The mean possibility
over all classes is $efficiency: 1 would mean that nothing was excluded, 0.33 that only one class was
left.</p>
<p class="verdict">$verdict</p>
</main>
<footer>Made by ccssl $version, <code>ccssl demo --seed $seed</code>. Try another seed: the points change,
the promise does not.</footer>
</body>
</html>
"""
