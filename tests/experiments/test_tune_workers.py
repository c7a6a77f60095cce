"""Trials in processes of their own: they see no test images, survive being killed, and change nothing by being many."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ccssl import cli
from ccssl.experiments.config import RunConfig
from ccssl.experiments.run import read_result, read_run
from ccssl.experiments.tune import Search, space_of, tune

FLAGS = {
    "dataset": "digits",
    "labels": 40,
    "method": "ccssl-prop",
    "steps": 18,
    "batch": 4,
    "eval_every": 6,
    "eval_unlabeled": 20,
    "device": "cpu",
    "precision": "fp32",
}
NAME = "digits-40-ccssl-prop"


def search(trials):
    return Search(base=RunConfig(**FLAGS), space=space_of("ccssl-prop"), trials=trials)


def trial_folder(study, number):
    return study / "tuning" / NAME / "trials" / f"{number:03d}"


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.01)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Give all processes one thread: results are compared between searches with few and with many workers."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A search with one worker: its folder and its figures."""
    folder = tmp_path_factory.mktemp("study")
    return folder, tune(search(6), folder, quiet=True)


def test_every_trial_is_a_run_of_its_parameters(study):
    folder, result = study
    assert len(result["trials"]) == 6
    for trial in result["trials"]:
        run = trial_folder(folder, trial["trial"])
        config = read_run(run)
        assert {**config.to_dict(), **config.options}.items() >= trial["parameters"].items()
        assert config.validation == result["validation_images"] == 130
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        judged = {str(line["step"]): line["accuracy"] for line in lines if line["phase"] == "validation"}
        assert judged.items() <= trial["accuracy_after"].items()
        if trial["state"] == "complete":
            assert read_result(run)["validation"]["accuracy"] == trial["accuracy"]
        assert not (run / "checkpoint").exists()  # nobody will go on with it


def test_no_worker_sees_a_test_image(study):
    """Test images are a part of every split that is made where there are any, and are evaluated where there are any."""
    folder, result = study
    for trial in result["trials"]:
        run = trial_folder(folder, trial["trial"])
        split = json.loads((run / "split.json").read_text())
        assert split["test"] == []
        assert split["test_size"] == 0
        phases = {json.loads(line)["phase"] for line in (run / "metrics.jsonl").read_text().splitlines()}
        assert phases == {"train", "validation", "unlabeled"}
        if trial["state"] == "complete":
            assert "test" not in read_result(run)


def test_train_takes_the_best_configuration(study, tmp_path, capsys):
    _, result = study
    words = ["train", "--config", result["file"], "--seed", "5", "--steps", "2", "--out", str(tmp_path / "run")]
    assert cli.main([*words, "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["split"]["test"] > 0
    config = read_run(tmp_path / "run")
    assert {**config.to_dict(), **config.options}.items() >= result["best"]["parameters"].items()
    assert (config.seed, config.steps, config.validation) == (5, 2, 0)


def test_three_workers_of_which_one_is_killed(study, tmp_path, capsys):
    killed = []

    def kill():
        wait_for(lambda: (trial_folder(tmp_path, 1) / "metrics.jsonl").exists())
        worker = next(child for child in multiprocessing.active_children() if child.name == "trial-worker-1")
        os.kill(worker.pid, signal.SIGKILL)
        killed.append(worker.pid)

    thread = threading.Thread(target=kill)
    thread.start()
    result = tune(search(7), tmp_path, workers=3)
    thread.join()
    assert killed
    assert "(killed by SIGKILL); another one goes on with it" in capsys.readouterr().err
    assert [trial["trial"] for trial in result["trials"]] == list(range(7))
    _, alone = study
    for one, other in zip(result["trials"], alone["trials"], strict=False):
        assert one["parameters"] == other["parameters"]
        shared = one["accuracy_after"].keys() & other["accuracy_after"].keys()
        assert shared
        assert all(one["accuracy_after"][step] == other["accuracy_after"][step] for step in shared)
    assert not [child for child in multiprocessing.active_children() if child.name.startswith("trial-worker")]


def children(process):
    path = Path(f"/proc/{process}/task/{process}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def alive(process):
    status = Path(f"/proc/{process}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by /proc")
def test_a_killed_coordinator_takes_its_workers_with_it_and_the_search_goes_on_as_if_nothing_had_been(
    study, tmp_path
):
    flags = [word for name, value in FLAGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "ccssl", "tune", "--out", str(tmp_path), "--trials", "6", "--quiet", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (trial_folder(tmp_path, 2) / "metrics.jsonl").exists())
    workers = [
        child for child in children(process.pid) if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()
    ]
    process.kill()
    process.communicate(timeout=60)
    assert workers
    wait_for(lambda: not any(alive(worker) for worker in workers))
    assert not (tmp_path / "tuned").exists()
    result = tune(search(6), tmp_path, quiet=True)
    _, alone = study
    assert {**result, "file": None} == {**alone, "file": None}
