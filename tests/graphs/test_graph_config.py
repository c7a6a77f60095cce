"""The configuration of a link predictor: what it refuses, and that it survives as plain data."""

from dataclasses import fields

import pytest
from toy_graph import toy_config

from ccssl.errors import InputError
from ccssl.experiments.config import config_text, read_config
from ccssl.experiments.graph_run import config_from
from ccssl.graphs.config import METHODS, GraphConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "ccssl"}, r"method must be one of supervised, .*, got 'ccssl'\. Did you mean ccssl-\w+\?"),
        ({"method": "fixmatch"}, "method must be one of"),
        ({"model": "complx"}, "got 'complx'. Did you mean complex"),
        ({"split_mode": "pair"}, "Did you mean paired"),
        ({"normalize": "layer"}, "normalize must be one of none, unit, batch"),
        ({"loss": "mse"}, "loss must be one of ce, bce"),
        ({"batch_of": "entities"}, "batch_of must be one of facts, queries"),
        ({"optimizer": "sgd"}, "optimizer must be one of adam, adagrad"),
        ({"schedule": "step"}, "schedule must be one of constant, cosine"),
        ({"select": "first"}, "select must be one of best, last"),
        ({"teacher": "parent"}, "teacher must be one of model, snapshot, ema, own, got 'parent'"),
        ({"split": "40-60"}, "split must be all, or numbers such as"),
        ({"dim": 0}, "dim must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"epochs": -1}, "epochs must be at least 1"),
        ({"calibrate_every": 0}, "calibrate_every must be at least 1"),
        ({"eval_every": 0}, "eval_every must be at least 1"),
        ({"lr": -0.1}, "lr must be a finite number, at least 0, got -0.1"),
        ({"lr": float("inf")}, "lr must be a finite number"),
        ({"n3": float("nan")}, "n3 must be a finite number"),
        ({"seed": -1}, "seed must be"),
        ({"patience": -1}, "patience must be"),
        ({"mu": 0.0}, "mu must be a finite number above 0"),
        ({"temperature": 0.0}, "temperature must be a finite number above 0"),
        ({"min_p_value": 1.5}, r"min_p_value must lie in \[0, 1\], got 1.5"),
        ({"ema": 1.0}, r"ema must lie in \[0, 1\)"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\)"),
        (
            {"options": {"gama": 1}, "method": "ccssl-prop"},
            "takes normalization, gamma, got 'gama'. Did you mean gamma",
        ),
        ({"options": {"gamma": 1}, "method": "supervised"}, "method supervised takes no options, got 'gamma'"),
        ({"options": {"gamma": -1}, "method": "ccssl-prop"}, "gamma"),
        ({"options": {"normalization": "sum"}}, "normalization must be one of"),
    ],
)
def test_what_no_predictor_can_be_trained_by_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        toy_config(**changes)


@pytest.mark.parametrize("method", METHODS)
def test_a_configuration_survives_its_file(tmp_path, method):
    options = {"gamma": 0.5} if method == "ccssl-prop" else {}
    config = toy_config(method=method, options=options, lr=1e-3, n3=0.5, teacher="ema", per_relation=True)
    (tmp_path / "config.yaml").write_text(config_text(config))
    assert config_from(read_config(tmp_path / "config.yaml")) == config


def test_whole_numbers_will_do_where_fractions_are_meant():
    assert config_from({"lr": 1, "mu": 2}) == GraphConfig(lr=1.0, mu=2.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [({"epoch": 3}, "no field 'epoch'. Did you mean epochs"), ({"dim": "large"}, "dim must be int, got 'large'")],
)
def test_unknown_names_and_wrong_types_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        config_from(values)


def test_every_field_says_what_it_is():
    assert all(f.metadata["help"] for f in fields(GraphConfig))
    assert hash(toy_config().shares) == hash((0.4, 0.4, 0.2))
