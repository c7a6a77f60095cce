"""The folder of a link predictor's run: complete, repeatable, resumable bit for bit, and never two at once."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from toy_graph import toy_config, toy_graph

from ccssl.errors import InputError
from ccssl.experiments import folder as run_folder
from ccssl.experiments.config import RunConfig, config_text
from ccssl.experiments.graph_run import Stopped, evaluate, load_run, read_result, read_run, train
from ccssl.graphs.training import Training
from ccssl.training import checkpoint

SHAKY = {"dropout": 0.2, "input_dropout": 0.1}  # draws in every step from torch's own generator


def run(config, out, graph=None, **options):
    return train(config, out, graph=graph or toy_graph(), quiet=True, **options)


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
    out = tmp_path / "run"
    result = run(toy_config(), out)
    names = {"config.yaml", "split.json", "metrics.jsonl", "checkpoint", "tensorboard", "result.json"}
    assert names <= {path.name for path in out.iterdir()}
    assert read_result(out) == result
    wanted = {"test", "validation", "unlabeled", "relations", "best", "split", "steps", "epochs", "seed", "cost"}
    assert wanted <= result.keys()
    assert {"mrr", "hits@10", "head.mrr", "tail.hits@1", "optimistic.mrr", "pessimistic.head.mrr"} <= result[
        "test"
    ].keys()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = result["steps"] // 4
    assert [(line["step"], line["phase"], line["epoch"]) for line in lines] == [
        (epoch * steps, phase, epoch) for epoch in (2, 4) for phase in ("train", "validation", "unlabeled")
    ]
    best = max((line for line in lines if line["phase"] == "validation"), key=lambda line: line["mrr"])
    assert result["best"]["epoch"] == best["epoch"]
    assert result["validation"]["mrr"] == best["mrr"]
    assert list((out / "tensorboard").glob("events*"))
    split = json.loads((out / "split.json").read_text())
    assert split["checksum"] == toy_graph().checksum
    assert result["split"] == {
        "labeled": 40, "calibration": 40, "unlabeled": 20, "validation": 20, "test": 20, "queries": 40,
    }  # fmt: skip
    assert len(split["labeled"]["tail"]) == 40
    assert sum(facts["facts"] for facts in result["relations"].values()) == 20
    assert read_run(out) == toy_config()


def test_a_run_repeats(tmp_path):
    run(toy_config(**SHAKY), tmp_path / "one")
    run(toy_config(**SHAKY), tmp_path / "two")
    assert_same(outcome(tmp_path / "one"), outcome(tmp_path / "two"))
    run(toy_config(**SHAKY, seed=1), tmp_path / "other")
    assert outcome(tmp_path / "one")[2]["test"] != outcome(tmp_path / "other")[2]["test"]


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "supervised"},
        {"method": "pseudo-label", "teacher": "ema", "optimizer": "adagrad"},
        {"method": "ccssl-diff", "per_relation": True, "batch_of": "queries"},
        {"method": "ccssl-prop", "normalize": "batch", "calibrate_every": 2},
    ],
)
@pytest.mark.parametrize("moment", [1, 7, 9])  # before, within and after the second epoch of three steps or so
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_and_the_run_goes_on_bit_for_bit(
    tmp_path, monkeypatch, changes, moment, number
):
    config = toy_config(**changes, **SHAKY, batch=28, epochs=5)
    run(config, tmp_path / "whole")
    step = Training.step

    def kick(self):
        step(self)
        if self.steps_done == moment:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Training, "step", kick)
    with pytest.raises(Stopped, match=r"go on with: ccssl graph train --resume --out .*cut") as stopped:
        run(config, tmp_path / "cut")
    assert stopped.value.number == number
    monkeypatch.undo()
    assert checkpoint.load(tmp_path / "cut" / "checkpoint")[1]["step"] == moment
    assert not (tmp_path / "cut" / "result.json").exists()
    run(config, tmp_path / "cut", resume=True)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "cut"))


def test_a_signal_after_the_last_step_ends_nothing(tmp_path, monkeypatch):
    step = Training.step

    def kick(self):
        step(self)
        if self.steps_done == 4 * self.epoch_steps:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Training, "step", kick)
    assert run(toy_config(), tmp_path / "run")["epochs"] == 4


KILLED = """
import sys, os
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)  # a pool of threads would not survive the fork
from pathlib import Path
from test_graph_run import SHAKY, run, toy_config
from ccssl.graphs.training import Training
from ccssl.experiments import folder
import ccssl.training.checkpoint as checkpoint
countdown = {moment}
def dying(function):
    def wrapped(*args, **options):
        global countdown
        countdown -= 1
        if countdown == 0:
            os._exit(9)
        return function(*args, **options)
    return wrapped
