"""What is shown of an artifact: a title, grids of cells with ours beside the paper's, and what a reader should know.

The best value of each column is marked, ours and the paper's separately, whatever the paper prints in bold: where that
differs, a note says so. Blocks of columns with the same heading become grids of their own, so that ours and the paper's
fit beside each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ccssl.experiments.paper.artifacts import (
    DATASETS,
    METHODS,
    Artifact,
    Column,
    CredalSets,
    Curves,
    Row,
    SearchSpaces,
    Table,
)
from ccssl.experiments.paper.plan import cell, shown
from ccssl.experiments.paper.printed import Printed
from ccssl.experiments.paper.results import Ours, Results
from ccssl.experiments.paper.scales import SCALES
from ccssl.experiments.spaces import SPACES, Value
from ccssl.experiments.study import duration

NOTHING = "–"


class Cell(NamedTuple):
    """A text, and whether it is the best of its column."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Grid:
    """Cells under heads; the first cell of a row is its head. Heads of the first line span several columns."""

    heads: tuple[tuple[str, int], ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]  # each with its group


@dataclass(frozen=True)
class View:
    """An artifact, ready to be written in any format."""

    name: str
    title: str
    grids: tuple[Grid, ...]
    notes: tuple[str, ...]
    pictures: tuple[Path, ...] = ()


def view(
    name: str, artifact: Artifact, results: Results, phase: str = "test", pictures: Sequence[Path] = ()
) -> View:
    """Return what is shown of an artifact; ``phase`` "median20" takes the median of the last evaluations on test."""
    title = f"{artifact.title} ({artifact.place} of the paper)"
    if isinstance(artifact, SearchSpaces):
        return View(name, title, (_spaces(artifact),), ("Names are those of ccssl train.",))
    if isinstance(artifact, CredalSets):
        pi = "; ".join("(" + ", ".join(f"{degree:g}" for degree in pi) + ")" for pi in artifact.possibilities)
        return View(name, title, (), (f"Possibility degrees: {pi}.",), tuple(pictures))
    part = phase if artifact.phase == "test" else artifact.phase
    if isinstance(artifact, Curves):
        grids: tuple[Grid, ...] = (_ends(artifact, results, part),)
    else:
        blocks = itertools.groupby(shown(artifact, results.scale), lambda column: column.heads[:-1])
        grids = tuple(_grid(artifact, results, part, heads, tuple(columns)) for heads, columns in blocks)
    notes = tuple(_notes(artifact, results, part))
    return View(name, title + _scale(artifact, results), grids, notes, tuple(pictures))


def _scale(artifact: Table | Curves, results: Results) -> str:
    """Return how ours came about, for the title."""
    if artifact.kind is None:
        return ""
    counts = sorted({len(runs) for runs in _runs(artifact, results) if runs})
    return f" at the scale {results.scale}: {SCALES[results.scale].title}; {_seeds(counts)}"


def _seeds(counts: Sequence[int]) -> str:
    """Say how many seeds there are, given the numbers that occur, ascending."""
    if not counts:
        return "nothing run yet"
    if len(counts) > 1:
        return f"{counts[0]} to {counts[-1]} seeds"
    return f"{counts[0]} seed{'s' * (counts[0] > 1)}"


def _runs(artifact: Table | Curves, results: Results) -> Iterator[list[Any]]:
    for row in artifact.rows:
        for column in artifact.columns:
            yield results.runs(artifact, row, column)


def _grid(table: Table, results: Results, phase: str, heads: tuple[str, ...], columns: tuple[Column, ...]) -> Grid:
    """Return columns with common heads: ours, where anything is run, beside the paper's, where anything was printed."""
    with_ours, with_paper = table.kind is not None, any(column.printed for column in columns) and _printed(table)
    sides = ("ours",) * with_ours + ("paper",) * with_paper
    cells: dict[Row, list[Cell]] = {row: [] for row in table.rows}
    for column in columns:
        if with_ours:
            ours = {row: results.figure(table, row, column, phase) for row in table.rows}
            best = best_rows(table, {row: found.mean for row, found in ours.items() if found})
            for row, found in ours.items():
                cells[row].append(Cell(ours_text(table, found), row in best))
        if with_paper:
            paper = {row: printed_cell(table, row, column) for row in table.rows}
            best = best_rows(table, {row: found.number for row, found in paper.items() if found})
            for row, found in paper.items():
                cells[row].append(Cell(_paper_text(found), row in best))
    spans = ((", ".join(heads), 1), *((column.heads[-1], len(sides)) for column in columns))
    names = (table.corner, *(side for _ in columns for side in sides))
    return Grid(spans, names, tuple((row.group, (Cell(row.head), *cells[row])) for row in table.rows))


