"""From artifacts to runs: which runs a scale needs, on which data, and which cells show which runs.

A cell of images (``kind`` "images") is one run a seed, if its data set is here. A cell of link predictors ("graphs")
takes two stages: the runs of its grid, then those of the setting that the grid found best (``links``), which nobody
knows before; so ``chosen_runs`` is asked when the runs of ``plan`` have been made. The graphs are in the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ccssl.errors import InputError, did_you_mean
from ccssl.experiments import folder as run_folder
from ccssl.experiments import graph_run
from ccssl.experiments.config import read_config
from ccssl.experiments.paper import links
from ccssl.experiments.paper.artifacts import ARTIFACTS, Artifact, Column, Curves, Row, Settings, Table
from ccssl.experiments.paper.scales import SCALES, configuration, keeps, merged, run_key, run_name
from ccssl.experiments.run import train
from ccssl.experiments.spaces import SPACES
from ccssl.experiments.study import Job
from ccssl.graphs.config import GraphConfig
from ccssl.images.packed import is_packed
from ccssl.images.sources import SOURCES, load, state

RUNS, TUNED = "runs", "tuned"  # folders below a study's folder


@dataclass(frozen=True)
class Plan:
    """The runs that artifacts need, by name, and what they lack."""

    study: dict[str, Job]
    missing: dict[str, list[str]]  # data sets that are not here, and the artifacts that lack them


def choose(names: Sequence[str]) -> list[str]:
    """Return the artifacts that are meant, each once, in the order of the paper; ``all`` means all."""
    for name in names:
        if name != "all" and name not in ARTIFACTS:
            raise InputError(
                f"the paper has no artifact {name!r}: take all, or some of {', '.join(ARTIFACTS)}."
                f"{did_you_mean(name, ARTIFACTS)}"
            )
    return [name for name in ARTIFACTS if name in names or "all" in names]


def shown(artifact: Table | Curves, scale: str) -> tuple[Column, ...]:
    """Return the columns that are shown at a scale: those of the scale, and those that were printed."""
    return tuple(column for column in artifact.columns if scale in column.scales or _has_print(artifact, column))


def cell(artifact: Table | Curves, row: Row, column: Column, scale: str) -> Settings | None:
    """Return the settings of a cell's runs, or None where a scale has none."""
    if artifact.kind == "counts" or scale not in column.scales:
        return None
    settings = merged(row.settings, column.settings)
    return settings if artifact.kind == "graphs" or keeps(SCALES[scale], settings) else None


def cells(artifact: Artifact, scale: str, kind: str) -> Iterator[Settings]:
    """Yield the settings of all cells of a kind that a scale has."""
    if not isinstance(artifact, Table | Curves) or artifact.kind != kind:
        return
    for column in artifact.columns:
        for row in artifact.rows:
            settings = cell(artifact, row, column, scale)
            if settings is not None:
                yield settings


def tuned_settings(out: Path, artifact: Table | Curves, scale: str, settings: Settings) -> Settings | None:
    """Return the hyperparameters that ``ccssl tune`` found for a cell, or None where the defaults hold."""
    if not (artifact.tuned and SCALES[scale].tuned):
        return None
    path = out / TUNED / f"{settings['dataset']}-{settings['labels']}-{settings['method']}.yaml"
    if not path.exists():
        return None
    found = read_config(path)
    options = found.get("options") or {}
    if not isinstance(options, dict):
        raise InputError(f"options in {path} must hold names and values, got {options!r}.")
    searched = SPACES[settings["method"]]
    chosen: dict[str, Any] = {name: found[name] for name in searched if name in found}
    return chosen | {"options": {name: options[name] for name in searched if name in options}}


def plan(names: Sequence[str], scale: str, out: Path, seeds: int, data: Path | None, device: str = "auto") -> Plan:
    """Return the runs of artifacts at a scale, of link predictors those of the grids; equal runs are there once."""
    if data is not None and not data.is_dir():
        raise InputError(f"--data must be a folder that holds NAME.npz files or packed data sets, got {data}.")
    if seeds < 1:
        raise InputError(f"--seeds must be at least 1, got {seeds}.")
    study: dict[str, Job] = {}
    missing: dict[str, list[str]] = {}
    places: dict[str, str | None] = {}
    for name in names:
        artifact = ARTIFACTS[name]
        for settings in cells(artifact, scale, "images"):
            assert isinstance(artifact, Table | Curves)
            config = configuration(SCALES[scale], settings, tuned_settings(out, artifact, scale, settings))
            if config.dataset not in places:
                places[config.dataset] = find_data(config.dataset, data)
            place = places[config.dataset]
            if place is None:
                lacking = missing.setdefault(config.dataset, [])
                if name not in lacking:
                    lacking.append(name)
                continue
            for seed in range(seeds):
                placed = replace(config, seed=seed, dataset=place, device=device)
                study[run_name(placed, config.dataset)] = Job(train, placed)
    _check_data(study, out / RUNS)
    for grid in grids(names, scale):
        for config in grid:
            study[links.run_name(config)] = Job(graph_run.train, replace(config, device=device))
    return Plan(study, missing)


