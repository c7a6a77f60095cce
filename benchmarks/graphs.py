"""Learning on knowledge graphs: an epoch against PyKEEN's, and a graph of 40,000 entities in bounded memory.

Everything here works on one thread, and times are those that it was on the processor: what else the machine does then
neither lengthens epochs of half a second nor spares those of a few milliseconds.
"""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.memory import resident
from benchmarks.table import Row, Table, duration, spread
from benchmarks.timing import Timings
from ccssl.experiments.graph_run import prepare
from ccssl.graphs.config import GraphConfig
from ccssl.graphs.files import load_graph
from ccssl.graphs.ranking import ENTRIES, filtered_ranks
from ccssl.graphs.training import Training
from ccssl.graphs.triples import Graph, graph_of

ROOT = Path(__file__).resolve().parent.parent
LIMIT_EPOCH = 4.0  # times as fast as PyKEEN
LIMIT_MEMORY = 6.0  # GB
LIMIT_RANKS = 5.0  # times as long with four times the entities
LIMIT_STEP = 5.5  # the same; p-values are looked up among four times as many calibration scores, too
DIM = 256
FEW, MANY = 10_000, 40_000
FACTS_AN_ENTITY = 7.5  # 300,000 facts of 40,000 entities
PARTS = "70:5:25"
# Without what the defaults of GraphConfig add for the sake of accuracy.
PLAIN: dict[str, Any] = {
    "input_dropout": 0.0,
    "dropout": 0.0,
    "batch_of": "facts",
    "mu": 4.0,
    "teacher": "own",
    "align": False,
    "patience": 0,
}

Epochs = Callable[[int], float]  # trains so many epochs, tells the seconds of one


def run(quick: bool = False) -> list[Table]:
    """Measure both tables; ``quick`` takes a small graph, an epoch or two and a few steps."""
    return [epochs(quick), many_entities(quick)]


# ---- an epoch -----------------------------------------------------------------------------------------------------


def epochs(quick: bool) -> Table:
    """Epochs over all training facts, both ways, in turns."""
    name = "nations" if quick else "umls"
    table = Table(
        "An epoch of link prediction",
        f"Supervised epochs over all training facts of {name.upper()} and their inverses on one thread, {DIM} real "
        "parameters a vector, Adam, batches of equal size, in turns with PyKEEN's LCWA loop with cross-entropy, a "
        "second or so of each; what PyKEEN prepares before its first epoch is not counted. Rows of a batch are "
        "queries with all their answers, as in the LCWA (`batch_of: queries`); ours averages its weights, too. "
        "*Facts* (`batch_of: facts`, 1vsAll) goes over each fact by itself, which is several times as many rows: its "
        "ratio, and that of CCSSL at 40:40:20, calibration and unlabeled queries included, are told for comparison.",
        ("model", "batch", "rows of", "ours", "PyKEEN", "paired ratio"),
        "PyKEEN / ours",
    )
    if find_spec("pykeen") is None:
        return table
    graph = load_graph(name)
    cases: list[tuple[str, int, str, dict[str, Any], float | None]] = [
        ("complex", 512, "queries", {"batch_of": "queries"}, LIMIT_EPOCH),
        ("complex", 1024, "queries", {"batch_of": "queries"}, LIMIT_EPOCH),
        ("distmult", 512, "queries", {"batch_of": "queries"}, LIMIT_EPOCH),
        ("complex", 512, "facts", {"batch_of": "facts"}, None),
        (
            "complex",
            512,
            "queries, CCSSL",
            {"batch_of": "queries", "method": "ccssl-diff", "split": "40:40:20"},
            None,
        ),
    ]
    for model, batch, told, settings, limit in cases[:1] if quick else cases:
        times = in_turns({"ours": ours(graph, model, batch, settings), "peer": peer(name, model, batch)}, quick)
        ratio = times.ratio("peer", "ours")
        cells = (
            model,
            str(batch),
            told,
            *(duration(times.minimum(side)) for side in ("ours", "peer")),
            spread(ratio),
        )
        table.rows.append(Row(cells, ratio.minima, limit, "at least"))
    return table


def in_turns(competitors: dict[str, Epochs], quick: bool) -> Timings:
    """Time epochs of the competitors in turns, as many as last for about a second."""
    seconds: dict[str, list[float]] = {name: [] for name in competitors}
    count = {name: 1 if quick else max(1, round(1 / train(2))) for name, train in competitors.items()}
    gc.collect()
    gc.freeze()  # PyKEEN collects garbage after each epoch: what is here has nothing to do with it
    for _ in range(1 if quick else 8):
        for name, train in competitors.items():
            seconds[name].append(train(count[name]))
    gc.unfreeze()
    return Timings(seconds)


def ours(graph: Graph, model: str, batch: int, settings: dict[str, Any]) -> Epochs:
    """Return what trains our epochs."""
    plain = {**PLAIN, "method": "supervised", "split": "all"}
    fixed = {"dataset": graph.name, "model": model, "dim": DIM, "batch": batch, "epochs": 10**6, "device": "cpu"}
    training = prepare(GraphConfig(**{**fixed, **plain, **settings}), graph)

    def train(count: int) -> float:
        start = time.process_time()
        for _ in range(count * training.epoch_steps):
            training.step()
        return (time.process_time() - start) / count

    return train