def _ends(curves: Curves, results: Results, phase: str) -> Grid:
    """Return where the lines of a figure end."""
    columns = [c for c in curves.columns if results.scale in c.scales]
    cells: dict[Row, list[Cell]] = {row: [] for row in curves.rows}
    for column in columns:
        for row in curves.rows:
            found = results.figure(curves, row, column, phase)
            digits = 2 if curves.factor == 100 else 3
            cells[row].append(Cell(_text(found, curves.factor, digits) if found else NOTHING))
    spans = (("", 1), *((column.heads[-1], 1) for column in columns))
    names = ("", *("at the end" for _ in columns))
    return Grid(spans, names, tuple((row.group, (Cell(row.head), *cells[row])) for row in curves.rows))


def _spaces(artifact: SearchSpaces) -> Grid:
    rows = []
    for heading, methods, parameter, name in artifact.rows:
        values = searched(methods, name)
        listed = ", ".join(str(value) if isinstance(value, bool) else f"{value:g}" for value in values)
        rows.append((heading, (Cell(heading), Cell(parameter), Cell(name), Cell(f"{{{listed}}}"))))
    return Grid((), ("Method", "Parameter", "Name", "Values"), tuple(rows))


def searched(methods: Iterable[str], name: str) -> tuple[Value, ...]:
    """Return the values that are searched of a parameter that methods (as the paper calls them) have in common."""
    found = {SPACES[METHODS[method]][name] for method in methods}
    if len(found) != 1:
        raise ValueError(f"{', '.join(methods)} do not search the same values of {name}: {found}")
    return found.pop()


def printed_cell(table: Table, row: Row, column: Column) -> Printed | None:
    """Return what the paper prints in a cell, or None."""
    if not (row.printed and column.printed):
        return None
    return row.printed[[c for c in table.columns if c.printed].index(column)]


def best_rows(table: Table, values: dict[Row, float]) -> set[Row]:
    """Return the rows with the best value: of all, or of their group; none where nothing competes."""
    best: set[Row] = set()
    for group in {row.group for row in values} if table.best_in_group else {None}:
        rivals = {row: value for row, value in values.items() if group is None or row.group == group}
        if len(rivals) > 1:
            wins = min(rivals.values()) if table.lower_is_better else max(rivals.values())
            best |= {row for row, value in rivals.items() if value == wins}
    return best


def ours_text(table: Table, ours: Ours | None) -> str:
    """Return our figure as the table writes it."""
    if ours is None:
        return NOTHING
    return _text(ours, table.factor, table.digits, table.deviation_factor, table.deviation_digits)


def _text(
    ours: Ours,
    factor: float,
    digits: int,
    deviation_factor: float | None = None,
    deviation_digits: int | None = None,
) -> str:
    text = f"{ours.mean * factor:.{digits}f}"
    if ours.deviation is None:
        return text
    deviation = ours.deviation * (factor if deviation_factor is None else deviation_factor)
    return f"{text} ± {deviation:.{digits if deviation_digits is None else deviation_digits}f}"


def _paper_text(printed: Printed | None) -> str:
    if printed is None:
        return NOTHING
    return printed.value + (f" ± {printed.deviation}" if printed.deviation else "")


def _printed(table: Table) -> bool:
    return any(row.printed for row in table.rows)


# ---- what a reader should know --------------------------------------------------------------------------------------


def _notes(artifact: Table | Curves, results: Results, phase: str) -> Iterator[str]:
    yield from artifact.notes
    if isinstance(artifact, Table):
        if artifact.kind is not None or any(cell.deviation for row in artifact.rows for cell in row.printed):
            unit = artifact.deviation_factor / artifact.factor
            multiples = "" if unit == 1 else f", in multiples of {1 / unit:g}"
            yield f"± is the standard deviation over seeds{multiples}."
        yield from wrong_bolds(artifact)
    if artifact.kind is None:
        return
    if phase == "median20":
        yield "Ours is the median of the last 20 evaluations of each run, not the last one."
    yield from _hyperparameters(artifact, results)
    yield from _gaps(artifact, results)
    yield from _circumstances(artifact, results)