Training.step = dying(Training.step)
folder.append = dying(folder.append)
checkpoint.save = dying(checkpoint.save)
checkpoint.write = dying(checkpoint.write)
run(toy_config(**SHAKY), Path({out!r}), resume=True)
"""


def test_killed_at_any_of_ten_moments_and_resumed_it_equals_the_uninterrupted_run(tmp_path):
    """The process dies without a word before a step, a line of metrics, or any file of a checkpoint is written."""
    run(toy_config(**SHAKY), tmp_path / "whole")
    expected = outcome(tmp_path / "whole")
    paths = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]
    moments = torch.randperm(24, generator=torch.Generator().manual_seed(0))[:10] + 1
    out, survivors = tmp_path / "cut", 0
    script = "\n".join(
        f"""
if os.fork() == 0:
    countdown = {moment}
    run(toy_config(**SHAKY), Path({str(out)!r} + "-{moment}"), resume=True)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
        for moment in moments.tolist()
    )
    template = KILLED.format(paths=paths, moment=10**6, out=str(tmp_path / "warm"))
    done = subprocess.run([sys.executable, "-c", template + script], capture_output=True, text=True, timeout=300)
    assert [int(line) for line in done.stdout.split()] == [9] * 10, done.stderr
    for moment in moments.tolist():
        cut = tmp_path / f"cut-{moment}"
        survivors += (cut / "checkpoint" / "state.json").exists()
        run(toy_config(**SHAKY), cut, resume=True)
        assert_same(expected, outcome(cut))
    assert 2 <= survivors < 10  # some died before the first checkpoint, some after


def test_a_run_that_patience_ended_is_finished_after_a_crash_too(tmp_path):
    config = toy_config(lr=0.0, patience=1, eval_every=1, epochs=9)
    first = run(config, tmp_path / "run")
    assert first["epochs"] == 2
    (tmp_path / "run" / "result.json").unlink()
    again = run(config, tmp_path / "run", resume=True)
    assert {k: v for k, v in again.items() if k != "cost"} == {k: v for k, v in first.items() if k != "cost"}


def test_a_finished_run_is_not_run_again(tmp_path, monkeypatch):
    first = run(toy_config(), tmp_path / "run")
    monkeypatch.setattr(Training, "step", None)
    assert run(toy_config(), tmp_path / "run", resume=True) == first


def test_folders_are_not_overwritten_and_not_shared(tmp_path):
    run(toy_config(epochs=1), tmp_path / "run")
    with pytest.raises(InputError, match="not empty"):
        run(toy_config(epochs=1), tmp_path / "run")
    with pytest.raises(InputError, match=r"run with another configuration, it differs in") as refused:
        run(toy_config(epochs=1, lr=0.1, method="pseudo-label"), tmp_path / "run", resume=True)
    for told in ("method ('ccssl-diff' there, 'pseudo-label' here)", "lr (0.03 there, 0.1 here)"):
        assert told in str(refused.value)
    with run_folder.opened(tmp_path / "held", False), pytest.raises(InputError, match="in use by another process"):
        run(toy_config(), tmp_path / "held")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        run(toy_config(), tmp_path / "file")


def test_the_device_may_differ_on_resuming(tmp_path):
    first = run(toy_config(device="cpu"), tmp_path / "run")
    if not torch.cuda.is_available():
        assert run(toy_config(device="auto"), tmp_path / "run", resume=True) == first


def test_while_training_only_the_validation_part_is_looked_at(tmp_path, monkeypatch):
    seen = []
    ranks = Training.ranks
    monkeypatch.setattr(Training, "ranks", lambda self, part, *rest: seen.append(part) or ranks(self, part, *rest))
    run(toy_config(), tmp_path / "run")
    assert seen == ["valid", "valid", "test", "valid"]  # two evaluations, then the result


def test_the_figures_are_those_of_the_weights_that_are_kept(tmp_path):
    best, last = (
        run(toy_config(select=select, lr=0.3, ema=0.0, epochs=12, eval_every=1), tmp_path / select)
        for select in ("best", "last")
    )
    assert best["best"] == last["best"]
    assert best["best"]["epoch"] < 12
    assert best["validation"] == best["best"]["validation"]
    assert last["validation"] != last["best"]["validation"]
    assert best["test"] != last["test"]


