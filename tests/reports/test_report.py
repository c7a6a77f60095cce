"""The report in words: every sentence is true to the figures, whatever the runs have shown."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from ccssl import cli
from ccssl.errors import InputError
from ccssl.experiments.run import read_result
from ccssl.metrics import DELTAS
from ccssl.reports import report as reporting
from ccssl.reports.report import class_table, page_for, report
from ccssl.reports.runs import Difference, Figure, over_items, over_seeds


@pytest.fixture(scope="module")
def one(runs):
    return report([runs["ccssl-prop", 0]])


@pytest.fixture(scope="module")
def pair(runs):
    return report([runs["supervised", 0], runs["ccssl-prop", 0]])


@pytest.fixture(scope="module")
def many(runs):
    return report(list(runs.values()))


def said(found):
    return " ".join(found.summary())


def figures_of(runs, method, phase, name):
    return [read_result(runs[method, seed])[phase][name] for seed in (0, 1)]


def percent(values):
    """Return mean and deviation as the report writes them."""
    if len(values) == 1:
        return f"{100 * values[0]:.1f}%"
    return f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f}%"


# ---- what is looked at --------------------------------------------------------------------------------------------


def test_the_method_with_the_most_to_show_is_looked_at(many, pair, one, runs):
    for methods, focus in (
        (["supervised", "fixmatch", "cssl", "ccssl-prop"], "ccssl-prop"),
        (["supervised", "fixmatch", "cssl"], "cssl"),
        (["supervised", "fixmatch"], "fixmatch"),
    ):
        assert report([runs[method, 0] for method in methods]).focus.name == focus
    assert [group.name for group in many.groups] == ["supervised", "ccssl-prop", "cssl", "fixmatch"]
    for found in (many, pair, one):
        assert found.focus.name == "ccssl-prop"
        assert found.run.config.seed == 0
    assert many.baseline is many.groups[0]
    assert many.reference is not None
    assert many.reference.config.seed == 0
    assert one.baseline is one.reference is one.reference_seen is one.brought is None


def test_the_two_networks_looked_at_had_the_same_labels(runs):
    found = report([runs["supervised", 1], runs["ccssl-prop", 0], runs["ccssl-prop", 1]])
    assert found.run.config.seed == found.reference.config.seed == 1
    assert (np.isin(found.seen.split.labeled, found.reference_seen.split.labeled)).all()


def test_supervised_only_runs_can_be_reported_alone(runs):
    found = report([runs["supervised", 0], runs["supervised", 1]])
    assert found.focus.name == "supervised"
    assert found.baseline is found.brought is found.seen.audit is found.seen.lesson is None
    text = said(found)
    accuracy = percent(figures_of(runs, "supervised", "test", "accuracy"))
    assert text == (
        "From 24 labels of strange.npz, supervised learned in 16 steps to name, on average over 2 draws of labels, "
        f"{accuracy} of 60 test images rightly."
    )


# ---- sentences ----------------------------------------------------------------------------------------------------


def test_the_summary_of_one_run(one, runs):
    text, result = said(one), read_result(runs["ccssl-prop", 0])
    assert text.startswith(
        "From 24 labels, 6 of them kept aside for calibration, and 96 unlabeled images of strange.npz, ccssl-prop "
        f"learned in 16 steps to name {percent([result['test']['accuracy']])} of 60 test images rightly. "
    )
    assert "What the unlabeled images brought is not known" in text
    assert (
        f"Of its pseudo-labels for unlabeled images, {percent([result['unlabeled']['accuracy']])} are right."
        in text
    )
    errors = [percent([result["test"][f"validity_error@{delta:g}"]]) for delta in DELTAS]
    assert f"{errors[0]} at 0.05, {errors[1]} at 0.1 and {errors[2]} at 0.25: the promise is kept." in text
    assert f"a mean possibility of {result['test']['efficiency']:.2f} open, between 0.25, one class alone" in text
    assert "None" not in text
    assert "nan" not in text


def test_the_summary_of_several_runs_speaks_of_means(many, runs):
    text = said(many)
    assert (
        f"on average over 2 draws of labels, {percent(figures_of(runs, 'ccssl-prop', 'test', 'accuracy'))} of"
        in text
    )
    alone = percent(figures_of(runs, "supervised", "test", "accuracy"))
    assert f"taught by the labels alone, is right on {alone}: " in text
    assert "95% interval over 2 draws of labels: " in text
    best = max(many.groups, key=lambda group: group.figure("test", "accuracy").mean)
    accuracy = percent(figures_of(runs, best.name, "test", "accuracy"))
    assert f"Of the 4 compared here, {best.name} is the most accurate, with {accuracy}." in text
    assert "the audit of seed 0 finds that the promise is kept." in text


def test_a_method_without_calibration_promises_nothing(runs):
    text = said(report([runs["cssl", 0]]))
    assert "Its degrees of possibility promise nothing; the true class got at most δ for " in text
    assert "kept" not in text
    assert "possib" not in said(report([runs["fixmatch", 0]]))


def test_a_broken_promise_is_told(one):
    broken = replace(one, seen=replace(one.seen, audit=replace(one.seen.audit, valid=False)))
    assert said(broken).count("the promise is broken.") == 1
    assert "kept." not in said(broken)


@pytest.mark.parametrize(
    ("brought", "words"),
    [
        (
            Difference(0.051, 0.02, 0.082, "X"),
            "the unlabeled images brought 5.1 points (95% interval over X: +2.0 to +8.2)",
        ),
        (
            Difference(-0.051, -0.082, -0.02, "X"),
            "the unlabeled images cost 5.1 points (95% interval over X: −8.2 to −2.0)",
        ),
        (
            Difference(0.01, -0.02, 0.04, "X"),
            "a difference of +1.0 points, which chance alone may explain (95% interval over X: −2.0 to +4.0)",
        ),
        (Difference(-0.0001, -0.02, 0.02, "X"), "a difference of +0.0 points, which chance"),
        (None, "but with other labels: without a seed in common, the difference says little."),
    ],
)
def test_what_unlabeled_images_brought(pair, brought, words):
    assert words in said(replace(pair, brought=brought))


# ---- the difference -----------------------------------------------------------------------------------------------


def test_one_seed_is_compared_item_by_item(pair):
    ours, theirs = pair.seen.test.right, pair.reference_seen.test.right
    assert pair.brought == over_items(int((ours & ~theirs).sum()), int((theirs & ~ours).sum()), 60)
    accuracies = [run.result["test"]["accuracy"] for run in (pair.run, pair.reference)]
    assert pair.brought.mean == pytest.approx(accuracies[0] - accuracies[1])


def test_several_seeds_are_compared_within_seeds(many, runs):
    ours, theirs = (figures_of(runs, method, "test", "accuracy") for method in ("ccssl-prop", "supervised"))
    assert many.brought == over_seeds([a - b for a, b in zip(ours, theirs, strict=True)])


def test_only_seeds_in_common_are_compared(runs, tmp_path):
    third = tmp_path / "third"  # as if it had been run with another seed
    shutil.copytree(runs["ccssl-prop", 1], third)
    for name, old, new in (("config.yaml", "seed: 1\n", "seed: 7\n"), ("result.json", '"seed": 1', '"seed": 7')):
        text = (third / name).read_text()
        assert text.count(old) == 1
        (third / name).write_text(text.replace(old, new))
    folders = [runs[key] for key in (("supervised", 0), ("supervised", 1), ("ccssl-prop", 0), ("ccssl-prop", 1))]
    found = report([*folders, third])
    assert found.brought.over == "the 2 draws of labels in common"
    assert found.brought.mean == report(folders).brought.mean
    assert report([runs["supervised", 0], third]).brought is None


# ---- cautions -----------------------------------------------------------------------------------------------------


def test_cautions_say_what_a_reader_must_not_overlook(one, many):
    told = one.cautions()
    assert any(caution.startswith("With 6 calibration items no p-value is below 1/7") for caution in told)
    assert any("nothing is ever excluded at δ = 0.05, 0.1:" in caution for caution in told)
    assert any("one draw of labels, seed 0" in caution for caution in told)
    assert not any("one draw" in caution for caution in many.cautions())


def test_a_lopsided_comparison_is_named(pair, runs):
    assert not any("more than the method" in caution for caution in pair.cautions())
    other = replace(pair.baseline.runs[0], config=replace(pair.baseline.config, steps=99, lr=0.5))
    told = replace(pair, baseline=replace(pair.baseline, runs=(other,))).cautions()
    assert "Supervised-only training differs in more than the method: steps 99, not 16; lr 0.5, not 0.03." in told


def test_metrics_that_were_cut_off_are_named(runs, tmp_path):
    folder = tmp_path / "cut"
    shutil.copytree(runs["cssl", 0], folder)
    text = (folder / "metrics.jsonl").read_text()
    place = text.index('{"step": 12')
    (folder / "metrics.jsonl").write_text(text[: place + 9])
    found = report([runs["supervised", 0], folder])
    assert any(f"{folder}/metrics.jsonl is cut off after step 8 of 16" in caution for caution in found.cautions())
    assert found.focus.over_time("test", "accuracy")[0] == [4, 8]
    assert not any("cut off" in caution for caution in report([runs["cssl", 0]]).cautions())
    (folder / "metrics.jsonl").unlink()
    assert any("cut off after step 0 of 16" in caution for caution in report([folder]).cautions())


# ---- tables -------------------------------------------------------------------------------------------------------


def test_the_table_has_a_row_a_group_and_a_column_a_figure(many, runs):
    lines = many.table().split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["supervised", "ccssl-prop", "cssl", "fixmatch"]
    assert f" {percent(figures_of(runs, 'cssl', 'test', 'accuracy'))} " in lines[4]
    assert "validity" not in lines[0]
    assert lines[6].split()[-3:] == ["5.0%", "10.0%", "25.0%"]
    reach = many.seen.audit.rows[2].band[1]
    assert lines[7].split()[-3:] == ["–", "–", f"{reach:.1%}"]
    alone = report([runs["supervised", 0]]).table()
    assert "error" not in alone
    assert "possibility" not in alone


def test_the_table_of_classes_counts_every_class(pair):
    rows = class_table(pair)
    test, other = pair.seen.test, pair.reference_seen.test
    assert [row["labels"] for row in rows] == [6] * 4
    assert sum(row["images"] for row in rows) == 60
    for k, row in enumerate(rows):
        mine = test.labels == k
        assert row["right"] == (test.predicted[mine] == k).mean()
        assert row["alone"] == (other.predicted[mine] == k).mean()
        assert row["error"] == (test.possibility[mine, k] <= 0.1).mean()
        named = test.predicted == k
        assert row["called"] == ((test.labels[named] == k).mean() if named.any() else None)
    shares = [row["right"] * row["images"] for row in rows]
    assert sum(shares) / 60 == pytest.approx(pair.run.result["test"]["accuracy"])


def test_a_class_that_is_never_named_has_no_precision(pair):
    predicted = np.eye(4)[np.zeros(60, int)]
    test = replace(pair.seen.test, probabilities=predicted)
    rows = class_table(replace(pair, seen=replace(pair.seen, test=test)))
    assert [row["called"] is None for row in rows] == [False, True, True, True]


def test_figures_are_ready_for_json(many, one, secret_run):
    for found in (many, one, report([secret_run])):
        figures = json.loads(json.dumps(found.figures(), allow_nan=False))
        assert figures["summary"] == said(found)
        assert len(figures["runs"]) == sum(len(group.runs) for group in found.groups)
        assert (figures["brought"] is None) == (found.brought is None)
    assert {run["method"] for run in many.figures()["runs"]} == {"supervised", "ccssl-prop", "cssl", "fixmatch"}
    assert "cost" not in many.figures()["runs"][0]


# ---- the page's place and the command -----------------------------------------------------------------------------


def test_where_the_page_goes(tmp_path):
    run = tmp_path / "run"
    assert page_for([run], None) == run / "report.html"
    assert page_for([run, tmp_path], tmp_path / "x.html") == tmp_path / "x.html"
    with pytest.raises(InputError, match="--out must name the page"):
        page_for([run, tmp_path], None)
    with pytest.raises(InputError, match=r"--out must name a file, but .* is a folder"):
        page_for([run], tmp_path)


def test_the_command_writes_the_page_and_prints_the_table(runs, tmp_path, capsys):
    page = tmp_path / "new" / "page.html"
    folders = [str(runs["supervised", 0]), str(runs["ccssl-prop", 0])]
    assert cli.main(["report", *folders, "--out", str(page)]) == 0
    out = capsys.readouterr().out
    table = report([runs["supervised", 0], runs["ccssl-prop", 0]]).table()
    assert out == f"{table}\n\nThe page with figures and images: {page}\n"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert cli.main(["report", *folders, "--out", str(page), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["page"] == str(page)
    assert [run["folder"] for run in figures["runs"]] == folders


@pytest.mark.parametrize("words", [["nowhere"], ["nowhere", "elsewhere"], [".", "--out", "."]])
def test_bad_input_is_one_sentence_and_exit_code_2(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_columns_say_percent_or_a_plain_number():
    column = {column.figure: column for column in reporting.COLUMNS}
    assert column["accuracy"].text(None) == "–"
    assert column["accuracy"].text(Figure(0.5, 0.01)) == "50.0 ± 1.0%"
    assert column["ece"].text(Figure(0.5, None)) == "0.500"
