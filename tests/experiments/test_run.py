"""A run's folder: complete, repeatable, resumable bit for bit, and never two at once."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from toy import Normed, make, toy_config, toy_data

from ccssl.errors import InputError
from ccssl.experiments import folder as run_folder
from ccssl.experiments.config import RunConfig, config_from, config_text, read_config
from ccssl.experiments.run import Stopped, load_run, read_result, train
from ccssl.training import checkpoint


def run(config, out, **options):
    return train(config, out, data=toy_data(), network=make(Normed), quiet=True, **options)


def outcome(out):
    """Return all that must not depend on how a run was interrupted."""
    tensors, state = checkpoint.load(out / "checkpoint")
    del state["seconds"]
    result = read_result(out)
    del result["cost"]
    return tensors, state, result, (out / "metrics.jsonl").read_text()


def assert_same(one, two):
    assert one[1:] == two[1:]
    assert one[0].keys() == two[0].keys()
    for name, tensor in one[0].items():
        assert torch.equal(tensor, two[0][name]), name


def test_the_folder_is_complete(tmp_path):
    result = run(toy_config(validation=8), tmp_path / "run")
    names = {"config.yaml", "split.json", "metrics.jsonl", "checkpoint", "tensorboard", "result.json"}
    assert names <= {path.name for path in (tmp_path / "run").iterdir()}
    assert read_result(tmp_path / "run") == result
    assert {"test", "unlabeled", "validation", "median20", "steps", "seed", "best", "cost"} <= result.keys()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["phase"]) for line in lines] == [
        (step, phase) for step in (5, 10, 12) for phase in ("train", "test", "validation", "unlabeled")
    ]
    assert {k: v for k, v in lines[-3].items() if k not in ("step", "phase")} == result["test"]
    median = sorted(line["accuracy"] for line in lines if line["phase"] == "test")[1]
    assert result["median20"]["accuracy"] == median
    best = max((line for line in lines if line["phase"] == "validation"), key=lambda line: line["accuracy"])
    assert result["best"]["step"] == best["step"]
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    split = json.loads((tmp_path / "run" / "split.json").read_text())
    assert result["split"]["labeled"] == len(split["labeled"]) == 18
    assert result["split"]["calibration"] == 6


def test_a_run_repeats(tmp_path):
    run(toy_config(), tmp_path / "one")
    run(toy_config(), tmp_path / "two")
    assert_same(outcome(tmp_path / "one"), outcome(tmp_path / "two"))
    run(toy_config(seed=1), tmp_path / "other")
    assert outcome(tmp_path / "one")[2]["test"] != outcome(tmp_path / "other")[2]["test"]


@pytest.mark.parametrize("method", ["ccssl-prop", "flexmatch", "cssl"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_and_the_run_goes_on_bit_for_bit(tmp_path, monkeypatch, method, number):
    config = toy_config(method=method)
    run(config, tmp_path / "whole")

    from ccssl.training.loop import Training

    step = Training.step

    def kick(self, batch):
        step(self, batch)
        if self.steps_done == 7:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Training, "step", kick)
    with pytest.raises(Stopped, match="--resume") as stopped:
        run(config, tmp_path / "cut")
    assert stopped.value.number == number
    monkeypatch.undo()
    assert checkpoint.load(tmp_path / "cut" / "checkpoint")[1]["step"] == 7
    run(config, tmp_path / "cut", resume=True)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "cut"))


KILLED = """
import sys, os, random
sys.path[:0] = {paths!r}
from pathlib import Path
from test_run import run, toy_config
from ccssl.training.loop import Training
from ccssl.experiments import folder
import ccssl.training.checkpoint as checkpoint
import ccssl.experiments.run as running
import torch
torch.set_num_threads(1)  # as here; and a child that is forked beside a pool of threads would wait for it for ever
countdown = {moment}
def dying(function):
    def wrapped(*args, **options):
        global countdown
        countdown -= 1
        if countdown == 0:
            os._exit(9)
        result = function(*args, **options)
        return result
    return wrapped
Training.step = dying(Training.step)
folder.append = dying(folder.append)
checkpoint.save = dying(checkpoint.save)
checkpoint.write = dying(checkpoint.write)
run(toy_config(), Path({out!r}), resume=True)
"""


def test_killed_at_any_of_ten_moments_and_resumed_it_equals_the_uninterrupted_run(tmp_path):
    """The process dies without a word before a step, a line of metrics, or any file of a checkpoint is written."""
    run(toy_config(), tmp_path / "whole")
    expected = outcome(tmp_path / "whole")
    paths = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]
    moments = torch.randperm(22, generator=torch.Generator().manual_seed(0))[:10] + 1
    out = tmp_path / "cut"
    survivors = 0
    script = "\n".join(
        f"""