def test_a_run_is_read_back_as_its_checkpoint_left_it(tmp_path):
    result = run(toy_config(), tmp_path / "run")
    again = evaluate(load_run(tmp_path / "run", toy_graph()))
    assert again == {name: result[name] for name in ("test", "relations", "validation")}
    with pytest.raises(InputError, match="not the folder of a run"):
        load_run(tmp_path)
    (tmp_path / "run" / "checkpoint" / "state.json").unlink()
    with pytest.raises(InputError, match="is finished, but its checkpoint is gone"):
        load_run(tmp_path / "run", toy_graph())
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(InputError, match="has no checkpoint yet: finish the run with ccssl graph train --resume"):
        load_run(tmp_path / "run", toy_graph())
    with pytest.raises(InputError, match="holds no finished run"):
        read_result(tmp_path)


def test_other_triples_are_noticed(tmp_path, monkeypatch):
    run(toy_config(), tmp_path / "run")
    with pytest.raises(InputError, match="was run on other triples than toy holds now"):
        load_run(tmp_path / "run", toy_graph(seed=1))
    (tmp_path / "run" / "result.json").unlink()
    graph = toy_graph()
    with pytest.raises(InputError, match=r"was run on other triples than toy holds now, its split\.json tells"):
        run(toy_config(), tmp_path / "run", graph=replace(graph, test=graph.test[:-1]), resume=True)


def test_a_run_on_images_is_told_apart(tmp_path):
    (tmp_path / "config.yaml").write_text(config_text(RunConfig()))
    with pytest.raises(InputError, match="is a run on images: ccssl evaluate and ccssl predict know it"):
        read_run(tmp_path)


def test_graphs_without_validation_or_test_facts(tmp_path):
    result = run(toy_config(), tmp_path / "neither", toy_graph(valid=[], test=[]))
    assert result["test"] == {}
    assert "validation" not in result
    assert "best" not in result
    assert "relations" not in result
    assert result["unlabeled"]["accuracy"] >= 0


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(tmp_path, monkeypatch):
    config = toy_config(method="supervised")
    with pytest.raises(
        InputError, match=r"not finite at step \d+, .* there is no checkpoint yet\. Try a smaller lr"
    ):
        run(replace(config, lr=1e30), tmp_path / "at once")
    step = Training.step

    def poisoned(self):
        if self.epochs_done == 3:
            self.scorer.entities.data.fill_(torch.nan)
        step(self)

    monkeypatch.setattr(Training, "step", poisoned)
    with pytest.raises(InputError, match=r"not finite at step 9, epoch 3, .* the checkpoint of step 6 is kept"):
        run(config, tmp_path / "later")
    assert checkpoint.load(tmp_path / "later" / "checkpoint")[1]["step"] == 6


def test_who_watches_is_told_before_the_checkpoint_and_may_end_the_run(tmp_path):
    told = []

    def watch(epoch, figures):
        told.append((epoch, set(figures), (tmp_path / "run" / "checkpoint").exists()))
        if epoch == 4:
            raise KeyError("enough")

    with pytest.raises(KeyError):
        run(toy_config(epochs=6), tmp_path / "run", watch=watch)
    phases = {"train", "validation", "unlabeled"}
    assert told == [(2, phases, False), (4, phases, True)]
    assert not (tmp_path / "run" / "result.json").exists()
    run(toy_config(epochs=6), tmp_path / "whole")
    run(toy_config(epochs=6), tmp_path / "run", resume=True)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "run"))


def test_what_a_user_should_know_of_the_data_is_said(tmp_path, capsys):
    graph = toy_graph()
    stranger = toy_graph(test=[("e00", "like", "e04"), ("nobody", "like", "e01")])
    train(toy_config(epochs=1), tmp_path / "run", graph=stranger)
    told = capsys.readouterr().err
    assert "note: the test part names 1 entities without a training fact: nobody" in told
    assert "note: 1 facts of the test part name an entity without a labeled fact: they rank last" in told
    assert "epoch 1: loss " in told
    assert "validation MRR" in told
    train(toy_config(epochs=1), tmp_path / "quiet", graph=graph, quiet=True)
    assert capsys.readouterr().err == ""


def test_a_scorer_of_ones_own_is_trained_and_read_back(tmp_path):
    from ccssl.graphs.scorers import SCORERS, Multiplicative

    def scorer(seed):
        torch.manual_seed(seed)
        return Multiplicative(SCORERS["distmult"], 20, 8, 6)

    result = run(toy_config(), tmp_path / "run", scorer=scorer(0))
    again = load_run(tmp_path / "run", toy_graph(), scorer(1))
    assert again.scorer.entities.shape == (20, 6)
    assert evaluate(again)["test"] == result["test"]
