"""Paired differences of a study of ``ccssl paper run``, as Markdown: what a table of means cannot tell.

    python studies/paired.py studies/reduced

Runs of one data set, number of labels and settings are compared *within* seeds: the same labels, the same initial
weights, the same order of batches. Shown are test accuracies, the mean of their differences with a 95% interval of
Student's t, and validity and efficiency of the pseudo-labels at the end. Labels drawn at random are a group of their
own. Settings other than the most frequent ones of a group (the ablations) are left out.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import yaml
from compare import CREDAL, PAIRS, half_width, spread

from ccssl.methods.config import CONFIGS as METHODS

NAME = re.compile(
    r"(?P<dataset>.+)-(?P<labels>\d+)-(?P<method>[a-z-]+)-seed(?P<seed>\d+)-(?P<settings>[0-9a-f]{6})"
)
SAMPLING = {"balanced": "", "iid": " drawn at random"}

Runs = dict[str, dict[int, dict[str, Any]]]  # results by method and seed


def main() -> None:
    """Print the tables of each group."""
    groups = sorted(read(Path(sys.argv[1]) / "runs").items())
    print("\n".join(accuracies(groups)))
    for group, runs in groups:
        if max(len(by_seed) for by_seed in runs.values()) > 1 and len(runs) > 1:
            print("\n".join(tables(group, runs)))


def read(folder: Path) -> dict[str, Runs]:
    """Return the results of the runs of a folder, by data set, number of labels and how they were drawn."""
    found = []
    for path in sorted(folder.glob("*/result.json")):
        if name := NAME.fullmatch(path.parent.name):
            config = yaml.safe_load((path.parent / "config.yaml").read_text())
            group = f"{name['dataset']}, {name['labels']} labels" + SAMPLING[config["label_sampling"]]
            found.append((group, name, json.loads(path.read_text())))
    usual = Counter((group, name["settings"]) for group, name, _ in found)
    groups: dict[str, Runs] = defaultdict(lambda: defaultdict(dict))
    for group, name, result in found:
        most = max((s for g, s in usual if g == group), key=lambda s: usual[group, s])
        if name["settings"] == most:
            groups[group][name["method"]][int(name["seed"])] = result
    return groups


def accuracies(groups: list[tuple[str, Runs]]) -> list[str]:
    """Return a table of test accuracies, a row a group, in percent: means and deviations over seeds."""
    known = [method for method in METHODS if any(method in runs for _, runs in groups)]
    lines = ["| test accuracy (%) | " + " | ".join(known) + " |", "|---|" + "---:|" * len(known)]
    for group, runs in groups:
        cells = []
        for method in known:
            values = [100 * result["test"]["accuracy"] for result in runs.get(method, {}).values()]
            deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.1f}{deviation}" if values else "")
        lines.append(f"| {group} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def tables(group: str, runs: Runs) -> list[str]:
    """Return the tables of a group."""
    lines = [f"### {group}", ""]
    lines += ["| pair | mean difference in accuracy | 95% interval | each seed |", "|---|---:|---:|---|"]
    for ours, theirs in PAIRS:
        seeds = sorted(set(runs.get(ours, {})) & set(runs.get(theirs, {})))
        if len(seeds) < 2:
            continue
        gaps = [runs[ours][s]["test"]["accuracy"] - runs[theirs][s]["test"]["accuracy"] for s in seeds]
        mean, half = statistics.mean(gaps), half_width(gaps)
        each = ", ".join(f"{gap:+.4f}" for gap in gaps)
        lines.append(f"| {ours} − {theirs} | {mean:+.4f} | {mean - half:+.4f} to {mean + half:+.4f} | {each} |")
    told = {
        method: [result["unlabeled"] for result in by_seed.values() if result["unlabeled"]]
        for method, by_seed in runs.items()
    }
    if any(told.values()):
        lines += ["", "| pseudo-labels of | accuracy | error at 0.05 | at 0.1 | at 0.25 | efficiency |"]
        lines += ["|---|---:|---:|---:|---:|---:|"]
    for method, parts in told.items():
        if parts:
            cells = [spread([part[name] for part in parts]) if name in parts[0] else "" for name in CREDAL]
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
