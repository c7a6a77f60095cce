"""A run's folder: complete, repeatable, resumable bit for bit, and never two at once."""

import json
import os
import signal
import statistics
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from toy import Flat, Normed, make, toy_config, toy_data

from ccssl.errors import InputError
from ccssl.experiments import folder as run_folder
from ccssl.experiments.config import RunConfig, config_from, config_text, read_config
from ccssl.experiments.run import Stopped, load_run, prepare, read_result, split_of, train
from ccssl.training import checkpoint
from ccssl.training.loop import Training


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


def test_weights_too_large_to_be_evaluated_stop_the_run(tmp_path):
    with pytest.raises(
        InputError, match=r"at step 1 the weights were not finite.*there is no checkpoint yet\. Try"
    ):
        run(toy_config(lr=1e30, eval_every=1), tmp_path / "run")
    with pytest.raises(InputError, match=r"not finite|no numbers"):
        run(toy_config(lr=1e12, eval_every=1), tmp_path / "other")


@pytest.mark.parametrize("asked", [False, True])
def test_spoiled_weights_never_replace_a_good_checkpoint(tmp_path, monkeypatch, asked):
    """Neither at the next evaluation nor at a signal, though every loss was finite."""
    step = Training.step

    def spoil(self, batch):
        step(self, batch)
        if self.steps_done == (7 if asked else 10):
            next(self.network.parameters()).data[0, 0] = torch.nan
            if asked:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Training, "step", spoil)
    with pytest.raises(
        (InputError, Stopped), match=r"at step (7|10) the weights.*the checkpoint of step 5 is kept"
    ):
        run(toy_config(), tmp_path / "run")
    tensors, state = checkpoint.load(tmp_path / "run" / "checkpoint")
    assert state["step"] == 5
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_the_median_is_that_of_the_last_twenty_evaluations(tmp_path):
    result = run(toy_config(method="supervised", steps=26, eval_every=1, lr=0.2), tmp_path / "run")
    records = run_folder.records(tmp_path / "run")
    values = [record["nll"] for record in records if record["phase"] == "test"]
    assert len(values) == 26
    assert result["median20"]["nll"] == statistics.median(values[-20:])
    assert len({statistics.median(values[-n:]) for n in (19, 20, 21, 26)}) == 4
    assert set(result["median20"]) == set(result["test"])


def test_the_best_network_is_the_one_reported_where_it_was_asked_for(tmp_path):
    # Once all validation items are right nothing is better: the best comes before the last.
    config = toy_config(method="supervised", labels=40, validation=8, steps=40, eval_every=5, lr=0.3, seed=1)
    found = {}
    for select in ("last", "best"):
        chosen = replace(config, select=select)
        result = found[select] = run(chosen, tmp_path / select)
        assert result["reported"] == select
        loaded = load_run(tmp_path / select, data=toy_data(), network=make(Normed, seed=5))
        expected = result if select == "last" else result["best"]
        figures = loaded.evaluate()
        assert figures == {name: expected[name] for name in figures}
        assert set(figures) == {"test", "validation"}
    assert found["best"]["best"]["step"] < 40
    assert found["best"]["best"]["test"] != found["best"]["test"]
    assert found["best"]["best"] == found["last"]["best"]
    assert found["best"]["test"] == found["last"]["test"]


def test_the_best_network_outlives_an_interruption(tmp_path, monkeypatch):
    config = toy_config(
        method="supervised", labels=40, validation=8, steps=40, eval_every=5, lr=0.3, seed=1, select="best"
    )
    run(config, tmp_path / "whole")
    step = Training.step

    def kick(self, batch):
        step(self, batch)
        if self.steps_done == 38:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Training, "step", kick)
    with pytest.raises(Stopped):
        run(config, tmp_path / "cut")
    monkeypatch.undo()
    run(config, tmp_path / "cut", resume=True)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "cut"))


@pytest.mark.parametrize("content", [1, 10_000])
def test_a_disk_that_is_full_for_events_is_told_in_a_sentence(tmp_path, monkeypatch, content):
    import tensorboardX.record_writer

    with monkeypatch.context() as patch:
        patch.setattr(tensorboardX.record_writer, "open_file", lambda path: open("/dev/full", "wb"))  # noqa: SIM115
        patch.setattr(Training, "losses", lambda self: dict.fromkeys(["loss", *map(str, range(content))], 0.5))
        with pytest.raises(InputError, match=r"tensorboard is full: events.* was not written.*--resume"):
            run(toy_config(), tmp_path / "run")
    run(toy_config(), tmp_path / "run", resume=True)
    run(toy_config(), tmp_path / "whole")
    assert_same(outcome(tmp_path / "run"), outcome(tmp_path / "whole"))


