"""One report on one or more runs: what was learned, as a paragraph, a table, figures for programs, and a page.

The run of the first conformal method named is the one *looked at closely*; if there is none, the first whose method
gives degrees of possibility, else the first that is not supervised-only. Its network is asked again, and so is the
supervised-only one with the same labels, where there is one. Of the others the final figures and the curves are told.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ccssl.conformal.validity import AuditRow
from ccssl.errors import InputError
from ccssl.experiments import folder as run_folder
from ccssl.metrics import DELTAS
from ccssl.reports.answers import Look, look
from ccssl.reports.runs import (
    BASELINE,
    Difference,
    Figure,
    FinishedRun,
    Group,
    baseline_of,
    groups,
    over_items,
    over_seeds,
    read_all,
)
from ccssl.training.checkpoint import write_text

PAGE = "report.html"
ERROR_DELTA = 0.1  # of the table of classes


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


COLUMNS = (
    Column("accuracy", "test", "accuracy", percent=True),
    Column("pseudo-labels right", "unlabeled", "accuracy", percent=True),
    Column("ECE", "test", "ece"),
    Column("Brier", "test", "brier"),
    Column("NLL", "test", "nll"),
    *(Column(f"error at δ = {delta:g}", "test", f"validity_error@{delta:g}", percent=True) for delta in DELTAS),
    Column("mean possibility", "test", "efficiency"),
)


@dataclass(frozen=True)
class Report:
    """What runs have shown."""

    groups: tuple[Group, ...]
    focus: Group  # looked at closely
    baseline: Group | None  # supervised-only, with the same labels
    run: FinishedRun  # of the focus
    reference: FinishedRun | None  # of the baseline
    seen: Look
    reference_seen: Look | None
    brought: Difference | None  # by unlabeled data, in accuracy

    @property
    def columns(self) -> list[Column]:
        """The columns that have something to show."""
        return [c for c in COLUMNS if any(group.figure(c.phase, c.figure) for group in self.groups)]

    def allowed(self, column: Column) -> AuditRow | None:
        """Return what validity allows for the figure of a column, if it is one that validity speaks of."""
        rows = self.seen.audit.rows if self.seen.audit else ()
        return next((row for row in rows if column.figure == f"validity_error@{row.delta:g}"), None)

    def figures(self) -> dict[str, Any]:
        """Return all figures, ready for JSON."""
        brought = self.brought and {
            "accuracy": self.brought.mean,
            "interval95": [self.brought.low, self.brought.high],
            "over": self.brought.over,
        }
        parts = ("test", "unlabeled", "validation", "median20", "steps", "seed", "split")
        audit = None
        if self.seen.audit:
            audit = self.seen.audit.to_dict()
            del audit["curve"]
        return {
            "summary": " ".join(self.summary()),
            "runs": [
                {
                    "folder": str(run.folder),
                    "name": group.name,
                    "method": run.config.method,
                    "dataset": run.config.dataset,
                    "labels": run.config.labels,
                    **{part: run.result[part] for part in parts if part in run.result},
                }
                for group in self.groups
                for run in group.runs
            ],
            "brought": brought,
            "audit": audit,
        }

    def table(self) -> str:
        """Return the comparison and what it means, in plain text."""
        columns = [c for c in self.columns if c.figure not in ("brier", "nll")]
        heads = [c.title.split(" δ")[0].split() for c in columns]
        heads = [[*words[:1], " ".join(words[1:])] for words in heads]
        for head, column in zip(heads, columns, strict=True):
            if column.figure.startswith("validity"):
                head[1] = column.title.split("= ")[1]
        rows = [[g.name, *(c.text(g.figure(c.phase, c.figure)) for c in columns)] for g in self.groups]
        if self.seen.audit:
            rows.append(
                ["if valid, at most", *(f"{row.delta:.1%}" if (row := self.allowed(c)) else "" for c in columns)]
            )
            rows.append(
                ["  and by chance", *(reach_text(row) if (row := self.allowed(c)) else "" for c in columns)]
            )
        lines = [["", *(head[0] for head in heads)], ["", *(head[1] for head in heads)], *rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            line[0].ljust(widths[0])
            + "".join("  " + cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
            for line in lines
        ]
        return "\n".join([*(line.rstrip() for line in text), "", textwrap.fill(" ".join(self.summary()), 88)])

    def summary(self) -> list[str]:
        """Return what was learned, a sentence each."""
        return [*_learned(self), *_brought(self), *_compared(self), *_trust(self)]

    def cautions(self) -> list[str]:
        """Return what a reader should keep in mind, a sentence each."""
        return list(_cautions(self))


def report(folders: Sequence[Path], device: str | None = None) -> Report:
    """Read runs and ask the networks of those looked at closely."""
    found = groups(read_all(folders))
    focus = _most_telling(found)
    baseline = baseline_of(focus, found)
    run, reference = _paired(focus, baseline)
    seen = look(run.folder, device)
    reference_seen = look(reference.folder, device, seen.data) if reference else None
    brought = _difference(focus, baseline, seen, reference_seen)
    return Report(tuple(found), focus, baseline, run, reference, seen, reference_seen, brought)


def _most_telling(found: Sequence[Group]) -> Group:
    """Return the group to look at closely: of those with the most to show, the first."""

    def shows(group: Group) -> tuple[bool, ...]:
        method = group.config.method
        return (
            group.config.method_class.uses_calibration,
            bool(group.figure("test", "efficiency")),
            method != BASELINE,
        )

    return max(found, key=shows)


def page_for(folders: Sequence[Path], out: Path | None) -> Path:
    """Return where the page goes: where the user says, or into the folder of the run."""
    if out is None:
        if len(folders) != 1:
            raise InputError("--out must name the page, such as page.html, where there are several runs.")
        out = folders[0] / PAGE
    if out.is_dir():
        raise InputError(f"--out must name a file, but {out} is a folder: name {out / PAGE}.")
    return out


def write_page(found: Report, out: Path) -> None:
    """Write the page of a report."""
    from ccssl.reports.page import render

    text = render(found)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)


def _paired(focus: Group, baseline: Group | None) -> tuple[FinishedRun, FinishedRun | None]:
    """Return a run of each, of the same seed where there is one: it has the same labels."""
    if baseline is None:
        return focus.runs[0], None
    seeds = {run.config.seed: run for run in baseline.runs}
    shared = [run for run in focus.runs if run.config.seed in seeds]
    return (shared[0], seeds[shared[0].config.seed]) if shared else (focus.runs[0], baseline.runs[0])


def _difference(focus: Group, baseline: Group | None, seen: Look, reference_seen: Look | None) -> Difference | None:
    """Return what unlabeled data brought: within seeds, or for a single one within test items."""
    if baseline is None or reference_seen is None:
        return None
    accuracy = {run.config.seed: run.result["test"]["accuracy"] for run in baseline.runs}
    differences = [
        run.result["test"]["accuracy"] - accuracy[run.config.seed]
        for run in focus.runs
        if run.config.seed in accuracy
    ]
    if len(differences) > 1:
        found = over_seeds(differences)
        if len(differences) < max(len(focus.runs), len(baseline.runs)):
            return replace(found, over=f"the {found.over} in common")
        return found
    if not differences:
        return None
    ours, theirs = seen.test.right, reference_seen.test.right
    return over_items(int((ours & ~theirs).sum()), int((theirs & ~ours).sum()), len(ours))


# ---- words --------------------------------------------------------------------------------------------------------


def _learned(found: Report) -> list[str]:
    group, size = found.focus, found.run.result["split"]
    accuracy = group.figure("test", "accuracy")
    assert accuracy is not None
    labels = f"{size['labeled'] + size['calibration']:,} labels"
    if size["calibration"]:
        labels += f", {size['calibration']:,} of them kept aside for calibration,"
    source = labels.rstrip(",")
    if group.config.method != BASELINE:
        source = f"{labels} and {size['unlabeled']:,} unlabeled images"
    times = "" if len(group.runs) == 1 else f", on average over {len(group.runs)} draws of labels,"
    return [
        f"From {source} of {Path(group.config.dataset).name}, {group.config.method} learned in {group.config.steps:,} "
        f"steps to name{times} {COLUMNS[0].text(accuracy)} of {size['test']:,} test images rightly."
    ]


def _brought(found: Report) -> list[str]:
    if found.focus.config.method == BASELINE:
        return []
    if found.baseline is None:
        return [
            "What the unlabeled images brought is not known: it takes a run on the labels alone to compare with, "
            "and the end of the page has its command."
        ]
    alone = found.baseline.figure("test", "accuracy")
    sentence = f"The same network, taught by the labels alone, is right on {COLUMNS[0].text(alone)}"
    if found.brought is None:
        return [f"{sentence}, but with other labels: without a seed in common, the difference says little."]
    difference = found.brought
    low, high = points_text(difference.low), points_text(difference.high)
    interval = f"95% interval over {difference.over}: {low} to {high}"
    if not difference.sure:
        points = points_text(difference.mean)
        return [f"{sentence}: a difference of {points} points, which chance alone may explain ({interval})."]
    verb = "brought" if difference.mean > 0 else "cost"
    return [f"{sentence}: the unlabeled images {verb} {abs(100 * difference.mean):.1f} points ({interval})."]


def _compared(found: Report) -> list[str]:
    """Say which of several groups is the most accurate."""
    if len(found.groups) < 3:
        return []
    accuracy = {group.name: figure for group in found.groups if (figure := group.figure("test", "accuracy"))}
    best = max(accuracy, key=lambda name: accuracy[name].mean)
    share = COLUMNS[0].text(accuracy[best])
    return [f"Of the {len(found.groups)} compared here, {best} is the most accurate, with {share}."]


def points_text(difference: float) -> str:
    """Return a difference of shares in points, with a sign.

    >>> points_text(-0.0234)
    '−2.3'
    """
    return f"{round(100 * difference, 1) + 0.0:+.1f}".replace("-", "−")


def reach_text(row: AuditRow) -> str:
    """Return up to where chance may carry the errors of a valid calibration, if it can make errors at this δ at all."""
    return f"{row.band[1]:.1%}" if row.reachable else "–"


def _trust(found: Report) -> list[str]:
    sentences = []
    right = found.focus.figure("unlabeled", "accuracy")
    if right is not None:
        sentences.append(f"Of its pseudo-labels for unlabeled images, {COLUMNS[0].text(right)} are right.")
    errors = [(c, found.focus.figure(c.phase, c.figure)) for c in COLUMNS if c.figure.startswith("validity")]
    shares = [f"{column.text(error)} at {column.title.split('= ')[1]}" for column, error in errors if error]
    efficiency = found.focus.figure("test", "efficiency")
    if efficiency is None or not shares:
        return sentences
    listed = ", ".join(shares[:-1]) + f" and {shares[-1]}"
    if found.seen.audit:
        kept = "the promise is kept" if found.seen.audit.valid else "the promise is broken"
        if len(found.focus.runs) > 1:
            kept = f"the audit of seed {found.run.config.seed} finds that {kept}"
        sentences.append(
            "Its degrees of possibility promise that the true class gets at most δ for at most a share δ of images; "
            f"of the test images it was {listed}: {kept}."
        )
    else:
        sentences.append(
            f"Its degrees of possibility promise nothing; the true class got at most δ for {listed} of the test images."
        )
    least = 1 / len(found.seen.data.class_names)
    sentences.append(
        f"They leave a mean possibility of {efficiency.mean:.2f} open, between {least:.2g}, one class alone, and "
        "1, anything."
    )
    return sentences


def _cautions(found: Report) -> Iterator[str]:
    yield from found.seen.split.notices
    audit = found.seen.audit
    if audit:
        unreachable = ", ".join(f"{row.delta:g}" for row in audit.rows if not row.reachable)
        if unreachable:
            yield (
                f"With {audit.calibration_items} calibration items no p-value is below "
                f"1/{audit.calibration_items + 1}, so nothing is ever excluded at δ = {unreachable}: "
                "that there is no error is no merit there."
            )
    if len(found.focus.runs) == 1:
        yield (
            f"This is one draw of labels, seed {found.run.config.seed}. Another draw gives other figures: name runs "
            "with further seeds to see how far they scatter."
        )
    for run in (run for group in found.groups for run in group.runs):
        last = run.records[-1]["step"] if run.records else 0
        if last < run.config.steps:
            yield (
                f"{run.folder / run_folder.METRICS} is cut off after step {last:,} of {run.config.steps:,}: its curves "
                "end there. The final figures are whole."
            )
    if found.baseline and (other := _unequal(found.focus, found.baseline)):
        yield f"Supervised-only training differs in more than the method: {other}."


def _unequal(focus: Group, baseline: Group) -> str:
    """Name the settings that make a comparison lopsided."""
    names = ("steps", "batch", "lr", "momentum", "weight_decay", "ema", "precision")
    told = [
        f"{name.replace('_', ' ')} {getattr(baseline.config, name)}, not {getattr(focus.config, name)}"
        for name in names
        if getattr(baseline.config, name) != getattr(focus.config, name)
    ]
    return "; ".join(told)


def class_table(found: Report) -> list[dict[str, Any]]:
    """Return a row for each class: labels, test images, who is right how often, and errors of the possibilities."""
    split, test = found.seen.split, found.seen.test
    given = np.bincount(
        found.seen.data.train_labels[np.concatenate([split.labeled, split.calibration])],
        minlength=len(found.seen.data.class_names),
    )
    rows = []
    for k, name in enumerate(found.seen.data.class_names):
        member, called = test.labels == k, test.predicted == k
        rows.append(
            {
                "name": name,
                "labels": int(given[k]),
                "images": int(member.sum()),
                "alone": _share(found.reference_seen.test.right[member]) if found.reference_seen else None,
                "right": _share(test.right[member]),
                "called": _share(test.right[called]),
                "error": None if test.possibility is None else _share(test.possibility[member, k] <= ERROR_DELTA),
            }
        )
    return rows


def _share(hits: np.ndarray) -> float | None:
    return float(hits.mean()) if len(hits) else None
