"""A search whose trials are kept in PostgreSQL: by many processes at once, and while the database comes and goes."""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import optuna
import psycopg
import pytest
from postgres import USER, needs_postgres, open_server
from pretend import pretending

from ccssl import cli
from ccssl.errors import InputError
from ccssl.experiments import trials as storage
from ccssl.experiments import tune as tuning
from ccssl.experiments.config import RunConfig
from ccssl.experiments.paper.artifacts import ARTIFACTS
from ccssl.experiments.paper.plan import tuned_settings
from ccssl.experiments.run import read_run
from ccssl.experiments.tune import Search, space_of, tune

pytestmark = needs_postgres

TINY = {"dataset": "digits", "labels": 40, "steps": 9, "batch": 4, "eval_every": 3, "eval_unlabeled": 20}


def search(method="cssl", trials=20, **changes):
    base = RunConfig(method=method, **{**TINY, "device": "cpu", "precision": "fp32", **changes})
    return Search(base=base, space=space_of(method), trials=trials)


def goodness(config, step):
    return round(0.9 - abs(config["lr"] - 0.03) - 0.2 / step, 6)


@pytest.fixture(scope="module")
def server():
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with open_server() as server:
        yield server


@pytest.fixture
def url(server, request):
    """A database of the test's own."""
    name = f"db{abs(hash(request.node.name)) % 10**9}"
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server.url.removesuffix("postgres") + name


@pytest.fixture
def pretend(monkeypatch):
    monkeypatch.setattr(tuning, "POLL", 0.05)
    kind = pretending(goodness)
    monkeypatch.setattr(tuning, "Worker", kind)
    return kind


def numbers(result):
    return [trial["trial"] for trial in result["trials"]]