if os.fork() == 0:
    countdown = {moment}
    run(toy_config(), Path({str(out)!r} + "-{moment}"), resume=True)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
        for moment in moments.tolist()
    )
    template = KILLED.format(paths=paths, moment=10**6, out=str(tmp_path / "warm"))
    done = subprocess.run([sys.executable, "-c", template + script], capture_output=True, text=True, timeout=300)
    codes = [int(line) for line in done.stdout.split()]
    assert codes == [9] * 10, done.stderr
    for moment in moments.tolist():
        cut = tmp_path / f"cut-{moment}"
        survivors += (cut / "checkpoint" / "state.json").exists()
        run(toy_config(), cut, resume=True)
        assert_same(expected, outcome(cut))
    assert 3 <= survivors < 10  # some died before the first checkpoint, some after


def test_a_metrics_line_that_a_crash_cut_is_dropped(tmp_path):
    run_folder.append(tmp_path, [{"step": 5, "phase": "test"}, {"step": 10, "phase": "test"}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "pha')
    assert [record["step"] for record in run_folder.records(tmp_path)] == [5, 10]
    run_folder.keep_until(tmp_path, 5)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 5, "phase": "test"}\n'


def test_a_finished_run_is_not_run_again(tmp_path):
    first = run(toy_config(), tmp_path / "run")
    assert run(toy_config(), tmp_path / "run", resume=True) == first


def test_folders_are_not_overwritten_and_not_shared(tmp_path):
    run(toy_config(steps=3), tmp_path / "run")
    with pytest.raises(InputError, match="not empty"):
        run(toy_config(steps=3), tmp_path / "run")
    with pytest.raises(InputError, match=r"differs in lr \(0.03 there, 0.1 here\)"):
        run(toy_config(steps=3, lr=0.1), tmp_path / "run", resume=True)
    with run_folder.opened(tmp_path / "held", False), pytest.raises(InputError, match="in use by another process"):
        run(toy_config(), tmp_path / "held")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        run(toy_config(), tmp_path / "file")


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(tmp_path):
    config = toy_config(method="supervised", lr=1e30, steps=12)
    with pytest.raises(
        InputError, match=r"not finite at step \d+, with labeled images .* there is no checkpoint yet"
    ):
        run(config, tmp_path / "run")


def test_an_overlap_of_calibration_and_training_is_refused(tmp_path, monkeypatch):
    import numpy as np

    import ccssl.experiments.run as running

    honest = running.split_of

    def planted(config, data):
        split = honest(config, data)
        return replace(split, unlabeled=np.sort(np.append(split.unlabeled, split.calibration[:1])))

    monkeypatch.setattr(running, "split_of", planted)
    with pytest.raises(ValueError, match="calibration"):
        run(toy_config(), tmp_path / "run")


def test_a_run_is_read_back_as_its_checkpoint_left_it(tmp_path):
    result = run(toy_config(), tmp_path / "run")
    again = load_run(tmp_path / "run", data=toy_data(), network=make(Normed, seed=5))
    assert again.evaluate()["test"] == result["test"]
    with pytest.raises(InputError, match="not the folder of a run"):
        load_run(tmp_path)


def test_a_configuration_survives_its_file(tmp_path):
    config = toy_config(method="ccssl-prop", options={"gamma": 0.5}, calibration_fraction=0.1)
    (tmp_path / "config.yaml").write_text(config_text(config))
    assert config_from(read_config(tmp_path / "config.yaml")) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("metod: cssl", "no field 'metod'. Did you mean method"),
        ("labels: many", "labels must be int, got 'many'"),
        ("lr: true", "lr must be float"),
        ("- 1", "must hold names and values"),
        ("a: [", "is not YAML"),
    ],
)
def test_bad_configuration_files_are_refused(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        config_from(read_config(path))


def test_folds_restrict_the_labels():
    import numpy as np

    from ccssl.experiments.run import split_of

    data = replace(toy_data(), folds=np.arange(240).reshape(2, 120))
    split = split_of(RunConfig(dataset="toy", labels=24, fold=1), data)
    assert min(split.labeled.min(), split.calibration.min()) >= 120
    assert split.unlabeled.min() == 0
    with pytest.raises(InputError, match="fold must be from 0 to 1 for toy, got 2"):
        split_of(RunConfig(dataset="toy", labels=24, fold=2), data)
