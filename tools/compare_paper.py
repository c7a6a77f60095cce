"""Compare every cell of every table that the paper prints with what ``ccssl paper`` says that it prints.

    python tools/compare_paper.py ccssl.tex [--log studies/paper_cells.log]

The paper's LaTeX source is parsed here, by itself: its tabulars row by row, heads that span columns spread over
them, commands undone, numbers and deviations and bold type kept. Ours are the artifacts of
``ccssl.experiments.paper``, whatever they are: each table that names a label of the source is compared with the tabular
of that label, cell by cell, values as numbers, deviations as numbers, bold as bold; row heads and column heads, too. A
table of the source that no artifact names, and an artifact whose table the source lacks, are errors. The exit code is
1 if anything differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ccssl.experiments.paper.artifacts import ARTIFACTS, SearchSpaces, Table
from ccssl.experiments.paper.views import printed_cell, printed_columns, searched


@dataclass(frozen=True)
class Cell:
    """What stands in a cell: its text, and for numbers the value, the deviation and the type."""

    text: str
    deviation: str | None = None
    bold: bool = False


@dataclass(frozen=True)
class Tabular:
    """A table of the source: its heads, one tuple for each column after the first, and its rows."""

    heads: tuple[tuple[str, ...], ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


def tables(source: str) -> dict[str, Tabular]:
    """Return the tables of a LaTeX source by their labels."""
    source = re.sub(r"(?<!\\)%.*", "", source)
    found = {}
    for block in re.findall(r"\\begin\{table\}(.*?)\\end\{table\}", source, re.DOTALL):
        label = re.search(r"\\label\{([^}]*)\}", block)
        body = re.search(r"\\begin\{tabular\}\{[^}]*\}(.*?)\\end\{tabular\}", block, re.DOTALL)
        if label and body:
            found[label[1]] = _tabular(re.sub(r"\\label\{[^}]*\}", "", body[1]))
    return found


def _tabular(body: str) -> Tabular:
    """Read the rows before the first rule in the middle as heads, the others as rows."""
    body = re.sub(r"\\(?:toprule|bottomrule)|\\cmidrule(?:\([a-z]*\))?\{[^}]*\}", "", body)
    head, *rest = body.split(r"\midrule")
    lines = [list(_spread(line)) for line in _lines(head)]
    width = max(map(len, lines))
    columns = zip(*(line + [""] * (width - len(line)) for line in lines), strict=True)
    rows = []
    for line in _lines("".join(rest)):
        first, *cells = (_cell(cell) for cell in line.split("&"))
        rows.append((first.text, tuple(cells)))
    return Tabular(tuple(tuple(_cell(text).text for text in column) for column in columns)[1:], tuple(rows))


def _lines(body: str) -> Iterator[str]:
    return (line for line in re.split(r"\\\\", body) if line.strip())


def _spread(line: str) -> Iterator[str]:
    """Yield the cells of a line of heads, one that spans several columns once for each."""
    for cell in line.split("&"):
        spans = re.search(r"\\multicolumn\{(\d+)\}\{[^}]*\}\{(.*)\}", cell, re.DOTALL)
        yield from [spans[2]] * int(spans[1]) if spans else [cell]


def _cell(source: str) -> Cell:
    source = re.sub(r"\\multirow\{\d+\}\{[^}]*\}\{(.*)\}", r"\1", source.strip())
    deviation = re.search(r"\\pm\s*\$?\s*\{?\s*([\d.]+)", source)
    bold = r"\textbf" in source
    if deviation:
        source = source[: source.index(r"{\small")]
    return Cell(_plain(source), deviation[1] if deviation else None, bold)


_SYMBOLS = {
    r"\mu": "μ",
    r"\tau": "τ",
    r"\gamma": "γ",
    r"\delta": "δ",
    r"\lambda": "λ",
    r"\mathcal": "",
    r"\text": "",
}


def _plain(source: str) -> str:
    """Return the text of a piece of LaTeX."""
    source = source.replace(r"\ccssl{}", "CCSSL").replace(r"\ccssl", "CCSSL").replace(r"\textbf", "")
    source = source.replace(r"\{", "⦃").replace(r"\}", "⦄").replace(r"\#", "#")
    for command, symbol in _SYMBOLS.items():
        source = re.sub(re.escape(command) + r"(?![a-z])", symbol, source)
    source = re.sub(r"[{}$]", "", source).replace("⦃", "{").replace("⦄", "}")
    return " ".join(source.replace("~", " ").split())


# ---- comparison -----------------------------------------------------------------------------------------------------


def compare(source: str) -> Iterator[tuple[bool, str]]:
    """Yield for each cell whether it is equal, and a line that tells of it."""
    theirs = tables(source)
    named = set()
    for name, artifact in ARTIFACTS.items():
        label = getattr(artifact, "source", "")
        if not label:
            continue
        named.add(label)
        if label not in theirs:
            yield False, f"{name}: the source has no table {label}"
        elif isinstance(artifact, Table):
            yield from _compare_table(name, artifact, theirs[label])
        elif isinstance(artifact, SearchSpaces):
            yield from _compare_spaces(name, artifact, theirs[label])
    for label in theirs.keys() - named:
        yield False, f"no artifact shows the table {label} of the source"


def _compare_table(name: str, table: Table, theirs: Tabular) -> Iterator[tuple[bool, str]]:
    rows = [row for row in table.rows if row.printed]
    columns = printed_columns(table)
    yield from _equal(name, "rows", [row.head for row in rows], [head for head, _ in theirs.rows])
    heads = [_known(column.heads) for column in columns]
    yield from _equal(name, "columns", heads, [_known(head) for head in theirs.heads[: len(columns)]])
    if len(theirs.heads) > len(columns):
        yield False, f"{name}: the source has {len(theirs.heads)} columns, we have {len(columns)}"
    for row, (_, cells) in zip(rows, theirs.rows, strict=False):
        if len(cells) != len(columns):
            yield False, f"{name}, {row.head}: the source has {len(cells)} cells, we have {len(columns)}"
        for column, cell in zip(columns, cells, strict=False):
            ours = printed_cell(table, row, column)
            place = f"{name} | {row.head} | {', '.join(column.heads)}"
            if ours is None:
                yield False, f"{place}: ours has none, the source {cell.text}"
                continue
            same = (
                _number(ours.value) == _number(cell.text)
                and (ours.deviation is None) == (cell.deviation is None)
                and (ours.deviation is None or float(ours.deviation) == float(cell.deviation or "nan"))
                and ours.bold == cell.bold
            )
            told = _told(ours.value, ours.deviation, ours.bold)
            yield same, f"{place}: {told}" + ("" if same else f", but {_told(*vars(cell).values())} in the source")


def _compare_spaces(name: str, spaces: SearchSpaces, theirs: Tabular) -> Iterator[tuple[bool, str]]:
    heading, found = "", []
    for head, (parameter, values) in theirs.rows:
        heading = head or heading
        found.append((heading, parameter.text, values.text))
    ours = [
        (
            heading,
            parameter,
            "{" + ", ".join(str(v) if isinstance(v, bool) else f"{v:g}" for v in searched(methods, key)) + "}",
        )
        for heading, methods, parameter, key in spaces.rows
    ]
    for mine, other in zip(ours, found, strict=False):
        same = all(a.replace(" ", "") == b.replace(" ", "") for a, b in zip(mine, other, strict=True))
        yield same, f"{name} | {' | '.join(mine)}" + ("" if same else f", but {' | '.join(other)} in the source")
    yield len(ours) == len(found), f"{name} | number of rows: {len(ours)}"


def _known(heads: tuple[str, ...]) -> str:
    """Return heads as one text; what stands between formulas may be set in different ways."""
    return " ".join(re.sub(r"[^\w#@.-]", "", head) for head in heads if head)


def _equal(name: str, what: str, ours: list[str], theirs: list[str]) -> Iterator[tuple[bool, str]]:
    same = ours == theirs
    yield same, f"{name} | {what}: {'; '.join(ours)}" + ("" if same else f", but {'; '.join(theirs)} in the source")


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _told(value: str, deviation: str | None, bold: bool) -> str:
    return value + (f" ± {deviation}" if deviation else "") + (" (bold)" if bold else "")


def main() -> int:
    """Compare, tell, and keep the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the paper's LaTeX source")
    parser.add_argument("--log", type=Path, help="where every comparison is written")
    args = parser.parse_args()
    found = list(compare(args.source.read_text(encoding="utf-8")))
    wrong = [line for same, line in found if not same]
    summary = f"{len(found)} comparisons, {len(found) - len(wrong)} equal, {len(wrong)} different"
    if args.log:
        lines = [("equal      " if same else "DIFFERENT  ") + line for same, line in found]
        args.log.write_text("\n".join([*lines, summary]) + "\n", encoding="utf-8")
    print("\n".join([*wrong, summary]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