def test_events_are_what_tensorboard_reads(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    run(toy_config(method="supervised"), tmp_path / "run")
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()
    content, found, start = file.read_bytes(), [], 0
    while start < len(content):
        size = int.from_bytes(content[start : start + 8], "little")
        found.append(Event.FromString(content[start + 12 : start + 12 + size]))
        start += size + 16
    assert found[0].file_version == "brain.Event:2"
    assert found[1].step == 1
    written = [(event.step, value.tag) for event in found for value in event.summary.value]
    assert [step for step, tag in written if tag == "test/accuracy"] == [5, 10, 12]
    assert file.name.startswith("events.out.tfevents.")


class Tied(Flat):
    """A network that uses a weight twice, and has a view of another."""

    def __init__(self):
        super().__init__()
        self.layers.insert(1, nn.Linear(64, 64))
        self.layers.insert(2, nn.Linear(64, 64))
        self.layers[2].weight = self.layers[1].weight
        self.register_buffer("whole", torch.zeros(6))
        self.register_buffer("part", self.whole[:3])


def test_a_network_with_tied_weights_is_kept_and_goes_on(tmp_path):
    def tied(config, out, **options):
        return train(config, out, data=toy_data(), network=make(Tied), quiet=True, **options)

    config = toy_config(method="ccssl-prop")
    tied(config, tmp_path / "whole")

    class Enough(Exception):
        pass

    def watch(step, figures):
        if step == 10:
            raise Enough

    with pytest.raises(Enough):
        tied(config, tmp_path / "cut", watch=watch)
    tied(config, tmp_path / "cut", resume=True)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "cut"))
    network = load_run(tmp_path / "cut", data=toy_data(), network=make(Tied, seed=3)).network.network
    assert network.layers[1].weight is network.layers[2].weight


def coloured(**changes):
    """Return the toy problem in colour."""
    data = toy_data()
    train_images, test_images = (np.repeat(images, 3, -1) for images in (data.train_images, data.test_images))
    return replace(data, train_images=train_images, test_images=test_images, **changes)


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("told", [None, True, False])
def test_images_are_mirrored_where_the_user_or_the_data_say_so(tmp_path, capsys, asked, told):
    data = coloured(flip=bool(told), flip_told=told is not None)
    config = toy_config(flip=asked, steps=1, method="supervised")
    train(config, tmp_path / "run", data=data)
    silent = asked is None and told is None
    assert ("give --flip if it does" in capsys.readouterr().err) == silent
    expected = bool(told) if asked is None else asked
    for training in (prepare(config, data, split_of(config, data)), load_run(tmp_path / "run", data)):
        assert training.data.flip == training.batches.flip == expected
        flips = [training.batches.at(step).labeled.view.flip.any() for step in range(4)]
        assert any(flips) == expected


def test_grey_images_that_say_nothing_are_not_asked_about(tmp_path, capsys):
    data = replace(toy_data(), flip_told=False)
    train(toy_config(steps=1, method="supervised"), tmp_path / "run", data=data)
    assert "--flip" not in capsys.readouterr().err


def test_a_share_for_calibration_that_nobody_uses_is_told(tmp_path, capsys):
    for method, told in (("fixmatch", True), ("ccssl-prop", False)):
        config = toy_config(steps=1, method=method, calibration_fraction=0.5)
        train(config, tmp_path / method, data=toy_data(), network=make(Flat))
        assert ("note: calibration_fraction is passed over: fixmatch" in capsys.readouterr().err) == told


def test_what_is_told_about_a_split_is_no_part_of_it(tmp_path, monkeypatch):
    def watch(step, figures):
        if step == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(toy_config(), tmp_path / "run", watch=watch)
    path = tmp_path / "run" / "split.json"
    split = json.loads(path.read_text())
    path.write_text(json.dumps(split | {"notices": ["In other words."]}))
    run(toy_config(), tmp_path / "run", resume=True)
    (tmp_path / "run" / "result.json").unlink()
    path.write_text(json.dumps(split | {"labeled": split["labeled"][1:]}))
    with pytest.raises(InputError, match="run on other images or labels"):
        run(toy_config(), tmp_path / "run", resume=True)


def test_an_overlap_of_calibration_and_training_is_refused(tmp_path, monkeypatch):
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
        ("steps: 1e3", "steps must be int, got '1e3'"),
        ("lr: fast", "lr must be float, got 'fast'"),
        ("flip: 1", "flip must be bool | None, got 1"),
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


def test_numbers_with_an_exponent_are_numbers(tmp_path):
    """YAML 1.1 calls 3e-2 a text: it wants a point and a sign."""
    path = tmp_path / "config.yaml"
    path.write_text("lr: 3e-2\ncalibration_fraction: 1e-1\nmethod: ccssl-prop\noptions:\n  gamma: 1e-2\n")
    config = config_from(read_config(path))
    assert (config.lr, config.calibration_fraction, config.options) == (0.03, 0.1, {"gamma": 0.01})


