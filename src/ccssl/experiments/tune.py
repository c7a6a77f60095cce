"""The search for hyperparameters: Bayesian optimisation with Hyperband, judged on validation images.

The paper's protocol: 20 configurations a combination of data set, number of labels and method, suggested by Bayesian
optimisation; Hyperband with reduction factor 3 stops the poor ones early, none before 20 epochs; one fixed seed. The
best configuration is then used for all seeds.

*Which configuration comes next* is a function of the seed, its number and the trials so far: the sampler (the
tree-structured Parzen estimator, or a Gaussian process) is made anew, with a seed of its own, for each. So a search
with one worker repeats exactly, also after it was killed. The seed of the runs is fixed, so that a configuration need
not be run twice: where the sampler suggests one that was tried, it is asked again, the refused one being to it a trial
under way, which it keeps away from; after ``ASKS`` times an untried one is drawn. Once none is left, figures are taken
over. The sampler sees the trials of all of Hyperband's brackets. Optuna would show it those of one bracket
only, of which there are three or four: with 20 trials it would draw at random to the end.

*How far a trial has come* is counted in steps, of which all trials have equally many. An epoch is one pass over the
unlabeled pool; 20 epochs are most steps where mu is smallest. That many steps are the least that a trial gets in a
run of the paper's 2^18 steps. A shorter run scales them down with its length, but not below a 27th of it: after less,
three rounds before the end, nothing has been learned that could be judged. In one line, for T steps ::

    least  =  min( E,  max( E T / 2^18,  T / 27 ) ),      E = 20 |pool| / (batch * smallest mu).

A trial is judged at its first evaluation from there on, then from 3, 9, ... times as many steps on.

*What is judged* is the accuracy of the averaged network on validation images, which are kept aside from the training
images. Trials have no test images at all (``trial_worker``).

A search lies in ``STUDY/tuning/NAME``: what is searched (``search.json``), the journal unless there is a database,
and one run folder a trial. Its result is ``STUDY/tuned/NAME.yaml``, NAME being DATASET-LABELS-METHOD.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from itertools import product
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ccssl.errors import InputError

try:
    import optuna
except ModuleNotFoundError:
    raise InputError("a search needs Optuna: install it with pip install 'ccssl[tune]'.") from None
from optuna.distributions import CategoricalDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.trial import FrozenTrial, TrialState

from ccssl.experiments import folder as run_folder
from ccssl.experiments import trials as trial_storage
from ccssl.experiments.config import RunConfig, config_from, differences, one_of
from ccssl.experiments.run import FREE_ON_RESUME, split_of
from ccssl.experiments.spaces import SPACES, Space
from ccssl.experiments.trial_worker import Worker
from ccssl.experiments.trials import Parameters, Trials
from ccssl.images.dataset import ImageData
from ccssl.images.sources import SOURCES, load
from ccssl.training import checkpoint

PAPER_STEPS = 2**18
EPOCHS = 20
REDUCTION = 3
VALIDATION_SHARE = 0.1  # of the training images with a known label
ASKS = 20  # how often the sampler is asked for a configuration that was not tried
LIVES = 3  # how often the worker of a trial may die before the trial is given up
FAILURES = 3  # how many trials may be given up before the search is
POLL = 2.0  # seconds after which an idle coordinator looks at what the others do
ENDING = 60.0  # seconds that workers have for their last checkpoint

SAMPLERS: dict[str, Callable[[int], optuna.samplers.BaseSampler]] = {
    "tpe": lambda seed: optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True),
    "gp": lambda seed: optuna.samplers.GPSampler(seed=seed, n_startup_trials=5),
}
# What a search decides for itself, or what belongs to one machine: no part of the best configuration.
NOT_TUNED = ("validation", "seed", "select", *FREE_ON_RESUME)

Figures = dict[str, Any]


class Interrupted(KeyboardInterrupt):
    """A signal asked the search to end; everything is kept."""

    def __init__(self, number: int) -> None:
        super().__init__("stopped; go on with the same command")
        self.number = number


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched: the values of some parameters, all else being as in ``base``."""

    base: RunConfig
    space: Space
    trials: int = 20
    sampler: str = "tpe"

    def __post_init__(self) -> None:
        """Refuse what cannot be searched."""
        one_of("sampler", self.sampler, list(SAMPLERS))
        if self.trials < 1:
            raise InputError(f"trials must be at least 1, got {self.trials}.")
        if self.base.select != "last":
            raise InputError("select must be last: a search judges the network after the last step.")

    @property
    def name(self) -> str:
        """DATASET-LABELS-METHOD; a file such as emnist_byclass.npz is called by the name of its data set."""
        stem = Path(self.base.dataset).stem
        dataset = next((name for name in SOURCES if name == stem.replace("_", "-")), stem)
        return f"{dataset}-{self.base.labels}-{self.base.method}"

    def to_dict(self) -> dict[str, Any]:
        """Return what two searches of one name must agree on; the number of trials may grow.

        In place of a parameter that is searched stand its values.
        """
        names = {f.name for f in fields(RunConfig)}
        config = {name: value for name, value in self.base.to_dict().items() if name not in FREE_ON_RESUME}
        options = dict(config.pop("options"))
        for name, values in self.space.items():
            (config if name in names else options)[name] = list(values)
        return {**config, "options": options, "sampler": self.sampler}


