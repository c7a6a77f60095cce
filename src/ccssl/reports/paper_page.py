"""A study of the paper as one page that needs nothing from outside; ``paper_page.html`` says what stands where.

It shows what ``ccssl paper show`` prints, with two differences. At most scales ours has no counterpart for most of what
the paper prints; so here are the columns that hold a value of ours, and the notes name the others. And figures are
drawn a panel at a time, so that each can be read on a telephone.

The looks are those of every page (``page.css``). The template escapes whatever it is given; only drawings are markup
already.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from ccssl._version import __version__
from ccssl.errors import InputError
from ccssl.experiments.folder import CONFIG
from ccssl.experiments.paper.artifacts import ARTIFACTS, Curves, Table
from ccssl.experiments.paper.figures import single_pictures
from ccssl.experiments.paper.results import Results
from ccssl.experiments.paper.scales import SCALES
from ccssl.experiments.paper.show import is_run, needs_runs
from ccssl.experiments.paper.views import NOTHING, PAPER, Cell, Grid, circumstances, view
from ccssl.images.sources import SOURCES
from ccssl.reports.figures import embeddable
from ccssl.training.checkpoint import write_text

PAGE = "paper.html"  # in a study's folder

# What may be read from the figures of a scale.
READING = {
    "smoke": "This scale only tests that every part works: its figures mean nothing.",
    "reduced": "At this scale networks for images are small and learn for few steps, and link predictors try few "
    "settings. Compare ours with ours, above all with supervised only, rather than with the printed values.",
}


def write_page(names: Sequence[str], out: Path, scale: str, phase: str = "test") -> Path:
    """Write the page of a study into its folder; return where it is."""
    text = render(names, out, scale, phase)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / PAGE, text)
    return out / PAGE


def render(names: Sequence[str], out: Path, scale: str, phase: str = "test") -> str:
    """Return the page of artifacts."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    results = Results(out, scale)
    run = [name for name in names if needs_runs(name) and is_run(name, results)]
    missing = [name for name in names if needs_runs(name) and name not in run]
    if missing and not run:
        raise InputError(
            f"{out} holds no run at the scale {scale} of what is to be shown: begin with `ccssl paper run {missing[0]} "
            f"--scale {scale} --out {out}`."
        )
    here = files(__package__ or "ccssl.reports")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["breakable"] = lambda text: Markup("_<wbr>").join(
        text.split("_")
    )  # which escapes the parts
    template = environment.from_string((here / "paper_page.html").read_text(encoding="utf-8"))
    return template.render(
        version=__version__,
        style=Markup((here / "page.css").read_text(encoding="utf-8")),
        scale=scale,
        reading=READING.get(scale) if run else None,
        total=len(ARTIFACTS),
        facts=list(_facts(run, results)),
        sections=[_section(name, results, phase) for name in names if name not in missing],
        missing=[(ARTIFACTS[name].place, name) for name in missing],
        **_repetition(run, missing, names, results, phase),
    )


def _facts(run: Sequence[str], results: Results) -> Iterator[tuple[str, str]]:
    """Yield how ours came about."""
    scale, shown = SCALES[results.scale], _artifacts(run)
    made = circumstances(shown, results)
    if made is None:
        return
    kinds = {artifact.kind for artifact in shown}
    if "images" in kinds:
        yield "Images", scale.title
    if "graphs" in kinds:
        yield "Link prediction", scale.graphs.title
    yield "Runs", f"{made.runs}, {made.seeds}, {made.time} of computing in all"
    yield "Machine", made.machines
    yield "Data", "; ".join(made.data)


def _artifacts(names: Sequence[str]) -> list[Table | Curves]:
    return [artifact for name in names if isinstance(artifact := ARTIFACTS[name], Table | Curves)]


