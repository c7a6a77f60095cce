"""The search for hyperparameters: what is proposed, what is stopped, how many trials end, and what is written."""

import json
import math
import os
import signal
import threading
import warnings
from dataclasses import replace
from itertools import product

import numpy as np
import optuna
import pytest
import yaml
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial
from pretend import Death, pretending

from ccssl import cli
from ccssl.errors import InputError
from ccssl.experiments import folder as run_folder
from ccssl.experiments import tune as tuning
from ccssl.experiments.config import RunConfig, read_config
from ccssl.experiments.paper.plan import tuned_settings
from ccssl.experiments.spaces import SPACES
from ccssl.experiments.tune import Search, least_steps, propose, pruner_of, space_of, tune
from ccssl.images.sources import load

SMALL = {"dataset": "digits", "labels": 40, "steps": 27, "batch": 4, "eval_every": 9, "validation": 100}


def search(method="ccssl-prop", trials=20, sampler="tpe", space=None, **changes):
    base = RunConfig(method=method, **{**SMALL, **changes})
    return Search(base=base, space=space or space_of(method), trials=trials, sampler=sampler)


def goodness(config, step):
    """Return an accuracy that grows with the steps, and is the better the nearer the learning rate is to 0.03."""
    distance = abs(math.log(config["lr"] / 0.03))
    return round(0.9 - 0.1 * distance - 0.2 / step + (0.01 if config["mu"] == 7 else 0), 6)


@pytest.fixture(autouse=True)
def no_news_from_optuna():
    optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.fixture
def workers(monkeypatch):
    """Return a function that puts workers who pretend into the place of real ones."""

    def use(curve=goodness, **options):
        kind = pretending(curve, **options)
        monkeypatch.setattr(tuning, "Worker", kind)
        monkeypatch.setattr(tuning, "POLL", 0.05)
        monkeypatch.setattr(os, "fsync", lambda file: None)  # a thousand times a search, and nothing to lose
        return kind

    return use


# ---- what is searched ---------------------------------------------------------------------------------------------


def test_given_parameters_are_not_searched():
    assert space_of("cssl") == SPACES["cssl"]
    assert set(space_of("ccssl-prop", fixed=["lr", "gamma", "out"])) == set(SPACES["ccssl-prop"]) - {"lr", "gamma"}
    with pytest.raises(InputError, match="nothing is left to search: lr, weight_decay are all given"):
        space_of("supervised", fixed=["lr", "weight_decay"])
    with pytest.raises(
        InputError, match="there is nothing to search for pseudo-label: the paper searches for supervised"
    ):
        space_of("pseudo-label")


@pytest.mark.parametrize("method", SPACES)
def test_every_point_of_every_space_is_a_configuration(method):
    base = RunConfig(method=method, **SMALL)
    for values in product(*SPACES[method].values()):
        point = dict(zip(SPACES[method], values, strict=True))
        config = tuning.configured(base, point)
        assert {**config.to_dict(), **vars(config.method_config())}.items() >= point.items()


def test_a_configured_point_keeps_other_options():
    base = RunConfig(method="ccssl-prop", options={"normalization": "top"})
    config = tuning.configured(base, {"gamma": 1.0, "lr": 0.05})
    assert config.options == {"normalization": "top", "gamma": 1.0}
    assert config.lr == 0.05
    assert base.options == {"normalization": "top"}


def test_bad_searches():
    with pytest.raises(InputError, match=r"sampler must be one of tpe, gp, got 'tpee'\. Did you mean tpe\?"):
        search(sampler="tpee")
    with pytest.raises(InputError, match="trials must be at least 1, got 0"):
        search(trials=0)
    with pytest.raises(InputError, match="select must be last"):
        search(select="best")