def space_of(method: str, fixed: Sequence[str] = ()) -> Space:
    """Return what the paper searches for a method, without the parameters that are ``fixed``."""
    if method not in SPACES:
        raise InputError(f"there is nothing to search for {method}: the paper searches for {', '.join(SPACES)}.")
    space = {name: values for name, values in SPACES[method].items() if name not in fixed}
    if not space:
        raise InputError(f"nothing is left to search: {', '.join(SPACES[method])} are all given.")
    return space


def configured(base: RunConfig, parameters: Mapping[str, Any]) -> RunConfig:
    """Return a configuration with some parameters, be they fields or the method's options, set to other values."""
    names = {f.name for f in fields(RunConfig)}
    options = {name: value for name, value in parameters.items() if name not in names}
    own = {name: value for name, value in parameters.items() if name in names}
    return config_from({**own, "options": {**base.options, **options}}, base)


def with_validation(config: RunConfig, data: ImageData) -> RunConfig:
    """Return the configuration with validation images: those asked for, else a tenth of what has a known label."""
    if config.validation:
        return config
    known = int((data.train_labels >= 0).sum())
    left = known - config.labels
    if left < 1:
        raise InputError(
            f"a search needs validation images beside the {config.labels} labels, but {data.name} has "
            f"{known} training images with a known label: take fewer labels."
        )
    return replace(config, validation=min(left, max(1, round(VALIDATION_SHARE * known))))


def least_steps(search: Search, pool: int) -> int:
    """Return the steps that every trial gets before it may be stopped; ``pool`` is the number of unlabeled images."""
    steps = search.base.steps
    images = search.base.batch * min(int(mu) for mu in search.space.get("mu", (search.base.mu,)))
    epochs = EPOCHS * max(pool, 1) / images
    return max(1, min(steps, math.ceil(min(epochs, max(epochs * steps / PAPER_STEPS, steps / REDUCTION**3)))))


def pruner_of(search: Search, pool: int) -> optuna.pruners.BasePruner:
    """Return what stops poor trials early: Hyperband, or nothing beside a Gaussian process."""
    if search.sampler == "gp":
        return optuna.pruners.NopPruner()
    least = least_steps(search, pool)
    return optuna.pruners.HyperbandPruner(least, search.base.steps, REDUCTION)


def propose(search: Search, trials: Sequence[FrozenTrial]) -> Parameters:
    """Return the parameters to try next, after ``trials``."""
    seed = int(np.random.SeedSequence([search.base.seed, len(trials)]).generate_state(1)[0])
    tried = [trial.params for trial in trials]
    grid = (dict(zip(search.space, values, strict=True)) for values in product(*search.space.values()))
    untried = [point for point in grid if point not in tried]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        memory = optuna.create_study(direction="maximize", sampler=SAMPLERS[search.sampler](seed))
        memory.add_trials([trial for trial in trials if trial.state != TrialState.FAIL])
        for _ in range(ASKS):
            parameters = memory.ask({name: CategoricalDistribution(v) for name, v in search.space.items()}).params
            if parameters in untried or not untried:
                return parameters
    return untried[np.random.default_rng(seed).integers(len(untried))]


