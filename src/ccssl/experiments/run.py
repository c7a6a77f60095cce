"""Run a configuration: load the data, split, train, evaluate, keep everything; or go on where it stopped.

The order of events after a stretch of training is evaluation, metrics, checkpoint. A run that is killed in between
resumes from the checkpoint before and writes the same lines again: on the CPU the end is the same bit for bit.

Reported is the averaged network after the last step (``select: last``, ``test`` in ``result.json``), with the median of
the last 20 evaluations beside it. Where there are validation data, ``best`` has the figures of the evaluation that was
best on them, its test figures among them; with ``select: best`` its network is the one reported: ``reported`` in
``result.json`` is then ``best``, the checkpoint keeps its weights, and ``load_run`` returns them. Nothing is ever
chosen on test data.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn

from ccssl import collective
from ccssl.errors import InputError
from ccssl.experiments import course
from ccssl.experiments import folder as run_folder
from ccssl.experiments.config import RunConfig, config_from, config_text, differences, read_config
from ccssl.experiments.course import Stopped
from ccssl.images.dataset import ImageData, digest
from ccssl.images.networks import NETWORKS
from ccssl.images.normalized import Normalized
from ccssl.images.sources import SOURCES, load, only_fold
from ccssl.images.splits import Split, make_split
from ccssl.methods import Method
from ccssl.training import checkpoint, processes
from ccssl.training.loop import NonFiniteLoss, Training, find_device, find_precision

# What may differ between a run and its resumption without changing what it computes.
FREE_ON_RESUME = ("device", "eval_batch")
LAST_EVALUATIONS = 20
BEST = "best."  # what the names of the best weights begin with in a checkpoint

Result = dict[str, Any]
Watch = Callable[[int, Mapping[str, Mapping[str, float]]], None]


def train(
    config: RunConfig,
    out: Path,
    *,
    resume: bool = False,
    data: ImageData | None = None,
    network: nn.Module | None = None,
    quiet: bool = False,
    watch: Watch | None = None,
) -> Result:
    """Train as configured, write the folder ``out``, return what ``result.json`` holds.

    ``data`` stands in for ``config.dataset``, ``network`` (uint8 images normalised to mean 0 and deviation 1 in, logits
    out) for ``config.model``: then resuming needs them again. ``watch`` is given the step and the figures of each
    evaluation, before the checkpoint; what it raises ends the run.
    """
    with processes.joined(config.device):
        # What was chosen for this machine is a part of what was run; on another one it might be chosen differently.
        config = replace(config, precision=find_precision(config.precision, find_device(config.device)))
        config = replace(config, dataset=_located(config.dataset))
        main = collective.rank() == 0
        with run_folder.opened(out, resume) if main else nullcontext():
            if resume and (out / run_folder.CONFIG).exists():
                _same_configuration(config, out, data)
            if resume and (out / run_folder.RESULT).exists():
                return read_result(out)
            return _train(config, out, resume, main, data, network, quiet, watch)


def _train(
    config: RunConfig,
    out: Path,
    resume: bool,
    main: bool,
    data: ImageData | None,
    network: nn.Module | None,
    quiet: bool,
    watch: Watch | None,
) -> Result:
    found = checkpoint.load(out / run_folder.CHECKPOINT) if resume else None
    data = data or load(config.dataset)
    split = split_of(config, data)
    told = {**split.to_json(), "images": digest(data)}
    if found is not None and _without_notices(run_folder.read_json(out / run_folder.SPLIT)) != _without_notices(
        told
    ):
        raise InputError(
            f"{out} was run on other images or labels than {config.dataset} holds now, its {run_folder.SPLIT} tells: "
            "bring those back, or name another folder."
        )
    if main and not quiet:
        for notice in (*split.notices, *_notices(config, data)):
            print(f"note: {notice}", file=sys.stderr)
    training = prepare(config, data, split, network)
    processes.wait()  # nobody writes before everybody has looked
    if main and found is None:
        checkpoint.write_text(out / run_folder.CONFIG, config_text(config))
        checkpoint.write_text(out / run_folder.SPLIT, json.dumps(told) + "\n")
        run_folder.keep_until(out, -1)
    run = _Run(training, config, out, main, quiet, watch)
    if found is not None:
        run.resume(*found)
    return run.finish()


def _without_notices(split: Mapping[str, Any]) -> dict[str, Any]:
    """Return who has which role and what the images are, without what is told about it."""
    return {name: value for name, value in split.items() if name != "notices"}


def _located(dataset: str) -> str:
    """Return a data set's name, or where its file or folder is, whatever the current folder will be."""
    return dataset if dataset in SOURCES or not Path(dataset).exists() else str(Path(dataset).absolute())