def test_validation_images_are_a_tenth_of_those_with_a_known_label():
    data = load("digits")
    config = RunConfig(dataset="digits", labels=40)
    assert tuning.with_validation(config, data).validation == round(0.1 * len(data.train_labels))
    assert tuning.with_validation(replace(config, validation=7), data).validation == 7
    known = np.where(np.arange(len(data.train_labels)) < 45, data.train_labels, -1)
    few = replace(data, train_labels=known)
    assert tuning.with_validation(config, few).validation == 4
    assert tuning.with_validation(replace(config, labels=44), few).validation == 1
    with pytest.raises(
        InputError, match="needs validation images beside the 45 labels, but digits has 45 training"
    ):
        tuning.with_validation(replace(config, labels=45), few)


def test_a_search_is_called_by_the_name_of_its_data(tmp_path):
    assert search().name == "digits-40-ccssl-prop"
    assert search(dataset=str(tmp_path / "emnist_byclass.npz")).name == "emnist-byclass-40-ccssl-prop"
    assert search(dataset=str(tmp_path / "my_own.npz")).name == "my_own-40-ccssl-prop"


# ---- how far a trial must come ------------------------------------------------------------------------------------


def test_twenty_epochs_at_the_length_of_the_paper():
    long = search(steps=2**18, batch=32, eval_every=1024)
    assert least_steps(long, 50_000 - 250) == math.ceil(20 * 49_750 / (32 * 3))
    assert least_steps(search("supervised", steps=2**18, batch=32, mu=7), 49_750) == math.ceil(20 * 49_750 / 224)


@pytest.mark.parametrize("steps", [1, 2, 27, 100, 1000, 20_000, 2**18, 2**20])
@pytest.mark.parametrize("pool", [0, 1, 1000, 50_000, 10**7])
def test_the_least_steps_follow_the_formula(steps, pool):
    found = least_steps(search(steps=steps, batch=32), pool)
    assert 1 <= found <= steps
    epochs = 20 * max(pool, 1) / (32 * 3)
    assert found == max(1, min(steps, math.ceil(min(epochs, max(epochs * steps / 2**18, steps / 27)))))
    assert found <= math.ceil(epochs)


def test_hyperband_has_the_factor_and_the_least_resource_of_the_paper():
    pruner = pruner_of(search(), 1000)
    assert isinstance(pruner, optuna.pruners.HyperbandPruner)
    assert (pruner._reduction_factor, pruner._min_resource, pruner._max_resource) == (3, 1, 27)
    assert isinstance(pruner_of(search(sampler="gp"), 1000), optuna.pruners.NopPruner)


# ---- what is proposed ---------------------------------------------------------------------------------------------


def proposals(found, count, value=lambda point: 0.5):
    """Return ``count`` points, each proposed after the ones before have ended."""
    trials = []
    for _ in range(count):
        point = propose(found, trials)
        distributions = {name: CategoricalDistribution(v) for name, v in found.space.items()}
        trials.append(create_trial(params=point, distributions=distributions, value=value(point)))
    return [trial.params for trial in trials]


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_proposals_are_a_function_of_seed_and_trials_alone(sampler):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = search(sampler=sampler)
        one = proposals(found, 8, lambda point: point["lr"])
        np.random.seed(5)  # noqa: NPY002 - what a library might draw from
        again = proposals(found, 8, lambda point: point["lr"])
    assert one == again
    for point in one:
        assert all(point[name] in values for name, values in found.space.items())
    assert proposals(search(sampler=sampler, seed=1), 8, lambda point: point["lr"]) != one


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_no_point_is_proposed_twice_while_another_is_left(sampler):
    found = search("supervised", sampler=sampler)  # ten points
    points = [tuple(point.values()) for point in proposals(found, 12, lambda point: point["lr"])]
    assert len(set(points[:10])) == 10
    assert set(points[10:]) <= set(points[:10])


def test_running_trials_are_not_proposed_again():
    found = search("supervised")
    distributions = {name: CategoricalDistribution(v) for name, v in found.space.items()}
    trials = []
    for _ in range(10):
        trials.append(
            create_trial(state=TrialState.RUNNING, params=propose(found, trials), distributions=distributions)
        )
    assert len({tuple(trial.params.values()) for trial in trials}) == 10


