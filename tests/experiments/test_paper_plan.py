"""From the paper's tables to runs: names that last, data that are here, hyperparameters that were searched for."""

from dataclasses import fields, replace

import numpy as np
import pytest
import yaml

from ccssl.errors import InputError
from ccssl.experiments.config import RunConfig
from ccssl.experiments.paper import printed
from ccssl.experiments.paper.artifacts import ARTIFACTS, GRAPHS, Column, Curves, Row, Table
from ccssl.experiments.paper.plan import RUNS, TUNED, cells, choose, count_runs, missing_data, plan
from ccssl.experiments.paper.results import over_seeds
from ccssl.experiments.paper.scales import SCALES, configuration, run_name
from ccssl.experiments.paper.views import best_rows, ours_text, printed_cell, printed_columns, wrong_bolds
from ccssl.experiments.run import FREE_ON_RESUME
from ccssl.images.sources import SOURCES

NEEDS_RUNS = [name for name, a in ARTIFACTS.items() if isinstance(a, Table | Curves) and a.kind != "counts"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A place for fetched data that holds none."""
    monkeypatch.setenv("CCSSL_HOME", str(tmp_path / "home"))


def write_data(folder, name, flip):
    """Write a data set of 4 grey images."""
    folder.mkdir(exist_ok=True)
    images, labels = np.zeros((4, 8, 8), np.uint8), np.arange(4) % 2
    parts = {"train_images": images, "train_labels": labels, "test_images": images, "test_labels": labels}
    np.savez(folder / f"{name}.npz", **parts, flip=np.array(flip))
    return folder / f"{name}.npz"


# ---- artifacts and names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NEEDS_RUNS)
def test_every_artifact_has_runs_at_every_scale(name, scale):
    artifact = ARTIFACTS[name]
    assert count_runs([name], scale) > 0
    if artifact.kind == "images":
        for settings in cells(artifact, scale, "images"):
            assert configuration(SCALES[scale], settings).method == settings["method"]


@pytest.mark.parametrize("scale", SCALES)
def test_names_of_image_runs_are_those_of_one_configuration(scale):
    found = {}
    for name in NEEDS_RUNS:
        for settings in cells(ARTIFACTS[name], scale, "images"):
            config = configuration(SCALES[scale], settings)
            assert found.setdefault(run_name(config, config.dataset), config) == config
    assert len(set(map(repr, found.values()))) == len(found)


def test_names_are_stable():
    """A changed name would run anew what is finished."""
    settings = {"dataset": "svhn", "labels": 250, "method": "ccssl-prop", "options": {"gamma": 10.0}}
    config = configuration(SCALES["paper"], settings)
    name = run_name(config, "svhn")
    assert name == "svhn-250-ccssl-prop-seed0-d95a58"
    elsewhere = replace(config, seed=12, device="cuda", dataset="/data/svhn.npz")
    assert run_name(elsewhere, "svhn") == name.replace("seed0", "seed12")
    names = {run_name(replace(config, **{field: value}), "svhn") for field, value in {"lr": 0.1, "mu": 3}.items()}
    assert len(names | {name}) == 3
    given = configuration(SCALES["paper"], {**settings, "momentum": 0.9})
    assert run_name(given, "svhn") == name, "whether a value is given or usual makes no difference"
    assert {"device"} <= set(FREE_ON_RESUME) <= {f.name for f in fields(RunConfig)}


def test_artifacts_come_once_in_the_order_of_the_paper():
    assert choose(["ece", "accuracies", "ece"]) == ["accuracies", "ece"]
    assert choose(["ece", "all"]) == list(ARTIFACTS)
    with pytest.raises(InputError, match=r"no artifact 'link-predicton'.* Did you mean link-prediction"):
        choose(["link-predicton"])


# ---- data -----------------------------------------------------------------------------------------------------------


def test_data_are_taken_from_the_folder_and_what_is_missing_is_named(tmp_path):
    path = write_data(tmp_path / "data", "svhn", SOURCES["svhn"].flip)
    found = plan(["curves-250", "validity", "link-prediction"], "paper", tmp_path / "out", 1, tmp_path / "data")
    images = [job.config for name, job in found.study.items() if not name.startswith(tuple(GRAPHS))]
    assert {config.dataset for config in images} == {str(path)}
    assert found.missing == {"cifar10": ["curves-250", "validity"]}
    assert missing_data(found).startswith("not here: cifar10 for curves-250, validity. Fetch by")
    assert any(name.startswith("kinship-") for name in found.study), "what is here is run"
    assert missing_data(plan(["link-prediction"], "paper", tmp_path / "out", 1, None)) == ""


def test_data_that_do_not_know_whether_to_mirror_are_refused(tmp_path):
    path = write_data(tmp_path / "data", "emnist_byclass", not SOURCES["emnist-byclass"].flip)
    with pytest.raises(
        InputError, match=rf"{path} must say that a mirrored image of emnist-byclass .* `ccssl data pack"
    ):
        plan(["imbalance"], "paper", tmp_path / "out", 1, tmp_path / "data")


def test_a_study_does_not_go_on_with_other_data(tmp_path):
    write_data(tmp_path / "data", "svhn", SOURCES["svhn"].flip)
    found = plan(["validity"], "paper", tmp_path / "out", 1, tmp_path / "data")
    name = next(iter(found.study))
    run = tmp_path / "out" / RUNS / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump({"dataset": "/elsewhere/mine.npz"}))
    with pytest.raises(InputError, match=f"{name} was run on /elsewhere/mine.npz, not on "):
        plan(["validity"], "paper", tmp_path / "out", 1, tmp_path / "data")
    (run / "config.yaml").write_text(yaml.safe_dump({"dataset": "/elsewhere/svhn.npz"}))
    plan(["validity"], "paper", tmp_path / "out", 1, tmp_path / "data")


def test_hyperparameters_that_were_found_are_used_at_the_scale_of_the_paper_where_the_paper_searched(tmp_path):
    write_data(tmp_path / "data", "svhn", SOURCES["svhn"].flip)
    (tmp_path / TUNED).mkdir()
    best = {"lr": 0.05, "mu": 3, "steps": 7, "options": {"gamma": 0.01}}
    (tmp_path / TUNED / "svhn-250-ccssl-prop.yaml").write_text(yaml.safe_dump(best))

    def configs(artifact, scale):
        jobs = plan([artifact], scale, tmp_path, 3, tmp_path / "data").study.values()
        return [job.config for job in jobs if (job.config.method, job.config.labels) == ("ccssl-prop", 250)]

    tuned = configs("validity", "paper")
    assert [(c.lr, c.mu, c.options["gamma"], c.steps, c.seed) for c in tuned] == [
        (0.05, 3, 0.01, 2**18, seed) for seed in range(3)
    ]
    assert all(config.lr == 0.03 for config in configs("gamma", "paper"))
    assert all(config.lr == 0.03 for config in configs("validity", "reduced"))


# ---- what is bold ---------------------------------------------------------------------------------------------------


def some_table(**changes):
    rows = (Row("a", group="1"), Row("b", group="1"), Row("c", group="2"), Row("d", group="2"))
    return Table("t", "p", rows, (Column(("x",)),), **changes)


@pytest.mark.parametrize(
    ("changes", "values", "best"),
    [
        ({}, (1, 3, 2, 3), "bd"),
        ({"lower_is_better": True}, (1, 3, 2, 3), "a"),
        ({"best_in_group": True}, (1, 3, 2, 4), "bd"),
        ({"best_in_group": True, "lower_is_better": True}, (1, 3, 2, 4), "ac"),
        ({"best_in_group": True}, (1, 3, 2, None), "b"),
        ({}, (None, None, 2, None), ""),
        ({"kind": "counts"}, (1, 2, 3, 4), ""),
    ],
)
def test_the_best_rows_are_those_of_the_best_value(changes, values, best):
    table = some_table(**changes)
    known = {row: value for row, value in zip(table.rows, values, strict=True) if value is not None}
    assert {row.head for row in best_rows(table, known)} == set(best)


def test_the_papers_bold_type_is_wrong_twice():
    told = [
        note for artifact in ARTIFACTS.values() if isinstance(artifact, Table) for note in wrong_bolds(artifact)
    ]
    assert told == [
        "The paper prints 0.381 of ComplEx-CCSSL (KINSHIP, H@3) in bold, but ComplEx-PL has 0.382.",
        "The paper prints 0.378 of ComplEx-CCSSL (KINSHIP, H@3) in bold, but ComplEx-PL has 0.382.",
    ]


def test_deviations_have_the_unit_of_the_table():
    ours = over_seeds([0.031, 0.033, 0.035])
    assert ours_text(ARTIFACTS["validity"], ours) == "0.033 ± 2.0"
    assert ours_text(ARTIFACTS["accuracies"], ours) == "3.30 ± 0.20"
    assert ours_text(ARTIFACTS["link-prediction"], ours) == "0.033 ± 0.002"
    assert ours_text(ARTIFACTS["graph-data"], over_seeds([10432])) == "10,432"
    assert ours_text(ARTIFACTS["ece"], None) == "–"


def test_every_printed_row_has_a_cell_for_each_printed_column():
    for artifact in ARTIFACTS.values():
        if isinstance(artifact, Table):
            width = len(printed_columns(artifact))
            assert {len(row.printed) for row in artifact.rows} <= {0, width}
    table = ARTIFACTS["link-prediction"]
    for column in table.columns:
        beside = [c for c in table.columns if c.heads == column.heads]
        assert len(beside) == 2, "both ways to split"
        assert len({printed_cell(table, table.rows[1], c) for c in beside}) == 1
    assert printed_cell(table, table.rows[1], table.columns[-1]) == printed.Printed("0.284", None, False)
