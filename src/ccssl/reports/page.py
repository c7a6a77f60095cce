"""A report as one page that needs nothing from outside: figures are SVG in it, images are PNG in it, no script.

``page.html`` says what stands where, ``page.css`` how it looks; here is what they are filled with. The template escapes
whatever it is given, the names of classes above all; only the drawings of ``figures`` are markup already.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ccssl import metrics
from ccssl._version import __version__
from ccssl.credal.polytope import draw
from ccssl.experiments.config import RunConfig
from ccssl.metrics import DELTAS
from ccssl.reports import figures, gallery
from ccssl.reports.answers import Answers, Lesson, Look
from ccssl.reports.report import ERROR_DELTA, Report, class_table, points_text, reach_text
from ccssl.reports.runs import BASELINE, Group, command

EXAMPLES = 6  # of each kind in the gallery
CONFUSIONS = 8  # named in words
LESSON_CLASSES = 5  # told of in numbers

Placed = list[tuple[Group, int | None]]


def render(found: Report) -> str:
    """Return the page."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    here = files(__package__ or "ccssl.reports")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"percent": _percent, "number": "{:,}".format, "whole": _whole, "reach": reach_text}
    template = environment.from_string((here / "page.html").read_text(encoding="utf-8"))
    drawings = {name: Markup(figures.embeddable(svg, f"{name}-", label)) for name, svg, label in _drawings(found)}
    return template.render(
        version=__version__,
        style=Markup((here / "page.css").read_text(encoding="utf-8")),
        report=found,
        drawings=drawings,
        **_contents(found),
    )


def _placed(found: Report) -> Placed:
    """Give each group the place of its colour: the focus the first, the baseline its own."""
    others = [group for group in found.groups if group is not found.baseline and group is not found.focus]
    places = {id(group): place for place, group in enumerate([found.focus, *others])}
    if found.focus.config.method == BASELINE:
        places[id(found.focus)] = 0
    return [(group, places.get(id(group))) for group in found.groups]


def _contents(found: Report) -> dict[str, Any]:
    run, seen = found.run, found.seen
    names = seen.data.class_names
    others = f" and {len(found.groups) - 1} others" if len(found.groups) > 2 else ""
    chosen = gallery.choose(seen.unlabeled, EXAMPLES) if seen.unlabeled else {}
    return {
        "title": f"{found.focus.config.method}{others} on {Path(run.config.dataset).name}, {run.config.labels} labels",
        "tiles": list(_tiles(found)),
        "rows": [
            {
                "name": group.name,
                "paint": _paint(place),
                "runs": len(group.runs),
                "focus": group is found.focus,
                "cells": [(c.title, c.text(group.figure(c.phase, c.figure))) for c in found.columns],
            }
            for group, place in _placed(found)
        ],
        "captions": dict(_captions(found)),
        "allowed": [found.allowed(column) for column in found.columns],
        "lines": _lines(_placed(found)),
        "credal_lines": _lines(_with(_placed(found), "test", "efficiency")),
        "lesson": _lesson(seen.lesson, names) if seen.lesson else None,
        "classes": class_table(found),
        "error_delta": ERROR_DELTA,
        "confusions": _confusions(_confusion(seen), names),
        "gallery": {
            kind: [gallery.example(row, seen.unlabeled, seen.data) for row in rows] for kind, rows in chosen.items()
        }
        if seen.unlabeled
        else None,
        "truth_known": seen.unlabeled is not None and bool((seen.unlabeled.labels >= 0).any()),
        "guesses": "predictions" if found.focus.config.method == BASELINE else "pseudo-labels",
        "wrong": _wrong(seen.unlabeled) if seen.unlabeled else (0, 0),
        "settings": [(name.replace("_", " "), _setting(value)) for name, value in _settings(run.config).items()],
        "made_with": [(name, value) for name, value in run.made_with.items() if value],
        "commands": [
            (command(member.config, member.folder), member.result["cost"]["seconds"])
            for group in found.groups
            for member in group.runs
        ],
        "baseline_command": None
        if found.baseline or found.focus.config.method == BASELINE
        else command(
            replace(run.config, method=BASELINE, options={}), run.folder.parent / f"{run.folder.name}-{BASELINE}"
        ),
        "page_command": shlex.join(
            [
                "ccssl",
                "report",
                *(str(run.folder) for group in found.groups for run in group.runs),
                "--out",
                "page.html",
            ]
        ),
    }