def test_proposals_learn_from_what_ended():
    """The first ten points of a search are drawn at random; the next ten are better than such."""

    def value(point):
        return goodness({**point, "mu": 7}, 10) + 0.05 * (point["gamma"] == 0.1)

    found = search()
    grid = [dict(zip(found.space, values, strict=True)) for values in product(*found.space.values())]
    every = np.array([value(point) for point in grid])
    points = [point for seed in range(3) for point in proposals(search(seed=seed), 20, value)[10:]]
    chance = every.std() / math.sqrt(len(points))
    assert np.mean([value(point) for point in points]) > every.mean() + 2.5 * chance


# ---- the search ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_exactly_so_many_trials_end(count, workers, tmp_path):
    kind = workers()
    result = tune(search(eval_every=1), tmp_path, workers=count, quiet=True)
    trials = result["trials"]
    assert [trial["trial"] for trial in trials] == list(range(20))
    assert len(kind.begun) == 20
    complete = [trial for trial in trials if trial["state"] == "complete"]
    stopped = [trial for trial in trials if trial["state"] == "stopped early"]
    assert len(complete) + len(stopped) == 20
    assert stopped
    assert all(trial["steps"] == 27 for trial in complete)
    assert {trial["steps"] for trial in stopped} <= {1, 3, 9}
    assert result["best"] == max(complete, key=lambda trial: (trial["accuracy"], -trial["trial"]))
    for trial in trials:
        point = {**SMALL, **trial["parameters"]}
        assert trial["accuracy"] == goodness(point, trial["steps"])
        assert trial["accuracy_after"][str(trial["steps"])] == trial["accuracy"]
    assert len({tuple(trial["parameters"].values()) for trial in trials}) == 20


def test_a_search_with_one_worker_repeats_exactly(workers, tmp_path):
    workers()
    one, other = (tune(search(trials=12), tmp_path / name, quiet=True) for name in "ab")
    assert {**one, "file": None} == {**other, "file": None}


def test_a_gaussian_process_stops_nothing_early(workers, tmp_path):
    workers()
    result = tune(search(trials=7, sampler="gp", steps=3), tmp_path, quiet=True)
    assert [trial["state"] for trial in result["trials"]] == ["complete"] * 7


def test_more_trials_go_on_with_those_that_are_there(workers, tmp_path):
    kind = workers()
    five = tune(search(trials=5), tmp_path, quiet=True)
    eight = tune(search(trials=8), tmp_path, quiet=True)
    assert eight["trials"][:5] == five["trials"]
    assert [name for name, _ in kind.begun] == [f"{number:03d}" for number in range(8)]
    assert tune(search(trials=3), tmp_path, quiet=True)["trials"] == eight["trials"]  # what has ended stays
    at_once = tune(search(trials=8), tmp_path / "at once", quiet=True)
    assert at_once["trials"] == eight["trials"]


def test_figures_are_taken_over_once_every_point_was_tried(workers, tmp_path):
    kind = workers(lambda config, step: config["lr"] + step / 1000)
    result = tune(search("supervised", trials=13, steps=9), tmp_path, quiet=True)
    assert len(result["trials"]) == 13
    assert len(kind.begun) == 10
    by_point = {tuple(trial["parameters"].values()): trial for trial in result["trials"][:10]}
    for trial in result["trials"][10:]:
        first = by_point[tuple(trial["parameters"].values())]
        assert {**trial, "trial": None} == {**first, "trial": None}


# ---- what goes wrong ----------------------------------------------------------------------------------------------


def test_a_worker_that_dies_is_replaced(workers, tmp_path, capsys):
    died = []

    def before(config, folder, step):
        if folder.name in ("002", "004") and step == 9 and folder.name not in died:
            died.append(folder.name)
            raise Death

    kind = workers(before=before)
    result = tune(search(trials=9), tmp_path, workers=3)
    assert died
    assert len(result["trials"]) == 9
    assert len(kind.begun) == 9 + len(died)
    told = capsys.readouterr().err
    for name in died:
        assert f"a worker ended in trial {int(name)} (killed by SIGKILL); another one goes on with it" in told


