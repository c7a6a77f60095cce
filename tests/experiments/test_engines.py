"""Engines: the same runs give the same results, whichever engine made them, and whatever the process ran before."""

import importlib.util
import json
from collections import deque
from dataclasses import replace

import jobs
import pytest

from ccssl.errors import InputError
from ccssl.experiments import engines
from ccssl.experiments.config import RunConfig
from ccssl.experiments.run import train
from ccssl.experiments.study import Job, run_study

WORDS = {
    "dataset": "digits",
    "labels": 40,
    "steps": 6,
    "batch": 8,
    "mu": 2,
    "eval_every": 3,
    "eval_unlabeled": 50,
    "device": "cpu",
}


def small(**changes):
    return RunConfig(**{**WORDS, "precision": "fp32", **changes})


def runs():
    configs = {"first": small(), "second": small(seed=1), "third": small(method="fixmatch")}
    return {name: Job(train, config) for name, config in configs.items()}


def kept(folder):
    """Return what a run leaves behind, but for what it cost."""
    result = json.loads((folder / "result.json").read_text())
    del result["cost"]
    names = ("metrics.jsonl", "split.json", "config.yaml")
    tensors = sorted((folder / "checkpoint").glob("*.safetensors"))
    assert tensors
    return result, [(folder / name).read_bytes() for name in names], [path.read_bytes() for path in tensors]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The runs in this process, with one thread, each for itself."""
    folder = tmp_path_factory.mktemp("alone")
    for name, job in runs().items():
        train(job.config, folder / name, resume=True, quiet=True)
    return {name: kept(folder / name) for name in runs()}


def test_processes_change_nothing_about_results(alone, tmp_path):
    outcome = run_study(runs(), tmp_path, workers=2, threads=1)
    assert not outcome.broken
    assert {name: kept(tmp_path / name) for name in runs()} == alone


@pytest.mark.ray
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'ccssl[ray]'")
def test_ray_gives_what_processes_give(alone, tmp_path):
    outcome = run_study(runs(), tmp_path, workers=2, threads=1, engine="ray")
    assert not outcome.broken
    assert {name: kept(tmp_path / name) for name in runs()} == alone


@pytest.mark.ray
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'ccssl[ray]'")
def test_ray_tells_what_broke_and_goes_on(tmp_path):
    ends = {"a": "raise", "b": "refuse", "c": "die", "d": "raise once", "e": "well"}
    tasks = {name: Job(jobs.run, jobs.Task(end)) for name, end in ends.items()}
    outcome = run_study(tasks, tmp_path, workers=2, threads=1, engine="ray")
    assert sorted(outcome.made) == ["d", "e"]
    assert outcome.broken["a"].startswith("ZeroDivisionError: planted (")
    assert outcome.broken["b"] == "lr must be smaller, got 7."
    assert outcome.broken["c"].startswith("Ray lost it: ")


def test_without_ray_the_sentence_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'ccssl\[ray\]'"):
        run_study(runs(), tmp_path, engine="ray")


def test_an_error_that_cannot_be_kept_is_told_all_the_same(tmp_path):
    told = engines.attempt(Job(jobs.run, jobs.Task("raise")), tmp_path / "a")
    assert told is not None
    assert str(tmp_path / "a" / "error.txt") in told
    (tmp_path / "a" / "error.txt").unlink()
    (tmp_path / "a" / "error.txt").mkdir()
    assert engines.attempt(Job(jobs.run, jobs.Task("raise")), tmp_path / "a") == "ZeroDivisionError: planted"


def test_an_engine_asked_to_stop_before_it_began_does_nothing(tmp_path):
    queue = deque(["a"])
    job = Job(jobs.run, jobs.Task())
    assert list(engines.processes(queue, {"a": job}, tmp_path, 1, 1, lambda: 2)) == []
    assert list(queue) == ["a"]
    assert replace(job.config).end == "well"
