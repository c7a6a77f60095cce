"""Runs read back: which can stand on one page, which belong together, what their difference is, how to repeat them."""

import argparse
import json
import math
import random
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import yaml

from ccssl import cli
from ccssl.errors import InputError
from ccssl.experiments.config import RunConfig
from ccssl.experiments.flags import add_flags, config_of
from ccssl.reports import runs as read
from ccssl.reports.runs import FinishedRun, baseline_of, command, groups, over_items, over_seeds, read_all


def finished(folder="run", accuracy=0.5, **changes):
    """Return a run as if it had been read."""
    return FinishedRun(Path(folder), RunConfig(**changes), {"test": {"accuracy": accuracy}}, (), {})


def copied(folder, to):
    shutil.copytree(folder, to)
    return to


# ---- reading ------------------------------------------------------------------------------------------------------


def test_a_run_is_read_whole(runs):
    folder = runs["ccssl-prop", 1]
    run = read.read_finished(folder)
    assert run.config.method == "ccssl-prop"
    assert run.config.seed == run.result["seed"] == 1
    steps, accuracy = run.over_time("test", "accuracy")
    assert steps == [4, 8, 12, 16]
    assert accuracy[-1] == run.result["test"]["accuracy"]
    assert set(run.made_with) == {"ccssl", "python", "torch", "commit"}
    assert run.over_time("test", "no such figure") == ([], [])


def test_a_folder_named_twice_counts_once(runs):
    folder = runs["cssl", 0]
    found = read_all([folder, runs["cssl", 1], folder / ".." / folder.name])
    assert [run.config.seed for run in found] == [0, 1]


def test_what_is_no_finished_run_is_refused(runs, tmp_path):
    with pytest.raises(InputError, match=r"there is no folder .*nowhere"):
        read.read_finished(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"is not the folder of a run: it has no config\.yaml"):
        read.read_finished(tmp_path / "empty")
    with pytest.raises(InputError, match="no run to report"):
        read_all([])
    begun = copied(runs["cssl", 0], tmp_path / "begun")
    (begun / "result.json").unlink()
    with pytest.raises(InputError, match=r"no finished run: result\.json is missing\. Finish it with"):
        read.read_finished(begun)
    (begun / "result.json").write_text('{"test": {"acc')
    with pytest.raises(InputError, match=r"result\.json is damaged"):
        read.read_finished(begun)
    (begun / "config.yaml").write_text("[")
    with pytest.raises(InputError, match=r"config\.yaml is not YAML"):
        read.read_finished(begun)


def test_a_run_on_a_graph_is_told_from_one_on_images(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"dataset": "umls", "split_mode": "paired"}))
    with pytest.raises(InputError, match="is a run on a graph: ccssl graph report shows it"):
        read.read_finished(tmp_path)


def test_a_run_without_test_images_is_refused(runs, tmp_path):
    folder = copied(runs["cssl", 0], tmp_path / "trial")
    result = json.loads((folder / "result.json").read_text())
    del result["test"]
    (folder / "result.json").write_text(json.dumps(result))
    with pytest.raises(InputError, match="without test images"):
        read.read_finished(folder)


def test_runs_on_different_data_are_refused(runs, secret_run, tmp_path):
    with pytest.raises(InputError, match=r"runs of different data sets .*strange\.npz.*hidden\.npz"):
        read_all([runs["cssl", 0], secret_run])
    folder = copied(runs["cssl", 1], tmp_path / "other")
    result = json.loads((folder / "result.json").read_text())
    result["split"]["test"] += 1
    (folder / "result.json").write_text(json.dumps(result))
    with pytest.raises(InputError, match=r"the test images of these runs differ: .* has 60, .* has 61"):
        read_all([runs["cssl", 0], folder])


def test_one_run_made_twice_is_refused(runs, tmp_path):
    again = copied(runs["cssl", 0], tmp_path / "again")
    with pytest.raises(InputError, match="one run made twice"):
        read_all([runs["cssl", 0], again])


def test_a_truncated_line_of_metrics_costs_no_more_than_what_follows_it(runs, tmp_path):
    folder = copied(runs["cssl", 0], tmp_path / "cut")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-2]) + lines[-2][:17])
    whole, cut = read.read_finished(runs["cssl", 0]), read.read_finished(folder)
    assert cut.records == whole.records[:-2]
    assert cut.result == whole.result
    (folder / "metrics.jsonl").unlink()
    assert read.read_finished(folder).records == ()


# ---- groups -------------------------------------------------------------------------------------------------------


def test_runs_that_differ_in_the_seed_alone_belong_together():
    found = groups(
        [
            finished(method="cssl", seed=2),
            finished(method="supervised"),
            finished(method="cssl", seed=1),
            finished(method="cssl", seed=3, device="cpu", eval_batch=3),
            finished(method="cssl", labels=80),
        ]
    )
    assert [(group.name, [run.config.seed for run in group.runs]) for group in found] == [
        ("cssl, labels 40", [1, 2, 3]),
        ("supervised, labels 40", [0]),
        ("cssl, labels 80", [0]),
    ]


