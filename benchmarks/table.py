"""A table of figures with limits, as Markdown and as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.timing import Ratio


@dataclass(frozen=True)
class Row:
    """One case: what was measured, the figure that is judged, and its limit."""

    cells: tuple[str, ...]  # the first columns, as text
    figure: float  # what the limit is about
    limit: float | None  # None: told for comparison only
    sense: Literal["at most", "at least"] = "at most"

    @property
    def met(self) -> bool | None:
        """Whether the limit is met; None without one."""
        if self.limit is None:
            return None
        return self.figure <= self.limit if self.sense == "at most" else self.figure >= self.limit


@dataclass(frozen=True)
class Table:
    """Rows of one topic and how they were measured."""

    title: str
    caption: str
    columns: tuple[str, ...]  # names of the cells
    figure: str  # name of the judged figure, which with its limit and verdict ends a row
    rows: list[Row] = field(default_factory=list)

    def markdown(self) -> str:
        """Return title, caption and table."""
        head = [*self.columns, self.figure, "limit", "met"]
        lines = [head, ["---"] * len(self.columns) + ["---:", "---:", ":---:"]]
        for row in self.rows:
            limit = "" if row.limit is None else f"{'≤' if row.sense == 'at most' else '≥'} {row.limit:g}"
            met = {None: "", True: "yes", False: "**no**"}[row.met]
            lines.append([*row.cells, f"**{number(row.figure)}**", limit, met])
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"## {self.title}\n\n{self.caption}\n\n{table}\n"

    def data(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "title": self.title,
            "figure": self.figure,
            "rows": [
                {
                    **dict(zip(self.columns, row.cells, strict=True)),
                    "figure": row.figure,
                    "limit": row.limit,
                    "sense": row.sense,
                    "met": row.met,
                }
                for row in self.rows
            ],
        }


def number(value: float) -> str:
    """Return three significant digits, without an exponent.

    >>> number(0.01234), number(2.5), number(12345.6)
    ('0.0123', '2.50', '12,346')
    """
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def duration(seconds: float) -> str:
    """Return a time with a unit that suits it.

    >>> duration(0.0000314), duration(0.00271), duration(1.5)
    ('31.4 µs', '2.71 ms', '1.50 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{number(seconds / scale)} {unit}"
    return f"{number(seconds * 1e6)} µs"


def spread(ratio: Ratio) -> str:
    """Return the median of the paired ratios and their quartiles."""
    return f"{number(ratio.median)} [{number(ratio.low)}, {number(ratio.high)}]"
