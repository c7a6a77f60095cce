"""Studies: what is missing is made, what is finished is kept, what breaks is told, and nothing else suffers from it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jobs
import pytest

from ccssl.errors import InputError
from ccssl.experiments import study
from ccssl.experiments.study import Job, StudyStopped, run_study

TESTS = Path(__file__).parents[1]


def tasks(**ends):
    return {name: Job(jobs.run, jobs.Task(end)) for name, end in ends.items()}


def tries(folder):
    return len((folder / "tries").read_text())


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)


def test_missing_runs_are_made_and_finished_ones_left_alone(tmp_path, capsys):
    outcome = run_study(tasks(a="well", b="well"), tmp_path)
    assert (outcome.made, outcome.skipped, outcome.broken) == (["a", "b"], 0, {})
    outcome = run_study(tasks(a="well", b="well", c="well"), tmp_path, workers=2, threads=1)
    assert (outcome.made, outcome.skipped) == (["c"], 2)
    assert [tries(tmp_path / name) for name in "abc"] == [1, 1, 1]
    assert json.loads((tmp_path / "c" / "result.json").read_text())["threads"] == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "[1/2] a, 3 s; about 3 s left",
        "[2/2] b, 3 s; all are made",
        "[3/3] c, 3 s; all are made",
    ]
    assert run_study(tasks(a="well"), tmp_path).skipped == 1


def test_what_breaks_is_tried_once_more_then_listed_and_tried_again_by_the_next_call(tmp_path, capsys):
    ends = {"a": "raise", "b": "refuse", "c": "die", "d": "raise once", "e": "die once", "f": "well"}
    outcome = run_study(tasks(**ends), tmp_path, workers=2, threads=1)
    assert sorted(outcome.made) == ["d", "e", "f"]
    assert outcome.broken["a"].startswith("ZeroDivisionError: planted (")
    assert outcome.broken["b"] == "lr must be smaller, got 7."
    assert "SIGKILL" in outcome.broken["c"]
    assert "fewer --workers" in outcome.broken["c"]
    assert {name: tries(tmp_path / name) for name in "abcdef"} == {"a": 2, "b": 2, "c": 2, "d": 2, "e": 2, "f": 1}
    assert 'raise ZeroDivisionError("planted")' in (tmp_path / "a" / "error.txt").read_text()
    assert not (tmp_path / "d" / "error.txt").exists()
    told = capsys.readouterr().err
    assert "a broke and is tried again: ZeroDivisionError" in told
    assert "a is broken: ZeroDivisionError" in told
    again = run_study(tasks(**{**ends, "a": "well"}), tmp_path, workers=2, threads=1)
    assert (again.made, again.skipped, sorted(again.broken)) == (["a"], 3, ["b", "c"])


def test_two_studies_cannot_write_the_same_folder(tmp_path):
    with study._alone(tmp_path), pytest.raises(InputError, match=rf"another study .*\(process {os.getpid()}\)"):
        run_study(tasks(a="well"), tmp_path)
    assert not (tmp_path / "a").exists()
    assert run_study(tasks(a="well"), tmp_path).made == ["a"]  # the lock went with its holder


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"engine": "proceses"}, "engine must be processes or ray, got 'proceses'. Did you mean processes?"),
        ({"workers": 0}, "workers must be at least 1, got 0."),
        ({"threads": -1}, "threads must be at least 1, got -1."),
    ],
)
def test_bad_options(options, sentence, tmp_path):
    with pytest.raises(InputError) as refused:
        run_study(tasks(a="well"), tmp_path, **options)
    assert str(refused.value) == sentence


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="a study cannot be kept in"):
        run_study(tasks(a="well"), tmp_path / "file")


def test_a_signal_lets_runs_keep_their_checkpoints(tmp_path):
    process = started(tmp_path, a="slow", b="slow", c="well")
    wait_for(lambda: all((tmp_path / name / "process").exists() for name in "ab"))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 7, (out, err)
    assert "stopped; what was done is kept, and the same command goes on with the rest" in out
    assert [(tmp_path / name / "checkpoint").exists() for name in "ab"] == [True, True]
    assert not (tmp_path / "c").exists()
    outcome = run_study(tasks(a="well", b="well", c="well"), tmp_path, threads=1)
    assert sorted(outcome.made) == ["a", "b", "c"]


def test_runs_end_with_a_study_that_was_killed(tmp_path):
    process = started(tmp_path, a="slow")
    wait_for(lambda: (tmp_path / "a" / "process").exists() and (tmp_path / "a" / "process").read_text())
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: (tmp_path / "a" / "checkpoint").exists())
    worker = int((tmp_path / "a" / "process").read_text())
    wait_for(lambda: not alive(worker))


def started(folder, **ends):
    """Run a study of two workers in a process of its own; it exits with 7 when it was stopped."""
    code = (
        "import sys, jobs\nfrom pathlib import Path\nfrom ccssl.experiments.study import Job, StudyStopped, run_study\n"
        "if __name__ == '__main__':\n"
        f"    tasks = {{name: Job(jobs.run, jobs.Task(end)) for name, end in {ends!r}.items()}}\n"
        f"    try: run_study(tasks, Path({str(folder)!r}), workers=2, threads=1)\n"
        "    except StudyStopped as stopped: print(stopped); sys.exit(7)\n"
    )
    script = folder.parent / f"{folder.name}.py"
    script.write_text(code)
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process}/status").read_text().find("State:\tZ") < 0 if sys.platform == "linux" else True


def test_the_estimate_knows_how_long_a_kind_of_run_takes(tmp_path):
    planned = {
        f"{method}{i}": Job(jobs.run, jobs.Task(method=method)) for method in ("quick", "long") for i in range(3)
    }
    for name, seconds in (("quick0", 10), ("long0", 100)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps({"cost": {"seconds": seconds}}))
    assert study._Progress(planned, tmp_path, workers=1).left() == 2 * 10 + 2 * 100
    assert study._Progress(planned, tmp_path, workers=2).left() == 110


def test_a_study_beside_the_main_thread_runs_without_signals(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run_study, tasks(a="well"), tmp_path).result().made == ["a"]


def test_a_second_signal_stops_at_once(tmp_path):
    before = signal.getsignal(signal.SIGTERM)

    def told_twice():
        with study._signals() as asked:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(asked, 5)
            assert asked() == signal.SIGTERM
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

    with pytest.raises(StudyStopped):
        told_twice()
    assert signal.getsignal(signal.SIGTERM) == before
