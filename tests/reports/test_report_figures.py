"""Figures: valid SVG that takes its colours from the page, with ids of its own, whatever names and numbers it shows."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch

from ccssl import metrics
from ccssl.conformal import Calibration, audit
from ccssl.credal.polytope import draw
from ccssl.experiments.config import RunConfig
from ccssl.reports import figures
from ccssl.reports.runs import FinishedRun, Group

SVG = "{http://www.w3.org/2000/svg}"
HREF = "{http://www.w3.org/1999/xlink}href"
STYLE = (Path(figures.__file__).parent / "page.css").read_text(encoding="utf-8")
NAMES = ("<script>alert(1)</script>", "\"&'", "$x^2$ ☃ 猫\n", "]]>--><b>")


def group(name="cssl", runs=2, steps=5, values=None, accuracy=0.5):
    """Return a group of runs with an accuracy and a validity error over time."""
    made = []
    for seed in range(runs):
        line = values if values is not None else [(seed + step) / 10 for step in range(steps)]
        records = tuple(
            {"step": 10 * (i + 1), "phase": phase, "accuracy": value}
            for i, value in enumerate(line)
            for phase in ("test", "unlabeled")
        )
        result = {"test": {"accuracy": accuracy + seed / 100}}
        made.append(FinishedRun(Path("run"), RunConfig(seed=seed), result, records, {}))
    return Group(name, tuple(made))


def an_audit(shift=0.0):
    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(40, 4, generator=draw), torch.arange(40) % 4
    fresh = torch.randn(60, 4, generator=draw) + shift * torch.nn.functional.one_hot(torch.arange(60) % 4, 4)
    calibration = Calibration().fit(logits.softmax(-1), labels)
    return audit(calibration, fresh.softmax(-1), torch.arange(60) % 4, simulations=2000)


def drawings():
    p = torch.rand(50, 4, generator=torch.Generator().manual_seed(1)).softmax(-1)
    labels = torch.arange(50) % 4
    placed = [(group(NAMES[0], 2), 0), (group(NAMES[1], 1), 9), (group("alone", 1), None)]
    yield "over time", figures.over_time(placed, "accuracy")
    yield "two phases", figures.over_time(placed, "accuracy", ("test", "unlabeled"), bound=(0.1, 0.3))
    yield "no reach", figures.over_time(placed, "accuracy", bound=(0.05, None))
    yield "floor", figures.over_time(placed, "accuracy", share=False, floor=0.25)
    yield "no records", figures.over_time([(group(values=[]), 0)], "accuracy", bound=(0.1, 0.3))
    yield "one record", figures.over_time([(group(values=[0.5]), 0)], "accuracy")
    yield "accuracies", figures.accuracies(placed)
    yield "reliability", figures.reliability([(metrics.reliability(p, labels), 0)])
    yield "law", figures.p_value_law(an_audit())
    yield "few classes", figures.confusion(np.diag([3, 0, 2, 5]), NAMES)
    yield "many classes", figures.confusion(np.eye(62, dtype=int), [str(k) for k in range(62)])
    yield "triangle", draw(torch.tensor([1, 0.5, 0.2]), torch.tensor([0.1, 0.2, 0.7]), labels=NAMES[:3])


DRAWINGS = dict(drawings())


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_ready_for_the_page(name):
    text = figures.embeddable(DRAWINGS[name], "mine-", 'what "it" <is>')
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    assert root.get("aria-label") == 'what "it" <is>'
    assert "width" not in root.attrib
    assert re.fullmatch(r"0 0 [\d.]+ [\d.]+", root.get("viewBox"))
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    assert all(name.startswith("mine-") for name in ids)
    used = re.findall(r"url\(#([^)]*)\)", text)
    for element in root.iter():
        if element.get(HREF, "").startswith("#"):
            used.append(element.get(HREF)[1:])
        else:
            assert element.get(HREF, "data:image/png;base64,").startswith("data:image/png;base64,")
    assert set(used) <= set(ids)
    assert not root.findall(f".//{SVG}script")
    assert not root.findall(f".//{SVG}style")
    assert "font-family" not in text
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)


@pytest.mark.parametrize("name", DRAWINGS)
def test_every_colour_is_one_of_the_page(name):
    text = figures.embeddable(DRAWINGS[name], "mine-", "x")
    text = re.sub(r"data:image/png;base64,[^\"]*", "", text)
    assert re.findall(r"#[0-9a-fA-F]{6}\b", text) == []
    for role in re.findall(r"var\((--[\w-]+)\)", text):
        assert STYLE.count(f"{role}: #") == 2, role  # in light and in dark
    assert "var(--" in text


@pytest.mark.parametrize("name", ["few classes", "accuracies", "triangle"])
def test_names_stay_names(name):
    root = ET.fromstring(figures.embeddable(DRAWINGS[name], "mine-", "x"))
    told = " ".join("".join(element.itertext()) for element in root.iter(f"{SVG}text"))
    assert "<script" in told
    assert not [element for element in root.iter() if element.tag in (f"{SVG}script", f"{SVG}b")]


def test_two_drawings_share_no_id():
    texts = [figures.embeddable(DRAWINGS["over time"], prefix, "x") for prefix in ("a-", "b-")]
    ids = [set(re.findall(r'\bid="([^"]*)"', text)) for text in texts]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_equal_input_gives_equal_bytes():
    again = dict(drawings())
    assert again == DRAWINGS


def test_groups_are_told_apart_by_colour_then_by_dashes():
    looks = [(figures.color(place), str(figures.dash(place))) for place in range(24)]
    assert len(set(looks)) == 24
    assert figures.color(None) not in figures.SERIES
    assert set(figures.SERIES) | {figures.BASELINE} <= set(figures.PAINT)


def test_a_long_line_keeps_its_ends_and_its_size_is_bounded():
    values = np.random.default_rng(0).random(5000).tolist()
    line = figures._thinned(values)
    assert len(line) == figures.MOST_POINTS
    assert (line[0], line[-1]) == (values[0], values[-1])
    long, short = group(values=values), group(values=values[:200])
    assert len(figures.over_time([(long, 0)], "accuracy")) < 1.5 * len(figures.over_time([(short, 0)], "accuracy"))


def polygons(svg):
    return len(re.findall(r'id="FillBetween|id="PolyCollection', svg))


def test_several_runs_have_a_band_and_one_has_none():
    assert polygons(figures.over_time([(group(runs=1), 0)], "accuracy")) == 0
    assert polygons(figures.over_time([(group(runs=2), 0)], "accuracy")) == 1


def test_a_broken_promise_changes_its_colour():
    good, bad = an_audit(), an_audit(shift=-6.0)
    assert good.valid
    assert not bad.valid
    assert figures.PREDICTION not in figures.p_value_law(good)
    assert figures.PREDICTION in figures.p_value_law(bad)


def test_a_number_stands_in_every_cell_of_few_classes():
    counts = np.array([[7, 0, 1, 0], [0, 12345, 0, 0], [0, 2, 3, 0], [0, 0, 0, 0]])
    texts = [e.text for e in ET.fromstring(figures.confusion(counts, "abcd")).iter(f"{SVG}text")]
    assert sorted(text for text in texts if text.strip("0123456789,") == "") == ["1", "12,345", "2", "3", "7"]
