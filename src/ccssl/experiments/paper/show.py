"""Write what is shown of artifacts: text for the reader, files for pictures and their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ccssl.errors import InputError
from ccssl.experiments.paper.artifacts import ARTIFACTS, Curves, Table
from ccssl.experiments.paper.figures import pictures
from ccssl.experiments.paper.formats import FORMATS, as_csv
from ccssl.experiments.paper.results import Results
from ccssl.experiments.paper.scales import SCALES
from ccssl.experiments.paper.views import view
from ccssl.training.checkpoint import write_text

FIGURES = "figures"  # folder below a study's folder


def scale_of(names: Sequence[str], out: Path) -> str:
    """Return the scale at which something was run for these artifacts; that of the paper where nothing was."""
    every = {scale: Results(out, scale) for scale in SCALES}
    found = [scale for scale, results in every.items() if any(is_run(name, results) for name in names)]
    if len(found) > 1:
        raise InputError(f"{out} holds runs at the scales {' and '.join(found)}: choose one with --scale.")
    return found[0] if found else "paper"


def shown(names: Sequence[str], out: Path, scale: str, form: str, phase: str = "test") -> Iterator[str]:
    """Yield each artifact in a format; pictures are written below ``out``."""
    if any(needs_runs(name) for name in names) and not out.is_dir():
        raise InputError(
            f"there is no study in {out}: run one by `ccssl paper run {names[0]} --scale {scale} --out {out}`."
        )
    results = Results(out, scale)
    for name in names:
        artifact = ARTIFACTS[name]
        numbers = as_csv(name, artifact, results, phase)
        files = _write_pictures(name, results, numbers, phase)
        if form == "csv":
            yield numbers
        else:
            yield FORMATS[form](view(name, artifact, results, phase, files))


def _write_pictures(name: str, results: Results, numbers: str, phase: str) -> list[Path]:
    """Write an artifact's pictures and their numbers; return the pictures."""
    folder, written = results.out / FIGURES, []
    stem = f"{name}-{results.scale}" if needs_runs(name) else name
    for ending, svg in pictures(ARTIFACTS[name], results, phase):
        folder.mkdir(parents=True, exist_ok=True)
        written.append(folder / f"{stem}{ending}.svg")
        write_text(written[-1], svg)
    if written:
        write_text(folder / f"{stem}.csv", numbers)
    return written


def needs_runs(name: str) -> bool:
    """Tell whether there is nothing to show of an artifact before runs have been made."""
    artifact = ARTIFACTS[name]
    return isinstance(artifact, Table | Curves) and artifact.kind != "counts"


def is_run(name: str, results: Results) -> bool:
    """Tell whether runs of an artifact have been made."""
    artifact = ARTIFACTS[name]
    if not isinstance(artifact, Table | Curves):
        return False
    return any(results.runs(artifact, row, column) for row in artifact.rows for column in artifact.columns)