def test_a_trial_that_kills_its_workers_is_given_up_and_another_takes_its_place(workers, tmp_path, capsys):
    def before(config, folder, step):
        if folder.name == "001":
            raise Death

    kind = workers(before=before)
    result = tune(search(trials=6), tmp_path)
    assert [trial["trial"] for trial in result["trials"]] == [0, 2, 3, 4, 5, 6]
    assert [name for name, _ in kind.begun].count("001") == tuning.LIVES
    assert (
        "3 workers ended in trial 1 (killed by SIGKILL); another trial takes its place" in capsys.readouterr().err
    )


def test_a_search_whose_workers_keep_dying_stops_and_can_go_on(workers, tmp_path):
    def before(config, folder, step):
        raise Death

    workers(before=before)
    with pytest.raises(InputError, match=r"workers keep ending, .* fewer workers or a smaller batch"):
        tune(search(trials=4), tmp_path, quiet=True)
    workers()
    assert len(tune(search(trials=4), tmp_path, quiet=True)["trials"]) == 4


def saying(word, text):
    """Return a kind of worker whose trials end with a word."""

    class Kind(pretending(goodness)):
        def _trial(self, config, folder):
            return word, text, None

    return Kind


def test_what_the_user_must_change_is_said_with_the_trial(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "Worker", saying("refused", "the disk is full."))
    with pytest.raises(InputError, match=r"trial 0 cannot be run \(lr [\d.]+, .*gamma .*\): the disk is full\."):
        tune(search(trials=4), tmp_path, quiet=True)


def test_a_mistake_in_the_program_keeps_its_traceback(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "Worker", saying("broken", "Traceback: planted"))
    with pytest.raises(RuntimeError, match="trial 0 failed:\nTraceback: planted"):
        tune(search(trials=4), tmp_path, quiet=True)


def test_a_loss_that_diverges_ends_a_trial_and_no_more(monkeypatch, workers, tmp_path):
    class Kind(pretending(goodness)):
        def _trial(self, config, folder):
            return ("ended", None, None) if config["lr"] > 0.03 else super()._trial(config, folder)

    monkeypatch.setattr(tuning, "Worker", Kind)
    result = tune(search(trials=8), tmp_path, quiet=True)
    assert len(result["trials"]) == 8
    for trial in result["trials"]:
        assert (trial["accuracy"] is None) == (trial["parameters"]["lr"] > 0.03)
        assert trial["accuracy"] is not None or trial["state"] == "stopped early"
    assert result["best"]["parameters"]["lr"] <= 0.03
    assert "stopped early" in tuning.result_table(result)
    monkeypatch.setattr(tuning, "Worker", saying("ended", None))
    with pytest.raises(
        InputError, match=r"no trial of digits-40-ccssl-prop was completed.* smaller learning rates"
    ):
        tune(search(trials=2), tmp_path / "none", quiet=True)
    assert not (tmp_path / "none" / "tuned").exists()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"steps": 28}, ["steps (27 there, 28 here)"]),
        ({"seed": 1, "labels": 40, "batch": 5}, ["seed (0 there, 1 here)", "batch (4 there, 5 here)"]),
        ({"sampler": "gp"}, ["sampler ('tpe' there, 'gp' here)"]),
        (
            {"space": space_of("ccssl-prop", ["lr"]), "lr": 0.07},
            ["lr ([0.005, 0.01, 0.03, 0.05, 0.1] there, 0.07 here)"],
        ),
        ({"space": space_of("ccssl-prop", ["lr"])}, ["lr ([0.005, 0.01, 0.03, 0.05, 0.1] there, 0.03 here)"]),
        ({"space": space_of("ccssl-prop", ["gamma"])}, ["options ({'gamma': [0.01, 0.1, 1.0]} there, {} here)"]),
        ({"space": {**space_of("ccssl-prop"), "momentum": (0.8, 0.9)}}, ["momentum (0.9 there, [0.8, 0.9] here)"]),
    ],
)
def test_another_search_of_the_same_name_is_refused(other, words, workers, tmp_path):
    kind = workers()
    tune(search(trials=2), tmp_path, quiet=True)
    before = (tmp_path / "tuned" / "digits-40-ccssl-prop.yaml").read_bytes()
    with pytest.raises(InputError) as refused:
        tune(search(trials=3, **other), tmp_path, quiet=True)
    for word in words:
        assert word in str(refused.value)
    assert "begun with another configuration" in str(refused.value)
    assert len(kind.begun) == 2
    assert (tmp_path / "tuned" / "digits-40-ccssl-prop.yaml").read_bytes() == before
    tune(search(trials=3, device="cpu", eval_batch=7), tmp_path, quiet=True)  # which change no result


