"""Run the configuration of a link predictor: load, split, train, evaluate, keep everything; or go on where it stopped.

The folder is that of every run (``folder``); a step is one of the optimizer, an evaluation follows some epochs, and
each evaluation is followed by a checkpoint: resumed, a run ends bit for bit as if nothing had stopped it. While
training only the validation part is looked at. The test part is ranked once, at the end, by the weights that are kept:
the averaged ones at their best validation MRR (``select: best``), or the last.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ccssl.errors import InputError
from ccssl.experiments import course
from ccssl.experiments import folder as run_folder
from ccssl.experiments.config import config_text, differences, read_config, typed
from ccssl.experiments.course import Stopped
from ccssl.graphs.config import OWN, GraphConfig
from ccssl.graphs.files import load_graph
from ccssl.graphs.ranking import TIES, Ranks
from ccssl.graphs.splits import GraphSplit, split_of
from ccssl.graphs.training import Evaluation, Training, make_scorer
from ccssl.graphs.triples import Graph
from ccssl.training import checkpoint
from ccssl.training.loop import NonFiniteLoss

FREE_ON_RESUME = ("device",)  # what may differ between a run and its resumption
COMMAND = "ccssl graph train"

Result = dict[str, Any]
Watch = Callable[[int, Mapping[str, Mapping[str, float]]], None]


def train(
    config: GraphConfig,
    out: Path,
    *,
    resume: bool = False,
    graph: Graph | None = None,
    scorer: nn.Module | None = None,
    quiet: bool = False,
    watch: Watch | None = None,
) -> Result:
    """Train as configured, write the folder ``out``, return what ``result.json`` holds.

    ``graph`` stands in for ``config.dataset``, ``scorer`` (``ccssl.graphs.scorers`` says what it must be) for
    ``config.model``: then resuming needs them again. ``watch`` is given the epoch and the figures of each evaluation,
    before the checkpoint; what it raises ends the run.
    """
    with run_folder.opened(out, resume):
        if resume and (out / run_folder.CONFIG).exists():
            _same_configuration(config, out)
        if resume and (out / run_folder.RESULT).exists():
            return read_result(out)
        found = checkpoint.load(out / run_folder.CHECKPOINT) if resume else None
        graph = graph or load_graph(config.dataset)
        training = prepare(config, graph, scorer)
        told = split_record(graph, training.split)
        if found is not None and run_folder.read_json(out / run_folder.SPLIT) != told:
            raise InputError(
                f"{out} was run on other triples than {config.dataset} holds now, its {run_folder.SPLIT} tells: "
                "bring those back, or name another folder."
            )
        if not quiet:
            for notice in (*graph.notices, *training.notices()):
                print(f"note: {notice}", file=sys.stderr)
        if found is None:
            checkpoint.write_text(out / run_folder.CONFIG, config_text(config))
            checkpoint.write_text(out / run_folder.SPLIT, json.dumps(told) + "\n")
            run_folder.keep_until(out, -1)
        run = _Run(training, out, quiet, watch)
        if found is not None:
            run.resume(*found)
        return run.finish()


def prepare(config: GraphConfig, graph: Graph, scorer: nn.Module | None = None) -> Training:
    """Return the training of a configuration, at its first step."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
    torch.use_deterministic_algorithms(config.deterministic)
    checkpoint.seed_random(config.seed)
    scorer = make_scorer(graph, config) if scorer is None else scorer
    return Training(scorer, graph, split_of(graph, config.split, config.split_mode, config.seed), config)


def split_record(graph: Graph, split: GraphSplit) -> dict[str, Any]:
    """Return the parts of a run: numbers of training facts, and how many facts and queries there are beside them."""
    rest = {"valid": len(graph.valid), "test": len(graph.test), "queries": len(graph.queries)}
    return {**split.to_json(), **rest, "checksum": graph.checksum}


def config_from(values: Mapping[str, Any]) -> GraphConfig:
    """Return a configuration from plain data; unknown names and wrong types are refused."""
    if "teacher" in values and values["teacher"] is None:  # as runs had it before the teacher had a name of its own
        values = {**values, "teacher": OWN}
    return GraphConfig(**typed(values, GraphConfig))


def read_run(folder: Path) -> GraphConfig:
    """Return the configuration of a run."""
    path = folder / run_folder.CONFIG
    if not path.exists():
        raise InputError(f"{folder} is not the folder of a run: it has no {path.name}.")
    found = read_config(path)
    if "split_mode" not in found:
        raise InputError(
            f"{folder} is a run on images: ccssl evaluate and ccssl predict know it, ccssl graph does not."
        )
    return config_from(found)


def read_result(folder: Path) -> Result:
    """Return the final figures of a finished run."""
    path = folder / run_folder.RESULT
    if not path.exists():
        raise InputError(
            f"{folder} holds no finished run: {path.name} is missing. Finish it with {COMMAND} --resume."
        )
    return run_folder.read_json(path)


