"""Paired differences of a study of ``ccssl paper run``, as Markdown: what a table of means cannot tell.

    python studies/paired.py studies/reduced

Runs of one data set, number of labels and settings are compared *within* seeds: the same labels, the same initial
weights, the same order of batches. Shown are the mean of the differences in test accuracy with a 95% interval of
Student's t, and validity and efficiency of the pseudo-labels at the end. Settings other than a data set's most frequent
ones (the ablations) are left out.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from compare import CREDAL, PAIRS, half_width, spread

NAME = re.compile(r"(?P<group>.+-\d+)-(?P<method>[a-z-]+)-seed(?P<seed>\d+)-(?P<settings>[0-9a-f]{6})")

Runs = dict[str, dict[int, dict[str, Any]]]  # results by method and seed


def main() -> None:
    """Print the tables of each data set and number of labels."""
    for group, runs in sorted(read(Path(sys.argv[1]) / "runs").items()):
        if max(len(by_seed) for by_seed in runs.values()) > 1 and len(runs) > 1:
            print("\n".join(tables(group, runs)))


def read(folder: Path) -> dict[str, Runs]:
    """Return the results of the runs of a folder, by data set and number of labels."""
    found = []
    for path in sorted(folder.glob("*/result.json")):
        if name := NAME.fullmatch(path.parent.name):
            found.append((name, json.loads(path.read_text())))
    usual = Counter((name["group"], name["settings"]) for name, _ in found)
    groups: dict[str, Runs] = defaultdict(lambda: defaultdict(dict))
    for name, result in found:
        most = max((s for g, s in usual if g == name["group"]), key=lambda s: usual[name["group"], s])
        if name["settings"] == most:
            groups[name["group"]][name["method"]][int(name["seed"])] = result
    return groups


def tables(group: str, runs: Runs) -> list[str]:
    """Return the tables of one data set and number of labels."""
    lines = [f"### {group.rpartition('-')[0]}, {group.rpartition('-')[2]} labels", ""]
    lines += ["| pair | mean difference in accuracy | 95% interval | each seed |", "|---|---:|---:|---|"]
    for ours, theirs in PAIRS:
        seeds = sorted(set(runs.get(ours, {})) & set(runs.get(theirs, {})))
        if len(seeds) < 2:
            continue
        gaps = [runs[ours][s]["test"]["accuracy"] - runs[theirs][s]["test"]["accuracy"] for s in seeds]
        mean, half = statistics.mean(gaps), half_width(gaps)
        each = ", ".join(f"{gap:+.4f}" for gap in gaps)
        lines.append(f"| {ours} − {theirs} | {mean:+.4f} | {mean - half:+.4f} to {mean + half:+.4f} | {each} |")
    lines += ["", "| pseudo-labels of | accuracy | error at 0.05 | at 0.1 | at 0.25 | efficiency |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    for method, by_seed in runs.items():
        parts = [result["unlabeled"] for result in by_seed.values() if result["unlabeled"]]
        if parts:
            cells = [spread([part[name] for part in parts]) if name in parts[0] else "" for name in CREDAL]
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
