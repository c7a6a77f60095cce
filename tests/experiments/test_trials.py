"""The trials of a search in their storage: begun once, reported and ended any number of times, kept through crashes."""

import os
import subprocess
import sys

import optuna
import pytest

from ccssl import cli
from ccssl.errors import InputError
from ccssl.experiments import trials as storage

SPACE = {"lr": (0.1, 0.2, 0.3)}


@pytest.fixture(autouse=True)
def no_news_from_optuna():
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def opened(folder, pruner=None):
    return storage.in_journal(folder, "search", pruner or optuna.pruners.NopPruner(), lambda sentence: None)


def first(trials):
    return {"lr": SPACE["lr"][len(trials) % 3]}


def test_trials_are_claimed_up_to_the_limit(tmp_path):
    trials = opened(tmp_path)
    mine = []
    for number in range(3):
        trial = trials.claim(mine, SPACE, first, 3)
        assert (trial.number, trial.params) == (number, first(mine))
        mine.append(number)
    assert trials.claim(mine, SPACE, first, 3) is None
    trials.end(1, 0.5)
    assert trials.claim([0, 2], SPACE, first, 3) is None  # what has ended counts
    trials.fail(2)
    assert trials.claim([0], SPACE, first, 3).number == 3  # what was given up does not
    assert [trial.state.name for trial in trials.all()] == ["RUNNING", "COMPLETE", "FAIL", "RUNNING"]


def test_what_nobody_works_on_is_claimed_before_anything_new(tmp_path):
    trials = opened(tmp_path)
    for _ in range(3):
        trials.claim([trial.number for trial in trials.all()], SPACE, first, 9)
    trials.end(0, 0.5)
    again = opened(tmp_path)
    assert again.claim([], SPACE, first, 9).number == 1
    assert again.claim([1], SPACE, first, 9).number == 2
    assert again.claim([1, 2], SPACE, first, 9).number == 3


def test_saying_a_thing_twice_does_no_harm(tmp_path):
    trials = opened(tmp_path)
    trials.claim([], SPACE, first, 1)
    for _ in range(2):
        assert not trials.report(0, 3, 0.25, last=False)
    for _ in range(2):
        trials.end(0, 0.5)
    trials.end(0, 0.9)
    trials.end(0, None)
    assert trials.report(0, 4, 0.3, last=False)  # it is over
    (trial,) = trials.all()
    assert (trial.state.name, trial.value, trial.intermediate_values) == ("COMPLETE", 0.5, {3: 0.25})


def test_a_poor_trial_is_over_but_not_after_its_last_report(tmp_path):
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    trials = opened(tmp_path, pruner)
    for number, accuracy in enumerate((0.9, 0.8, 0.7)):
        trials.claim(list(range(number)), SPACE, first, 9)
        trials.report(number, 1, accuracy, last=False)
        trials.end(number, accuracy)
    trials.claim([], SPACE, first, 9)
    assert not trials.report(3, 1, 0.1, last=True)
    trials.claim([3], SPACE, first, 9)
    assert trials.report(4, 1, 0.1, last=False)
    assert [trial.state.name for trial in trials.all()][3:] == ["RUNNING", "PRUNED"]


def test_what_is_searched_is_described_once(tmp_path):
    known = opened(tmp_path).describe({"lr": 1})
    assert known["lr"] == 1
    assert opened(tmp_path).describe({"lr": 2}) == known


def test_a_journal_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "journal.log").mkdir()
    with pytest.raises(OSError, match="journal"):  # the command line turns it into a sentence
        opened(tmp_path)
    (tmp_path / "journal.log").rmdir()
    trials = opened(tmp_path)

    def full():
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match=r"journal\.log cannot be written or read \(No space left on device\)"):
        trials._patiently(full)


def test_the_only_coordinator_of_a_folder_always_has_the_same_name(tmp_path):
    with storage.owner_of(tmp_path) as one, storage.owner_of(tmp_path) as beside:
        assert beside != one
    with storage.owner_of(tmp_path) as again, storage.owner_of(tmp_path / "other") as other:
        assert again == one
        assert other != one


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("postgresql://me:hunter2@host:port/db", "this one cannot be read."),
        ("hunter2", "this one cannot be read."),
        ("", "this one cannot be read."),
        ("mysql://me:hunter2@host/db", "got mysql://."),
        ("sqlite:///hunter2.db", "got sqlite://. Without --storage, trials are kept in a file under --out."),
        ("redis://:hunter2@localhost/1", "got redis://."),
    ],
)
def test_bad_addresses_are_refused_without_repeating_a_secret(url, sentence, tmp_path, capsys):
    words = ["tune", "--out", str(tmp_path), "--dataset", "digits", "--steps", "4", "--storage", url, "--quiet"]
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "postgresql://USER@HOST/DATABASE" in captured.err
    assert sentence in captured.err
    assert "hunter2" not in captured.err
    assert not (tmp_path / "tuned").exists()


def test_a_database_that_never_answers_is_given_up_after_a_while(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(storage, "PATIENCE", 0.6)
    words = ["tune", "--out", str(tmp_path), "--dataset", "digits", "--steps", "4"]
    assert cli.main([*words, "--storage", "postgresql://me:hunter2@127.0.0.1:9/db"]) == 2  # nobody listens there
    told = capsys.readouterr().err
    assert "note: the database db at 127.0.0.1:9 does not answer (" in told
    assert "ccssl: the database db at 127.0.0.1:9 was lost (" in told
    assert "did not come back within 0.6 s" in told
    assert "hunter2" not in told


def test_without_optuna_the_command_says_what_to_install():
    code = "import sys; sys.modules['optuna'] = None; from ccssl import cli; sys.exit(cli.main(['tune', '--out', 'x']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == "ccssl: a search needs Optuna: install it with pip install 'ccssl[tune]'.\n"


def test_without_its_driver_a_database_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(InputError, match=r"pip install 'ccssl\[tune\]'"):
        storage._database("postgresql://me@host/db")


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs symbolic links")
@pytest.mark.parametrize("text", [b"", b"half", b"one\n", b"one\nhalf", b"one\ntwo\n"])
def test_mending_a_journal_drops_no_whole_line(text, tmp_path):
    journal = tmp_path / "journal.log"
    journal.write_bytes(text)
    os.symlink("nowhere", tmp_path / "journal.log.lock")
    storage._mend(journal)
    kept = journal.read_bytes()
    assert text.startswith(kept)
    assert kept.count(b"\n") == text.count(b"\n")
    assert kept == b"" or kept.endswith(b"\n")
    assert not os.path.lexists(tmp_path / "journal.log.lock")
