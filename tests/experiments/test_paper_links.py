"""Link predictors of the paper: of each grid the best on validation is shown, and nothing else decides."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ccssl.experiments.paper import links
from ccssl.experiments.paper.artifacts import ARTIFACTS, GRID, LINK_SETTINGS
from ccssl.experiments.paper.plan import RUNS, cell, cells, chosen_runs, grids, plan
from ccssl.experiments.paper.results import Results
from ccssl.experiments.paper.scales import SCALES
from ccssl.experiments.paper.views import view
from ccssl.graphs.config import GraphConfig
from ccssl.graphs.files import load_graph
from ccssl.graphs.splits import split_of

LINKS = ("link-prediction", "link-prediction-40-10-50", "link-prediction-30-20-50")
TABLE = ARTIFACTS["link-prediction"]


def row_of(head, table=TABLE):
    return next(row for row in table.rows if row.head == head)


def column_of(name, table=TABLE):
    return next(column for column in table.columns if column.name == name)


def settings_of(head="ComplEx-CCSSL", column="UMLS, MRR, split in pairs", scale="paper", table=TABLE):
    return cell(table, row_of(head, table), column_of(column, table), scale)


def grid_of(**which):
    return links.grid(SCALES[which.get("scale", "paper")], settings_of(**which))


def write(out, config, validation, test):
    """Write a finished run."""
    folder = out / RUNS / links.run_name(config)
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"mrr": test, "hits@1": test, "hits@3": test}
    cost = {"seconds": 1.0, "device": "cpu", "machine": "here", "threads": 1}
    split = {"labeled": 1, "calibration": 1, "unlabeled": 1, "validation": 652, "test": 661}
    result = {"test": figures, "validation": {"mrr": validation}, "steps": 5, "split": split, "cost": cost}
    (folder / "result.json").write_text(json.dumps(result))


def test_the_best_on_validation_is_shown_though_all_others_are_better_on_test(tmp_path):
    configs = grid_of()
    for i, config in enumerate(configs):
        write(tmp_path, config, validation=0.5 if i == 4 else 0.4 - i / 100, test=0.1 if i == 4 else 0.9)
    results = Results(tmp_path, "paper")
    assert results.chosen(settings_of()).config == configs[4]
    row = row_of("ComplEx-CCSSL")
    ours = results.figure(TABLE, row, column_of("UMLS, MRR, split in pairs"), "test")
    assert (ours.mean, ours.deviation, ours.seeds) == (0.1, None, 1)
    further = chosen_runs(["link-prediction"], "paper", tmp_path, seeds=3)
    assert {job.config.seed for job in further.values()} == {0, 1, 2}
    assert {(job.config.lr, job.config.batch, job.config.epochs) for job in further.values()} == {
        (configs[4].lr, configs[4].batch, configs[4].epochs)
    }


def test_the_other_seeds_count_in_the_figure_but_not_in_the_choice(tmp_path):
    configs = grid_of()
    for i, config in enumerate(configs):
        write(tmp_path, config, validation=0.5 - i / 100, test=0.3)
    write(tmp_path, replace(configs[0], seed=1), validation=0.0, test=0.5)
    write(tmp_path, replace(configs[0], seed=2), validation=0.0, test=0.7)
    write(tmp_path, replace(configs[1], seed=1), validation=0.99, test=0.0)
    results = Results(tmp_path, "paper")
    ours = results.figure(TABLE, row_of("ComplEx-CCSSL"), column_of("UMLS, H@1, split in pairs"), "test")
    assert ours.mean == pytest.approx(0.5)
    assert (ours.deviation, ours.seeds) == (pytest.approx(0.2), 3)


def test_equal_validation_takes_the_first_and_what_is_not_finished_takes_no_part(tmp_path):
    configs = grid_of()
    choice = links.choose(configs, lambda config: 0.4 if config in configs[2:4] else None)
    assert choice == links.Choice(configs[2], 0.4, 2, 12)
    assert links.choose(configs, lambda config: None) is None
    (tmp_path / links.run_name(configs[0])).mkdir()
    assert links.validation_mrr(tmp_path / links.run_name(configs[0])) is None


def test_a_grid_that_is_not_complete_is_told(tmp_path):
    configs = grid_of()
    for config in configs[:-1]:
        write(tmp_path, config, validation=0.4, test=0.3)
    notes = view("link-prediction", TABLE, Results(tmp_path, "paper")).notes
    told = "Chosen while some runs of the grid were not finished or broken: ComplEx-CCSSL (UMLS, split in pairs)."
    assert told in notes
    write(tmp_path, configs[-1], validation=0.4, test=0.3)
    notes = view("link-prediction", TABLE, Results(tmp_path, "paper")).notes
    assert not any(note.startswith("Chosen while") for note in notes)


def test_what_was_chosen_is_shown(tmp_path):
    configs = grid_of()
    for config in configs:
        best = (config.lr, config.batch, config.epochs) == (0.1, 1024, 5)
        write(tmp_path, config, validation=0.5 if best else 0.4, test=0.3)
    *_, grid = view("link-prediction", TABLE, Results(tmp_path, "paper")).grids
    assert grid.columns[0] == "chosen: lr / batch / epochs"
    cells = {row[0].text: [c.text for c in row[1:]] for _, row in grid.rows}
    assert cells["ComplEx-CCSSL"] == ["0.1 / 1024 / 5", "–", "–", "–"]
    assert cells["ComplEx-PL"] == ["–"] * 4


def test_the_grid_is_the_papers():
    configs = grid_of()
    assert len(configs) == 3 * 2 * 2
    assert {config.lr for config in configs} == {0.01, 0.1, 0.001}
    assert {config.batch for config in configs} == {512, 1024}
    assert {config.epochs for config in configs} == {5, 50}
    assert GRID.keys() == {"lr", "batch", "epochs"}
    for config in configs:
        assert (config.loss, config.batch_of, config.optimizer, config.seed) == ("ce", "facts", "adam", 0)
        assert all(getattr(config, name) == value for name, value in LINK_SETTINGS.items())
        assert config.eval_every == config.epochs, "evaluated once, at its end"


def test_no_default_of_the_library_decides_about_the_papers_runs():
    told = {*LINK_SETTINGS, *GRID, *settings_of(), "seed", "device", "eval_every"}
    assert {field.name for field in fields(GraphConfig)} == told, "say in LINK_SETTINGS what the paper did"


@pytest.mark.parametrize("name", LINKS)
def test_each_row_is_divided_as_its_table_says(name):
    split = {"link-prediction": "40:40:20"}.get(name, name.removeprefix("link-prediction-").replace("-", ":"))
    table = ARTIFACTS[name]
    for head, column in ((r, c) for r in table.rows for c in table.columns):
        settings = cell(table, head, column, "paper")
        if settings["method"] == "ccssl-diff":
            assert settings["split"] == split
        elif settings["method"] == "pseudo-label":
            assert settings["split"] == ("50:50" if split == "30:20:50" else "40:60")
        else:
            assert settings["split"].split(":")[0] in head.head
        paired = column.variant == "split in pairs"
        assert (settings["split_mode"], settings["exclude_known"]) == (
            ("paired", True) if paired else ("paper", False)
        )


def test_supervised_only_learns_from_the_labels_that_the_others_have():
    graph = load_graph("umls")
    for mode in ("paired", "paper"):
        labeled = [split_of(graph, ratio, mode, seed=1).labeled for ratio in ("40:60", "40:40:20", "40:10:50")]
        assert all((part == labeled[0]).all() for part in labeled)
        labeled = [split_of(graph, ratio, mode, seed=1).labeled for ratio in ("30:70", "30:20:50")]
        assert (labeled[0] == labeled[1]).all()


def test_cells_that_are_equal_are_the_same_runs(tmp_path):
    alone = [plan([name], "paper", tmp_path, 3, None).study for name in LINKS]
    together = plan(LINKS, "paper", tmp_path, 3, None).study
    assert set(together) == set().union(*alone)
    assert len(together) == 96 * 12 < sum(map(len, alone))
    shared = {job.config.method for name, job in alone[0].items() if name in alone[1]}
    assert shared == {"supervised", "pseudo-label"}
    assert not set(alone[0]) & set(alone[2])


@pytest.mark.parametrize("scale", SCALES)
def test_names_are_those_of_one_configuration(scale):
    found = {}
    for grid in grids(LINKS, scale):
        for config in grid:
            assert found.setdefault(links.run_name(config), config) == config
    settings = [settings for name in LINKS for settings in cells(ARTIFACTS[name], scale, "graphs")]
    every = [config for some in settings for config in links.grid(SCALES[scale], some)]
    assert {links.run_name(config) for config in every} == set(found)
    assert len(set(map(repr, every))) == len(found)


def test_scales_have_no_runs_in_common():
    names = [{links.run_name(c) for grid in grids(LINKS, scale) for c in grid} for scale in SCALES]
    assert not any(a & b for i, a in enumerate(names) for b in names[:i]), "so a study knows its scale"


def test_names_are_stable():
    """A changed name would run anew what is finished."""
    names = [links.run_name(config) for config in grid_of()]
    assert names[0] == "umls-complex-ccssl-diff-40-40-20-paired-seed0-44136f"
    assert len(set(names)) == 12
    assert links.run_name(replace(grid_of()[0], seed=7)) == names[0].replace("seed0", "seed7")


def test_graphs_are_counted_as_the_paper_counts_them():
    table = ARTIFACTS["graph-data"]
    shown = view("graph-data", table, Results(Path("nowhere"), "paper"))
    (grid,) = shown.grids
    rows = {row[0].text: [c.text for c in row[1:]] for _, row in grid.rows}
    assert rows["UMLS"][4:] == ["10,432", "10,432", "1,304", "1,304", "1,322", "1,965"]
    assert rows["KINSHIP"] == ["104", "105", "50", "51", "17,088", "17,088", "2,136", "2,136", "2,148", "3,210"]
    assert not any(c.best for _, row in grid.rows for c in row), "sizes do not compete"
    for graph, more in (("UMLS", "643"), ("KINSHIP", "1,062")):
        ours, paper = (int(n.replace(",", "")) for n in rows[graph][-2:])
        assert f"{paper - ours:,}" == more
        assert f"{more} ({graph})" in " ".join(shown.notes)
    assert "scale" not in shown.title