def peer(name: str, model: str, batch: int) -> Epochs:
    """Return what trains PyKEEN's epochs; what it does before the first of them is not counted."""
    from pykeen.datasets import get_dataset  # pyright: ignore[reportMissingImports]
    from pykeen.models import model_resolver  # pyright: ignore[reportMissingImports]
    from pykeen.training import LCWATrainingLoop, TrainingCallback  # pyright: ignore[reportMissingImports]

    logging.getLogger("pykeen").setLevel(logging.ERROR)
    facts = get_dataset(dataset=name, dataset_kwargs={"create_inverse_triples": True}).training
    dim = DIM // 2 if model == "complex" else DIM  # complex numbers
    network = model_resolver.make(
        model, triples_factory=facts, embedding_dim=dim, loss="crossentropy", random_seed=0
    )
    loop = LCWATrainingLoop(
        model=network,
        triples_factory=facts,
        optimizer=torch.optim.Adam(network.parameters(), lr=0.01),
        automatic_memory_optimization=False,
    )
    done = 0

    class Clock(TrainingCallback):
        def __init__(self) -> None:
            super().__init__()
            self.ends: list[float] = []

        def post_epoch(self, epoch: int, epoch_loss: float, **kwargs: Any) -> None:
            self.ends.append(time.process_time())

    def train(count: int) -> float:
        nonlocal done
        clock, goes_on = Clock(), done > 0
        done += count + 1
        loop.train(
            triples_factory=facts, num_epochs=done, batch_size=batch, callbacks=clock, continue_training=goes_on,
            use_tqdm=False, use_tqdm_batch=False, pin_memory=False,
        )  # fmt: skip
        return (clock.ends[-1] - clock.ends[0]) / count

    return train


# ---- a large graph ------------------------------------------------------------------------------------------------


def many_entities(quick: bool) -> Table:
    """A stretch of CCSSL and filtered ranks, on a large graph and on a quarter of it."""
    few, many = (100, 400) if quick else (FEW, MANY)
    steps, asked = (2, 20) if quick else (20, 1000)
    table = Table(
        f"{many:,} entities, {int(FACTS_AN_ENTITY * many):,} facts",
        f"CCSSL-diff with ComplEx on random facts of 100 relations, {DIM} parameters, split {PARTS}, batch 512 facts, "
        "on one thread, each graph in a process of its own. *Refresh* renews teacher and calibration, once an epoch; "
        f"*step* is the fastest of {steps}; *epoch* is what both come to for a whole one, which was not run; *ranks* "
        f"are those of {asked:,} facts both ways among all entities, at most {ENTRIES:,} scores at a time; *memory* is "
        "the peak of the process, torch included. Ratios are for equal numbers of queries.",
        ("entities", "refresh", "step", "epoch", "ranks", "memory", "judged"),
        "figure",
    )
    found = {count: measured(count, steps, asked) for count in (few, many)}

    def cells(count: int) -> tuple[str, ...]:
        one = found[count]
        epoch = one["refresh"] + one["steps"] * one["step"]
        times = (duration(one["refresh"]), duration(one["step"]), duration(epoch), duration(one["ranks"]))
        return f"{count:,}", *times, f"{one['memory'] / 1e9:.2f} GB"

    table.rows.append(Row((*cells(few), "GB of memory"), found[few]["memory"] / 1e9, None))
    table.rows.append(Row((*cells(many), "GB of memory"), found[many]["memory"] / 1e9, LIMIT_MEMORY))
    sides = f"{many:,} / {few:,}"
    for part, what, limit in (("step", "ratio of steps", LIMIT_STEP), ("ranks", "ratio of ranks", LIMIT_RANKS)):
        ratio = found[many][part] / found[few][part]
        table.rows.append(Row((sides, "", "", "", "", "", what), ratio, limit))
    return table


def measured(entities: int, steps: int, asked: int) -> dict[str, float]:
    """Return the figures of one graph, found out in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.graphs", str(entities), str(steps), str(asked)],
        cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def random_graph(entities: int, asked: int) -> Graph:
    """Return a graph of random facts."""
    draw, relations = np.random.default_rng(0), 100

    def facts(count: int) -> np.ndarray:
        return draw.integers(0, (entities, relations, entities), (count, 3))

    parts = {"train": facts(int(FACTS_AN_ENTITY * entities)), "valid": facts(0), "test": facts(asked)}
    names = [f"entity {n}" for n in range(entities)], [f"relation {n}" for n in range(relations)]
    return graph_of("random", *names, parts)


def main(entities: str, steps: str, asked: str) -> None:
    """Print the seconds and the peak memory of a stretch of training and of ranking."""
    torch.set_num_threads(1)
    graph = random_graph(int(entities), int(asked))
    training = prepare(
        GraphConfig(
            **{**PLAIN, "dataset": "random", "split": PARTS, "method": "ccssl-diff", "dim": DIM, "batch": 512},
            model="complex",
            per_relation=False,
            device="cpu",
        ),
        graph,
    )  # fmt: skip
    refresh = seconds(training.refresh)
    training.step()  # the first one, which refreshes again
    step = min(seconds(training.step) for _ in range(int(steps)))
    training.check()
    ranks = min(seconds(lambda: ranked(training, graph)) for _ in range(5))
    print(
        json.dumps(
            {"refresh": refresh, "step": step, "steps": training.epoch_steps, "ranks": ranks, "memory": peak()}
        )
    )


def ranked(training: Training, graph: Graph) -> None:
    """Rank the test facts."""
    filtered_ranks(training.ema.network, graph, graph.test, trained=training.trained)


def seconds(function: Callable[[], object]) -> float:
    """Return how long a call is on the processor."""
    start = time.process_time()
    function()
    return time.process_time() - start


def peak() -> int:
    """Return the largest memory that this process has held, in bytes."""
    return resident("VmHWM")


if __name__ == "__main__":
    main(*sys.argv[1:])