def _notices(config: RunConfig, data: ImageData) -> Iterator[str]:
    """Say what was asked for and does nothing, and what nobody has said."""
    if config.calibration_fraction and not config.method_class.uses_calibration:
        yield f"calibration_fraction is passed over: {config.method} calibrates nothing and trains on all labels."
    if config.flip is None and not data.flip_told and data.train_images.shape[-1] == 3:
        yield (
            f"{config.dataset} does not say whether a mirrored image keeps its class, so none is mirrored: give "
            "--flip if it does, as in most photographs, else --no-flip."
        )


def split_of(config: RunConfig, data: ImageData) -> Split:
    """Return the split that a configuration makes of a data set."""
    data_of_fold = data if config.fold is None else only_fold(data, config.fold)
    return make_split(
        data_of_fold.train_labels,
        len(data.test_labels),
        len(data.class_names),
        config.labels,
        config.seed,
        sampling=config.label_sampling,
        calibration_fraction=config.calibration_share,
        validation=config.validation,
        include_labeled=config.include_labeled,
    )


def prepare(config: RunConfig, data: ImageData, split: Split, network: nn.Module | None = None) -> Training:
    """Return the training of a configuration, at its first step."""
    split.check()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
    torch.use_deterministic_algorithms(config.deterministic)
    checkpoint.seed_random(config.seed)
    if config.flip is not None:
        data = replace(data, flip=config.flip)
    height, width, channels = data.train_images.shape[1:]
    if network is None:
        network = NETWORKS[config.model](len(data.class_names), channels, min(height, width))
    training_ids = np.sort(np.concatenate([split.labeled, split.unlabeled]))
    normalized = Normalized(network, data.train_images, training_ids)
    return Training(normalized, method_of(config, data, split), data, split, config)


def method_of(config: RunConfig, data: ImageData, split: Split) -> Method:
    """Return the method of a configuration, with the class frequencies of its labels."""
    classes = len(data.class_names)
    known = np.bincount(data.train_labels[np.concatenate([split.labeled, split.calibration])], minlength=classes)
    prior = torch.from_numpy(known / known.sum()).float()
    return config.method_class(classes, len(split.unlabeled), config.method_config(), prior)


def read_result(folder: Path) -> Result:
    """Return the final figures of a finished run."""
    path = folder / run_folder.RESULT
    if not path.exists():
        raise InputError(
            f"{folder} holds no finished run: {path.name} is missing. Finish it with ccssl train --resume."
        )
    return run_folder.read_json(path)


def read_run(folder: Path) -> RunConfig:
    """Return the configuration of a run."""
    path = folder / run_folder.CONFIG
    if not path.exists():
        raise InputError(f"{folder} is not the folder of a run: it has no {path.name}.")
    return config_from(read_config(path))


def load_run(
    folder: Path, data: ImageData | None = None, network: nn.Module | None = None, device: str | None = None
) -> Training:
    """Return a run as its last checkpoint left it; with ``select: best`` its average is the best on validation."""
    config = read_run(folder)
    if device:
        config = replace(config, device=device)
        if config.precision == "fp16" and find_device(device).type == "cpu":
            config = replace(config, precision="fp32")
    found = checkpoint.load(folder / run_folder.CHECKPOINT)
    if found is None:
        raise run_folder.no_checkpoint(folder, "ccssl train")
    data = data or load(config.dataset)
    split = Split.from_json(run_folder.read_json(folder / run_folder.SPLIT))
    training = prepare(config, data, split, network)
    tensors, state = found
    best = {f"ema.{name.removeprefix(BEST)}": value for name, value in tensors.items() if name.startswith(BEST)}
    training.load(tensors | best, state)
    return training


