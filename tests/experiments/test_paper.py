"""The paper's tables and figures, run at the smallest scale: everything is made once, shown in every format, kept."""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from ccssl.cli import main
from ccssl.experiments import study as studies
from ccssl.experiments.paper.artifacts import ARTIFACTS, CredalSets, Curves, SearchSpaces, Table
from ccssl.experiments.paper.plan import RUNS, cell, count_runs, shown
from ccssl.experiments.paper.results import Results
from ccssl.experiments.paper.scales import SCALES, configuration, run_name
from ccssl.experiments.paper.views import printed_cell

LINKS = ("link-prediction", "link-prediction-40-10-50", "link-prediction-30-20-50")
TESTS = Path(__file__).parents[1]


def command(*words):
    """Call the command line; return its exit code and what it wrote."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["paper", *map(str, words)])
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Everything that the paper shows, one seed each."""
    out = tmp_path_factory.mktemp("paper") / "study"
    code, told, err = command("run", "all", "--scale", "smoke", "--seeds", 1, "--threads", 1, "--out", out)
    assert code == 0, err
    assert re.fullmatch(r"\d+ runs made, 0 were there, 0 broken\n", told)
    return out


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A place for fetched data that holds none."""
    monkeypatch.setenv("CCSSL_HOME", str(tmp_path / "home"))


def runs(out):
    return sorted(path.name for path in (out / RUNS).iterdir() if path.is_dir())


def results(out):
    """Return what runs came to, but for what they cost."""
    found = {name: json.loads((out / RUNS / name / "result.json").read_text()) for name in runs(out)}
    return {name: {key: value for key, value in result.items() if key != "cost"} for name, result in found.items()}


def tables():
    return {name: artifact for name, artifact in ARTIFACTS.items() if isinstance(artifact, Table)}


# ---- everything, once -----------------------------------------------------------------------------------------------


def test_a_second_call_makes_nothing(study):
    before = {path: path.stat().st_mtime_ns for path in (study / RUNS).rglob("result.json")}
    code, told, err = command("run", "all", "--scale", "smoke", "--seeds", 1, "--out", study)
    assert (code, told, err) == (0, f"0 runs made, {len(before)} were there, 0 broken\n", "")
    assert before == {path: path.stat().st_mtime_ns for path in (study / RUNS).rglob("result.json")}


def test_the_text_shows_everything_and_says_at_which_scale(study):
    code, text, _ = command("show", "all", "--out", study)
    assert code == 0
    for artifact in ARTIFACTS.values():
        assert f"{artifact.title} ({artifact.place} of the paper)" in text
    assert "Not run yet" not in text
    assert "Part of the grid" not in text
    assert text.count(" at the scale smoke: 20 steps of a small network on the embedded 8x8 digits") == sum(
        getattr(artifact, "kind", None) == "images" for artifact in ARTIFACTS.values()
    )
    assert text.count(" at the scale smoke: 2 epochs on the embedded graph Nations in place of both") == len(LINKS)
    assert text.count("; 1 seed\n") == sum(isinstance(a, Table | Curves) for a in ARTIFACTS.values()) - 1


@pytest.mark.parametrize("name", tables())
def test_csv_holds_ours_and_the_papers_of_every_cell(name, study):
    table = tables()[name]
    _, text, _ = command("show", name, "--out", study, "--format", "csv", "--scale", "smoke")
    found = {(line["row"], line["column"]): line for line in csv.DictReader(io.StringIO(text))}
    columns = shown(table, "smoke")
    assert len(found) == len(table.rows) * len(columns)
    for row in table.rows:
        for column in columns:
            line = found[row.head, column.name]
            assert 0 <= float(line["ours"]) < 1e5, "ours is there"
            assert line["seeds"] == "1"
            assert line["ours deviation"] == ""
            paper = printed_cell(table, row, column)
            assert (line["paper"] == "") == (paper is None)
            if paper:
                assert float(line["paper"]) * table.factor == pytest.approx(paper.number)
                assert line["paper bold"] == str(paper.bold)
            assert bool(line["chosen"]) == (table.kind == "graphs")


@pytest.mark.parametrize("name", [name for name, a in ARTIFACTS.items() if not isinstance(a, Table)])
def test_csv_of_what_is_no_table(name, study):
    _, text, _ = command("show", name, "--out", study, "--format", "csv", "--scale", "smoke")
    lines = list(csv.DictReader(io.StringIO(text)))
    artifact = ARTIFACTS[name]
    if isinstance(artifact, Curves):
        drawn = {(line["line"], line["panel"]) for line in lines}
        assert drawn == {(row.head, c.name) for row in artifact.rows for c in artifact.columns}
        assert {int(line["step"]) for line in lines} == {5, 10, 15, 20}
    elif isinstance(artifact, SearchSpaces):
        assert len(lines) == len(artifact.rows)
    else:
        assert isinstance(artifact, CredalSets)
        assert all(sum(map(float, line["extreme point"].split())) == pytest.approx(1) for line in lines)


def test_markdown_has_whole_tables(study):
    _, text, _ = command("show", "all", "--out", study, "--format", "markdown")
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(blocks) > len(ARTIFACTS)
    for block in blocks:
        lines = block.splitlines()
        assert re.fullmatch(r"\| --- (\| ---: )*\|", lines[1])
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1, block
    assert text.count("### ") == len(ARTIFACTS)
    assert "![curves-250](figures/curves-250-smoke.svg)" in text


def test_latex_has_whole_tables(study):
    _, text, _ = command("show", "all", "--out", study, "--format", "latex")
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == len(ARTIFACTS)
    grids = re.findall(r"\\begin\{tabular\}\{(l.*?)\}\n(.*?)\\end\{tabular\}", text, re.DOTALL)
    for columns, body in grids:
        for line in body.splitlines():
            if not line.startswith(("\\toprule", "\\midrule", "\\bottomrule")):
                spanned = sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", line))
                assert len(re.split(r"(?<!\\)&", line)) + spanned == len(columns), line
                assert line.endswith(r"\\")
    assert not re.search(r"(?<!\\)[%#_](?! picture)", text), "what LaTeX takes for a command is escaped"
    assert not set(text) - set(map(chr, range(128)))


def test_figures_are_pictures_with_a_line_for_each_row(study):
    command("show", "all", "--out", study)
    folder = study / "figures"
    for name, artifact in ARTIFACTS.items():
        if isinstance(artifact, Curves) or getattr(artifact, "plot", ""):
            svg = (folder / f"{name}-smoke.svg").read_text()
            ET.fromstring(svg)
            assert all(f">{row.head}</text>" in svg for row in artifact.rows)
            assert (folder / f"{name}-smoke.csv").exists()
    assert ET.parse(folder / "credal-sets-3-classes.svg").getroot().tag.endswith("svg")


def test_more_seeds_are_run_with_the_chosen_settings_only(study, tmp_path):
    out = tmp_path / "study"
    shutil.copytree(study, out)
    before = set(runs(out))
    code, told, err = command("run", LINKS[0], "--scale", "smoke", "--seeds", 2, "--threads", 1, "--out", out)
    made = set(runs(out)) - before
    assert (code, len(made)) == (0, 18), err  # three models, three rows each, two ways to split
    assert told == "18 runs made, 36 were there, 0 broken\n"
    assert all("-seed1-" in name for name in made)
    assert err.startswith("settings are chosen by validation: 18 runs with other seeds\n")
    found = results(out)
    for name in made:
        chosen = name.replace("-seed1-", "-seed0-")
        beside = [other for other in before if other.startswith(chosen[: chosen.rindex("-")])]
        assert len(beside) == 2, "the grid of this scale"
        best = max(found[other]["validation"]["mrr"] for other in beside)
        assert found[chosen]["validation"]["mrr"] == best
    _, text, _ = command("show", LINKS[0], "--out", out)
    assert "; 2 seeds\n" in text
    assert re.search(r"ComplEx-CCSSL +0\.\d{3} ± 0\.\d{3}", text)


def test_list_counts_shared_runs_once(study):
    _, told, _ = command("list", "--json")
    listed = json.loads(told)
    assert [part["name"] for part in listed["artifacts"]] == list(ARTIFACTS)
    one_seed = listed["runs of all"]["smoke"] - len(runs(study))
    assert 0 < one_seed < listed["runs of all"]["smoke"], "the default are two seeds"
    alone = {part["name"]: part["runs"]["paper"] for part in listed["artifacts"]}
    assert count_runs(LINKS, "paper") == 1344 < sum(alone[name] for name in LINKS)
    _, text, _ = command("list")
    assert all(name in text for name in ARTIFACTS)


def test_a_metrics_line_that_was_cut_is_passed_over(study, tmp_path):
    out = tmp_path / "study"
    shutil.copytree(
        study / RUNS, out / RUNS, ignore=lambda _, names: [n for n in names if n.startswith("nations-")]
    )
    curves = ARTIFACTS["curves-250"]
    whole = [Results(out, "smoke").curve(curves, curves.rows[1], column) for column in curves.columns]
    for path in (out / RUNS).glob("*/metrics.jsonl"):
        with path.open("a") as file:
            file.write('{"step": 20, "phase": "te')
    assert [Results(out, "smoke").curve(curves, curves.rows[1], column) for column in curves.columns] == whole
    assert len(whole[0]) == 4
    assert command("show", "curves-250", "--out", out)[0] == 0


def test_the_median_of_the_last_evaluations(study):
    _, text, _ = command("show", "imbalance", "link-prediction", "--out", study, "--figure", "median20")
    assert text.count("Ours is the median of the last 20 evaluations") == 1, "link predictors have none"
    assert "Not run yet" not in text
    table = ARTIFACTS["link-prediction"]
    assert Results(study, "smoke").figure(table, table.rows[0], table.columns[0], "test")


def test_two_scales_in_a_folder_must_be_told_apart(study, tmp_path):
    out = tmp_path / "study"
    artifact = ARTIFACTS["imbalance"]
    for scale in ("smoke", "reduced"):
        settings = cell(artifact, artifact.rows[0], artifact.columns[0], scale)
        config = configuration(SCALES[scale], settings)
        folder = out / RUNS / run_name(config, config.dataset)
        folder.mkdir(parents=True)
        source = next((study / RUNS).glob("digits-*/result.json"))
        shutil.copy(source, folder / "result.json")
    code, _, err = command("show", "imbalance", "--out", out)
    assert code == 2
    assert f"{out} holds runs at the scales smoke and reduced: choose one with --scale." in err
    assert command("show", "imbalance", "--out", out, "--scale", "reduced")[0] == 0


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_an_unknown_artifact_suggests_the_nearest(tmp_path):
    for words in (("run", "acuracies", "--scale", "smoke"), ("show", "acuracies")):
        code, _, err = command(*words, "--out", tmp_path)
        assert code == 2
        assert "the paper has no artifact 'acuracies'" in err
        assert "Did you mean accuracies?" in err


def test_missing_data_are_named_with_what_needs_them(home, tmp_path):
    code, _, err = command("run", "imbalance", "curves-emnist", "--scale", "reduced", "--out", tmp_path / "study")
    assert code == 2
    assert "not here: emnist-byclass for imbalance, curves-emnist. Fetch by `ccssl data fetch NAME`" in err
    code, _, err = command(
        "run", "imbalance", "--scale", "smoke", "--data", tmp_path / "none", "--out", tmp_path / "s"
    )
    assert code == 2
    assert f"--data must be a folder that holds NAME.npz files or packed data sets, got {tmp_path / 'none'}." in err


def test_nothing_is_shown_of_a_folder_that_is_not_there(tmp_path):
    code, _, err = command("show", "imbalance", "--out", tmp_path / "none")
    assert code == 2
    assert f"there is no study in {tmp_path / 'none'}: run one by `ccssl paper run imbalance" in err
    assert command("show", "search-spaces", "graph-data", "--out", tmp_path / "none")[0] == 0, "they need no runs"


def test_a_study_that_has_not_begun_says_so(tmp_path):
    code, text, _ = command("show", "link-prediction", "imbalance", "--out", tmp_path, "--scale", "paper")
    assert code == 0
    assert text.count("nothing run yet") == 2
    assert text.count("Not run yet, or its data set is not here: ") == 2


def test_seeds_must_be_some(tmp_path):
    code, _, err = command("run", "gamma", "--scale", "smoke", "--seeds", 0, "--out", tmp_path)
    assert (code, "--seeds must be at least 1, got 0." in err) == (2, True)


def test_two_studies_cannot_write_the_same_folder(tmp_path):
    with studies._alone(tmp_path / RUNS):
        code, _, err = command("run", "link-prediction", "--scale", "smoke", "--out", tmp_path)
    assert code == 2
    assert f"another study is being run in {tmp_path / RUNS} (process {os.getpid()})" in err
    assert runs(tmp_path) == []


# ---- interruptions --------------------------------------------------------------------------------------------------


def test_a_study_survives_the_death_of_a_worker_and_a_stop_and_comes_to_the_same(study, tmp_path):
    words = ("run", "link-prediction", "--scale", "smoke", "--seeds", "1", "--threads", "1", "--out", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-m", "ccssl", "paper", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    finished = lambda: len(list((tmp_path / RUNS).glob("*/result.json")))  # noqa: E731
    try:
        wait_for(lambda: finished() >= 3)
        workers = children(process.pid)
        assert workers or sys.platform != "linux"
        for number in workers:
            os.kill(number, signal.SIGKILL)
        wait_for(lambda: finished() >= 6)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "stopped; what was done is kept, and the same command goes on with the rest" in err
    there = finished()
    assert there < 36
    code, told, err = command(*words)
    assert (code, told) == (0, f"{36 - there} runs made, {there} were there, 0 broken\n"), err
    uninterrupted = results(study)
    assert results(tmp_path) == {name: uninterrupted[name] for name in runs(tmp_path)}


def children(process):
    """Return the processes of Python that a process has started, but for the one that looks after shared resources."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            told = (path / "cmdline").read_text()
        except OSError:
            continue
        if int(fields[1]) == process and "spawn_main" in told:
            found.append(int(path.name))
    return found


def wait_for(condition, seconds=90):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.01)
