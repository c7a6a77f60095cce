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
    GRAPHS,
    METHODS,
    Artifact,
    Column,
    CredalSets,
    Curves,
    Row,
    SearchSpaces,
    Table,
)
from ccssl.experiments.paper.links import GRID_SEED, Choice
from ccssl.experiments.paper.plan import cell, shown
from ccssl.experiments.paper.printed import Printed
from ccssl.experiments.paper.results import Ours, Results
from ccssl.experiments.paper.scales import SCALES
from ccssl.experiments.spaces import SPACES, Value
from ccssl.experiments.study import duration

NOTHING = "–"
OURS, PAPER = "ours", "paper"


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
    best: str = "best of its column"  # what the marked cells are
    made: str = ""  # how ours came about; also part of the title


class Circumstances(NamedTuple):
    """How ours came about: of an artifact, or of several together."""

    runs: int
    seeds: str
    steps: str
    time: str
    machines: str
    data: tuple[str, ...]


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
    part = part_of(artifact, phase)
    if isinstance(artifact, Curves):
        grids: tuple[Grid, ...] = (_ends(artifact, results, part),)
    else:
        columns = shown(artifact, results.scale)
        blocks = itertools.groupby(columns, lambda column: (*column.heads[:-1], column.variant))
        grids = tuple(_grid(artifact, results, part, heads, tuple(block)) for heads, block in blocks)
        if artifact.kind == "graphs":
            grids += (_choices(artifact, results),)
    notes = tuple(_notes(artifact, results, part))
    best = "best of its group of rows" if isinstance(artifact, Table) and artifact.best_in_group else View.best
    made = _scale(artifact, results)
    return View(name, f"{title} {made}".rstrip(), grids, notes, tuple(pictures), best, made)


def part_of(artifact: Table | Curves, phase: str) -> str:
    """Return the part of a result that is shown of an artifact, given what is wanted of test data."""
    return phase if artifact.phase == "test" and artifact.kind == "images" else artifact.phase


def _scale(artifact: Table | Curves, results: Results) -> str:
    """Return how ours came about, for the title."""
    if artifact.kind == "counts":
        return ""
    scale = SCALES[results.scale]
    title = scale.graphs.title if artifact.kind == "graphs" else scale.title
    return f"at the scale {results.scale}: {title}; {_seeds(_numbers([artifact], results))}"


def _numbers(artifacts: Iterable[Table | Curves], results: Results) -> list[int]:
    """Return the numbers of seeds that cells have, ascending."""
    return sorted({len(runs) for artifact in artifacts for runs in _runs(artifact, results) if runs})


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
    """Return columns with common heads: ours beside the paper's, where anything was printed."""
    with_paper = any(column.printed for column in columns) and _printed(table)
    sides = (OURS, *(PAPER,) * with_paper)
    cells: dict[Row, list[Cell]] = {row: [] for row in table.rows}
    for column in columns:
        ours = {row: results.figure(table, row, column, phase) for row in table.rows}
        best = best_rows(table, {row: found.mean for row, found in ours.items() if found})
        for row, found in ours.items():
            cells[row].append(Cell(ours_text(table, found), row in best))
        if with_paper:
            paper = {row: printed_cell(table, row, column) for row in table.rows}
            best = best_rows(table, {row: found.number for row, found in paper.items() if found})
            for row, found in paper.items():
                cells[row].append(Cell(_paper_text(found), row in best))
    spans = ((", ".join(filter(None, heads)), 1), *((column.heads[-1], len(sides)) for column in columns))
    names = (table.corner, *(side for _ in columns for side in sides))
    return Grid(spans, names, tuple((row.group, (Cell(row.head), *cells[row])) for row in table.rows))


def _choices(table: Table, results: Results) -> Grid:
    """Return the setting of the grid that each cell shows."""
    columns = list({(*c.heads[:-1], c.variant): c for c in table.columns}.values())
    rows = []
    for row in table.rows:
        cells = [Cell(row.head)]
        for column in columns:
            settings = cell(table, row, column, results.scale)
            choice = results.chosen(settings) if settings else None
            cells.append(Cell(" / ".join(map(str, chosen_values(choice, results.scale).values())) or NOTHING))
        rows.append((row.group, tuple(cells)))
    spans = tuple((", ".join(heads), len(list(same))) for heads, same in itertools.groupby(columns, _block))
    names = ("chosen: " + " / ".join(SCALES[results.scale].graphs.grid), *(column.variant for column in columns))
    return Grid((("", 1), *spans), names, tuple(rows))


def _block(column: Column) -> tuple[str, ...]:
    return column.heads[:-1]


def chosen_values(choice: Choice | None, scale: str) -> dict[str, Any]:
    """Return the values of the grid that were chosen; nothing where nothing was."""
    return {name: getattr(choice.config, name) for name in SCALES[scale].graphs.grid} if choice else {}


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
    return row.printed[[c.heads for c in printed_columns(table)].index(column.heads)]


def printed_columns(table: Table) -> list[Column]:
    """Return the columns that the paper prints, of variants the first."""
    found: dict[tuple[str, ...], Column] = {}
    for column in table.columns:
        if column.printed:
            found.setdefault(column.heads, column)
    return list(found.values())


