"""A report on link prediction as one page that needs nothing from outside; ``graph_page.html`` says what stands where.

The looks are those of every page (``page.css``). The template escapes whatever it is given, the names of entities above
all; only drawings are markup already.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from ccssl._version import __version__
from ccssl.reports import figures, graph_figures
from ccssl.reports.graph_answers import DELTA
from ccssl.reports.graph_report import MRR, GraphReport, relation_rows, signed
from ccssl.reports.graph_runs import command, config_of
from ccssl.reports.runs import BASELINE, Group

SIDES = {"": "both", "tail.": "tails", "head.": "heads"}
TIES = {"": "", "optimistic.": ", ties in its favour", "pessimistic.": ", ties against it"}
RANKS = ("mrr", "hits@1", "hits@3", "hits@10")

FEW = 12  # relations that are told of at once

Placed = list[tuple[Group, int | None]]


def render(found: GraphReport) -> str:
    """Return the page."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    here = files(__package__ or "ccssl.reports")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"percent": _percent, "number": "{:,}".format, "three": "{:.3f}".format, "soft": _soft}
    template = environment.from_string((here / "graph_page.html").read_text(encoding="utf-8"))
    drawings = {name: Markup(figures.embeddable(svg, f"{name}-", label)) for name, svg, label in _drawings(found)}
    return template.render(
        version=__version__,
        style=Markup((here / "page.css").read_text(encoding="utf-8")),
        report=found,
        drawings=drawings,
        **_contents(found),
    )


def _placed(found: GraphReport) -> Placed:
    """Give each group the place of its colour: the focus the first, the baseline its own."""
    others = [group for group in found.groups if group is not found.baseline and group is not found.focus]
    places = {id(group): place for place, group in enumerate([found.focus, *others])}
    return [(group, places.get(id(group))) for group in found.groups]


def _contents(found: GraphReport) -> dict[str, Any]:
    config, run = found.config, found.run
    others = f" and {len(found.groups) - 1} others" if len(found.groups) > 2 else ""
    placed = _placed(found)
    return {
        "title": f"{config.method}{others} on {Path(config.dataset).name}, missing links",
        "delta": DELTA,
        "few": FEW,
        "tiles": list(_tiles(found)),
        "rows": [
            {
                "name": group.name,
                "paint": _paint(place),
                "runs": len(group.runs),
                "focus": group is found.focus,
                "cells": [(c.title, c.text(group.figure(c.phase, c.figure))) for c in found.columns],
            }
            for group, place in placed
        ],
        "sides": list(_sides(found)),
        "lines": _lines(placed),
        "pair": _lines([(g, p) for g, p in placed if g is found.focus or g is found.baseline]),
        "taught": _lines([(g, p) for g, p in placed if g.figure("unlabeled", "accuracy")]),
        "relations": relation_rows(found),
        "settings": [(name.replace("_", " "), _setting(value)) for name, value in _settings(found).items()],
        "made_with": [(name, value) for name, value in run.made_with.items() if value],
        "commands": [
            (command(config_of(member), member.folder), member.result["cost"]["seconds"])
            for group in found.groups
            for member in group.runs
        ],
        "baseline_command": None
        if found.baseline or config.method == BASELINE
        else command(
            replace(config, method=BASELINE, options={}), run.folder.parent / f"{run.folder.name}-{BASELINE}"
        ),
        "predict_command": shlex.join(["ccssl", "graph", "predict", str(run.folder), "--out", "new-facts.csv"]),
        "page_command": shlex.join(
            ["ccssl", "graph", "report", *(str(m.folder) for group in found.groups for m in group.runs), "--out",
             "page.html"]
        ),
    }  # fmt: skip