def tune(
    search: Search, out: Path, *, workers: int = 1, storage: str | None = None, quiet: bool = False
) -> Figures:
    """Search until ``search.trials`` have ended, complete or stopped early; write the best; return all figures.

    A search that is there already goes on. ``storage`` is the address of a PostgreSQL database that coordinators on
    other machines use, too; without it the trials are kept in a file below ``out``.
    """
    if workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("a search starts its processes itself: leave torch.distributed.run away, give --workers.")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    data = load(search.base.dataset)
    search = replace(search, base=with_validation(search.base, data))
    folder = out / "tuning" / search.name
    progress = _Progress(search, quiet)
    fractions = search.space.get("calibration_fraction", (search.base.calibration_fraction,))
    splits = [split_of(configured(search.base, {"calibration_fraction": fraction}), data) for fraction in fractions]
    for notice in dict.fromkeys(notice for split in splits for notice in split.notices):
        progress.note(notice)
    pruner = pruner_of(search, len(splits[0].unlabeled))
    if search.sampler == "tpe" and search.base.eval_every >= search.base.steps:
        progress.note(
            f"no trial can be stopped early: the first evaluation, eval_every {search.base.eval_every}, is the last."
        )
    with _interruptible(), ExitStack() as held:
        if storage is None:
            held.enter_context(run_folder.opened(folder, resume=True))
            trials = trial_storage.in_journal(folder, search.name, pruner, progress.note)
        else:
            owner = held.enter_context(trial_storage.owner_of(folder))
            trials = held.enter_context(
                trial_storage.in_database(storage, search.name, owner, pruner, progress.note)
            )
        _same_search(search, trials, folder)
        with progress.shown():
            _Coordinator(search, trials, folder, progress).run(workers)
        return _result(search, trials.all(), out / "tuned" / f"{search.name}.yaml")


def _same_search(search: Search, trials: Trials, folder: Path) -> None:
    """Refuse to go on with a search of the same name that is another one, in the storage or in the folder."""
    path = folder / "search.json"
    ours: dict[str, Any] = json.loads(json.dumps(search.to_dict()))  # as it was kept: without tuples
    stored = trials.describe(ours)
    beside = run_folder.read_json(path) if path.exists() else stored
    for theirs in (stored, beside):
        if other := differences(ours, theirs):
            raise InputError(
                f"a search {search.name} was begun with another configuration, it differs in {'; '.join(other)}: give "
                "that one, or name another folder (with --storage, another database, too)."
            )
    if beside["id"] != stored["id"]:
        raise InputError(f"{folder} belongs to a search in another storage: name that one, or another folder.")
    if not path.exists():
        run_folder.write_json(path, stored)


class _Coordinator:
    """Hands trials out to workers on this machine, replaces workers that die, and listens to what they say."""

    def __init__(self, search: Search, trials: Trials, folder: Path, progress: _Progress) -> None:
        self.search, self.trials, self.folder, self.progress = search, trials, folder, progress
        self.running: dict[int, int] = {}  # index of a worker -> number of its trial
        self.deaths: dict[int, int] = {}  # number of a trial -> workers that died in it
        self.last_beat = time.monotonic()

    def run(self, count: int) -> None:
        """Run trials until all have ended."""
        workers: dict[int, Worker] = {}
        try:
            while True:
                self._hand_out(workers, count)
                if not self.running and self._all_ended():
                    return
                pipes: dict[Any, int] = {
                    worker.pipe: index for index, worker in workers.items() if index in self.running
                }
                if not pipes:
                    time.sleep(POLL)  # others are at work on what is left
                for index in [pipes[pipe] for pipe in wait(list(pipes), timeout=POLL)]:
                    try:
                        message = workers[index].pipe.recv()
                    except (EOFError, OSError):
                        self._mourn(workers.pop(index))
                    else:
                        self._listen(workers[index], *message)
                self._beat(workers)
        finally:
            _end(list(workers.values()))

    def _all_ended(self) -> bool:
        ended = sum(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in self.trials.all())
        return ended >= self.search.trials

    def _hand_out(self, workers: dict[int, Worker], count: int) -> None:
        for index in range(count):
            while index not in self.running:
                mine = list(self.running.values())
                trial = self.trials.claim(
                    mine, self.search.space, lambda trials: propose(self.search, trials), self.search.trials
                )
                if trial is None:
                    return
                if self._take_over(trial):
                    continue
                if index not in workers:
                    workers[index] = Worker(index, count)
                self._start(workers[index], trial)

    def _start(self, worker: Worker, trial: FrozenTrial) -> None:
        self.running[worker.index] = trial.number
        self.progress.begun(trial)
        config = configured(self.search.base, trial.params)
        worker.run(config.to_dict(), self.folder / "trials" / f"{trial.number:03d}")

    def _take_over(self, trial: FrozenTrial) -> bool:
        """End a trial with the figures of one that ended with the same parameters, if there is such a one."""
        for other in self.trials.all():
            if other.number != trial.number and _ended(other) and other.params == trial.params:
                for step, accuracy in other.intermediate_values.items():
                    self.trials.report(trial.number, step, accuracy, last=True)
                self._end(trial.number, other.value if other.state == TrialState.COMPLETE else None)
                return True
        return False

    def _listen(self, worker: Worker, word: str, *said: Any) -> None:
        number = self.running[worker.index]
        if word == "report":
            step, accuracy = said
            over = self.trials.report(number, step, accuracy, last=step >= self.search.base.steps)
            worker.answer(over)
            self.progress.came(number, step)
        elif word == "ended":
            del self.running[worker.index]
            self._end(number, said[0])
        elif word == "refused":
            parameters = _told(configured(self.search.base, self._parameters(number)), self.search.space)
            raise InputError(f"trial {number} cannot be run ({parameters}): {said[0]}")
        else:
            raise RuntimeError(f"trial {number} failed:\n{said[0]}")

    def _end(self, number: int, accuracy: float | None) -> None:
        self.trials.end(number, accuracy)
        self.progress.ended(number, self.trials.all())

    def _mourn(self, worker: Worker) -> None:
        """See to the trial of a worker that has died: another one goes on with it, as long as that helps."""
        number, how = self.running.pop(worker.index), worker.end_of()
        if number not in self._running_numbers():
            self.progress.ended(number, self.trials.all())  # it was stopped early just before
            return
        self.deaths[number] = self.deaths.get(number, 0) + 1
        if self.deaths[number] < LIVES:
            self.progress.note(f"a worker ended in trial {number} ({how}); another one goes on with it")
            return  # it is claimed again: running, ours, and nobody at work on it
        self.trials.fail(number)
        self.progress.note(f"{LIVES} workers ended in trial {number} ({how}); another trial takes its place")
        if sum(deaths >= LIVES for deaths in self.deaths.values()) >= FAILURES:
            raise InputError(
                f"workers keep ending, the last one in trial {number} ({how}): is there too little memory? Give fewer "
                "workers or a smaller batch, and go on with the same command. What has ended is kept."
            )

    def _running_numbers(self) -> set[int]:
        return {trial.number for trial in self.trials.all() if trial.state == TrialState.RUNNING}

    def _parameters(self, number: int) -> Parameters:
        return next(trial.params for trial in self.trials.all() if trial.number == number)

    def _beat(self, workers: dict[int, Worker]) -> None:
        if time.monotonic() - self.last_beat < trial_storage.BEAT:
            return
        lost = self.trials.beat(list(self.running.values()))
        self.last_beat = time.monotonic()
        for index, number in list(self.running.items()):
            if number in lost:  # to another machine, which took this one for dead
                _end([workers.pop(index)])
                del self.running[index]


