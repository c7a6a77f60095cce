"""The page: whole in itself, well-formed, safe with any name, and good to read on a phone, in the dark and on paper."""

import base64
import html
import io
import re
import shlex
from html.parser import HTMLParser

import pytest
from browser import WIDTHS, needs_browser, open_browser
from conftest import NAMES
from PIL import Image

from ccssl.credal.polytope import SET
from ccssl.reports.figures import DEEPEST
from ccssl.reports.page import render
from ccssl.reports.report import report

MOST_BYTES = 3_000_000
VOID = ("meta", "img", "br", "hr", "input", "link", "wbr")


class Page(HTMLParser):
    """Checks that tags close in order, and collects them and the text between them."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))


CASES = {
    "one": [("ccssl-prop", 0)],
    "pair": [("supervised", 0), ("ccssl-prop", 0)],
    "many": [(method, seed) for method in ("supervised", "ccssl-prop", "cssl", "fixmatch") for seed in (0, 1)],
    "supervised": [("supervised", 0)],
    "without possibilities": [("fixmatch", 0)],
    "without calibration": [("cssl", 0), ("supervised", 0)],
}


@pytest.fixture(scope="module")
def texts(runs, secret_run):
    found = {name: report([runs[key] for key in keys]) for name, keys in CASES.items()}
    found["unknown labels"] = report([secret_run])
    return {name: render(each) for name, each in found.items()}


@pytest.fixture(params=[*CASES, "unknown labels"])
def text(request, texts):
    return texts[request.param]


def test_the_page_is_well_formed_and_small(text):
    page = Page(text)
    assert text.startswith("<!doctype html>")
    assert text.rstrip().endswith("</html>")
    assert len(text.encode()) < MOST_BYTES
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for link in page.all("a"):
        assert link["href"][1:] in ids
    assert [attributes.get("alt") for attributes in page.all("img")].count(None) == 0
    assert all(attributes.get("aria-label") for attributes in page.all("svg"))
    heads = [tag for tag, _ in page.tags if tag in ("h1", "h2", "h3")]
    assert heads.count("h1") == 1


def test_the_page_asks_for_nothing(text):
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "embed", "form", "audio", "video"} & {
        tag for tag, _ in page.tags
    }
    without_names = re.sub(r'xmlns(:\w+)?="http://www\.w3\.org/[^"]*"', "", text)
    assert not re.search(r"https?:|//[a-z]|@import|javascript:", re.sub(r"base64,[^\"]*", "", without_names))
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href", "xlink:href"):
            assert attributes.get(name, "#").startswith(("#", "data:image/png;base64,")), (tag, attributes[name])
    for place in re.findall(r"url\(([^)]*)\)", text):
        assert place.startswith("#")
    for attributes in page.all("img"):
        Image.open(io.BytesIO(base64.b64decode(attributes["src"].partition(",")[2]))).verify()


def test_names_are_shown_as_they_are(text):
    page = Page(text)
    for name in NAMES:
        assert name in page.text
    assert "<script" not in text
    assert "49" not in [word.strip() for word in page.words if "7 * 7" in word]


def test_nothing_is_missing_or_left_over(text):
    words = Page(text).text
    assert not re.search(r"\bNone\b|\bnan\b|Undefined|\{%|%\}", words)


def test_sections_are_there_where_they_have_something_to_show(texts):
    sections = {
        name: {attributes["id"] for attributes in Page(text).all("section")} for name, text in texts.items()
    }
    always = {"result", "training", "confidence", "classes", "gallery", "repeat"}
    assert sections["supervised"] == sections["without possibilities"] == always
    assert sections["without calibration"] == always | {"validity"}
    for name in ("one", "pair", "many", "unknown labels"):
        assert sections[name] == always | {"validity", "lesson"}, name


def svgs(text):
    return re.findall(r'aria-label="([^"]*)"', text)


def test_figures_follow_what_was_run(texts):
    assert any("Test accuracy of each method" in label for label in svgs(texts["many"]))
    assert not any("Test accuracy of each method" in label for label in svgs(texts["pair"]))
    for name in ("one", "pair", "many", "without calibration"):
        assert sum("Validity error" in label for label in svgs(texts[name])) == 3, name
    assert not any("Validity" in label for label in svgs(texts["without possibilities"]))
    assert any("pseudo-labels" in label for label in svgs(texts["one"]))
    assert not any("pseudo-labels" in label for label in svgs(texts["unknown labels"]))
    assert not any("pseudo-labels" in label for label in svgs(texts["supervised"]))


def test_the_page_tells_the_summary_and_the_cautions(runs):
    found = report([runs[key] for key in CASES["many"]])
    words = Page(render(found)).text.replace("\N{NO-BREAK SPACE}", " ")
    for sentence in (*found.summary(), *found.cautions()):
        assert sentence in words
    for group in found.groups:
        for column in found.columns:
            assert column.text(group.figure(column.phase, column.figure)) in words


def test_words_fit_the_method(texts):
    supervised, unknown = Page(texts["supervised"]).text, Page(texts["unknown labels"]).text
    assert "with unlabeled images, too" not in supervised
    assert "pseudo-label" not in supervised
    assert "this method gives no degrees of possibility" in supervised
    assert "in truth" not in unknown
    assert "Confidently wrong" not in unknown
    assert "✓" not in unknown
    assert "Confidently wrong" in Page(texts["one"]).text
    none = Page(texts["without calibration"]).text
    assert "come from its own confidence" in none
    assert "Audit" not in none


def test_a_level_out_of_reach_is_not_said_to_have_a_shade(texts):
    words = Page(texts["one"]).text.replace("\N{NO-BREAK SPACE}", " ")
    assert "Error at δ = 0.05: out of reach for ccssl-prop" in words
    assert "Error at δ = 0.25: the shade is what chance allows" in words


def test_commands_to_repeat_are_whole(texts, runs):
    pre = re.findall(r"<pre>(.*?)</pre>", texts["many"], re.DOTALL)
    lines = [html.unescape(re.sub(r"<[^>]*>", "", each)) for each in pre]
    assert len(lines) == len(CASES["many"]) + 1
    for line in lines[:-1]:
        assert shlex.split(line)[:2] == ["ccssl", "train"]
    assert shlex.split(lines[-1]) == ["ccssl", "report", *map(str, runs.values()), "--out", "page.html"]
    alone = re.findall(r"<pre>(.*?)</pre>", texts["one"], re.DOTALL)
    assert len(alone) == 3
    assert "--method</span> <span>supervised" in alone[1]


def test_equal_runs_give_equal_pages(runs, texts):
    assert render(report([runs[key] for key in CASES["pair"]])) == texts["pair"]


# ---- in a browser -------------------------------------------------------------------------------------------------

# The least contrast of text against what lies behind it, by the rule of WCAG 2, and the text that has it.
CONTRAST = """
const clear = [0, 0, 0, 0];
function parts(color) {
  const found = color.match(/[\\d.]+/g);
  return found ? [0, 1, 2, 3].map(i => found[i] === undefined ? 1 : Number(found[i])) : clear;
}
function light([r, g, b]) {
  const [x, y, z] = [r, g, b].map(c => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
  return .2126 * x + .7152 * y + .0722 * z;
}
function behind(element) {
  for (let e = element; e; e = e.parentElement) {
    const found = parts(getComputedStyle(e).backgroundColor);
    if (found[3] === 1) return found;
  }
  return [255, 255, 255, 1];
}
let least = [99, ''], seen = 0;
for (const e of document.querySelectorAll('body *')) {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  const box = e.getBoundingClientRect();
  if (!own || !box.width || !box.height) continue;
  const style = getComputedStyle(e), inSvg = e instanceof SVGElement;
  const paint = parts(inSvg ? style.fill : style.color);
  const [one, other] = [light(paint), light(behind(e))].sort((a, b) => b - a);
  const contrast = (one + .05) / (other + .05);
  seen += 1;
  if (contrast < least[0]) least = [contrast, e.textContent.trim().slice(0, 40)];
}
return [least[0], least[1], seen];
"""
OVERFLOW = """
const wide = document.documentElement.clientWidth;
const out = [...document.querySelectorAll('body *')].filter(e => {
  if (e.closest('.scroll') || e.closest('svg')) return false;
  const box = e.getBoundingClientRect();
  return box.width && (box.right > wide + 1 || box.left < -1);
});
return [document.documentElement.scrollWidth, wide, out.map(e => e.outerHTML.slice(0, 80))];
"""


@pytest.fixture(scope="module")
def chromium():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.browser
@needs_browser
def test_the_browser_asks_for_nothing_else(chromium, pages):
    chromium.show(pages / "many.html")
    chromium.requested()
    chromium.show(pages / "pair.html")
    asked = [address for address in chromium.requested() if not address.startswith("data:")]
    assert asked == [(pages / "pair.html").as_uri()]
    assert chromium.run("return document.images.length") > 10
    assert chromium.run("return [...document.images].every(image => image.complete && image.naturalWidth > 0)")


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("name", ["many", "supervised"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_nothing_reaches_beyond_the_window(chromium, pages, width, name):
    chromium.show(pages / f"{name}.html", width)
    chromium.run("for (const d of document.querySelectorAll('details')) d.open = true")
    scroll, client, out = chromium.run(OVERFLOW)
    assert client == width
    assert scroll <= width
    assert out == []


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_text_stands_out(chromium, pages, width, dark):
    chromium.show(pages / "many.html", width, dark)
    contrast, where, seen = chromium.run(CONTRAST)
    assert seen > 300
    assert contrast >= 4.5, where
    paper = chromium.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 150) == dark


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_numbers_stand_out_in_the_deepest_cell(chromium, pages, dark):
    chromium.show(pages / "one.html", 1280, dark)
    paper, ink = (
        [int(c) for c in re.findall(r"\d+", chromium.run(f"return getComputedStyle(document.body).{name}"))]
        for name in ("backgroundColor", "color")
    )
    paint = [int(SET[i : i + 2], 16) for i in (1, 3, 5)]
    cell = [DEEPEST * a + (1 - DEEPEST) * b for a, b in zip(paint, paper, strict=True)]
    assert contrast_of(ink, cell) >= 4.5


def contrast_of(one, other):
    def light(rgb):
        parts = [c / 255 for c in rgb]
        r, g, b = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted([light(one), light(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.browser
@needs_browser
def test_paper_is_white_even_in_the_dark(chromium, pages):
    chromium.show(pages / "many.html", 800, dark=True, paper=True)
    assert (
        chromium.run("return getComputedStyle(document.documentElement).getPropertyValue('--paper')") == "#ffffff"
    )
    contrast, where, _ = chromium.run(CONTRAST)
    assert contrast >= 4.5, where
    assert chromium.run("return getComputedStyle(document.querySelector('nav')).display") == "none"
    scroll, client, _ = chromium.run(OVERFLOW)
    assert scroll <= client
    printed = chromium.devtools("Page.printToPDF", printBackground=False)["data"]
    assert base64.b64decode(printed).startswith(b"%PDF")


@pytest.mark.browser
@needs_browser
def test_bars_of_one_picture_begin_at_one_place_and_tell_the_degree(chromium, pages):
    chromium.show(pages / "many.html", WIDTHS["phone"])
    cards = chromium.run(
        "return [...document.querySelectorAll('.card ul')].map(ul => [...ul.querySelectorAll('i')].map(i => {"
        " const box = i.getBoundingClientRect();"
        " return [box.left, box.width, Number(i.style.getPropertyValue('--share'))]; }))"
    )
    assert len(cards) > 10
    for bars in cards:
        assert len({round(left) for left, _, _ in bars}) == 1
        full = max(width / share for _, width, share in bars if share > 0.2)
        for _, width, share in bars:
            assert width == pytest.approx(max(1, full * share), abs=1)
