"""The demonstration: two runs and a page about them, the same every time, and never done twice."""

import json
import re

import pytest

from ccssl import cli, demo
from ccssl.errors import InputError
from ccssl.experiments.run import Stopped, read_result, read_run
from ccssl.reports.report import Report

STEPS = 20


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    return demo.run_demo(tmp_path_factory.mktemp("demo") / "new" / "folder", seed=3, steps=STEPS, quiet=True)


def files(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_both_runs_are_ordinary_ones(shown):
    folder = shown.page.parent
    for method in ("supervised", "ccssl-prop"):
        run = folder / f"{method}-seed3"
        config = read_run(run)
        assert (config.method, config.dataset, config.labels, config.seed) == (method, "digits", 40, 3)
        assert config.steps == STEPS
        evaluations = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert sorted(set(evaluations)) == list(range(2, STEPS + 1, 2))
    assert shown.page == folder / "index.html"
    assert {path.name for path in folder.iterdir()} == {"index.html", "supervised-seed3", "ccssl-prop-seed3"}


def test_the_full_demonstration_has_ten_evaluations_and_equal_settings():
    configs = [demo.config_of(method, seed=0) for method in demo.METHODS]
    assert [config.steps // config.eval_every for config in configs] == [10, 10]
    one, other = ({**config.to_dict(), "method": None} for config in configs)
    assert one == other


def test_the_report_compares_the_two_runs(shown):
    assert isinstance(shown.report, Report)
    assert (shown.report.focus.name, shown.report.baseline.name) == ("ccssl-prop", "supervised")
    assert shown.report.brought is not None
    ours, theirs = (read_result(run.folder) for run in (shown.report.run, shown.report.reference))
    assert ours["split"]["labeled"] + ours["split"]["calibration"] == theirs["split"]["labeled"] == 40
    assert ours["split"]["calibration"] == 10
    assert shown.report.brought.mean == pytest.approx(ours["test"]["accuracy"] - theirs["test"]["accuracy"])


def test_a_second_call_trains_nothing_and_says_the_same(shown, monkeypatch):
    from ccssl.training.loop import Training

    def step(self, batch):
        raise AssertionError("it trained")

    monkeypatch.setattr(Training, "step", step)
    folder = shown.page.parent
    before = {path: kept for path, kept in files(folder).items() if path != shown.page and path.name != ".lock"}
    page = shown.page.read_text(encoding="utf-8")
    again = demo.run_demo(folder, seed=3, steps=STEPS)
    assert again.figures() == shown.figures()
    assert again.page.read_text(encoding="utf-8") == page
    after = {path: kept for path, kept in files(folder).items() if path != shown.page and path.name != ".lock"}
    assert after == before


def test_an_interrupted_demonstration_goes_on(shown, tmp_path, monkeypatch):
    from ccssl.experiments.run import _Run

    check, seen = _Run._checkpoint, []

    def stop(self):
        check(self)
        seen.append(self.training.steps_done)
        if len(seen) == 3:
            raise Stopped(2, self.out)

    with monkeypatch.context() as patched:
        patched.setattr(_Run, "_checkpoint", stop)
        with pytest.raises(Stopped):
            demo.run_demo(tmp_path, seed=3, steps=STEPS, quiet=True)
    assert not (tmp_path / "index.html").exists()
    again = demo.run_demo(tmp_path, seed=3, steps=STEPS, quiet=True).figures()
    first = shown.figures()
    assert again["brought"] == first["brought"]
    for one, other in zip(again["runs"], first["runs"], strict=True):
        assert {**one, "folder": None} == {**other, "folder": None}


def test_figures_are_ready_for_json(shown):
    figures = json.loads(json.dumps(shown.figures(), allow_nan=False))
    assert figures["page"] == str(shown.page)
    assert [run["method"] for run in figures["runs"]] == ["supervised", "ccssl-prop"]
    assert figures["audit"]["calibration_items"] == 10
    assert (
        figures["brought"]["interval95"][0] <= figures["brought"]["accuracy"] <= figures["brought"]["interval95"][1]
    )


def test_the_table_fits_a_terminal_and_names_the_page(shown):
    lines = shown.table().splitlines()
    assert max(len(line) for line in lines[:-1]) <= 88
    assert lines[-1].endswith(str(shown.page))
    text = shown.table()
    for run in shown.report.figures()["runs"]:
        assert f"{run['name']} " in text
        assert f"{100 * run['test']['accuracy']:.1f}%" in text
    assert " ".join(shown.report.summary()) in " ".join(text.split())


def test_the_page_needs_nothing_from_outside(shown):
    page = shown.page.read_text(encoding="utf-8")
    assert len(page.encode()) < 3_000_000
    bare = re.sub(r'xmlns(:\w+)?="http://www\.w3\.org/[^"]*"', "", re.sub(r"base64,[^\"]*", "", page))
    assert not re.search(r"https?:|<script|<link|@import", bare)
    for place in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert place.startswith(("#", "data:image/png;base64,")), place


def test_the_command_prints_a_table_or_json(shown, capsys, monkeypatch):
    monkeypatch.setattr(demo, "run_demo", lambda out, seed: shown if (str(out), seed) == ("here", 3) else None)
    assert cli.main(["demo", "--out", "here", "--seed", "3"]) == 0
    assert capsys.readouterr().out == shown.table() + "\n"
    assert cli.main(["demo", "--out", "here", "--seed", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(shown.figures()))


def test_ctrl_c_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def stopped(out, seed):
        raise Stopped(2, out)

    monkeypatch.setattr(demo, "run_demo", stopped)
    with pytest.raises(SystemExit) as end:
        cli.main(["demo", "--out", str(tmp_path)])
    assert end.value.code == 130
    assert capsys.readouterr().err == "ccssl: stopped; the same command goes on\n"


def test_a_folder_with_another_demonstration_is_refused(shown):
    with pytest.raises(InputError, match=r"steps \(20 there, 30 here\)"):
        demo.run_demo(shown.page.parent, seed=3, steps=30, quiet=True)


def test_out_that_is_a_file_is_refused_before_any_work(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("mine")
    assert cli.main(["demo", "--out", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"ccssl: --out must name a folder, but {file} is a file.\n"
    assert file.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [file]