def _end(workers: Sequence[Worker]) -> None:
    """Give workers some time for a last checkpoint; a second signal takes it from them."""
    until = time.monotonic() + ENDING
    try:
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.wait(until - time.monotonic())
    except Interrupted:
        for worker in workers:
            worker.wait(0)
        raise


class _Progress:
    """Tells how far the search is: a line a trial, and on a terminal a bar; how long it may take in both."""

    def __init__(self, search: Search, quiet: bool) -> None:
        self.search, self.quiet = search, quiet
        self.share: dict[int, float] = {}  # number of a trial at work here -> how far it is
        self.done = 0
        self.started: tuple[float, float] | None = None  # when, and how many trials had ended
        self._print: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
        self._update: Callable[[float, str], None] = lambda done, left: None

    def note(self, sentence: str) -> None:
        """Tell what may surprise."""
        if not self.quiet:
            self._print(f"note: {sentence}")

    def begun(self, trial: FrozenTrial) -> None:
        """Take notice of a trial that begins, or goes on."""
        self.share[trial.number] = (trial.last_step or 0) / self.search.base.steps
        if self.started is None:
            self.started = time.monotonic(), self._sum()

    def came(self, number: int, step: int) -> None:
        """Take notice of how far a trial is."""
        self.share[number] = step / self.search.base.steps
        self._update(self._sum(), self._left())

    def ended(self, number: int, trials: Sequence[FrozenTrial]) -> None:
        """Tell of a trial that has ended."""
        self.share.pop(number, None)
        done = [trial for trial in trials if _ended(trial)]
        self.done = len(done)
        self._update(self._sum(), self._left())
        trial = next((trial for trial in done if trial.number == number), None)
        if self.quiet or trial is None:
            return
        how = "complete" if trial.state == TrialState.COMPLETE else "stopped early"
        accuracy = "no figure" if trial.value is None else f"validation accuracy {trial.value:.4f}"
        best = _best(done)
        so_far = f", best {best.value:.4f}" if best else ""
        told = _told(configured(self.search.base, trial.params), self.search.space)
        self._print(
            f"trial {number} {how}, {accuracy} ({told}); {len(done)} of {self.search.trials}{so_far}, {self._left()}"
        )

    def _sum(self) -> float:
        return self.done + sum(self.share.values())

    def _left(self) -> str:
        if self.started is None:
            return ""
        when, before = self.started
        gained = self._sum() - before
        if gained <= 0:
            return "time left unknown"
        seconds = (time.monotonic() - when) / gained * max(0.0, self.search.trials - self._sum())
        return f"about {_duration(seconds)} left" if self._sum() < self.search.trials else "done"

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show a bar on a terminal while the context is open."""
        if self.quiet or not sys.stderr.isatty():
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
        )
        console, before = Console(stderr=True), self._print
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(f"tuning {self.search.name}", total=self.search.trials, left="")
            self._print = lambda line: console.print(line, markup=False, highlight=False)
            self._update = lambda done, left: bar.update(task, completed=done, left=left)
            try:
                yield
            finally:
                self._print, self._update = before, lambda done, left: None


def _result(search: Search, trials: Sequence[FrozenTrial], path: Path) -> Figures:
    """Write the best configuration, and return the figures of all trials."""
    best = _best(trials)
    if best is None:
        raise InputError(
            f"no trial of {search.name} was completed, all losses diverged or were stopped: search smaller learning "
            "rates, for example with --lr 0.003."
        )
    ended = [trial for trial in trials if _ended(trial)]
    config = configured(search.base, best.params)
    path.parent.mkdir(parents=True, exist_ok=True)
    stopped = sum(trial.state == TrialState.PRUNED for trial in ended)
    checkpoint.write_text(
        path,
        f"# Found by ccssl tune: {len(ended)} trials, {stopped} of them stopped early, seed {search.base.seed}; trial "
        f"{best.number} reached an\n# accuracy of {best.value:.4f} on {search.base.validation} validation images.\n"
        + yaml.safe_dump(tuned(config, search.space), sort_keys=False),
    )
    return {
        "search": search.name,
        "file": str(path),
        "validation_images": search.base.validation,
        "best": _figures(best),
        "trials": [_figures(trial) for trial in ended],
    }


def tuned(config: RunConfig, space: Space) -> dict[str, Any]:
    """Return the fields of a best configuration: the problem, what was searched, and what is not as by default."""
    usual = {f.name: f.default for f in fields(RunConfig)}
    named = {"dataset", "labels", "method", *space}
    values = {name: v for name, v in config.to_dict().items() if name not in NOT_TUNED}
    kept = {name: v for name, v in values.items() if name != "options" and (name in named or v != usual[name])}
    return {**kept, "options": values["options"]} if values["options"] else kept


def result_table(result: Mapping[str, Any]) -> str:
    """Return a row a trial, the best first, and where the best configuration is."""
    trials = sorted(result["trials"], key=lambda trial: (trial["state"] != "complete", -(trial["accuracy"] or 0)))
    names = list(result["best"]["parameters"])
    rows = [["trial", "state", "steps", "accuracy", *names]]
    for trial in trials:
        accuracy = "" if trial["accuracy"] is None else f"{trial['accuracy']:.4f}"
        parameters = [_value(trial["parameters"][name]) for name in names]
        rows.append([str(trial["trial"]), trial["state"], str(trial["steps"]), accuracy, *parameters])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    best = result["best"]
    return "\n".join(
        [
            f"{result['search']}: accuracy on {result['validation_images']} validation images",
            *lines,
            f"Trial {best['trial']} is the best; its configuration is in {result['file']}:",
            f"  ccssl train --config {result['file']} --seed 1 --out RUN",
        ]
    )


def _figures(trial: FrozenTrial) -> Figures:
    state = "complete" if trial.state == TrialState.COMPLETE else "stopped early"
    values = {str(step): trial.intermediate_values[step] for step in sorted(trial.intermediate_values)}
    return {
        "trial": trial.number,
        "state": state,
        "steps": trial.last_step or 0,
        "accuracy": trial.value,
        "parameters": trial.params,
        "accuracy_after": values,
    }


def _ended(trial: FrozenTrial) -> bool:
    return trial.state in (TrialState.COMPLETE, TrialState.PRUNED)


def _best(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Return the complete trial of the largest accuracy, the first of several."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return max(complete, key=lambda trial: (trial.value, -trial.number), default=None)


def _told(config: RunConfig, space: Space) -> str:
    values = {**config.to_dict(), **config.options}
    return ", ".join(f"{name} {_value(values[name])}" for name in space)


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into ``Interrupted``."""

    def stop(number: int, _: object) -> None:
        raise Interrupted(number)

    try:
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where signals never arrive
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