def test_options_tell_groups_of_one_method_apart_and_a_default_is_no_option():
    prop = {"method": "ccssl-prop"}
    found = groups(
        [
            finished(**prop, options={"gamma": 1.0}),
            finished(**prop),
            finished(**prop, seed=1, options={"gamma": RunConfig(**prop).method_config().gamma}),
            finished(method="cssl"),
        ]
    )
    assert [group.name for group in found] == ["ccssl-prop, gamma 1.0", "ccssl-prop, gamma 0.1", "cssl"]
    assert [len(group.runs) for group in found] == [1, 2, 1]


def test_figures_of_a_group_are_means_and_sample_deviations():
    values = [0.5, 0.75, 0.85]
    (group,) = groups([finished(seed=seed, accuracy=value) for seed, value in enumerate(values)])
    found = group.figure("test", "accuracy")
    assert found is not None
    assert found.mean == pytest.approx(np.mean(values))
    assert found.deviation == pytest.approx(np.std(values, ddof=1))
    assert group.figure("test", "ece") is None
    assert group.figure("unlabeled", "accuracy") is None
    (single,) = groups([finished()])
    assert single.figure("test", "accuracy") == read.Figure(0.5, None)


def test_curves_of_a_group_span_its_runs(runs):
    (group,) = groups(read_all([runs["cssl", 0], runs["cssl", 1]]))
    steps, mean, low, high = group.over_time("test", "accuracy")
    curves = np.array([run.over_time("test", "accuracy")[1] for run in group.runs])
    assert steps == [4, 8, 12, 16]
    np.testing.assert_allclose(mean, curves.mean(0))
    np.testing.assert_allclose(low, curves.min(0))
    np.testing.assert_allclose(high, curves.max(0))


def test_the_baseline_has_the_same_labels_and_network():
    found = groups(
        [
            finished(method="supervised", labels=80),
            finished(method="supervised", model="wrn-28-2"),
            finished(method="supervised", label_sampling="iid"),
            finished(method="supervised", mu=1),
            finished(method="cssl"),
        ]
    )
    assert baseline_of(found[4], found) is found[3]
    assert baseline_of(found[4], found[:3]) is None
    assert baseline_of(found[3], found) is None


# ---- differences --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 10])
def test_the_interval_over_seeds_is_that_of_the_paired_t_test(n):
    draw = np.random.default_rng(n)
    one, other = draw.normal(0.8, 0.05, n), draw.normal(0.7, 0.05, n)
    found = over_seeds((one - other).tolist())
    low, high = scipy.stats.ttest_rel(one, other).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.mean == pytest.approx((one - other).mean())
    assert found.over == f"{n} draws of labels"


def test_the_interval_over_items_is_that_of_the_mean_of_paired_differences():
    draw = np.random.default_rng(3)
    ours, theirs = draw.random(400) < 0.8, draw.random(400) < 0.7
    found = over_items(int((ours & ~theirs).sum()), int((theirs & ~ours).sum()), 400)
    differences = ours.astype(float) - theirs.astype(float)
    error = differences.std() / math.sqrt(400)
    low, high = scipy.stats.norm.interval(0.95, differences.mean(), error)
    assert (found.mean, found.low, found.high) == pytest.approx((differences.mean(), low, high), abs=1e-6)


def test_a_difference_is_sure_if_its_interval_has_no_zero():
    assert over_items(40, 10, 500).sure
    assert over_items(10, 40, 500).sure
    assert not over_items(12, 10, 500).sure
    assert not over_items(0, 0, 500).sure


def test_the_interval_over_items_covers_as_often_as_it_says():
    draw = random.Random(1)
    inside = 0
    for _ in range(400):
        outcomes = draw.choices((1, -1, 0), (0.15, 0.05, 0.8), k=300)
        found = over_items(outcomes.count(1), outcomes.count(-1), 300)
        inside += found.low <= 0.1 <= found.high
    assert 0.91 <= inside / 400 <= 0.98  # four deviations of a share of .95 among 400 are .044


# ---- how to repeat ------------------------------------------------------------------------------------------------

CONFIGS = [
    RunConfig(),
    RunConfig(method="supervised", steps=7, lr=0.1, ema_ramp=False, channels_last=True, deterministic=True),
    RunConfig(method="ccssl-prop", options={"gamma": 1.0}, calibration_fraction=0.5, label_sampling="iid"),
    RunConfig(method="flexmatch", options={"warmup": False, "threshold": 0.8}, fold=3, validation=9),
    RunConfig(method="fixmatch-da", options={"hard": True}, dataset="a folder/of images; rm -r x", seed=11),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)
def test_the_command_of_a_run_makes_the_same_run(config, tmp_path):
    words = shlex.split(command(config, tmp_path / "a run"))
    assert words[:2] == ["ccssl", "train"]
    assert "train" in cli.COMMANDS
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.set_defaults(resume=False)
    add_flags(parser)
    args = parser.parse_args(words[2:])
    found = config_of(args)
    assert args.out == tmp_path / "a run"
    assert found.method_config() == config.method_config()
    assert {**found.to_dict(), "options": {}} == {**config.to_dict(), "options": {}}
