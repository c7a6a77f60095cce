"""A study of the paper as one page: what ours has is there, safe with any name, and good to read everywhere.

The runs are pretended: their folders hold figures that nobody trained for.
"""

import html
import json
import random
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from browser import WIDTHS, needs_browser, open_browser
from test_report_page import CONTRAST, MOST_BYTES, OVERFLOW, Page

from ccssl.cli import main
from ccssl.experiments.paper import links
from ccssl.experiments.paper.artifacts import ARTIFACTS
from ccssl.experiments.paper.plan import RUNS, cells, grids
from ccssl.experiments.paper.results import Results
from ccssl.experiments.paper.scales import SCALES, configuration, run_name
from ccssl.experiments.paper.views import Cell, Grid, view
from ccssl.reports.paper_page import with_ours

STRANGE = "<script>alert(1)</script> & {{ 7 * 7 }}"  # a machine
WITHOUT_RUNS = {"search-spaces", "graph-data", "credal-sets"}
LINKS = {"link-prediction", "link-prediction-40-10-50", "link-prediction-30-20-50"}


def pretend(out, names, scale, seeds, **changes):
    """Write the folders of finished runs of artifacts."""
    draw = random.Random(0)
    configs = {}
    for name in names:
        for settings in cells(ARTIFACTS[name], scale, "images"):
            for seed in range(seeds):
                config = replace(configuration(SCALES[scale], settings, seed=seed), **changes)
                configs[run_name(config, configuration(SCALES[scale], settings).dataset)] = config
    configs |= {links.run_name(config): config for grid in grids(names, scale) for config in grid}
    figures = ("accuracy", "ece", "efficiency", "mrr", "hits@1", "hits@3")
    figures += tuple(f"validity_error@{delta}" for delta in (0.05, 0.1, 0.25))
    for name, config in configs.items():
        folder = out / RUNS / name
        folder.mkdir(parents=True)
        parts = {
            part: {figure: draw.random() for figure in figures} for part in ("test", "unlabeled", "validation")
        }
        split = dict.fromkeys(("labeled", "calibration", "unlabeled", "validation", "test"), 1000)
        cost = {"seconds": 60.0, "device": "cpu", "machine": STRANGE, "threads": 1}
        result = {**parts, "steps": 20, "split": split, "cost": cost}
        (folder / "result.json").write_text(json.dumps(result))
        records = [{"step": step, "phase": part, **parts[part]} for step in (5, 20) for part in parts]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        made_with = {"ccssl": "0.1", "commit": "abc<i>"}
        (folder / "config.yaml").write_text(yaml.safe_dump({**config.to_dict(), "made_with": made_with}))
    return out


