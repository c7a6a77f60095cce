"""The demonstration: right figures, the same every time, and a page that needs nothing from outside."""

import base64
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
import torch

from ccssl import cli, demo
from ccssl.credal import contains, project
from ccssl.errors import InputError


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    return demo.run_demo(tmp_path_factory.mktemp("demo") / "new" / "folder", seed=0)


@pytest.fixture(scope="module")
def page(shown):
    return shown.page.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["taught", "torn", "settled"])
def test_items_follow_the_mathematics(shown, name):
    item = shown.items[name]
    p_values, pi = torch.tensor(item.p_values), torch.tensor(item.possibility)
    prediction, target = torch.tensor(item.prediction), torch.tensor(item.target)
    torch.testing.assert_close(pi, p_values / p_values.max())
    assert bool(contains(target, pi, atol=1e-5))
    torch.testing.assert_close(target, project(prediction, pi), atol=1e-5, rtol=0)
    kl = float((target * (target / prediction).log()).sum())
    assert item.loss == pytest.approx(kl, abs=1e-5)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_items_show_what_the_page_says_of_them(seed, tmp_path):
    items = demo.run_demo(tmp_path, seed).items
    second = {name: sorted(item.possibility)[1] for name, item in items.items()}
    assert items["taught"].loss > 0.02
    assert second["torn"] > 0.5
    assert items["torn"].loss < items["taught"].loss
    assert second["settled"] < 0.1
    assert max(items["settled"].prediction) > 0.9


def test_figures_are_plausible_and_json(shown):
    figures = json.loads(json.dumps(shown.figures(), allow_nan=False))
    assert 0.7 < figures["accuracy"] < 0.95
    assert 1 / 3 < figures["efficiency"] < 0.7
    assert figures["valid"]
    assert set(figures["errors"]) == {"0.05", "0.1", "0.25"}


def test_the_page_depends_on_the_seed_alone(shown, page, tmp_path):
    torch.manual_seed(123)
    assert demo.run_demo(tmp_path / "again", seed=0).page.read_text(encoding="utf-8") == page
    assert demo.run_demo(tmp_path / "other", seed=1).page.read_text(encoding="utf-8") != page


class Page(HTMLParser):
    """Collects tags and checks that they close in order."""

    VOID = ("meta", "img", "br")

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_asks_for_nothing(page):
    parser = Page()
    parser.feed(page)
    assert parser.open == []
    pictures = [attributes for tag, attributes in parser.seen if tag == "img"]
    assert len(pictures) == 5
    for attributes in pictures:
        assert attributes["alt"]
        kind, _, data = attributes["src"].partition(",")
        assert kind == "data:image/svg+xml;base64"
        ET.fromstring(base64.b64decode(data))
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in parser.seen}
    assert not re.search(r"url\(|@import|https?://", page)
    assert "$" not in re.sub(r"base64,[^\"]*", "", page)


def test_the_page_shows_the_figures(shown, page):
    item = shown.items["taught"]
    for values in (item.prediction, item.p_values, item.possibility, item.target):
        for value in values:
            assert f"<td>{value:.2f}<i" in page
    assert f"{shown.accuracy:.0%}" in page
    assert f"{item.loss:.3f}" in page


def test_command_prints_a_table_and_the_path(tmp_path, capsys):
    assert cli.main(["demo", "--out", str(tmp_path), "--seed", "0"]) == 0
    out = capsys.readouterr().out
    assert str(tmp_path / "index.html") in out
    for word in ("prediction", "p-value", "possibility", "target", "accuracy", "delta 0.05"):
        assert word in out
    assert max(map(len, out.splitlines()[:-1])) <= 80


def test_command_prints_json(tmp_path, capsys):
    assert cli.main(["demo", "--out", str(tmp_path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["items"]["taught"]["loss"] > 0


def test_out_that_is_a_file_is_refused_before_any_work(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(InputError, match="--out must name a folder"):
        demo.run_demo(file)
    assert cli.main(["demo", "--out", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert file.read_text() == "mine"