def best_rows(table: Table, values: dict[Row, float]) -> set[Row]:
    """Return the rows with the best value: of all, or of their group; none where nothing competes."""
    best: set[Row] = set()
    if table.kind == "counts":
        return best
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
    text = f"{ours.mean * factor:,.{digits}f}"
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
        if artifact.kind != "counts":
            unit = artifact.deviation_factor / artifact.factor
            multiples = "" if unit == 1 else f", in multiples of {1 / unit:g}"
            yield f"± is the standard deviation over seeds{multiples}."
        yield from wrong_bolds(artifact)
    if artifact.kind == "counts":
        return
    if phase == "median20":
        yield "Ours is the median of the last 20 evaluations of each run, not the last one."
    yield from _hyperparameters(artifact, results)
    yield from _gaps(artifact, results)
    if isinstance(artifact, Table) and artifact.kind == "graphs":
        yield from _grids(artifact, results)
    yield from _circumstances(artifact, results)


def wrong_bolds(table: Table) -> Iterator[str]:
    """Yield where the paper's bold type is not at the best printed value."""
    if not any(cell.bold for row in table.rows for cell in row.printed):
        return
    for column in printed_columns(table):
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
        head = column.name
        planned = [row for row in artifact.rows if cell(artifact, row, column, results.scale) is not None]
        if not planned and (results.scale in column.scales or (isinstance(artifact, Table) and _printed(artifact))):
            out.append(head)
        missing += [(row.head, head) for row in planned if not results.runs(artifact, row, column)]
    if out:
        yield f"Not part of this scale: {'; '.join(out).removesuffix('.')}."
    if missing:
        yield f"Not run yet, or its data set is not here: {_places(missing)}."


def _grids(table: Table, results: Results) -> Iterator[str]:
    """Say how settings were chosen, and where that is not final."""
    names = ", ".join(SCALES[results.scale].graphs.grid)
    yield (
        f"Of each cell {names} were chosen by validation MRR with seed {GRID_SEED}, then run with the other seeds; "
        "test figures play no part in it."
    )
    open_: list[tuple[str, str]] = []
    for row in table.rows:
        for column in table.columns:
            settings = cell(table, row, column, results.scale)
            choice = results.chosen(settings) if settings else None
            place = (row.head, ", ".join(filter(None, (*column.heads[:-1], column.variant))))
            if choice and choice.finished < choice.settings and place not in open_:
                open_.append(place)
    if open_:
        yield f"Chosen while some runs of the grid were not finished or broken: {_places(open_)}."


def _circumstances(artifact: Table | Curves, results: Results) -> Iterator[str]:
    """Say on what machine and on how much data ours was run."""
    made = circumstances([artifact], results)
    if made is None:
        return
    beside = ", those of the grids that are not shown left out" if artifact.kind == "graphs" else ""
    yield f"Ours: {made.runs} runs of {made.steps} steps, {made.time} of computing in all{beside}; {made.machines}."
    yield f"Data of ours: {'; '.join(made.data)}."


def circumstances(artifacts: Sequence[Table | Curves], results: Results) -> Circumstances | None:
    """Return how ours came about, or None where there is nothing of ours."""
    runs: dict[Path, str] = {}  # each with its data
    for artifact in artifacts:
        for column in artifact.columns:
            for path in (path for row in artifact.rows for path in results.runs(artifact, row, column)):
                runs[path] = _data(artifact, column, results, path)
    if not runs:
        return None
    found = [results.result(path) for path in runs]
    costs = [result["cost"] for result in found]
    machines = {f"{cost['device']} on {cost['machine']}, threads a run: {cost['threads']}" for cost in costs}
    return Circumstances(
        len(runs),
        _seeds(_numbers(artifacts, results)),
        " or ".join(f"{n:,}" for n in sorted({result["steps"] for result in found})),
        duration(sum(cost["seconds"] for cost in costs)),
        "; ".join(sorted(machines)),
        tuple(dict.fromkeys(runs.values())),
    )


def _data(artifact: Table | Curves, column: Column, results: Results, path: Path) -> str:
    """Return the data of a run of a column, and how many there are."""
    scale, split, dataset = SCALES[results.scale], results.result(path)["split"], column.settings["dataset"]
    if artifact.kind == "graphs":
        title = scale.graphs.stand_in or GRAPHS[dataset]
        return f"{title}, {split['validation']:,} validation and {split['test']:,} test facts"
    pool = sum(split[part] for part in ("labeled", "calibration", "unlabeled", "validation"))
    title = scale.stand_in or DATASETS[dataset].title
    return f"{title}, {pool:,} training and {split['test']:,} test images"


def _places(pairs: Sequence[tuple[str, str]]) -> str:
    """Return pairs of rows and columns, gathered by the columns of a row.

    >>> _places([("UDA", "40 lab."), ("CSSL", "40 lab."), ("UDA", "250 lab.")])
    'UDA (40 lab., 250 lab.), CSSL (40 lab.)'
    """
    rows = dict.fromkeys(row for row, _ in pairs)
    return ", ".join(f"{row} ({', '.join(c for r, c in pairs if r == row)})" for row in rows)