def _drawings(found: Report) -> Iterator[tuple[str, str, str]]:
    """Yield name, drawing and description of each figure."""
    placed, seen = _placed(found), found.seen
    if len(placed) > 2:
        yield "accuracies", figures.accuracies(placed), "Test accuracy of each method, a dot a run"
    yield "accuracy", figures.over_time(placed, "accuracy"), "Accuracy on test images over training steps"
    yield "loss", figures.over_time(placed, "loss", ("train",), share=False), "Loss over training steps"
    taught = _with(placed, "unlabeled", "accuracy")
    if taught:
        label = "Share of pseudo-labels that are right, over training steps"
        yield "pseudo", figures.over_time(taught, "accuracy", ("unlabeled",)), label
    credal = _with(placed, "test", "efficiency")
    if credal:
        reach = {row.delta: row.band[1] for row in seen.audit.rows if row.reachable} if seen.audit else {}
        for delta in DELTAS:
            yield (
                _validity(delta),
                figures.over_time(
                    credal, f"validity_error@{delta:g}", ("test", "unlabeled"), bound=(delta, reach.get(delta))
                ),
                f"Validity error at {delta:g} over training steps, with its bound",
            )
        least = 1 / len(seen.data.class_names)
        label = "Mean possibility over training steps"
        yield (
            "efficiency",
            figures.over_time(credal, "efficiency", ("test", "unlabeled"), share=False, floor=least),
            label,
        )
    yield "reliability", figures.reliability(list(_diagrams(found))), "Accuracy against confidence on test images"
    if seen.audit:
        yield (
            "audit",
            figures.p_value_law(seen.audit),
            "Distribution of the p-values of the true classes, with its band",
        )
    label = "How often each class was called which"
    yield "confusion", figures.confusion(_confusion(seen), seen.data.class_names), label
    if seen.lesson and len(seen.data.class_names) > 2:
        yield (
            "triangle",
            _triangle(seen.lesson, seen.data.class_names),
            "Credal set, prediction and target in a triangle",
        )


def _validity(delta: float) -> str:
    """Name the figure of the validity errors at a level."""
    return f"validity-{delta:g}".replace(".", "-")


def _captions(found: Report) -> Iterator[tuple[str, str]]:
    """Yield what stands below the figures of validity."""
    rows = {row.delta: row for row in found.seen.audit.rows} if found.seen.audit else {}
    for delta in DELTAS:
        meaning = "."
        if delta in rows:
            meaning = ": the shade is what chance allows a valid method."
            if not rows[delta].reachable:
                meaning = f": out of reach for {found.focus.name}, which has too few calibration items."
        yield _validity(delta), f"Error at δ = {delta:g}{meaning}"


def _diagrams(found: Report) -> Iterator[tuple[metrics.Reliability, int | None]]:
    for seen, place in ((found.reference_seen, None), (found.seen, 0)):
        if seen:
            yield (
                metrics.reliability(torch.from_numpy(seen.test.probabilities), torch.from_numpy(seen.test.labels)),
                place,
            )


def _tiles(found: Report) -> Iterator[tuple[str, str, str]]:
    """Yield the figures that matter most: number, what it is, what to compare it with."""
    focus, columns = found.focus, {(c.phase, c.figure): c for c in found.columns}

    def text(group: Group, phase: str, figure: str) -> str:
        return columns[phase, figure].text(group.figure(phase, figure))

    alone, too = "right from the labels alone", "right with unlabeled images, too"
    if found.baseline:
        yield text(found.baseline, "test", "accuracy"), alone, "supervised-only"
    yield text(focus, "test", "accuracy"), alone if focus.config.method == BASELINE else too, focus.name
    if found.brought:
        points = points_text(found.brought.mean)
        beside = f"{points_text(found.brought.low)} to {points_text(found.brought.high)} with 95% confidence"
        yield points, "points brought by unlabeled images", beside
    if found.seen.audit:
        row = next(row for row in found.seen.audit.rows if row.delta == ERROR_DELTA)
        told = text(focus, "test", f"validity_error@{ERROR_DELTA:g}")
        yield told, f"true classes called implausible at δ = {ERROR_DELTA:g}", f"valid: {row.delta:.0%} or less"


