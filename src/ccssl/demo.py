"""The demonstration: what unlabeled images bring, on real data and within two minutes.

The same small network learns the digits that the package carries twice: from forty labels alone, and by
``ccssl-prop`` from the same forty labels, of which some are kept aside for calibration, and all other training images
without labels. A report compares the two on test images that neither has seen, and says whether the
degrees of possibility kept their promise.

The runs are ordinary ones, with folders of their own below ``folder``: what was interrupted goes on, and what is
finished is not run again.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ccssl.errors import InputError

if TYPE_CHECKING:
    from ccssl.experiments.config import RunConfig
    from ccssl.reports.report import Report

METHODS = ("supervised", "ccssl-prop")
LABELS, STEPS, EVALUATIONS = 40, 500, 10
PAGE = "index.html"


@dataclass(frozen=True)
class Demo:
    """The page of the demonstration, and what stands on it."""

    page: Path
    report: Report

    def figures(self) -> dict[str, Any]:
        """Return the figures, ready for JSON."""
        return {"page": str(self.page), **self.report.figures()}

    def table(self) -> str:
        """Return the comparison in plain text, and where the page is."""
        intro = textwrap.fill(
            f"Handwritten digits, {LABELS} labels: from the labels alone, and with unlabeled images, too.", 88
        )
        return f"{intro}\n\n{self.report.table()}\n\nThe page with figures and images: {self.page}"


def run_demo(folder: Path, seed: int = 0, steps: int = STEPS, quiet: bool = False) -> Demo:
    """Train, compare, and write ``folder``/index.html."""
    from ccssl.experiments.run import train
    from ccssl.reports.report import report, write_page

    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out must name a folder, but {folder} is a file.")
    runs = [folder / f"{method}-seed{seed}" for method in METHODS]
    for method, run in zip(METHODS, runs, strict=True):
        train(config_of(method, seed, steps), run, resume=True, quiet=quiet)
    demo = Demo(folder / PAGE, report(runs))
    write_page(demo.report, demo.page)
    return demo


def config_of(method: str, seed: int, steps: int = STEPS) -> RunConfig:
    """Return the run of a method."""
    from ccssl.experiments.config import RunConfig

    every = max(1, steps // EVALUATIONS)
    return RunConfig(dataset="digits", labels=LABELS, method=method, steps=steps, eval_every=every, seed=seed)
