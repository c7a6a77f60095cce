"""The figures of a link predictor as tables in plain text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ccssl.graphs.predictor import Link

FIGURES = ("mrr", "hits@1", "hits@3", "hits@10")
SIDES = {"": "both", "tail.": "tails", "head.": "heads"}
TIES = {"": "", "optimistic.": "optimistic ", "pessimistic.": "pessimistic "}


def result_table(result: Mapping[str, Any]) -> str:
    """Return the filtered figures: a row for each part and side, and each kind of tie that reads differently there."""
    rows: list[tuple[str, ...]] = [("filtered ranks of", *FIGURES)]
    for phase, title in {"test": "test", "validation": "validation"}.items():
        found = result.get(phase) or {}
        for ties, how in TIES.items():
            for side, asked in SIDES.items():
                cells = _cells(found, f"{ties}{side}")
                if cells and (not ties or cells != _cells(found, side)):
                    rows.append((f"{title}, {how}{asked}", *cells))
    if len(rows) == 1:
        return "The graph has neither test nor validation facts: there is nothing to rank."
    return aligned(rows)


def _cells(found: Mapping[str, float], prefix: str) -> list[str]:
    """Return figures as they are shown, none where they were not taken."""
    return [f"{found[prefix + name]:.4f}" for name in FIGURES] if f"{prefix}mrr" in found else []


def relation_table(result: Mapping[str, Any]) -> str:
    """Return the figures of each relation, the most frequent first."""
    found: Mapping[str, Mapping[str, float]] = result.get("relations") or {}
    if not found:
        return ""
    order = sorted(found, key=lambda name: (-found[name]["facts"], name))
    rows: list[tuple[str, ...]] = [("test facts by relation", "facts", *FIGURES)]
    for name in order:
        rows.append((name, f"{found[name]['facts']:,}", *(f"{found[name][figure]:.4f}" for figure in FIGURES)))
    return aligned(rows)


def sets_table(figures: Mapping[str, Any]) -> str:
    """Say how often the prediction sets of test queries hold the answer, and how large they are."""
    found = figures["sets"]
    if not found:
        return "The graph has no test facts to see how often prediction sets hold the answer."
    low, high = found["band"]
    each = ", each relation and direction by itself" if found["per_relation"] else ""
    wanted = f"wanted: {'at least ' if each else ''}{1 - found['delta']:.1%}"
    return (
        f"Prediction sets at delta {found['delta']:g}, calibrated on {found['calibration']:,} facts "
        f"({found['part']}){each}: "
        f"{found['coverage']:.1%} of {found['queries']:,} test queries have their answer in the set "
        f"({wanted}; {low:.1%} to {high:.1%} where calibration and test are exchangeable); "
        f"mean size {found['size']:.1f} of {found['entities']:,} entities, median {found['median_size']:.0f}."
    )


def links_table(links: Iterable[Link], calibrated: bool = True) -> str:
    """Return new facts with what is said of them; where nothing calibrates, without what it takes calibration for."""
    titles = ("head", "relation", "tail", "asked", "score", "probability")
    rows: list[tuple[str, ...]] = [
        (*titles, *(("p-value", "possibility", "in set", "set size") if calibrated else ()))
    ]
    for link in links:
        row = (link.head, link.relation, link.tail, link.asked, f"{link.score:.4f}", f"{link.probability:.4f}")
        if calibrated:
            said = "yes" if link.in_set else "no"
            row = (*row, f"{link.p_value:.4f}", f"{link.possibility:.4f}", said, str(link.set_size))
        rows.append(row)
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as columns: texts to the left, numbers to the right.

    >>> print(aligned([("name", "mrr"), ("umls", "0.95")]))
    name   mrr
    umls  0.95
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    numeric = [all(_is_number(row[column]) for row in rows[1:]) for column in range(len(rows[0]))]
    lines = (
        "  ".join(
            f"{cell:>{width}}" if right else f"{cell:<{width}}"
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _is_number(text: str) -> bool:
    return text.replace(",", "").replace(".", "").replace("-", "").isdecimal()