def grids(names: Sequence[str], scale: str) -> list[list[GraphConfig]]:
    """Return the grids of the link predictors that artifacts show, each once."""
    found = {}
    for name in names:
        for settings in cells(ARTIFACTS[name], scale, "graphs"):
            grid = links.grid(SCALES[scale], settings)
            found[links.run_name(grid[0])] = grid
    return list(found.values())


def chosen_runs(names: Sequence[str], scale: str, out: Path, seeds: int, device: str = "auto") -> dict[str, Job]:
    """Return the runs of link predictors with the settings that their grids found best, with all seeds."""
    study: dict[str, Job] = {}
    for grid in grids(names, scale):
        choice = links.choose(grid, lambda config: links.validation_mrr(out / RUNS / links.run_name(config)))
        if choice is None:
            continue
        for seed in range(seeds):
            config = replace(choice.config, seed=seed, device=device)
            study[links.run_name(config)] = Job(graph_run.train, config)
    return study


def count_runs(names: Sequence[str], scale: str) -> int:
    """Return how many runs artifacts need, whether their data are here or not, at default settings."""
    seeds = SCALES[scale].seeds
    every = (settings for name in names for settings in cells(ARTIFACTS[name], scale, "images"))
    configs = (configuration(SCALES[scale], settings) for settings in every)
    images = {run_key(config, config.dataset) for config in configs}
    graphs = grids(names, scale)
    return len(images) * seeds + sum(len(grid) + seeds - 1 for grid in graphs)


def missing_data(plan: Plan) -> str:
    """Say which data sets are not here, for what, and how to get them; nothing if none is missing."""
    if not plan.missing:
        return ""
    lacking = "; ".join(f"{name} for {', '.join(artifacts)}" for name, artifacts in plan.missing.items())
    return (
        f"not here: {lacking}. Fetch by `ccssl data fetch NAME`, or put NAME.npz into the folder that --data names; "
        "cells without data are left out."
    )


def find_data(name: str, folder: Path | None) -> str | None:
    """Return what ``RunConfig.dataset`` must be for a data set: in the folder, else fetched; None if it is not here."""
    if folder is not None:
        for stem in (name, name.replace("-", "_")):
            if is_packed(folder / stem):
                return _with_flips(name, folder / stem)
            if (folder / f"{stem}.npz").is_file():
                return _with_flips(name, folder / f"{stem}.npz")
    return name if state(name) in ("embedded", "ready", "fetched") else None


def _with_flips(name: str, path: Path) -> str:
    """Refuse data that do not know whether their images may be mirrored: training would be another than the paper's."""
    flip = SOURCES[name].flip
    if load(path).flip != flip:
        wanted = "--flip" if flip else "--no-flip"
        packed = path.parent / (name if path.suffix == ".npz" else f"{name}-packed")
        raise InputError(
            f"{path} must say that a mirrored image of {name} {'keeps' if flip else 'does not keep'} its class: "
            f"pack it once by `ccssl data pack {path} {wanted} --out {packed}`."
        )
    return str(path)


def _check_data(study: dict[str, Job], folder: Path) -> None:
    """Refuse to go on with runs that were made of other data."""
    for name, job in study.items():
        path = folder / name / run_folder.CONFIG
        if not path.exists():
            continue
        theirs = str(read_config(path).get("dataset"))
        if Path(theirs).name != Path(job.config.dataset).name:
            raise InputError(
                f"{folder / name} was run on {theirs}, not on {job.config.dataset}: name another --out, or bring "
                "that back."
            )


def _has_print(artifact: Table | Curves, column: Column) -> bool:
    return column.printed and isinstance(artifact, Table) and any(row.printed for row in artifact.rows)
