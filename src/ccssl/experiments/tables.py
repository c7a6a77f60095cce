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

BEST = "{}, averaged network at its best on validation (reported)"


def result_table(result: Mapping[str, Any]) -> str:
    """Return one row a part of the data, one column a figure."""
    parts = {title: result[phase] for phase, title in PHASES.items() if result.get(phase)}
    if (
        "reported" not in result and "test" in result
    ):  # an evaluation of the network that is reported, whichever it is
        parts = {"test, the network reported": result["test"]} | {
            t: f for t, f in parts.items() if t != PHASES["test"]
        }
    if result.get("reported") == "best":
        best = result.get("best", {})
        parts = {BEST.format(phase): best[phase] for phase in ("test", "validation") if best.get(phase)} | parts
    names = list(dict.fromkeys(name for figures in parts.values() for name in figures))
    width = max(len(title) for title in parts)
    heads = [name.replace("validity_error", "error") for name in names]
    widths = [max(len(head), 6) for head in heads]
    lines = [" " * width + "".join(f"  {head:>{w}}" for head, w in zip(heads, widths, strict=True))]
    for title, figures in parts.items():
        cells = (f"{figures[n]:.4f}" if n in figures else "" for n in names)
        lines.append(f"{title:<{width}}" + "".join(f"  {cell:>{w}}" for cell, w in zip(cells, widths, strict=True)))
    return "\n".join(lines)
