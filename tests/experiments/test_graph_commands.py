"""``ccssl graph``: every command once for real, its figures as text, JSON and files, and a sentence for bad input."""

import csv
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields

import pytest

from ccssl import cli
from ccssl.experiments.config import config_text
from ccssl.experiments.graph_run import read_run
from ccssl.experiments.graph_tables import result_table
from ccssl.graphs.config import METHODS, GraphConfig
from ccssl.graphs.export import names_of
from ccssl.graphs.files import load_graph
from ccssl.graphs.predictor import UNCALIBRATED, Link
from ccssl.graphs.training import Training
from ccssl.methods.config import CONFIGS
from ccssl.reports.graph_commands import COMMANDS

SMALL = ["--dim", "16", "--epochs", "4", "--eval-every", "2", "--batch", "256", "--lr", "0.03", "--device", "cpu"]
TRAIN = ["train", "--dataset", "nations", "--split", "40:40:20", "--method", "ccssl-diff", *SMALL]


def graph(capsys, *words):
    """Return exit code, output and error output of a command, whether it returned or ended the process."""
    try:
        code = cli.main(["graph", *map(str, words)])
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def nations(tmp_path_factory):
    """A run, and what training said of it."""
    out = tmp_path_factory.mktemp("runs") / "nations"
    command = [sys.executable, "-m", "ccssl", "graph", *TRAIN, "--out", str(out), "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr == ""
    return out, json.loads(done.stdout)


def test_training_leaves_a_run_and_prints_its_figures(nations, capsys):
    out, figures = nations
    assert json.loads((out / "result.json").read_text()) == figures
    assert 0.1 < figures["test"]["mrr"] < 1
    config = read_run(out)
    assert (config.dataset, config.method, config.dim, config.epochs) == ("nations", "ccssl-diff", 16, 4)


def test_without_json_figures_come_as_a_table_and_progress_as_lines(tmp_path, capsys):
    code, out, err = graph(capsys, *TRAIN, "--out", tmp_path / "run")
    assert code == 0
    assert [line.split()[:2] for line in err.splitlines()] == [["epoch", "2:"], ["epoch", "4:"]]
    assert [line.split("  ")[0] for line in out.splitlines()][:4] == [
        "filtered ranks of",
        "test, both",
        "test, tails",
        "test, heads",
    ]
    mrr = json.loads((tmp_path / "run" / "result.json").read_text())["test"]["mrr"]
    assert out.splitlines()[1].split() == ["test,", "both", f"{mrr:.4f}", *out.splitlines()[1].split()[3:]]


def test_evaluating_again_gives_the_same_figures(nations, capsys):
    out, figures = nations
    code, text, err = graph(capsys, "evaluate", out, "--json")
    assert (code, err) == (0, "")
    assert json.loads(text) == {name: figures[name] for name in ("test", "relations", "validation")}
    code, text, _ = graph(capsys, "evaluate", out)
    assert code == 0
    for name, found in figures["relations"].items():
        assert f"{name} " in text
        assert f"{found['mrr']:.4f}" in text


def queries_file(folder, *rows):
    path = folder / "ask.tsv"
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    return path


ASKED = (("brazil", "embassy", "?"), ("?", "embassy", "usa"))


def test_new_facts_of_queries_as_json(nations, tmp_path, capsys):
    code, text, _ = graph(
        capsys, "predict", nations[0], "--queries", queries_file(tmp_path, *ASKED), "--top", "2", "--json"
    )
    assert code == 0
    found = json.loads(text)
    facts = found["facts"]
    assert [(fact["asked"], fact["place"]) for fact in facts] == [
        ("tail", 1),
        ("tail", 2),
        ("head", 1),
        ("head", 2),
    ]
    assert all(list(fact) == list(Link._fields) for fact in facts)
    assert {(fact["head"], fact["relation"]) for fact in facts[:2]} == {("brazil", "embassy")}
    assert {(fact["tail"], fact["relation"]) for fact in facts[2:]} == {("usa", "embassy")}
    sets = found["sets"]
    assert sets["delta"] == 0.1
    assert sets["band"][0] <= 0.9 <= sets["band"][1]
    assert sets["queries"] == 402


def test_new_facts_of_queries_as_a_table(nations, tmp_path, capsys):
    code, text, _ = graph(capsys, "predict", nations[0], "--queries", queries_file(tmp_path, *ASKED), "--top", "3")
    assert code == 0
    sentence, *table = [line for line in text.splitlines() if line]
    assert sentence.startswith(
        "Prediction sets at delta 0.1, calibrated on 637 facts (calibration part of the split)"
    )
    assert "wanted: 90.0%" in sentence
    assert table[0].split()[:3] == ["head", "relation", "tail"]
    assert len(table) == 1 + 6
    assert all("embassy" in line for line in table[1:])


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_all_missing_links_go_to_a_file(nations, tmp_path, capsys, ending):
    path = tmp_path / "new" / f"links.{ending}"
    code, text, _ = graph(capsys, "predict", nations[0], "--out", path, "--top", "1")
    assert code == 0
    if ending == "csv":
        with path.open(newline="") as file:
            head, *rows = csv.reader(file)
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        table = parquet.read_table(path)
        head, rows = table.column_names, list(zip(*table.to_pydict().values(), strict=True))
    assert head == list(Link._fields)
    assert f"{len(rows):,} facts written to {path}" in text
    assert 600 < len(rows) <= 14 * 55  # the best of each query, where anything is missing
    assert len({tuple(map(str, row[:3])) for row in rows}) == len(rows)
    nations_facts = load_graph("nations")
    known = {
        (nations_facts.entities[h], nations_facts.relations[r], nations_facts.entities[t])
        for h, r, t in nations_facts.known[: len(nations_facts.known) // 2].tolist()
    }
    assert len(known) == 1992
    assert not known & {tuple(row[:3]) for row in rows}


def test_files_and_json_tell_how_much_was_written(nations, tmp_path, capsys):
    asked = queries_file(tmp_path, *ASKED)
    words = ["--queries", asked, "--out", tmp_path / "links.csv", "--sets", tmp_path / "sets.csv", "--json"]
    code, text, _ = graph(capsys, "predict", nations[0], *words)
    assert code == 0
    found = json.loads(text)
    assert found["queries"] == 2
    with (tmp_path / "sets.csv").open(newline="") as file:
        sets = list(csv.DictReader(file))
    assert [(row["head"], row["relation"], row["tail"]) for row in sets] == [tuple(row) for row in ASKED]
    for row in sets:
        assert len(names_of(row["set"])) == int(row["set_size"])
    with (tmp_path / "links.csv").open(newline="") as file:
        links = list(csv.DictReader(file))
    assert len(links) == found["facts"] > 5
    for link in links:
        side = sets[link["asked"] == "head"]
        answer = link[link["asked"]]
        assert (answer in names_of(side["set"])) == (link["in_set"] == "True")
        assert link["set_size"] == side["set_size"]


def test_delta_least_p_value_and_calibration_are_heard(nations, tmp_path, capsys):
    asked = queries_file(tmp_path, *ASKED)

    def told(*words):
        code, text, _ = graph(capsys, "predict", nations[0], "--queries", asked, "--json", "--top", "14", *words)
        assert code == 0
        return json.loads(text)

    plain, strict, each = told(), told("--delta", "0.5"), told("--per-relation")
    level = sorted(f["p_value"] for f in plain["facts"])[len(plain["facts"]) // 2]
    least = told("--min-p-value", str(level))
    assert strict["sets"]["delta"] == 0.5
    assert strict["sets"]["size"] < plain["sets"]["size"]
    assert [f for f in plain["facts"] if f["p_value"] >= level] == [
        {**f, "place": g["place"]}
        for f, g in zip(least["facts"], [f for f in plain["facts"] if f["p_value"] >= level], strict=True)
    ]
    assert 0 < len(least["facts"]) < len(plain["facts"])
    assert [f["p_value"] for f in each["facts"]] != [f["p_value"] for f in plain["facts"]]
    assert [f["score"] for f in each["facts"]] == [f["score"] for f in plain["facts"]]
    # Groups of a dozen facts can miss little of 10%, and the band says so.
    assert plain["sets"]["band"][0] < 0.9 < plain["sets"]["band"][1]
    assert sum(each["sets"]["band"]) / 2 > 0.9
    assert each["sets"]["band"][1] > plain["sets"]["band"][1]
    text = graph(capsys, "predict", nations[0], "--per-relation")[1]
    assert "637 facts (calibration part of the split), each relation and direction by itself: " in text
    assert "(wanted: at least 90.0%; {:.1%} to {:.1%} where".format(*each["sets"]["band"]) in text


def test_without_queries_the_way_to_see_facts_is_told(nations, capsys):
    code, text, _ = graph(capsys, "predict", nations[0])
    assert code == 0
    assert "Name a file of --queries to see new facts here, or --out FILE to write those of all queries." in text


def test_no_queries_in_a_file_are_no_facts(nations, tmp_path, capsys):
    empty = queries_file(tmp_path)
    for ending in ("csv", "parquet"):
        path = tmp_path / f"links.{ending}"
        code, text, _ = graph(capsys, "predict", nations[0], "--queries", empty, "--out", path)
        assert code == 0
        assert f"0 facts written to {path}" in text
        assert path.exists()


def family(folder):
    folder.mkdir()
    for part, rows in {
        "train": [
            "ada parent bob",
            "bob parent cy",
            "ada knows cy",
            "cy knows bob",
            "bob knows ada",
            "cy knows ada",
        ],
        "valid": ["ada knows bob"],
        "test": ["bob knows cy"],
        "unlabeled": ["cy parent ?", "? knows ada"],
    }.items():
        (folder / f"{part}.tsv").write_text("".join(row.replace(" ", "\t") + "\n" for row in rows))
    return folder


def test_a_folder_of_ones_own(tmp_path, capsys):
    folder = family(tmp_path / "family")
    words = ["--dataset", folder, "--split", "all", "--method", "pseudo-label", *SMALL, "--out", tmp_path / "run"]
    code, text, _ = graph(capsys, "train", *words, "--json", "--quiet")
    assert code == 0
    assert json.loads(text)["split"]["queries"] == 2
    code, text, _ = graph(
        capsys, "predict", tmp_path / "run", "--queries", folder / "unlabeled.tsv", "--json", "--delta", "0.5"
    )
    assert code == 0
    known = {"ada knows bob", "bob knows cy", *(folder / "train.tsv").read_text().replace("\t", " ").splitlines()}
    facts = {f"{f['head']} {f['relation']} {f['tail']}" for f in json.loads(text)["facts"]}
    assert facts == {f"cy parent {t}" for t in ("ada", "bob", "cy")} | {"ada knows ada"}
    assert not facts & known
    (folder / "train.tsv").write_text("ada\tparent\tbob\n")
    code, _, err = graph(capsys, "evaluate", tmp_path / "run")
    assert code == 2
    assert "was run on other triples" in err


def test_where_nothing_calibrates_nothing_is_said_of_it(tmp_path, capsys):
    (tmp_path / "family").mkdir()
    (tmp_path / "family" / "train.tsv").write_text("ada\tparent\tbob\nbob\tparent\tcy\nada\tknows\tcy\n")
    run = tmp_path / "run"
    words = ["--dataset", tmp_path / "family", "--split", "all", "--method", "supervised", *SMALL, "--out", run]
    code, text, _ = graph(capsys, "train", *words, "--quiet")
    assert (code, text) == (0, "The graph has neither test nor validation facts: there is nothing to rank.\n")
    assert graph(capsys, "evaluate", run)[1] == text
    code, text, _ = graph(capsys, "predict", run, "--out", tmp_path / "x.csv", "--sets", tmp_path / "sets.csv")
    assert code == 0
    assert text.splitlines()[0] == UNCALIBRATED
    for name, empty in (("x", {"p_value", "possibility", "in_set", "set_size"}), ("sets", {"set_size", "set"})):
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert rows
        for row in rows:
            assert {column for column, field in row.items() if field == ""} == empty
    asked = queries_file(tmp_path, ("bob", "knows", "?"))
    found = json.loads(graph(capsys, "predict", run, "--queries", asked, "--json")[1])
    assert found["note"] == UNCALIBRATED
    assert {(fact["p_value"], fact["in_set"], fact["set_size"]) for fact in found["facts"]} == {(None, None, None)}
    text = graph(capsys, "predict", run, "--queries", asked)[1]
    assert UNCALIBRATED in text
    assert text.splitlines()[2].split() == ["head", "relation", "tail", "asked", "score", "probability"]


def test_kinds_of_ties_are_shown_where_they_read_differently():
    plain = {"mrr": 0.5, "hits@1": 0.25, "hits@3": 0.5, "hits@10": 1.0}
    test = {f"{ties}{side}{name}": value for name, value in plain.items()
            for ties in ("", "optimistic.", "pessimistic.") for side in ("", "tail.", "head.")}  # fmt: skip
    test |= {"optimistic.mrr": 0.5000001, "pessimistic.mrr": 0.4999999, "pessimistic.head.mrr": 0.4}
    titles = [line.split("  ")[0] for line in result_table({"test": test}).splitlines()[1:]]
    assert titles == ["test, both", "test, tails", "test, heads", "test, pessimistic heads"]


def test_a_run_is_resumed_with_its_own_configuration(tmp_path, monkeypatch, capsys):
    step = Training.step

    def kick(self):
        step(self)
        if self.steps_done == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Training, "step", kick)
    code, out, err = graph(capsys, *TRAIN, "--out", tmp_path / "run", "--quiet")
    assert (code, out) == (128 + signal.SIGTERM, "")
    assert err == f"ccssl: stopped; go on with: ccssl graph train --resume --out {tmp_path / 'run'}\n"
    monkeypatch.undo()
    code, out, err = graph(capsys, "train", "--resume", "--out", tmp_path / "run", "--quiet", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["epochs"] == 4
    code, _, err = graph(capsys, "train", "--resume", "--out", tmp_path / "run", "--lr", "0.5")
    assert code == 2
    assert "lr (0.03 there, 0.5 here)" in err


def test_a_configuration_may_come_from_a_file(tmp_path, capsys):
    (tmp_path / "settings.yaml").write_text(
        "dataset: nations\nmethod: ccssl-prop\noptions: {gamma: 0.5}\nepochs: 1\n"
    )
    words = ["--config", tmp_path / "settings.yaml", "--dim", "8", "--quiet", "--out", tmp_path / "run"]
    assert graph(capsys, "train", *words)[0] == 0
    config = read_run(tmp_path / "run")
    assert (config.method, config.options, config.epochs, config.dim) == ("ccssl-prop", {"gamma": 0.5}, 1, 8)


@pytest.mark.parametrize("name", [f.name for f in fields(GraphConfig) if f.name != "options"])
def test_every_field_has_a_flag_with_a_word_on_it(name, capsys):
    code, out, _ = graph(capsys, "train", "--help")
    assert code == 0
    assert f"--{name.replace('_', '-')} " in out or f"--{name.replace('_', '-')}," in out


def test_hyperparameters_of_the_rooms_methods_have_flags_and_no_others(capsys):
    out = graph(capsys, "train", "--help")[1]
    ours = {f.name for method in METHODS for f in fields(CONFIGS[method])}
    others = (
        {f.name for method in CONFIGS for f in fields(CONFIGS[method])}
        - ours
        - {f.name for f in fields(GraphConfig)}
    )
    assert all(f"--{name}" in out for name in ours)
    assert not any(f"--{name.replace('_', '-')} " in out for name in others)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "Did you mean train?"),
        (["train", "--out", "RUN", "--dataset", "umsl"], "Did you mean umls?"),
        (["train", "--out", "RUN", "--method", "ccssl-dif"], "Did you mean ccssl-diff?"),
        (["train", "--out", "RUN", "--model", "complx"], "Did you mean complex?"),
        (["train", "--out", "RUN", "--split", "40:60:"], "got '40:60:'"),
        (["train", "--out", "RUN", "--split", "all", "--method", "ccssl-diff"], "split all leaves none"),
        (["train", "--out", "RUN", "--split", "40:60", "--method", "ccssl-prop"], "needs calibration facts"),
        (["train", "--out", "RUN", "--dim", "7"], "divisible by 2, got 7"),
        (["train", "--out", "RUN", "--epochs", "many"], "many"),
        (["train", "--out", "RUN", "--epoch", "3"], "Did you mean --epochs?"),
        (["train", "--out", "RUN", "--gamma", "1", "--method", "ccssl-diff"], "got 'gamma'"),
        (["train", "--out", "RUN", "--device", "abacus"], "got 'abacus'"),
        (["train", "--dataset", "umls"], "--out"),
        (["evaluate", "RUN"], "RUN is not the folder of a run"),
        (["predict", "RUN"], "RUN is not the folder of a run"),
        (["predict", "NATIONS", "--queries", "none.tsv"], "none.tsv: No such file or directory"),
        (
            ["predict", "NATIONS", "--queries", "ASK"],
            "line 2: the graph has no entity 'brasil'. Did you mean brazil?",
        ),
        (["predict", "NATIONS", "--top", "0", "--out", "links.csv"], "top must be at least 1, got 0"),
        (["predict", "NATIONS", "--delta", "1.5"], "delta must lie in [0, 1], got 1.5"),
        (["predict", "NATIONS", "--min-p-value", "-1", "--out", "x.csv"], "min_p_value must lie in [0, 1], got -1"),
        (["predict", "NATIONS", "--out", "links.json"], "ends with .csv or .parquet, got links.json"),
        (["predict", "NATIONS", "--top", "0"], "top must be at least 1, got 0"),
        (["predict", "NATIONS", "--out", "o.csv", "--sets", "s.txt"], "ends with .csv or .parquet, got s.txt"),
        (["predict", "NATIONS", "--sets", "sets.txt"], "ends with .csv or .parquet, got sets.txt"),
        (["evaluate", "NATIONS", "--device", "abacus"], "got 'abacus'"),
    ],
)
def test_bad_input_gets_a_sentence_and_code_2(nations, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    asked = queries_file(tmp_path, ASKED[0], ("brasil", "embassy", "?"))
    words = [{"NATIONS": str(nations[0]), "ASK": str(asked)}.get(word, word) for word in words]
    code, out, err = graph(capsys, *words)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "RUN" / "config.yaml").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name != "RUN"] == ["ask.tsv"]


def test_runs_on_images_are_told_apart(tmp_path, capsys):
    from ccssl.experiments.config import RunConfig

    (tmp_path / "config.yaml").write_text(config_text(RunConfig()))
    code, _, err = graph(capsys, "evaluate", tmp_path)
    assert code == 2
    assert "is a run on images" in err


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)])
def test_help_is_quick_and_loads_nothing_heavy(words):
    code = (
        "import sys; from ccssl.cli import main\n"
        f"try: main(['graph', *{words!r}, '--help'])\n"
        "finally: print([name for name in ('torch', 'numpy', 'scipy') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"
    assert f"usage: ccssl graph{''.join(' ' + word for word in words)}" in done.stdout