class _Run:
    """One run on its way: the training, its records, and what it has cost."""

    def __init__(
        self, training: Training, config: RunConfig, out: Path, main: bool, quiet: bool, watch: Watch | None
    ) -> None:
        self.training, self.config, self.out, self.main, self.quiet = training, config, out, main, quiet
        self.watch = watch
        self.history: list[dict[str, dict[str, float]]] = []  # the figures of each evaluation
        self.best: dict[str, Any] | None = None
        self.best_weights: dict[str, torch.Tensor] = {}  # of its averaged network, where that is the one reported
        self.seconds_before, self.started = 0.0, time.monotonic()
        self.steps_before = 0

    def resume(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Go back to a checkpoint."""
        self.training.load(tensors, state)
        checkpoint.set_random_state(tensors, state)
        self.history, self.best = state["history"], state["best"]
        self.best_weights = {name: value for name, value in tensors.items() if name.startswith(BEST)}
        self.seconds_before, self.steps_before = state["seconds"], self.training.steps_done
        if self.main:
            run_folder.keep_until(self.out, self.training.steps_done)

    def finish(self) -> Result:
        """Train to the end."""
        config, training = self.config, self.training
        with course.signals() as asked, self._progress() as progress, self._events() as events:
            try:
                for done in training.run(config.steps):
                    progress(done)
                    stop = processes.agree(asked())
                    if done % config.eval_every == 0 or done == config.steps:
                        training.check()
                        self._evaluate(events)
                        if self.watch is not None:
                            self.watch(done, self.history[-1])
                        self._checkpoint()
                    elif stop:
                        training.check()
                        self._checkpoint()
                    if stop and done < config.steps:
                        raise Stopped(stop, self.out)
            except NonFiniteLoss as error:
                kept = checkpoint.load(self.out / run_folder.CHECKPOINT)
                where = (
                    f"the checkpoint of step {kept[1]['step']} is kept" if kept else "there is no checkpoint yet"
                )
                other = "" if config.precision in ("fp32", "fp64") else " or precision fp32"
                raise InputError(f"{error}; {where}. Try a smaller lr{other}, in another folder.") from None
        result = self._result()
        if self.main:
            run_folder.write_json(self.out / run_folder.RESULT, result)
        processes.wait()
        return result

    def _evaluate(self, events: Any) -> None:
        step, figures = self.training.steps_done, self.training.evaluate()
        losses = self.training.losses()
        self.history.append(figures)
        score = figures.get("validation", {}).get("accuracy")
        if score is not None and (self.best is None or score > self.best["validation"]["accuracy"]):
            self.best = {"step": step, **figures}
            if self.main and self.config.select == "best":
                weights = self.training.ema.network.state_dict().items()
                self.best_weights = {BEST + k: v.to("cpu", copy=True) for k, v in weights if torch.is_tensor(v)}
        if not self.main:
            return
        records = {"train": losses, **figures}
        run_folder.append(self.out, [{"step": step, "phase": phase, **found} for phase, found in records.items()])
        for phase, found in records.items():
            for name, value in found.items():
                events.add_scalar(f"{phase}/{name}", value, step)
        events.flush()
        if not self.quiet:
            told = [f"{phase} {found['accuracy']:.4f}" for phase, found in figures.items() if "accuracy" in found]
            print(
                f"step {step:,}: loss {losses['loss']:.4f}, accuracy on {', '.join(told)}",
                file=sys.stderr,
                flush=True,
            )

    def _checkpoint(self) -> None:
        weights = self.training.tensors()  # which all ranks must ask for
        if not self.main:
            return
        tensors, state = checkpoint.random_state()
        state |= self.training.state() | {"history": self.history, "best": self.best, "seconds": self._seconds()}
        folder = self.out / run_folder.CHECKPOINT
        checkpoint.save(folder, self.training.steps_done, tensors | weights | self.best_weights, state)

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def _result(self) -> Result:
        last = self.history[-1]
        names = last.get("test", {})
        recent = [figures.get("test", {}) for figures in self.history[-LAST_EVALUATIONS:]]
        median = {name: statistics.median(figures[name] for figures in recent) for name in names}
        result: Result = {"unlabeled": {}, **last, "median20": median}
        result |= {"reported": self.config.select, "steps": self.config.steps, "seed": self.config.seed}
        if self.best is not None:
            result["best"] = self.best
        return result | {"split": self._split_sizes(), "cost": course.cost(self.training.device, self._seconds())}

    def _split_sizes(self) -> dict[str, int]:
        split = self.training.split
        return {
            name: len(getattr(split, name))
            for name in ("labeled", "calibration", "unlabeled", "validation", "test")
        }

    def _progress(self) -> AbstractContextManager[Any]:
        title = f"{self.config.method} on {Path(self.config.dataset).name}"
        return course.progress(title, self.config.steps, self.steps_before, self.quiet or not self.main)

    def _events(self) -> AbstractContextManager[Any]:
        return course.events(self.out, self.steps_before) if self.main else nullcontext()


def _same_configuration(config: RunConfig, out: Path, data: ImageData | None) -> None:
    """Refuse to go on with other settings; the data may have moved, if they are the same: then say where they are."""
    ours, theirs = config.to_dict(), read_run(out).to_dict()
    for name in FREE_ON_RESUME:
        theirs[name] = ours[name]
    moved = ours["dataset"] != theirs["dataset"] and (out / run_folder.SPLIT).exists()
    if moved and run_folder.read_json(out / run_folder.SPLIT).get("images") == digest(data or load(config.dataset)):
        theirs["dataset"] = ours["dataset"]
        if collective.rank() == 0:
            kept = yaml.safe_load((out / run_folder.CONFIG).read_text(encoding="utf-8"))
            changed = yaml.safe_dump({**kept, "dataset": config.dataset}, sort_keys=False)
            checkpoint.write_text(out / run_folder.CONFIG, changed)
    if other := differences(ours, theirs):
        raise InputError(
            f"{out} was run with another configuration, it differs in {'; '.join(other)}: "
            "resume with that one, or name another folder."
        )