def test_folds_restrict_the_labels():
    data = replace(toy_data(), folds=np.arange(240).reshape(2, 120))
    split = split_of(RunConfig(dataset="toy", labels=24, fold=1), data)
    assert min(split.labeled.min(), split.calibration.min()) >= 120
    assert split.unlabeled.min() == 0
    with pytest.raises(InputError, match="fold must be from 0 to 1 for toy, got 2"):
        split_of(RunConfig(dataset="toy", labels=24, fold=2), data)


def test_the_table_of_a_result_says_which_network_is_reported():
    from ccssl.experiments.tables import result_table

    last, best = {"accuracy": 0.25}, {"accuracy": 0.5}
    result = {"test": last, "reported": "best", "best": {"step": 3, "test": best, "validation": best}}
    first, second = result_table(result).splitlines()[1:3]
    assert "best on validation (reported)" in first
    assert "0.5000" in first
    assert "0.5000" in second
    assert "after the last step" in result_table({"test": last, "reported": "last"})
    assert "after the last step" not in result_table({"test": last})


def archive(path, seed=0, **changes):
    data = toy_data(seed=seed)
    arrays = {
        "train_images": data.train_images,
        "train_labels": data.train_labels,
        "test_images": data.test_images,
        "test_labels": data.test_labels,
    }
    np.savez(path, **{**arrays, **changes})
    return path


def test_a_run_finds_its_data_from_any_folder_and_after_they_moved(tmp_path, monkeypatch):
    def go(dataset, **options):
        return train(toy_config(dataset=dataset), tmp_path / "run", network=make(Normed), quiet=True, **options)

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(archive(tmp_path / "here" / "toy.npz").parent)
    result = go("toy.npz")
    monkeypatch.chdir(tmp_path)
    assert load_run(tmp_path / "run", network=make(Normed)).steps_done == 12
    (tmp_path / "here" / "toy.npz").rename(tmp_path / "there.npz")
    with pytest.raises(InputError, match=r"here/toy.npz does not exist"):
        load_run(tmp_path / "run", network=make(Normed))
    assert go("there.npz", resume=True) == result
    assert load_run(tmp_path / "run", network=make(Normed)).steps_done == 12
    archive(tmp_path / "other.npz", seed=1)
    with pytest.raises(InputError, match="differs in dataset"):
        go("other.npz", resume=True)


def test_other_images_with_the_same_labels_are_noticed(tmp_path):
    config = toy_config(dataset=str(archive(tmp_path / "toy.npz")))

    def lost(step, figures):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # after the second evaluation, with the checkpoint of the first
        train(config, tmp_path / "run", network=make(Normed), quiet=True, watch=lambda s, f: s < 10 or lost(s, f))
    archive(tmp_path / "toy.npz", train_images=255 - toy_data().train_images)
    with pytest.raises(InputError, match="was run on other images or labels than"):
        train(config, tmp_path / "run", network=make(Normed), quiet=True, resume=True)


def test_a_refused_run_leaves_no_folder_behind(tmp_path):
    with pytest.raises(InputError, match="fewer than"):
        run(toy_config(labels=2), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="fewer than"):
        run(toy_config(labels=2), tmp_path / "mine")
    assert (tmp_path / "mine").exists()


def test_a_folder_in_use_is_said_to_be_in_use(tmp_path):
    run(toy_config(), tmp_path / "run")
    with run_folder.opened(tmp_path / "run", True), pytest.raises(InputError, match="in use by another process"):
        run(toy_config(), tmp_path / "run")


def test_a_finished_run_whose_checkpoint_is_gone_cannot_be_finished(tmp_path):
    run(toy_config(), tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoint").iterdir():
        path.unlink()
    with pytest.raises(
        InputError, match="is finished, but its checkpoint is gone: restore it, or make the run anew"
    ):
        load_run(tmp_path / "run", data=toy_data(), network=make(Normed))


@pytest.mark.parametrize("damage", [b'{"step": 12, "pha', b"\xff\xfe\x00 garbage"])
def test_a_damaged_line_of_a_finished_run_is_told(tmp_path, capsys, damage):
    run(toy_config(), tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    whole = run_folder.records(tmp_path / "run")
    assert capsys.readouterr().err == ""
    with metrics.open("ab") as file:
        file.write(damage)
    assert run_folder.records(tmp_path / "run") == whole
    assert (
        f"metrics.jsonl, line {len(whole) + 1} is damaged: it and all after it are left out"
        in capsys.readouterr().err
    )


def test_missing_tensors_are_named_once(tmp_path):
    run(toy_config(), tmp_path / "run")
    (tensors,) = (tmp_path / "run" / "checkpoint").glob("*.safetensors")
    tensors.unlink()
    with pytest.raises(InputError) as told:
        load_run(tmp_path / "run", data=toy_data(), network=make(Normed))
    assert str(told.value).count("restore it from a copy") == 1


def test_the_seed_has_a_bound():
    with pytest.raises(InputError, match=r"seed must be below 2\^63"):
        toy_config(seed=2**64)