def test_three_workers_of_which_one_is_killed_end_exactly_twenty_trials(url, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def kill():
        folder = tmp_path / "tuning" / "digits-40-cssl" / "trials" / "004"
        until = time.monotonic() + 60
        while not (folder / "metrics.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.01)
        for child in multiprocessing.active_children():
            if child.name == "trial-worker-1":
                os.kill(child.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    result = tune(search(), tmp_path, workers=3, storage=url)
    thread.join()
    assert "(killed by SIGKILL)" in capsys.readouterr().err
    assert numbers(result) == list(range(20))
    assert {trial["state"] for trial in result["trials"]} <= {"complete", "stopped early"}
    study = optuna.load_study(study_name="digits-40-cssl", storage=url.replace("postgresql", "postgresql+psycopg"))
    states = [trial.state.name for trial in study.get_trials(deepcopy=False)]
    assert len(states) == 20
    assert set(states) <= {"COMPLETE", "PRUNED"}
    study._storage._backend.engine.dispose()
    # The best is taken by the paper's runs and by train.
    best = result["best"]["parameters"]
    artifact = next(each for each in ARTIFACTS.values() if getattr(each, "tuned", False))
    settings = {"dataset": "digits", "labels": 40, "method": "cssl"}
    assert tuned_settings(tmp_path, artifact, "paper", settings) == {**best, "options": {}}
    words = ["train", "--config", result["file"], "--steps", "1", "--out", str(tmp_path / "run"), "--quiet"]
    assert cli.main(words) == 0
    assert read_run(tmp_path / "run").to_dict().items() >= best.items()


def test_two_machines_share_a_search(url, tmp_path, pretend):
    """Two coordinators, with folders of their own, as on two machines."""
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(tune, search("ccssl-prop"), tmp_path / name, workers=2, storage=url, quiet=True)
            for name in ("one", "other")
        ]
        one, other = (future.result() for future in futures)
    assert numbers(one) == list(range(20))
    assert one["trials"] == other["trials"]
    assert sorted(name for name, _ in pretend.begun) == [f"{number:03d}" for number in range(20)]
    texts = {(tmp_path / name / "tuned" / "digits-40-ccssl-prop.yaml").read_text() for name in ("one", "other")}
    assert len(texts) == 1


def test_a_search_of_the_same_name_in_the_same_database_is_the_same_search(url, tmp_path, pretend):
    four = tune(search(trials=4), tmp_path / "one", storage=url, quiet=True)
    assert tune(search(trials=6), tmp_path / "other", storage=url, quiet=True)["trials"][:4] == four["trials"]
    with pytest.raises(
        InputError, match=r"begun with another configuration, it differs in steps \(9 there, 12 here\)"
    ):
        tune(search(trials=6, steps=12), tmp_path / "third", storage=url, quiet=True)
    with pytest.raises(InputError, match="belongs to a search in another storage"):
        tune(search(trials=6), tmp_path / "one", quiet=True)
    assert len(pretend.begun) == 6


# ---- a database that comes and goes -------------------------------------------------------------------------------


@pytest.fixture
def running(server):
    """The server, which runs again after the test."""
    yield server
    server.stop()
    server.start()


def test_a_database_that_comes_back_in_time_is_waited_for(running, url, tmp_path, monkeypatch, capsys):
    gone = []

    def before(config, folder, step):
        if folder.name == "003" and step == 6 and not gone:
            gone.append(step)
            running.stop()
            threading.Timer(1.0, running.start).start()

    monkeypatch.setattr(tuning, "Worker", pretending(goodness, before))
    monkeypatch.setattr(storage, "PATIENCE", 30.0)
    result = tune(search(trials=8), tmp_path, storage=url)
    assert gone
    assert numbers(result) == list(range(8))
    told = capsys.readouterr().err
    assert told.count("does not answer") == 1
    assert "asking again for 30 s" in told
    monkeypatch.setattr(tuning, "Worker", pretending(goodness))
    assert tune(search(trials=8), tmp_path / "undisturbed", quiet=True)["trials"] == result["trials"]


def test_a_database_that_stays_away_ends_the_search_and_keeps_everything(
    running, url, tmp_path, monkeypatch, capsys
):
    gone = []

    def before(config, folder, step):
        if folder.name == "003" and step == 6 and not gone:
            gone.append(step)
            running.stop()

    monkeypatch.setattr(tuning, "Worker", pretending(goodness, before))
    monkeypatch.setattr(storage, "PATIENCE", 1.0)
    secret = url.replace(f"{USER}@", f"{USER}:hunter2@")
    begun = time.monotonic()
    words = ["tune", "--out", str(tmp_path), "--trials", "8", "--storage", secret, "--precision", "fp32"]
    for name, value in {**TINY, "method": "cssl", "device": "cpu"}.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    assert cli.main(words) == 2
    assert time.monotonic() - begun < 30
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert "was lost (" in last
    assert (
        "did not come back within 1 s. Everything is kept: when it answers again, go on with the same command."
        in last
    )
    assert "hunter2" not in captured.err
    assert cli.main(words) == 2  # it is still away
    assert "hunter2" not in capsys.readouterr().err
    running.start()
    assert cli.main([*words, "--quiet"]) == 0
    monkeypatch.setattr(tuning, "Worker", pretending(goodness))
    found = tune(search(trials=8), tmp_path, storage=url, quiet=True)
    assert found["trials"] == tune(search(trials=8), tmp_path / "undisturbed", quiet=True)["trials"]


def test_what_no_patience_mends_is_told_at_once(server, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "PATIENCE", 60.0)
    begun = time.monotonic()
    nothing = server.url.removesuffix("postgres") + "nothing"
    with pytest.raises(
        InputError, match=r"the database nothing at 127\.0\.0\.1:\d+ cannot be used: .*does not exist"
    ):
        tune(search(), tmp_path, storage=nothing, quiet=True)
    with pytest.raises(InputError, match=r'cannot be used: .*role "nobody here" does not exist'):
        tune(search(), tmp_path, storage=server.url.replace(USER, "nobody%20here:hunter2"), quiet=True)
    assert time.monotonic() - begun < 20


# ---- the rules of sharing -----------------------------------------------------------------------------------------


def opened(url, owner):
    return storage.in_database(url, "shared", owner, optuna.pruners.NopPruner(), lambda sentence: None)


SPACE = {"lr": tuple(range(1000))}


def fresh(trials):
    return {"lr": len(trials)}


def test_no_trial_is_begun_twice_and_none_too_many(url):
    def claims(owner):
        with opened(url, owner) as trials:
            mine = []
            while (trial := trials.claim(mine, SPACE, fresh, 15)) is not None:
                assert trial.params == {"lr": trial.number}
                mine.append(trial.number)
            return mine

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(claims, "abcd"))
    assert sorted(number for mine in found for number in mine) == list(range(15))


def test_a_trial_changes_hands_when_its_owner_is_silent_for_long_and_ends_once(url, monkeypatch):
    assert storage.STALE > storage.PATIENCE + storage.BEAT
    with opened(url, "one") as one, opened(url, "other") as other:
        trial = one.claim([], SPACE, fresh, 1)
        assert trial is not None
        assert other.claim([], SPACE, fresh, 1) is None
        assert one.beat([trial.number]) == set()
        monkeypatch.setattr(storage, "STALE", 0.2)
        time.sleep(0.3)
        one.beat([trial.number])  # alive after all
        assert other.claim([], SPACE, fresh, 1) is None
        time.sleep(0.3)
        taken = other.claim([], SPACE, fresh, 1)
        assert taken is not None
        assert taken.number == trial.number
        assert one.beat([trial.number]) == {trial.number}
        assert other.beat([trial.number]) == set()
        other.end(trial.number, 0.7)
        one.end(trial.number, 0.1)
        one.fail(trial.number)
        assert one.report(trial.number, 3, 0.2, last=False)
        (ended,) = one.all()
        assert (ended.state.name, ended.value) == ("COMPLETE", 0.7)


def test_a_coordinator_that_was_killed_is_known_again(url):
    with opened(url, "one") as one:
        trial = one.claim([], SPACE, fresh, 1)
    with opened(url, "one") as again:  # no waiting until it counts as dead
        assert again.claim([], SPACE, fresh, 1).number == trial.number
        assert again.claim([trial.number], SPACE, fresh, 1) is None