def wrong_bolds(table: Table) -> Iterator[str]:
    """Yield where the paper's bold type is not at the best printed value."""
    if not any(cell.bold for row in table.rows for cell in row.printed):
        return
    for column in table.columns:
        found = {row: cell for row in table.rows if (cell := printed_cell(table, row, column))}
        best = best_rows(table, {row: cell.number for row, cell in found.items()})
        for row, cell in found.items():
            if cell.bold and row not in best:
                rivals = [r for r in best if not table.best_in_group or r.group == row.group]
                better = ", ".join(f"{r.head} has {found[r].value}" for r in rivals)
                yield f"The paper prints {cell.value} of {row.head} ({', '.join(column.heads)}) in bold, but {better}."


def _hyperparameters(artifact: Table | Curves, results: Results) -> Iterator[str]:
    """Say which cells are tuned, where the paper searched for hyperparameters."""
    if not artifact.tuned:
        return
    if not SCALES[results.scale].tuned:
        yield "The paper searched for hyperparameters; at this scale ours are those of the scale."
        return
    tuned: list[tuple[str, str]] = []
    default: list[tuple[str, str]] = []
    for column in artifact.columns:
        for row in artifact.rows:
            settings = cell(artifact, row, column, results.scale)
            if settings is not None:
                place = (row.head, f"{settings['dataset']} {settings['labels']}")
                group = default if results.tuned(artifact, settings) is None else tuned
                if place not in group:
                    group.append(place)
    yield f"Hyperparameters found by search: {_places(tuned) or 'none'}."
    yield f"Hyperparameters at their defaults: {_places(default) or 'none'}."


def _gaps(artifact: Table | Curves, results: Results) -> Iterator[str]:
    """Say which columns a scale leaves out, and which are not run yet."""
    out: list[str] = []
    missing: list[tuple[str, str]] = []
    for column in artifact.columns:
        head = ", ".join(column.heads)
        planned = [row for row in artifact.rows if cell(artifact, row, column, results.scale) is not None]
        if not planned and (results.scale in column.scales or (isinstance(artifact, Table) and _printed(artifact))):
            out.append(head)
        missing += [(row.head, head) for row in planned if not results.runs(artifact, row, column)]
    if out:
        yield f"Not part of this scale: {'; '.join(out)}."
    if missing:
        yield f"Not run yet, or its data set is not here: {_places(missing)}."


def _circumstances(artifact: Table | Curves, results: Results) -> Iterator[str]:
    """Say on what machine and on how much data ours was run."""
    runs: dict[Path, str] = {}
    for column in artifact.columns:
        title = SCALES[results.scale].stand_in or DATASETS[column.settings["dataset"]].title
        runs |= {path: title for row in artifact.rows for path in results.runs(artifact, row, column)}
    if not runs:
        return
    found = {path: results.result(path) for path in runs}
    steps = " or ".join(f"{n:,}" for n in sorted({result["steps"] for result in found.values()}))
    hours = duration(sum(result["cost"]["seconds"] for result in found.values()))
    costs = [result["cost"] for result in found.values()]
    machines = sorted(
        {f"{cost['device']} on {cost['machine']}, threads a run: {cost['threads']}" for cost in costs}
    )
    yield f"Ours: {len(runs)} runs of {steps} steps, {hours} of computing in all; {'; '.join(machines)}."
    sizes = {}
    for path, title in runs.items():
        split = found[path]["split"]
        pool = sum(split[part] for part in ("labeled", "calibration", "unlabeled", "validation"))
        sizes[f"{title}, {pool:,} training and {split['test']:,} test images"] = None
    yield f"Data of ours: {'; '.join(sizes)}."


def _places(pairs: Sequence[tuple[str, str]]) -> str:
    """Return pairs of rows and columns, gathered by the columns of a row.

    >>> _places([("UDA", "40 lab."), ("CSSL", "40 lab."), ("UDA", "250 lab.")])
    'UDA (40 lab., 250 lab.), CSSL (40 lab.)'
    """
    rows = dict.fromkeys(row for row, _ in pairs)
    return ", ".join(f"{row} ({', '.join(c for r, c in pairs if r == row)})" for row in rows)
