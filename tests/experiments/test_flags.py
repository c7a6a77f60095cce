"""Every field of a configuration and every hyperparameter of a method can be said on the command line."""

import argparse
from dataclasses import fields
from pathlib import Path

import pytest

from ccssl.cli import main
from ccssl.errors import InputError
from ccssl.experiments.config import RunConfig, config_text
from ccssl.experiments.flags import FIELDS, add_flags, config_of, method_options
from ccssl.methods import METHODS


def parsed(*words, out="run", resume=False):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    args = parser.parse_args(words)
    args.out, args.resume = Path(out), resume
    return config_of(args)


def other(f):
    """Return a value of a field that is not its default, and the words that say it."""
    values = {
        "dataset": "svhn", "label_sampling": "iid", "model": "wrn-28-2", "method": "cssl", "select": "last",
        "teacher": "ema", "device": "cpu", "precision": "bf16", "calibration_fraction": 0.5, "ema": 0.5,
        "momentum": 0.5, "fold": 3, "calibrate_every": 3,
    }  # fmt: skip
    flag = "--" + f.name.replace("_", "-")
    if f.name == "flip":
        return False, ["--no-flip"]
    if f.name in values:
        return values[f.name], [flag, str(values[f.name])]
    if isinstance(f.default, bool):
        return not f.default, [flag if not f.default else flag.replace("--", "--no-", 1)]
    value = f.default + (1 if isinstance(f.default, int) else 0.5)
    return value, [flag, str(value)]


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_has_a_flag(name):
    value, words = other(FIELDS[name])
    assert getattr(parsed(*words), name) == value


@pytest.mark.parametrize("name", METHODS)
def test_every_hyperparameter_has_a_flag(name):
    for option in fields(METHODS[name].Config):
        if option.name in FIELDS:
            continue
        words = ["--" + option.name.replace("_", "-"), str(option.default)]
        if isinstance(option.default, bool):
            words = words[:1]
        config = parsed("--method", name, *words)
        assert option.name in config.options
        config.method_config()


def test_no_hyperparameter_hides_a_field():
    assert not set(method_options()) & set(FIELDS)


def test_flags_go_before_the_file_and_another_method_forgets_the_options(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(config_text(RunConfig(labels=50, method="ccssl-prop", options={"gamma": 0.5})))
    assert parsed("--config", str(path)).options == {"gamma": 0.5}
    assert parsed("--config", str(path), "--labels", "60").labels == 60
    assert parsed("--config", str(path), "--method", "cssl").options == {}


def test_resuming_takes_the_runs_own_configuration(tmp_path):
    (tmp_path / "config.yaml").write_text(config_text(RunConfig(labels=50)))
    assert parsed(out=tmp_path, resume=True).labels == 50
    assert parsed(out=tmp_path).labels == 40


def test_a_hyperparameter_of_another_method_is_refused():
    with pytest.raises(InputError, match="method supervised takes no options, got 'gamma'"):
        parsed("--method", "supervised", "--gamma", "1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "fixmatsch"], "Did you mean fixmatch?"),
        (["--labls", "3"], "Did you mean --labels?"),
        (["--dataset", "cifar"], "cifar10"),
        (["--labels", "5"], "5"),
        (["--labels", "ten"], "ten"),
        (["--steps", "1e3"], "--steps: must be a whole number in digits, such as 1000, got '1e3'"),
        (["--lr", "fast"], "--lr: must be a number, such as 0.03 or 3e-2, got 'fast'"),
        (["--labels", "5", "--method", "supervised"], "random with --label-sampling iid"),
        (["--dataset", "no/such.npz"], "no/such.npz"),
    ],
)
def test_bad_words_get_a_sentence_and_code_2(tmp_path, capsys, words, message):
    try:
        code = main(["train", "--out", str(tmp_path / "run"), *words])
    except SystemExit as end:
        code = end.code
    told = capsys.readouterr().err
    assert code == 2
    assert message in told
    assert len(told.strip().splitlines()) <= 2
    assert not (tmp_path / "run" / "config.yaml").exists()