def page_of(out, *words):
    """Return the page that the command line writes."""
    assert main(["paper", "show", *map(str, words), "--out", str(out), "--format", "html"]) == 0
    return (out / "paper.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """Everything at the scale smoke; part of it at the scale reduced."""
    home = tmp_path_factory.mktemp("paper <b>& more")
    smoke = pretend(home / "smoke", list(ARTIFACTS), "smoke", 2)
    some = [name for name in ARTIFACTS if name not in LINKS]
    reduced = pretend(home / "reduced", some, "reduced", 3)
    return {"smoke": smoke, "reduced": reduced}


@pytest.fixture(scope="module")
def texts(studies):
    return {name: page_of(out, "all") for name, out in studies.items()}


@pytest.fixture(params=["smoke", "reduced"])
def text(request, texts):
    return texts[request.param]


def plain(text):
    return re.sub(r"\s+", " ", Page(text).text)


def sections(text):
    """Return what stands in each section."""
    return dict(re.findall(r'<section id="([^"]+)">(.*?)</section>', text, re.DOTALL))


# ---- what is there ------------------------------------------------------------------------------------------------


def test_the_command_prints_where_the_page_is(studies, capsys):
    page_of(studies["smoke"], "gamma")
    assert capsys.readouterr().out == f"{studies['smoke'] / 'paper.html'}\n"
    page_of(studies["smoke"], "all")


def test_everything_that_has_been_run_is_shown(texts):
    assert list(sections(texts["smoke"])) == [*ARTIFACTS, "repeat"]
    shown = sections(texts["reduced"])
    assert set(shown) == {*ARTIFACTS, "repeat"} - LINKS
    for name in LINKS:
        assert f"{ARTIFACTS[name].place} ({name})" in shown["repeat"]
    assert "Not run" not in sections(texts["smoke"])["repeat"]


def test_contents_lead_to_the_sections(text):
    page = Page(text)
    assert [link["href"][1:] for link in page.all("a")] == list(sections(text))


@pytest.mark.parametrize("scale", ["smoke", "reduced"])
def test_figures_and_notes_are_those_of_the_views(scale, studies, texts):
    results, shown = Results(studies[scale], scale), sections(texts[scale])
    for name in shown.keys() - {"repeat"}:
        words = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", "", shown[name]))).replace("\xa0", " ")
        found = view(name, ARTIFACTS[name], results)
        assert ARTIFACTS[name].title in words
        for note in found.notes:
            assert note in words, name
        for grid in filter(None, map(with_ours, found.grids)):
            for _, row in grid.rows:
                assert all(cell.text in words for cell in row), name
        bold = sum(
            cell.best for grid in filter(None, map(with_ours, found.grids)) for _, r in grid.rows for cell in r
        )
        assert shown[name].count("<b>") == bold
        assert (f"Bold: {found.best}." in words) == bool(bold)


def test_columns_without_ours_are_left_out_and_named(texts):
    accuracies = sections(texts["reduced"])["accuracies"]
    assert re.findall(r'colspan="(\d)">([^<]*)<', accuracies) == [
        ("2", "250 lab."), ("2", "400 lab."), ("2", "250 lab."), ("2", "1000 lab."),
    ]  # fmt: skip
    assert "Not part of this scale: CIFAR-10, 40 lab.; CIFAR-10, 4000 lab.; " in accuracies
    normalization = sections(texts["reduced"])["normalization"]
    assert re.findall("<caption>(.*?)<", normalization) == ["EMNIST-ByClass"]
    assert ">paper<" not in normalization, "of this data set nothing was printed"
    assert len(re.findall("<caption>", sections(texts["smoke"])["normalization"])) == 2


def test_a_grid_keeps_what_stands_beside_ours():
    def grid(*rows):
        heads = (("data", 1), ("a", 2), ("b", 2), ("c", 1))
        cells = tuple(("", tuple(Cell(text) for text in row)) for row in rows)
        return Grid(heads, ("", "ours", "paper", "ours", "paper", "ours"), cells)

    both, printed = ("x", "1", "2", "–", "3", "–"), ("y", "–", "2", "–", "4", "–")
    found = with_ours(grid(both, printed))
    assert found.heads == (("data", 1), ("a", 2))
    assert found.columns == ("", "ours", "paper")
    assert [[cell.text for cell in row] for _, row in found.rows] == [["x", "1", "2"], ["y", "–", "2"]]
    found = with_ours(grid(("x", "1", "–", "–", "3", "5")))
    assert (found.heads, found.columns) == ((("data", 1), ("a", 1), ("c", 1)), ("", "ours", "ours"))
    assert with_ours(grid(printed)) is None
    words = Grid((), ("name",), (("", (Cell("–"),)),))
    assert with_ours(words) == words


def test_pictures_are_drawn_a_panel_at_a_time(texts):
    shown = sections(texts["reduced"])
    assert shown["curves-250"].count("<svg") == 2
    assert shown["efficiency"].count("<svg") == 2, "of four panels two are run at this scale"
    assert shown["credal-sets"].count("<svg") == 2
    assert "<svg" not in shown["accuracies"]


def test_the_scale_stands_at_the_top(texts):
    for scale, text in texts.items():
        head = html.unescape(text.partition("<main>")[0])
        assert f"at the scale {scale}" in head
        assert SCALES[scale].title in head
        assert f"{2 if scale == 'smoke' else 3} seeds" in head
        assert (SCALES[scale].graphs.title in head) == (scale == "smoke"), "no link predictor was run"
    assert "its figures mean nothing" in texts["smoke"]


def commands(text):
    """Return the commands at the end, as a shell would divide them."""
    lines = re.findall("<pre>(.*?)</pre>", text, re.DOTALL)
    return [shlex.split(html.unescape(re.sub("<[^>]*>", "", line))) for line in lines]


def test_commands_can_be_repeated(studies, texts, tmp_path):
    out = str(studies["smoke"])
    everything = [name for name in ARTIFACTS if name not in WITHOUT_RUNS]
    assert commands(texts["smoke"]) == [
        ["ccssl", "paper", "run", *everything, "--scale", "smoke", "--out", out, "--seeds", "2"],
        ["ccssl", "paper", "show", "all", "--scale", "smoke", "--out", out, "--format", "html"],
    ]
    fetched = commands(texts["reduced"])
    names = ("cifar10", "cifar100", "emnist-byclass", "stl10", "svhn")
    assert fetched[:5] == [["ccssl", "data", "fetch", name] for name in names]
    assert fetched[-1][:4] == ["ccssl", "paper", "run", "link-prediction"], "what is missing"
    assert fetched[-2][:4] == ["ccssl", "paper", "show", "all"]


@pytest.mark.parametrize("folder", ["/data/packed", "packed"])
def test_data_of_a_folder_are_named_by_it(folder, tmp_path):
    study = pretend(tmp_path / "study", ["gamma"], "reduced", 1, dataset=f"{folder}/emnist-byclass")
    run, show = commands(page_of(study, "graph-data", "gamma", "imbalance"))
    assert run[-4:] == ["--seeds", "1", "--data", folder]
    assert run[3:6] == ["imbalance", "gamma", "--scale"], "they have runs in common"
    assert show[3:7] == ["imbalance", "gamma", "graph-data", "--scale"]


def test_without_runs_there_is_still_what_needs_none(tmp_path):
    text = page_of(tmp_path / "none", *WITHOUT_RUNS)
    assert set(sections(text)) == {*WITHOUT_RUNS, "repeat"}
    assert commands(text)[0][:3] == ["ccssl", "paper", "show"]
    assert "Supervised only" not in text.partition("<main>")[0]


def test_a_study_in_which_nothing_has_been_run_is_refused(tmp_path, capsys):
    for out in (tmp_path, tmp_path / "none"):
        assert main(["paper", "show", "all", "--out", str(out), "--format", "html", "--scale", "smoke"]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"ccssl: {out} holds no run at the scale smoke of what is to be shown: begin with ")
        assert f"`ccssl paper run accuracies --scale smoke --out {out}`." in told
        assert told.count("\n") == 1
        assert not (out / "paper.html").exists()


def test_equal_studies_give_equal_pages(studies, texts):
    assert page_of(studies["reduced"], "all") == texts["reduced"]


# ---- whole in itself, and safe --------------------------------------------------------------------------------------


def test_the_page_is_well_formed_and_small(text):
    page = Page(text)
    assert text.startswith("<!doctype html>")
    assert len(text.encode()) < MOST_BYTES
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all(drawing["aria-label"] for drawing in page.all("svg"))
    assert len(page.all("h1")) == 1
    assert not re.search(r"\bNone\b|\bnan\b|Undefined|\{%|%\}", page.text)


def test_the_page_asks_for_nothing(text):
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "embed", "form", "img"} & {tag for tag, _ in page.tags}
    without_names = re.sub(r'xmlns(:\w+)?="http://www\.w3\.org/[^"]*"', "", text)
    assert not re.search(r"https?:|//[a-z]|@import|javascript:", without_names)
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        assert all(attributes.get(name, "#").startswith("#") for name in ("src", "href", "xlink:href"))
    assert all(place.startswith("#") for place in re.findall(r"url\(([^)]*)\)", text))


def test_names_are_shown_as_they_are(text, studies):
    assert STRANGE in plain(text)
    assert "<script" not in text
    assert "abc<i>" in plain(text)
    assert "paper <b>& more" in html.unescape(re.sub("</?span>|</?pre>", "", sections(text)["repeat"]))
    assert "<b>& more" not in text


# ---- in a browser -------------------------------------------------------------------------------------------------

NARROW = {"small phone": 320, **WIDTHS}


@pytest.fixture(scope="module")
def chromium():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(texts, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("pages")
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.browser
@needs_browser
def test_the_browser_asks_for_nothing_else(chromium, pages):
    chromium.show(pages / "smoke.html")
    chromium.requested()
    chromium.show(pages / "reduced.html")
    assert chromium.requested() == [(pages / "reduced.html").as_uri()]


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("name", ["smoke", "reduced"])
@pytest.mark.parametrize("width", NARROW.values(), ids=NARROW)
def test_nothing_reaches_beyond_the_window(chromium, pages, width, name):
    chromium.show(pages / f"{name}.html", width)
    scroll, client, out = chromium.run(OVERFLOW)
    assert client == width
    assert scroll <= width
    assert out == []


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out(chromium, pages, dark):
    chromium.show(pages / "reduced.html", WIDTHS["phone"], dark)
    contrast, where, seen = chromium.run(CONTRAST)
    assert seen > 500
    assert contrast >= 4.5, where


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("name", ["smoke", "reduced"])
def test_letters_of_pictures_are_inside_of_them(chromium, pages, name):
    chromium.show(pages / f"{name}.html")
    out = chromium.run(
        "return [...document.querySelectorAll('svg')].flatMap(svg => { const box = svg.getBoundingClientRect();"
        " return [...svg.querySelectorAll('text')].filter(t => { const b = t.getBoundingClientRect();"
        " return b.left < box.left - 1 || b.right > box.right + 1 || b.top < box.top - 1 || b.bottom > box.bottom + 1;"
        " }).map(t => t.textContent); })"
    )
    assert out == []


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("name", ["smoke", "reduced"])
def test_paper_is_white_even_in_the_dark_and_wide_enough(chromium, pages, name):
    chromium.show(pages / f"{name}.html", 718, dark=True, paper=True)  # A4 without its margins
    contrast, where, _ = chromium.run(CONTRAST)
    assert contrast >= 4.5, where
    scroll, client, _ = chromium.run(OVERFLOW)
    assert scroll <= client