def _lesson(lesson: Lesson, names: tuple[str, ...]) -> dict[str, Any]:
    """Return what the page tells of the lesson: its views, and its most telling classes in numbers."""
    weight_K = lesson.possibility + lesson.taught + lesson.student
    shown = sorted(weight_K.argsort(kind="stable")[::-1][:LESSON_CLASSES].tolist())
    parts = (lesson.taught, lesson.p_values, lesson.possibility, lesson.student, lesson.target)
    return {
        "weak": gallery.data_uri(lesson.weak),
        "strong": gallery.data_uri(lesson.strong),
        "truth": None if lesson.label < 0 else names[lesson.label],
        "rows": [(names[k], [float(part[k]) for part in parts]) for k in shown],
        "hidden": len(names) - len(shown),
        "loss": lesson.loss,
        "corners": [names[k] for k in _corners(lesson)],
    }


def _corners(lesson: Lesson) -> list[int]:
    """The three classes of the triangle: the most possible ones, in the order of the classes."""
    weight_K = lesson.possibility + 1e-3 * (lesson.taught + lesson.student)
    return sorted(weight_K.argsort(kind="stable")[::-1][:3].tolist())


def _triangle(lesson: Lesson, names: tuple[str, ...]) -> str:
    """Draw the credal set on the three most possible classes alone."""
    corners = _corners(lesson)
    student = torch.from_numpy(lesson.student[corners])
    pi = torch.from_numpy(lesson.possibility[corners])
    return draw(pi, student / student.sum(), labels=[names[k] for k in corners])


def _confusion(seen: Look) -> Any:
    predicted, labels = torch.from_numpy(seen.test.predicted), torch.from_numpy(seen.test.labels)
    return metrics.confusion(predicted, labels, len(seen.data.class_names)).numpy()


def _confusions(counts_KK: Any, names: tuple[str, ...]) -> list[tuple[str, str, int]]:
    """Return the most frequent errors: true class, predicted class, how often."""
    errors_KK = counts_KK.copy()
    errors_KK[range(len(names)), range(len(names))] = 0
    order = errors_KK.reshape(-1).argsort(kind="stable")[::-1][:CONFUSIONS]
    places = [divmod(int(place), len(names)) for place in order]
    return [(names[t], names[p], int(errors_KK[t, p])) for t, p in places if errors_KK[t, p] > 0]


def _wrong(answers: Answers) -> tuple[int, int]:
    """Return how many answers are wrong, among how many whose truth is known."""
    known = answers.labels >= 0
    return int((known & ~answers.right).sum()), int(known.sum())


def _with(placed: Placed, phase: str, figure: str) -> Placed:
    """Return the groups that have a figure."""
    return [(group, place) for group, place in placed if group.figure(phase, figure)]


def _lines(placed: Placed) -> list[tuple[str, str, str]]:
    """Return what a legend tells of each group: name, colour and dashes."""
    return [(group.name, _paint(place), _border(place)) for group, place in placed]


def _settings(config: RunConfig) -> dict[str, Any]:
    """Return all settings of a run, those of its method last."""
    fields = {name: value for name, value in config.to_dict().items() if name != "options"}
    return {**fields, **vars(config.method_config())}


def _setting(value: object) -> str:
    if value is None:
        return "not given"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _paint(place: int | None) -> str:
    return figures.PAINT[figures.color(place)]


def _border(place: int | None) -> str:
    return "solid" if place is None else ("solid", "dashed", "dotted")[place // len(figures.SERIES) % 3]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def _whole(text: str) -> str:
    """Keep a condition such as δ = 0.1, and a deviation with its sign, on one line."""
    return text.replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}").replace(" ± ", " ±\N{NO-BREAK SPACE}")
