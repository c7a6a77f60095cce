"""Training on a CUDA device: no step waits for it, runs repeat themselves, and a stopped run ends as if it were not."""

import pytest
import torch
from toy import toy_config, toy_data
from toy_graph import toy_config as toy_graph_config

from ccssl.experiments import graph_run
from ccssl.experiments.run import prepare, read_result, split_of, train
from ccssl.graphs.config import METHODS as GRAPH_METHODS
from ccssl.images.sources import load
from ccssl.methods import METHODS
from ccssl.training import checkpoint

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("teacher", ["model", "snapshot", "ema"])
@pytest.mark.parametrize("method", METHODS)
def test_no_step_waits_for_the_device(method, teacher, precision):
    config = toy_config(method=method, teacher=teacher, device="cuda", precision=precision)
    ours = prepare(config, toy_data(), split_of(config, toy_data()))
    batches = [ours.batches.at(step) for step in range(4)]
    ours.step(batches[0])  # kernels are compiled and tables moved at their first use
    # The scaler of fp16 asks whether to step; nothing else may ask anything.
    torch.cuda.set_sync_debug_mode("error" if precision == "bf16" else "default")
    try:
        for batch in batches[1:]:  # step 3 refreshes the calibration, too
            ours.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ours.check()
    assert ours.steps_done == 4


def digits(folder, **options):
    config = toy_config(
        dataset="digits", method="ccssl-prop", labels=40, steps=60, eval_every=20, device="cuda", precision="bf16"
    )
    train(config, folder, data=load("digits"), quiet=True, **options)
    tensors, _ = checkpoint.load(folder / "checkpoint")
    result = read_result(folder)
    del result["cost"]
    return tensors, result, (folder / "metrics.jsonl").read_text()


def assert_same(one, two):
    assert one[1:] == two[1:]
    assert one[0].keys() == two[0].keys()
    for name, tensor in one[0].items():
        assert torch.equal(tensor, two[0][name]), name


def test_a_run_repeats_itself_bit_for_bit(tmp_path):
    assert_same(digits(tmp_path / "one"), digits(tmp_path / "two"))


def test_a_run_that_was_stopped_ends_as_if_it_were_not(tmp_path, monkeypatch):
    whole = digits(tmp_path / "whole")

    class Lost(Exception):
        pass

    save, saved = checkpoint.save, []

    def save_one(*arguments, **options):
        if saved:
            raise Lost
        saved.append(save(*arguments, **options))

    monkeypatch.setattr(checkpoint, "save", save_one)
    with pytest.raises(Lost):
        digits(tmp_path / "run")
    monkeypatch.undo()
    assert len(saved) == 1
    assert_same(digits(tmp_path / "run", resume=True), whole)


@pytest.mark.parametrize("method", GRAPH_METHODS)
def test_link_predictors_learn_what_they_learn_on_the_cpu(tmp_path, method):
    def mrr(device):
        config = toy_graph_config(
            dataset="nations", method=method, dim=32, batch=256, epochs=20, eval_every=20, device=device
        )
        return graph_run.train(config, tmp_path / device, quiet=True)["validation"]["mrr"]

    assert mrr("cuda") == pytest.approx(mrr("cpu"), abs=0.03)
