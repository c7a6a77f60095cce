"""The figures of a run as a table in plain text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PHASES = {
    "test": "test, averaged network after the last step",
    "median20": "test, median of the last 20 evaluations",
    "validation": "validation",
    "unlabeled": "pseudo-labels of unlabeled images",
}


def result_table(result: Mapping[str, Any]) -> str:
    """Return one row a part of the data, one column a figure."""
    parts = {title: result[phase] for phase, title in PHASES.items() if result.get(phase)}
    names = list(dict.fromkeys(name for figures in parts.values() for name in figures))
    width = max(len(title) for title in parts)
    heads = [name.replace("validity_error", "error") for name in names]
    widths = [max(len(head), 6) for head in heads]
    lines = [" " * width + "".join(f"  {head:>{w}}" for head, w in zip(heads, widths, strict=True))]
    for title, figures in parts.items():
        cells = (f"{figures[n]:.4f}" if n in figures else "" for n in names)
        lines.append(f"{title:<{width}}" + "".join(f"  {cell:>{w}}" for cell, w in zip(cells, widths, strict=True)))
    return "\n".join(lines)