def _section(name: str, results: Results, phase: str) -> dict[str, Any]:
    """Return what is shown of an artifact."""
    from markupsafe import Markup

    artifact, found = ARTIFACTS[name], view(name, ARTIFACTS[name], results, phase)
    grids = [narrow for grid in found.grids if (narrow := with_ours(grid))]
    return {
        "name": name,
        "place": artifact.place,
        "title": artifact.title,
        "made": found.made,
        "pictures": [
            Markup(embeddable(svg, f"{name}-{i}-", words))
            for i, (words, svg) in enumerate(single_pictures(artifact, results, phase))
        ],
        "tables": [_table(grid) for grid in grids],
        "best": found.best if any(cell.best for grid in grids for _, row in grid.rows for cell in row) else None,
        "notes": found.notes,
    }


def with_ours(grid: Grid) -> Grid | None:
    """Return a grid without empty columns, and without the paper's where ours has nothing; None if none is left."""
    if not grid.heads:
        return grid
    first, *spans = grid.heads
    heads, kept, start = [first], [0], 1
    for head, width in spans:
        filled = [k for k in range(start, start + width) if any(row[k].text != NOTHING for _, row in grid.rows)]
        start += width
        if any(grid.columns[k] != PAPER for k in filled):
            heads.append((head, len(filled)))
            kept += filled
    if not heads[1:]:
        return None
    rows = tuple((group, tuple(row[k] for k in kept)) for group, row in grid.rows)
    return replace(grid, heads=tuple(heads), columns=tuple(grid.columns[k] for k in kept), rows=rows)


def _table(grid: Grid) -> dict[str, Any]:
    """Return a grid as the template takes it: a caption, heads, and a body for each group of rows."""
    groups = itertools.groupby(grid.rows, key=lambda row: row[0])
    return {
        "caption": grid.heads[0][0] if grid.heads else "",
        "heads": grid.heads[1:],
        "corner": grid.columns[0],
        "columns": [(name, name == PAPER) for name in grid.columns[1:]],
        "bodies": [[[_parts(cell) for cell in row] for _, row in rows] for _, rows in groups],
    }


def _parts(cell: Cell) -> tuple[str, str, bool]:
    """Return a value, its deviation, and whether it is the best."""
    value, _, deviation = cell.text.partition(" ± ")
    return value, deviation, cell.best


def _repetition(
    run: Sequence[str], missing: Sequence[str], names: Sequence[str], results: Results, phase: str
) -> dict[str, Any]:
    """Return the commands that make the runs and the page again, and what the runs were made with."""
    shown = _artifacts(run)
    paths = dict.fromkeys(path for artifact in shown for path in results.all_runs(artifact))
    configs = [yaml.safe_load((path / CONFIG).read_text(encoding="utf-8")) for path in paths]
    datasets = sorted({str(config["dataset"]) for config in configs})
    folders = sorted({str(Path(dataset).parent) for dataset in datasets if Path(dataset).name != dataset})
    data = ["--data", folders[0] if len(folders) == 1 else "FOLDER"] if folders else []
    seeds = max((int(config["seed"]) + 1 for config in configs), default=0)
    made: dict[str, dict[str, None]] = {}
    for config in configs:
        for name, value in (config.get("made_with") or {}).items():
            made.setdefault(str(name), {})[str(value)] = None
    scaled = ["--scale", results.scale, "--out", str(results.out)]
    figure = [] if phase == "test" else ["--figure", phase]

    def run_command(artifacts: Sequence[str]) -> str:
        return shlex.join(["ccssl", "paper", "run", *artifacts, *scaled, "--seeds", str(seeds), *data])

    everything = ["all"] if len(names) == len(ARTIFACTS) else names
    return {
        "fetch_commands": [
            shlex.join(["ccssl", "data", "fetch", dataset])
            for dataset in datasets
            if dataset in SOURCES and not SOURCES[dataset].embedded
        ],
        "run_command": run_command(run) if run else None,
        "missing_command": run_command(missing) if missing else None,
        "page_command": shlex.join(["ccssl", "paper", "show", *everything, *scaled, *figure, "--format", "html"]),
        "made_with": [(name, ", ".join(values)) for name, values in made.items()],
    }