def load_run(
    folder: Path, graph: Graph | None = None, scorer: nn.Module | None = None, device: str | None = None
) -> Training:
    """Return a run as its last checkpoint left it."""
    config = read_run(folder)
    if device:
        config = replace(config, device=device)
    found = checkpoint.load(folder / run_folder.CHECKPOINT)
    if found is None:
        raise run_folder.no_checkpoint(folder, COMMAND)
    graph = graph or load_graph(config.dataset)
    training = prepare(config, graph, scorer)
    if run_folder.read_json(folder / run_folder.SPLIT) != split_record(graph, training.split):
        raise InputError(f"{folder} was run on other triples than {config.dataset} holds now: bring those back.")
    training.load(*found)
    return training


def evaluate(training: Training) -> Result:
    """Return the figures of the weights that are kept: test with all kinds of ties, by relation, and validation."""
    graph, found = training.graph, {}
    if len(graph.test):
        ranks = training.ranks("test", training.chosen)
        found["test"] = ranks.figures(TIES)
        found["relations"] = by_relation(ranks, graph)
    if len(graph.valid):
        found["validation"] = training.ranks("valid", training.chosen).figures()
    return found


def by_relation(ranks: Ranks, graph: Graph) -> dict[str, dict[str, float]]:
    """Return the figures of each relation that a ranked fact names, with the number of these facts."""
    count = np.bincount(ranks.relations[~ranks.heads], minlength=len(graph.relations))
    return {
        name: {"facts": int(count[number]), **ranks.of_relation(number).figures()}
        for number, name in enumerate(graph.relations)
        if count[number]
    }


class _Run:
    """One run on its way: the training, its records, and what it has cost."""

    def __init__(self, training: Training, out: Path, quiet: bool, watch: Watch | None) -> None:
        self.training, self.config, self.out, self.quiet, self.watch = training, training.config, out, quiet, watch
        self.last: dict[str, dict[str, float]] = {}  # the figures of the last evaluation
        self.seconds_before, self.started = 0.0, time.monotonic()
        self.steps_before = 0

    def resume(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Go back to a checkpoint."""
        self.training.load(tensors, state)
        checkpoint.set_random_state(tensors, state)
        self.last = state["last"]
        self.seconds_before, self.steps_before = state["seconds"], self.training.steps_done
        run_folder.keep_until(self.out, self.training.steps_done)

    def finish(self) -> Result:
        """Train to the end."""
        training, config = self.training, self.config
        title = f"{config.method} on {Path(config.dataset).name}"
        total = config.epochs * training.epoch_steps
        with (
            course.signals() as asked,
            course.progress(title, total, self.steps_before, self.quiet) as progress,
            course.events(self.out, self.steps_before) as events,
        ):
            try:
                for found in training.run():
                    progress(training.steps_done)
                    stop = asked()
                    if found is not None:
                        self._record(found, events)
                        if self.watch is not None:
                            self.watch(found.epoch, found.figures)
                        self._checkpoint()
                    elif stop:
                        training.check()
                        self._checkpoint()
                    if stop and not training.finished:
                        raise Stopped(stop, self.out, COMMAND)
            except NonFiniteLoss as error:
                kept = checkpoint.load(self.out / run_folder.CHECKPOINT)
                where = (
                    f"the checkpoint of step {kept[1]['step']} is kept" if kept else "there is no checkpoint yet"
                )
                raise InputError(f"{error}; {where}. Try a smaller lr.") from None
        result = self._result()
        run_folder.write_json(self.out / run_folder.RESULT, result)
        return result

    def _record(self, found: Evaluation, events: Any) -> None:
        step, self.last = self.training.steps_done, found.figures
        run_folder.append(
            self.out,
            [{"step": step, "phase": phase, "epoch": found.epoch, **part} for phase, part in found.figures.items()],
        )
        for phase, part in found.figures.items():
            for name, value in part.items():
                events.add_scalar(f"{phase}/{name}", value, step)
        events.flush()
        if not self.quiet:
            validation = found.figures.get("validation")
            told = f", validation MRR {validation['mrr']:.4f}{' (best so far)' * found.best}" if validation else ""
            print(
                f"epoch {found.epoch}: loss {found.figures['train']['loss']:.4f}{told}", file=sys.stderr, flush=True
            )

    def _checkpoint(self) -> None:
        tensors, state = checkpoint.random_state()
        state |= self.training.state() | {"last": self.last, "seconds": self._seconds()}
        checkpoint.save(
            self.out / run_folder.CHECKPOINT, self.training.steps_done, tensors | self.training.tensors(), state
        )

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def _result(self) -> Result:
        training = self.training
        result: Result = {"test": {}, "unlabeled": self.last.get("unlabeled", {}), **evaluate(training)}
        result |= {"steps": training.steps_done, "epochs": training.epochs_done, "seed": self.config.seed}
        if training.best is not None:
            result["best"] = training.best
        split, graph = training.split, training.graph
        parts = {part: len(getattr(split, part)) / 2 for part in ("labeled", "calibration", "unlabeled")}
        parts |= {"validation": len(graph.valid), "test": len(graph.test), "queries": len(training.pool)}
        return result | {"split": parts, "cost": course.cost(training.device, self._seconds())}


def _same_configuration(config: GraphConfig, out: Path) -> None:
    ours, theirs = config.to_dict(), read_run(out).to_dict()
    for name in FREE_ON_RESUME:
        theirs[name] = ours[name]
    if other := differences(ours, theirs):
        raise InputError(
            f"{out} was run with another configuration, it differs in {'; '.join(other)}: "
            "resume with that one, or name another folder."
        )