def _drawings(found: GraphReport) -> Iterator[tuple[str, str, str]]:
    """Yield name, drawing and description of each figure."""
    placed, seen = _placed(found), found.seen
    entities = len(seen.graph.entities)
    if any(group.over_time("validation", "mrr")[0] for group, _ in placed):
        drawing = figures.over_time(placed, "mrr", ("validation",), share=False)
        yield "mrr", drawing, "Mean reciprocal rank on validation facts over training steps"
    yield "loss", figures.over_time(placed, "loss", ("train",), share=False), "Loss over training steps"
    taught = [(group, place) for group, place in placed if group.figure("unlabeled", "accuracy")]
    if taught:
        drawing = figures.over_time(taught, "accuracy", ("unlabeled",))
        yield "pseudo", drawing, "Share of unlabeled queries whose hidden answer comes first, over training steps"
    ranks: list[tuple[np.ndarray, int | None]] = [(seen.ranks.realistic, 0)]
    if found.reference_ranks is not None:
        ranks.insert(0, (found.reference_ranks.realistic, None))
    yield "hits", graph_figures.hits(ranks, entities), "Share of answers among the first k entities, for every k"
    if seen.sets["calibration"]:
        drawing = graph_figures.misses(seen.misses, DELTA, found.kept)
        yield "misses", drawing, "Share of answers left out of their prediction set at each level, with its band"
        yield "sizes", graph_figures.set_sizes(seen.sizes, entities), "Sizes of the prediction sets of test queries"


def _tiles(found: GraphReport) -> Iterator[tuple[str, str, str]]:
    """Yield the figures that matter most: number, what it is, what to compare it with."""
    sets = found.seen.sets
    if found.baseline:
        yield _mrr(found.baseline, "MRR from the labeled facts alone")
    yield _mrr(found.focus, "MRR" if found.config.method == BASELINE else "MRR with unlabeled queries, too")
    if found.brought:
        beside = f"{signed(found.brought.low)} to {signed(found.brought.high)} with 95% confidence"
        yield signed(found.brought.mean), "MRR brought by unlabeled queries", beside
    if sets["calibration"]:
        low, high = sets["band"]
        beside = f"promised: {1 - DELTA:.0%}; by chance {low:.1%} to {high:.1%}"
        yield f"{sets['coverage']:.1%}", f"of answers are in their set, at δ = {DELTA:g}", beside
        beside = f"of {sets['entities']:,}; the median is {sets['median_size']:g}"
        yield f"{sets['size']:.1f}", "entities are in a set, on average", beside


def _mrr(group: Group, what: str) -> tuple[str, str, str]:
    mean, _, spread = MRR.text(group.figure("test", "mrr")).partition(" ")
    return mean, what, f"{group.name} {spread}".strip()


def _sides(found: GraphReport) -> Iterator[tuple[str, list[str]]]:
    """Yield the figures of the run looked at closely: a row a side, and a kind of tie that reads differently."""
    test = found.run.result["test"]

    def cells(prefix: str) -> list[str]:
        mrr, *shares = (test[f"{prefix}{name}"] for name in RANKS)
        return [f"{mrr:.3f}", *(_percent(share) for share in shares)]

    for ties, how in TIES.items():
        for side, asked in SIDES.items():
            if not ties or cells(f"{ties}{side}") != cells(side):
                yield f"{asked}{how}", cells(f"{ties}{side}")


def _settings(found: GraphReport) -> dict[str, Any]:
    return {**found.config.to_dict(), "options": vars(found.config.method_config())}


def _setting(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_setting(option)}" for name, option in value.items()) or "none"
    if value is None:
        return "the method's own"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _soft(name: str) -> Any:
    """Return a name that may be broken after its underscores, which browsers take for letters."""
    from markupsafe import Markup, escape

    return Markup("_<wbr>").join(escape(part) for part in name.split("_"))


def _lines(placed: Placed) -> list[tuple[str, str, str]]:
    """Return name, colour and dashes of groups, for a legend."""
    return [(group.name, _paint(place), _border(place)) for group, place in placed]


def _paint(place: int | None) -> str:
    return figures.PAINT[figures.color(place)]


def _border(place: int | None) -> str:
    return "solid" if place is None else ("solid", "dashed", "dotted")[place // len(figures.SERIES) % 3]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"
