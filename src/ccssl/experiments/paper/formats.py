r"""A view as text, Markdown or LaTeX; and the numbers of an artifact as CSV.

Every format has the same content. In plain text a star stands where the others have bold type. CSV has one line a
cell, in plain units (shares and not percent, deviations in the unit of their means), with nothing where there is
nothing.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence

from ccssl.experiments.paper.artifacts import Artifact, Column, CredalSets, Curves, Row, SearchSpaces, Table
from ccssl.experiments.paper.plan import cell
from ccssl.experiments.paper.results import Results
from ccssl.experiments.paper.views import (
    Cell,
    Grid,
    View,
    best_rows,
    chosen_values,
    part_of,
    printed_cell,
    searched,
)

# Characters that LaTeX would take for commands, and those that its fonts lack.
_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
    "γ": r"$\gamma$",
    "δ": r"$\delta$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
    "τ": r"$\tau$",
    "|": r"$|$",
    "<": r"$<$",
    ">": r"$>$",
}


def text(view: View) -> str:
    """Return a view for a terminal."""
    parts = [view.title, *("\n" + _text_grid(grid) for grid in view.grids)]
    if any(cell.best for grid in view.grids for _, row in grid.rows for cell in row):
        parts.append(f"\n* {view.best}")
    pictures = [f"written: {path}" for path in view.pictures]
    return "\n".join([*parts, *(f"- {note}" for note in view.notes), *pictures]) + "\n"


def _text_grid(grid: Grid) -> str:
    rows = [grid.columns, *(tuple(cell.text + "*" * cell.best for cell in row) for _, row in grid.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    spans, place = [], 0
    for head, number in grid.heads:
        width = sum(widths[place : place + number]) + 2 * (number - 1)
        if len(head) > width:  # a long head widens its last column
            widths[place + number - 1] += len(head) - width
            width = len(head)
        spans.append(head.ljust(width))
        place += number
    lines = ["  ".join(spans)] if spans else []
    return "\n".join([*(line.rstrip() for line in lines), aligned(rows, widths)])


def aligned(rows: Sequence[Sequence[str]], widths: Sequence[int] | None = None) -> str:
    """Return rows with their cells below each other."""
    widths = widths or [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def markdown(view: View) -> str:
    """Return a view for a page in Markdown."""
    pictures = (f"![{view.name}]({'/'.join(path.parts[-2:])})" for path in view.pictures)
    parts = [f"### {view.title}", *pictures, *(_markdown_grid(grid) for grid in view.grids)]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in view.notes)]).rstrip() + "\n"


def _markdown_grid(grid: Grid) -> str:
    above = [head for head, number in grid.heads for _ in range(number)] or [""] * len(grid.columns)
    heads = [", ".join(filter(None, pair)) for pair in zip(above, grid.columns, strict=True)]
    rows = [[f"**{cell.text}**" if cell.best else cell.text for cell in row] for _, row in grid.rows]
    aligned = ["---", *("---:" for _ in heads[1:])]
    return "\n".join("| " + " | ".join(_bars(cell) for cell in row) + " |" for row in (heads, aligned, *rows))


def _bars(cell: str) -> str:
    return cell.replace("|", r"\|")


def latex(view: View) -> str:
    """Return a view as a table environment; it needs the package booktabs."""
    lines = [r"\begin{table}[htbp]", r"\centering", rf"\caption{{{_latex(view.title)}}}"]
    lines += [f"% picture: {'/'.join(path.parts[-2:])}" for path in view.pictures]
    for grid in view.grids:
        lines += ["", rf"\begin{{tabular}}{{l{'c' * (len(grid.columns) - 1)}}}", r"\toprule"]
        if grid.heads:
            spans = [
                rf"\multicolumn{{{n}}}{{{'l' if not i else 'c'}}}{{{_latex(head)}}}"
                for i, (head, n) in enumerate(grid.heads)
            ]
            lines.append(" & ".join(spans) + r" \\")
        lines += [" & ".join(map(_latex, grid.columns)) + r" \\"]
        before = object()
        for group, row in grid.rows:
            if group != before:
                lines.append(r"\midrule")
            before = group
            lines.append(" & ".join(_latex_cell(cell) for cell in row) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}"]
    notes = r"\\ ".join(_latex(note) for note in view.notes)
    if notes:
        lines += ["", rf"\par\smallskip\footnotesize {notes}"]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def _latex_cell(cell: Cell) -> str:
    return rf"\textbf{{{_latex(cell.text)}}}" if cell.best else _latex(cell.text)


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


FORMATS: dict[str, Callable[[View], str]] = {"text": text, "markdown": markdown, "latex": latex}


def as_csv(name: str, artifact: Artifact, results: Results, phase: str = "test") -> str:
    """Return the numbers of an artifact as CSV."""
    if isinstance(artifact, Table):
        head, rows = TABLE_HEAD, _table(name, artifact, results, phase)
    elif isinstance(artifact, Curves):
        head, rows = CURVES_HEAD, _curves(name, artifact, results)
    elif isinstance(artifact, SearchSpaces):
        head, rows = ("artifact", "method", "name", "values"), _spaces(name, artifact)
    else:
        head, rows = ("artifact", "possibility", "extreme point"), _points(name, artifact)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return buffer.getvalue()


TABLE_HEAD = (
    "artifact", "scale", "row", "column", "figure", "ours", "ours deviation", "seeds", "ours best", "paper",
    "paper deviation", "paper best", "paper bold", "chosen",
)  # fmt: skip
CURVES_HEAD = ("artifact", "scale", "line", "panel", "figure", "step", "ours", "ours deviation", "seeds")


def _table(name: str, table: Table, results: Results, phase: str) -> Iterator[Sequence[object]]:
    part = part_of(table, phase)
    for column in table.columns:
        ours = {row: results.figure(table, row, column, part) for row in table.rows}
        paper = {row: printed_cell(table, row, column) for row in table.rows}
        our_best = best_rows(table, {row: found.mean for row, found in ours.items() if found})
        their_best = best_rows(table, {row: found.number for row, found in paper.items() if found})
        for row in table.rows:
            o, p = ours[row], paper[row]
            if not (o or p):
                continue
            deviation = float(p.deviation) / table.deviation_factor if p and p.deviation else ""
            yield (
                name,
                results.scale,
                row.head,
                column.name,
                column.figure,
                *(
                    (o.mean, "" if o.deviation is None else o.deviation, o.seeds, row in our_best)
                    if o
                    else ("",) * 4
                ),
                *((p.number / table.factor, deviation, row in their_best, p.bold) if p else ("",) * 4),
                _chosen(table, row, column, results),
            )


def _chosen(table: Table, row: Row, column: Column, results: Results) -> str:
    """Return the setting of the grid that a cell shows, nothing where there was no grid."""
    settings = cell(table, row, column, results.scale)
    if table.kind != "graphs" or settings is None:
        return ""
    values = chosen_values(results.chosen(settings), results.scale)
    return " ".join(f"{name}={value}" for name, value in values.items())


def _curves(name: str, curves: Curves, results: Results) -> Iterator[Sequence[object]]:
    for column in curves.columns:
        for row in curves.rows:
            for step, ours in results.curve(curves, row, column):
                deviation = "" if ours.deviation is None else ours.deviation
                yield (
                    name,
                    results.scale,
                    row.head,
                    column.name,
                    column.figure,
                    step,
                    ours.mean,
                    deviation,
                    ours.seeds,
                )


def _spaces(name: str, spaces: SearchSpaces) -> Iterator[Sequence[object]]:
    for heading, methods, _, parameter in spaces.rows:
        yield name, heading, parameter, " ".join(f"{value}" for value in searched(methods, parameter))


def _points(name: str, sets: CredalSets) -> Iterator[Sequence[object]]:
    import torch

    from ccssl.credal import extreme_points

    for pi in sets.possibilities:
        for point in extreme_points(torch.tensor(pi, dtype=torch.float64)):
            yield name, " ".join(f"{p:g}" for p in pi), " ".join(f"{p:g}" for p in point.tolist())
