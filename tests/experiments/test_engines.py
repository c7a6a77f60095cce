"""Engines: the same runs give the same results, whichever engine made them, and whatever the process ran before."""

import importlib.util
import json
import os
import signal
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import jobs
import pytest

from ccssl.errors import InputError
from ccssl.experiments import engines
from ccssl.experiments.config import RunConfig
from ccssl.experiments.run import train
from ccssl.experiments.study import Job, StudyStopped, run_study

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
    terminate = signal.getsignal(signal.SIGTERM)
    outcome = run_study(runs(), tmp_path, workers=2, threads=1, engine="ray")
    assert not outcome.broken
    assert {name: kept(tmp_path / name) for name in runs()} == alone
    assert not importlib.import_module("ray").is_initialized()
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert signal.getsignal(signal.SIGTERM) == terminate


@pytest.mark.ray
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'ccssl[ray]'")
def test_ray_tells_what_broke_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(jobs.__file__).parent))
    ends = {"a": "raise", "b": "refuse", "c": "die", "d": "raise once", "e": "well"}
    tasks = {name: Job(jobs.run, jobs.Task(end)) for name, end in ends.items()}
    outcome = run_study(tasks, tmp_path, workers=2, threads=1, engine="ray")
    assert sorted(outcome.made) == ["d", "e"]
    assert outcome.broken["a"].startswith("ZeroDivisionError: planted (")
    assert outcome.broken["b"] == "lr must be smaller, got 7."
    assert outcome.broken["c"].startswith("Ray lost it: The worker died unexpectedly")


@pytest.mark.ray
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'ccssl[ray]'")
def test_ray_tells_why_a_run_could_not_begin(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    outcome = run_study({"a": Job(jobs.run, jobs.Task())}, tmp_path, workers=1, threads=1, engine="ray")
    assert outcome.broken["a"].startswith("Ray lost it: ")
    assert outcome.broken["a"].endswith("No module named 'jobs'")


@pytest.mark.ray
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'ccssl[ray]'")
def test_ray_lets_a_run_that_is_stopped_keep_its_checkpoint(tmp_path):
    job = Job(train, small(steps=100_000, eval_every=100_000))  # no checkpoint before the end, unless it is stopped

    def stop():
        until = time.monotonic() + 60
        while not list(tmp_path.glob("a/tensorboard/*")) and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(StudyStopped):
        run_study({"a": job}, tmp_path, workers=1, threads=1, engine="ray")
    thread.join()
    assert json.loads((tmp_path / "a" / "checkpoint" / "state.json").read_text())["step"] < 100_000
    assert not (tmp_path / "a" / "result.json").exists()


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
