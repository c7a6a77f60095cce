"""Link predictors of the paper: from the settings of a cell to a grid of runs, and to the one that is shown.

The paper chose learning rate, batch and epochs of each model on a validation set. So a cell stands for a *grid* of
runs, all with the same seed; the setting with the best MRR on the validation part is *chosen*, and run with the other
seeds. Nothing here ever looks at test figures. What was chosen is written nowhere: it follows from the results of the
grid, whoever asks, so that it cannot disagree with them.

A setting whose run is not finished, or broke because its loss was not finite, takes no part. A choice knows how many
settings it was made of; as long as the grid is not complete it may change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ccssl.experiments import folder as run_folder
from ccssl.experiments.graph_run import FREE_ON_RESUME, config_from
from ccssl.experiments.paper.artifacts import GRID, LINK_SETTINGS, Settings
from ccssl.experiments.paper.scales import Scale, checksum, name_for_seed
from ccssl.experiments.study import is_finished
from ccssl.graphs.config import GraphConfig
from ccssl.graphs.files import load_graph

GRID_SEED = 0


class Choice(NamedTuple):
    """The best of a grid, and of how many settings it is the best."""

    config: GraphConfig
    validation: float  # its MRR there
    finished: int
    settings: int


def grid(scale: Scale, settings: Settings) -> list[GraphConfig]:
    """Return the configurations of which a cell shows the best."""
    values = {**LINK_SETTINGS, **settings, **scale.graphs.settings, "seed": GRID_SEED}
    values["dataset"] = scale.graphs.stand_in or values["dataset"]
    found = []
    for point in itertools.product(*scale.graphs.grid.values()):
        chosen = dict(zip(scale.graphs.grid, point, strict=True))
        found.append(config_from({**values, **chosen, "eval_every": chosen["epochs"]}))
    return found


def choose(configs: Sequence[GraphConfig], validation: Callable[[GraphConfig], float | None]) -> Choice | None:
    """Return the configuration with the best validation MRR, the first of several; None where nothing is known."""
    known = [(config, value) for config in configs if (value := validation(config)) is not None]
    if not known:
        return None
    best, value = max(known, key=lambda pair: pair[1])
    return Choice(best, value, len(known), len(configs))


def validation_mrr(folder: Path) -> float | None:
    """Return the validation MRR of a finished run."""
    return run_folder.read_json(folder / run_folder.RESULT)["validation"]["mrr"] if is_finished(folder) else None


def run_name(config: GraphConfig) -> str:
    """Return the stable name of a run.

    >>> from ccssl.experiments.paper.scales import SCALES
    >>> cell = {"dataset": "umls", "model": "qmult", "method": "pseudo-label", "split": "40:60", "split_mode": "paper"}
    >>> run_name(grid(SCALES["paper"], cell | {"exclude_known": False})[0])
    'umls-qmult-pseudo-label-40-60-paper-seed0-fe418b'
    """
    return name_for_seed(run_key(config), config.seed)


def run_key(config: GraphConfig) -> tuple[str, str]:
    """Return what the names of runs that differ in their seed have in common: a beginning and an end."""
    told = ("seed", "dataset", "model", "method", "split", "split_mode", *FREE_ON_RESUME)
    first = {name: values[0] for name, values in GRID.items()}
    usual = config_from({**LINK_SETTINGS, **first, "exclude_known": True, "eval_every": first["epochs"]})
    split = config.split.replace(":", "-")
    start = f"{config.dataset}-{config.model}-{config.method}-{split}-{config.split_mode}-seed"
    return start, f"-{checksum(config, usual, told)}"


def counts(dataset: str) -> dict[str, int]:
    """Return how large a graph is, inverses included.

    >>> counts("umls")
    {'entities': 135, 'relations': 92, 'train': 10432, 'valid': 1304, 'test': 1322}
    """
    graph = load_graph(dataset)
    parts = {part: 2 * len(getattr(graph, part)) for part in ("train", "valid", "test")}
    return {"entities": len(graph.entities), "relations": 2 * len(graph.relations), **parts}