def test_a_folder_whose_journal_is_gone_is_refused(workers, tmp_path):
    workers()
    tune(search(trials=2), tmp_path, quiet=True)
    (tmp_path / "tuning" / "digits-40-ccssl-prop" / "journal.log").unlink()
    with pytest.raises(InputError, match="belongs to a search in another storage"):
        tune(search(trials=2), tmp_path, quiet=True)


def test_two_searches_in_one_folder_are_refused(workers, tmp_path):
    workers()
    with (
        run_folder.opened(tmp_path / "tuning" / search().name, resume=True),
        pytest.raises(InputError, match="in use by another process"),
    ):
        tune(search(), tmp_path, quiet=True)


def test_half_a_line_at_the_end_of_the_journal_is_dropped(workers, tmp_path):
    workers()
    four = tune(search(trials=4), tmp_path, quiet=True)
    journal = tmp_path / "tuning" / "digits-40-ccssl-prop" / "journal.log"
    whole = journal.read_bytes()
    journal.write_bytes(whole + whole.splitlines()[0][:17])
    os.symlink("nowhere", journal.with_name("journal.log.lock"))  # the lock of a write that a crash cut off
    eight = tune(search(trials=8), tmp_path, quiet=True)
    assert eight["trials"][:4] == four["trials"]
    assert len(eight["trials"]) == 8
    assert journal.read_bytes().startswith(whole)
    assert eight["trials"] == tune(search(trials=8), tmp_path / "other", quiet=True)["trials"]


def test_a_crash_at_any_place_of_the_journal_costs_no_trial(workers, tmp_path):
    """The journal of a search that ended is cut as a crash might have done, and the search goes on."""
    workers()
    whole = tune(search(trials=4), tmp_path / "whole", quiet=True)
    journal = (tmp_path / "whole" / "tuning" / "digits-40-ccssl-prop" / "journal.log").read_bytes()
    draw = np.random.default_rng(0)
    first = journal.index(b"\n", journal.index(b"search")) + 1  # since when it is known what is searched
    for cut in draw.integers(first, len(journal), 6).tolist():
        folder = tmp_path / str(cut) / "tuning" / "digits-40-ccssl-prop"
        folder.mkdir(parents=True)
        (folder / "journal.log").write_bytes(journal[:cut])
        found = tune(search(trials=4), tmp_path / str(cut), quiet=True)
        assert found["trials"] == whole["trials"], cut


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_search_and_it_goes_on(number, workers, tmp_path):
    asked = []

    def before(config, folder, step):
        if folder.name == "003" and step == 9 and not asked:
            asked.append(step)
            os.kill(os.getpid(), number)
            threading.Event().wait(0.2)

    workers(before=before)
    handler = signal.getsignal(number)
    with pytest.raises(tuning.Interrupted) as stopped:
        tune(search(trials=6), tmp_path, quiet=True)
    assert stopped.value.number == number
    assert signal.getsignal(number) == handler
    found = tune(search(trials=6), tmp_path, quiet=True)
    workers()
    assert found["trials"] == tune(search(trials=6), tmp_path / "at once", quiet=True)["trials"]


