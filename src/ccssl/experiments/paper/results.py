"""What the runs of a study have come to: the figures of cells and curves, over seeds.

A cell's runs are found by name (``scales``), whatever their number: each seed that has been run counts. Of link
predictors they are those of the setting that is best on validation (``links``). Deviations are those of a sample, with
n - 1 below the fraction, and there is none of a single run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from ccssl.errors import InputError
from ccssl.experiments import folder as run_folder
from ccssl.experiments.paper import links
from ccssl.experiments.paper.artifacts import Column, Curves, Row, Settings, Table
from ccssl.experiments.paper.plan import RUNS, cell, tuned_settings
from ccssl.experiments.paper.scales import SCALES, configuration, run_key
from ccssl.experiments.study import is_finished
from ccssl.graphs.config import GraphConfig

_NAME = re.compile(r"(.+-seed)(\d+)(-[0-9a-f]{6})")


class Ours(NamedTuple):
    """A figure over seeds."""

    mean: float
    deviation: float | None
    seeds: int


class Point(NamedTuple):
    """A figure over seeds, on the way."""

    step: int
    ours: Ours


class Results:
    """The finished runs of a study at a scale."""

    def __init__(self, out: Path, scale: str) -> None:
        self.out, self.scale = out, scale
        self.folders: dict[tuple[str, str], list[Path]] = {}  # by what the names of runs have in common
        folder = out / RUNS
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            name = _NAME.fullmatch(path.name)
            if name and is_finished(path):
                self.folders.setdefault((name[1], name[3]), []).append(path)
        self.result = cache(self._result)
        self.choice = cache(self._choice)

    def runs(self, artifact: Table | Curves, row: Row, column: Column) -> list[Path]:
        """Return the folders of a cell's runs."""
        settings = cell(artifact, row, column, self.scale)
        if settings is None:
            return []
        if artifact.kind == "graphs":
            choice = self.chosen(settings)
            return self.folders.get(links.run_key(choice.config), []) if choice else []
        config = configuration(SCALES[self.scale], settings, self.tuned(artifact, settings))
        return self.folders.get(run_key(config, config.dataset), [])

    def tuned(self, artifact: Table | Curves, settings: Settings) -> Settings | None:
        """Return the hyperparameters that were found for a cell."""
        return tuned_settings(self.out, artifact, self.scale, settings)

    def chosen(self, settings: Settings) -> links.Choice | None:
        """Return the best setting of a link predictor so far, or None where nothing of its grid is finished."""
        return self.choice(tuple(settings.items()))

    def all_runs(self, artifact: Table | Curves) -> list[Path]:
        """Return the folders of all runs of an artifact, each once."""
        pairs = ((row, column) for row in artifact.rows for column in artifact.columns)
        return list(dict.fromkeys(path for pair in pairs for path in self.runs(artifact, *pair)))

    def figure(self, artifact: Table | Curves, row: Row, column: Column, phase: str) -> Ours | None:
        """Return the figure of a cell on a part of the data, or None where it has none."""
        if artifact.kind == "counts":
            return Ours(links.counts(row.settings["dataset"])[column.figure], None, 1)
        found = (self.result(path).get(phase, {}).get(column.figure) for path in self.runs(artifact, row, column))
        return over_seeds([value for value in found if value is not None])

    def curve(self, artifact: Curves, row: Row, column: Column) -> list[Point]:
        """Return a cell's figure at each step at which all of its runs were evaluated."""
        runs = [
            dict(self._evaluations(path, artifact.phase, column.figure))
            for path in self.runs(artifact, row, column)
        ]
        steps = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
        return [Point(step, ours) for step in steps if (ours := over_seeds([run[step] for run in runs]))]

    def _evaluations(self, path: Path, phase: str, figure: str) -> Iterator[tuple[int, float]]:
        for record in run_folder.records(path):
            if record["phase"] == phase and figure in record:
                yield record["step"], record[figure]

    def _choice(self, settings: tuple[tuple[str, Any], ...]) -> links.Choice | None:
        def validation(config: GraphConfig) -> float | None:
            path = self.out / RUNS / links.run_name(config)
            return self.result(path)["validation"]["mrr"] if is_finished(path) else None

        return links.choose(links.grid(SCALES[self.scale], dict(settings)), validation)

    def _result(self, path: Path) -> Mapping[str, Any]:
        found = run_folder.read_json(path / run_folder.RESULT)
        if missing := [name for name in ("test", "steps", "cost") if name not in found]:
            raise InputError(
                f"{path / run_folder.RESULT} lacks {', '.join(missing)}: remove {path}, and run the study again."
            )
        return found


def over_seeds(values: list[float]) -> Ours | None:
    """Return mean and deviation.

    >>> over_seeds([1.0, 3.0, 5.0])
    Ours(mean=3.0, deviation=2.0, seeds=3)
    """
    if not values:
        return None
    return Ours(mean(values), stdev(values) if len(values) > 1 else None, len(values))
