"""One report on runs of link prediction: what was learned, in words, tables, figures for programs, and a page.

Like a report on images (``report``), it looks at one run closely, the first that is not supervised-only, and puts
beside it a supervised-only one with the same labeled facts, where there is one.

Shapes: N test facts.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ccssl.experiments.graph_run import load_run
from ccssl.experiments.graph_tables import aligned
from ccssl.graphs.config import GraphConfig
from ccssl.graphs.predictor import LinkPredictor
from ccssl.graphs.ranking import Ranks
from ccssl.reports.graph_answers import DELTA, Look, look
from ccssl.reports.graph_runs import baseline_of, config_of, groups, read_all
from ccssl.reports.runs import BASELINE, Difference, Figure, FinishedRun, Group, over_seeds
from ccssl.training.checkpoint import write_text


@dataclass(frozen=True)
class Column:
    """One figure of the table of results."""

    title: str
    phase: str
    figure: str
    percent: bool = False

    def text(self, found: Figure | None) -> str:
        """Return mean and deviation for readers."""
        if found is None:
            return "–"
        scale, digits = (100, 1) if self.percent else (1, 3)
        spread = "" if found.deviation is None else f" ± {scale * found.deviation:.{digits}f}"
        return f"{scale * found.mean:.{digits}f}{spread}{'%' if self.percent else ''}"


MRR = Column("MRR", "test", "mrr")
COLUMNS = (
    MRR,
    *(Column(f"first {k}" if k > 1 else "first", "test", f"hits@{k}", percent=True) for k in (1, 3, 10)),
    Column("tails", "test", "tail.mrr"),
    Column("heads", "test", "head.mrr"),
    Column("hidden answer first", "unlabeled", "accuracy", percent=True),
)


@dataclass(frozen=True)
class GraphReport:
    """What runs have shown."""

    groups: tuple[Group, ...]
    focus: Group  # looked at closely
    baseline: Group | None  # supervised-only, with as many labeled facts
    run: FinishedRun  # of the focus
    reference: FinishedRun | None  # of the baseline
    seen: Look
    reference_ranks: Ranks | None
    brought: Difference | None  # by unlabeled queries, in MRR

    @property
    def config(self) -> GraphConfig:
        """The configuration of the run looked at closely."""
        return config_of(self.focus)

    @property
    def columns(self) -> list[Column]:
        """The columns that have something to show."""
        return [c for c in COLUMNS if any(group.figure(c.phase, c.figure) for group in self.groups)]

    @property
    def kept(self) -> bool:
        """Whether the coverage of the sets is in the band that chance allows, or above it."""
        return self.seen.sets["coverage"] >= self.seen.sets["band"][0]

    def figures(self) -> dict[str, Any]:
        """Return all figures, ready for JSON."""
        parts = ("test", "validation", "unlabeled", "relations", "steps", "epochs", "seed", "split")
        brought = self.brought and {
            "mrr": self.brought.mean,
            "interval95": [self.brought.low, self.brought.high],
            "over": self.brought.over,
        }
        return {
            "summary": " ".join(self.summary()),
            "runs": [
                {
                    "folder": str(run.folder),
                    "name": group.name,
                    "method": run.config.method,
                    "dataset": run.config.dataset,
                    **{part: run.result[part] for part in parts if part in run.result},
                }
                for group in self.groups
                for run in group.runs
            ],
            "brought": brought,
            "sets": self.seen.sets,
            "new": [link._asdict() for link in self.seen.new],
        }

    def table(self) -> str:
        """Return the comparison and what it means, in plain text."""
        columns = self.columns
        rows = [("filtered ranks", *(c.title for c in columns))]
        rows += [(g.name, *(c.text(g.figure(c.phase, c.figure)) for c in columns)) for g in self.groups]
        return f"{aligned(rows)}\n\n{textwrap.fill(' '.join(self.summary()), 88)}"

    def summary(self) -> list[str]:
        """Return what was learned, a sentence each."""
        return [*_learned(self), *_brought(self), *_trust(self)]

    def cautions(self) -> list[str]:
        """Return what a reader should keep in mind, a sentence each."""
        return list(_cautions(self))


def report(folders: Sequence[Path], device: str | None = None) -> GraphReport:
    """Read runs and ask the predictor of the one looked at closely."""
    found = groups(read_all(folders))
    focus = next((group for group in found if group.config.method != BASELINE), found[0])
    baseline = baseline_of(focus, found)
    run, reference = _paired(focus, baseline)
    seen = look(run.folder, device)
    alone = None if reference is None else LinkPredictor.of(load_run(reference.folder, seen.graph, device=device))
    ranks = alone.ranks() if alone else None
    return GraphReport(
        tuple(found), focus, baseline, run, reference, seen, ranks, _difference(focus, baseline, seen.ranks, ranks)
    )


def write_page(found: GraphReport, out: Path) -> None:
    """Write the page of a report."""
    from ccssl.reports.graph_page import render

    text = render(found)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)


# ---- runs ---------------------------------------------------------------------------------------------------------


def _paired(focus: Group, baseline: Group | None) -> tuple[FinishedRun, FinishedRun | None]:
    """Return a run of each, of the same seed where there is one: it has the same labeled facts."""
    if baseline is None:
        return focus.runs[0], None
    seeds = {run.config.seed: run for run in baseline.runs}
    shared = [run for run in focus.runs if run.config.seed in seeds]
    return (shared[0], seeds[shared[0].config.seed]) if shared else (focus.runs[0], baseline.runs[0])


def _difference(
    focus: Group, baseline: Group | None, ranks: Ranks, reference_ranks: Ranks | None
) -> Difference | None:
    """Return what unlabeled queries brought in MRR: within seeds, or for a single one within test facts."""
    if baseline is None or reference_ranks is None:
        return None
    alone = {run.config.seed: run.result["test"]["mrr"] for run in baseline.runs}
    differences = [
        run.result["test"]["mrr"] - alone[run.config.seed] for run in focus.runs if run.config.seed in alone
    ]
    if len(differences) > 1:
        found = over_seeds(differences)
        return dataclasses.replace(found, over=f"{len(differences)} divisions of the facts")
    return over_facts(1 / ranks.realistic - 1 / reference_ranks.realistic) if differences else None


def over_facts(differences: np.ndarray) -> Difference:
    """Return the mean of differences (2N,) with its normal interval; the two queries of a fact count as one draw.

    >>> found = over_facts(np.array([0.1, 0.3, 0.1, 0.3]))
    >>> round(found.mean, 3), round(found.low, 3), round(found.high, 3), found.over
    (0.2, 0.004, 0.396, 'the 2 test facts')
    """
    each = differences.reshape(2, -1).mean(0)
    mean = float(each.mean())
    half = 1.959964 * statistics.stdev(each.tolist()) / math.sqrt(len(each)) if len(each) > 1 else math.inf
    return Difference(mean, mean - half, mean + half, f"the {len(each):,} test facts")


# ---- words --------------------------------------------------------------------------------------------------------


def _learned(found: GraphReport) -> list[str]:
    group, config, size = found.focus, found.config, found.run.result["split"]
    mrr, first, ten = (_mean(group, name) for name in ("mrr", "hits@1", "hits@10"))
    source = f"{size['labeled']:,.0f} labeled facts of {Path(config.dataset).name}"
    if config.method != BASELINE:
        if size["calibration"] and config.method.startswith("ccssl"):
            source += f", {size['calibration']:,.0f} further ones kept aside for calibration"
        source += f" and {size['queries']:,} queries without an answer"
    runs = "" if len(group.runs) == 1 else f", on average over {len(group.runs)} divisions of the facts"
    return [
        f"From {source}, {config.method} learned to predict missing links with {config.model}{runs}: a mean reciprocal "
        f"rank (MRR) of {mrr:.3f} on {size['test']:,} test facts. {first:.1%} of the answers, heads and tails, come "
        f"first among {len(found.seen.graph.entities):,} entities, {ten:.1%} among the first ten."
    ]


def _mean(group: Group, name: str) -> float:
    found = group.figure("test", name)
    assert found is not None
    return found.mean


def _brought(found: GraphReport) -> list[str]:
    if found.config.method == BASELINE:
        return []
    if found.baseline is None:
        return [
            "What the unlabeled queries brought is not known: it takes a supervised run on the same labeled facts to "
            "compare with, and the end of the page has its command."
        ]
    sentence = f"The same model, taught by the labeled facts alone, reaches {_mean(found.baseline, 'mrr'):.3f}"
    if found.brought is None:
        return [f"{sentence}, but with other labeled facts: without a seed in common, the difference says little."]
    low, high = signed(found.brought.low), signed(found.brought.high)
    interval = f"95% interval over {found.brought.over}: {low} to {high}"
    if not found.brought.sure:
        return [
            f"{sentence}: a difference of {signed(found.brought.mean)}, which chance alone may explain ({interval})."
        ]
    verb = "brought" if found.brought.mean > 0 else "cost"
    return [f"{sentence}: the unlabeled queries {verb} {abs(found.brought.mean):.3f} ({interval})."]


def signed(difference: float) -> str:
    """Return a difference of MRR with its sign.

    >>> signed(-0.0234)
    '−0.023'
    """
    return f"{round(difference, 3) + 0.0:+.3f}".replace("-", "−")


def _trust(found: GraphReport) -> list[str]:
    sets = found.seen.sets
    low, high = sets["band"]
    sentences = []
    right = found.focus.figure("unlabeled", "accuracy")
    if right is not None:
        sentences.append(
            f"For {right.mean:.1%} of the unlabeled queries the most probable tail is the very answer that was hidden; "
            "others may be right, too."
        )
    if not sets["calibration"]:
        return [
            *sentences,
            "Nothing was kept aside to calibrate by, so that its prediction sets hold every candidate.",
        ]
    return [
        *sentences,
        f"Its prediction sets at δ = {DELTA:g} hold the answer of {sets['coverage']:.1%} of test queries; "
        f"{1 - DELTA:.0%} are promised, and by chance {low:.1%} to {high:.1%}"
        + (": the promise is kept." if found.kept else ": it is below what chance allows in 95% of cases.")
        + f" A set has {sets['size']:.1f} of {sets['entities']:,} entities on average.",
    ]


def _cautions(found: GraphReport) -> Iterator[str]:
    config, sets = found.config, found.seen.sets
    for notice in found.seen.notices:
        yield notice[:1].upper() + notice[1:] + "."
    if config.split_mode == "paper":
        yield (
            "The facts were divided as in the published experiments: what is labeled holds hardly a query for heads, "
            "and calibration facts are of another kind than unlabeled ones, so that nothing is promised."
        )
    if config.split_mode == "random":
        yield "Of many facts one query is labeled and the other unlabeled, whose answer a symmetric model then knows."
    if sets["part"] == "validation facts" and sets["calibration"]:
        chosen = ", by which the weights were chosen, too: they may be a little too small"
        yield "No facts were kept aside for calibration: prediction sets rest on the validation facts" + (
            f"{chosen}." if config.select == "best" else "."
        )
    if 0 < sets["calibration"] < 1 / DELTA - 1:
        yield f"With {sets['calibration']} calibration facts nothing can be excluded at δ = {DELTA:g}."
    if len(found.focus.runs) == 1:
        yield (
            f"This is one division of the facts, seed {config.seed}. Another one gives other figures: name runs with "
            "further seeds to see how far they scatter."
        )
    if found.baseline and (other := _unequal(found.focus, found.baseline)):
        yield f"Supervised-only training differs in more than the method: {other}."


def _unequal(focus: Group, baseline: Group) -> str:
    """Name the settings that make a comparison lopsided."""
    ours, theirs = config_of(focus), config_of(baseline)
    names = ("dim", "normalize", "input_dropout", "dropout", "loss", "batch_of", "batch", "epochs", "optimizer", "lr",
             "schedule", "n3", "ema", "patience", "select")  # fmt: skip
    told = [
        f"{name.replace('_', ' ')} {getattr(theirs, name)}, not {getattr(ours, name)}"
        for name in names
        if getattr(theirs, name) != getattr(ours, name)
    ]
    return "; ".join(told)


def relation_rows(found: GraphReport) -> list[dict[str, Any]]:
    """Return a row for each relation with test facts, the most frequent first."""
    ours, sets = found.run.result["relations"], found.seen.sets["relations"]
    alone = found.reference.result["relations"] if found.reference else {}
    return [
        {
            "name": name,
            "facts": ours[name]["facts"],
            "alone": alone[name]["mrr"] if alone else None,
            "mrr": ours[name]["mrr"],
            "hits": ours[name]["hits@10"],
            "coverage": sets[name]["coverage"],
            "size": sets[name]["size"],
        }
        for name in sorted(ours, key=lambda name: (-ours[name]["facts"], name))
    ]