def test_bad_numbers_of_workers(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="workers must be at least 1, got 0"):
        tune(search(), tmp_path, workers=0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"leave torch\.distributed\.run away"):
        tune(search(), tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- what is told and written -------------------------------------------------------------------------------------


def test_progress_tells_each_trial_the_best_so_far_and_how_long(workers, tmp_path, capsys):
    workers()
    tune(search(trials=5), tmp_path)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trial ")]
    assert len(lines) == 5
    for place, line in enumerate(lines, 1):
        assert f"; {place} of 5" in line
    assert "validation accuracy 0." in lines[0]
    assert lines[0].endswith("left")
    assert lines[-1].endswith("done")
    tune(search(trials=5), tmp_path / "quiet", quiet=True)
    assert capsys.readouterr().err == ""


def test_a_search_that_can_stop_nothing_says_so(workers, tmp_path, capsys):
    workers()
    tune(search(trials=1, eval_every=30), tmp_path)
    assert (
        "no trial can be stopped early: the first evaluation, eval_every 30, is the last" in capsys.readouterr().err
    )


def test_the_best_configuration_is_what_paper_run_and_train_take(workers, tmp_path):
    workers()
    result = tune(
        search(trials=6, model="small", options={"normalization": "top"}, eval_batch=9), tmp_path, quiet=True
    )
    path = tmp_path / "tuned" / "digits-40-ccssl-prop.yaml"
    assert result["file"] == str(path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# Found by ccssl tune: 6 trials, ")
    found = read_config(path)
    best = dict(result["best"]["parameters"])
    assert found["options"] == {"normalization": "top", "gamma": best.pop("gamma")}
    assert best.items() <= found.items()
    assert {"dataset": "digits", "labels": 40, "method": "ccssl-prop", "steps": 27}.items() <= found.items()
    assert not {"validation", "seed", "select", "device", "eval_batch"} & set(found)
    # Only what was searched is taken by the paper's runs, whose length and network are its own.
    from ccssl.experiments.paper.artifacts import ARTIFACTS

    artifact = next(a for a in ARTIFACTS.values() if getattr(a, "tuned", False))
    settings = {"dataset": "digits", "labels": 40, "method": "ccssl-prop"}
    taken = tuned_settings(tmp_path, artifact, "paper", settings)
    assert taken == {**best, "options": {"gamma": result["best"]["parameters"]["gamma"]}}
    assert tuned_settings(tmp_path, artifact, "smoke", settings) is None
    assert tuned_settings(tmp_path, artifact, "paper", {**settings, "labels": 41}) is None


def test_the_table_has_the_best_first(workers, tmp_path):
    workers()
    result = tune(search(trials=8), tmp_path, quiet=True)
    lines = tuning.result_table(result).splitlines()
    assert lines[0] == "digits-40-ccssl-prop: accuracy on 100 validation images"
    assert lines[1].split()[:4] == ["trial", "state", "steps", "accuracy"]
    assert lines[2].split()[0] == str(result["best"]["trial"])
    assert len(lines) == 2 + 8 + 2
    assert f"--config {result['file']}" in lines[-1]


def test_the_command(workers, tmp_path, capsys, monkeypatch):
    kind = workers()
    words = [
        "tune",
        "--out",
        str(tmp_path),
        "--trials",
        "4",
        "--workers",
        "2",
        "--dataset",
        "digits",
        "--labels",
        "40",
    ]
    words += ["--method", "cssl", "--lr", "0.05", "--steps", "9", "--eval-every", "3", "--quiet"]
    assert cli.main([*words, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["search"] == "digits-40-cssl"
    assert len(figures["trials"]) == 4
    assert all(config["lr"] == 0.05 for _, config in kind.begun)
    assert "lr" not in figures["best"]["parameters"]
    assert yaml.safe_load((tmp_path / "tuned" / "digits-40-cssl.yaml").read_text())["lr"] == 0.05
    assert cli.main(words) == 0
    assert capsys.readouterr().out.startswith("digits-40-cssl: accuracy on 130 validation images\n")

    def stopped(*args, **options):
        raise tuning.Interrupted(2)

    monkeypatch.setattr(tuning, "tune", stopped)
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 130
    assert "stopped; go on with the same command" in capsys.readouterr().err
