"""Reports on link prediction: what runs say, what their predictor answers, and a page that is safe with any name."""

import argparse
import html
import json
import re
import shlex
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from browser import WIDTHS, needs_browser, open_browser
from toy_graph import toy_config, toy_facts

from ccssl import cli
from ccssl.errors import InputError
from ccssl.experiments.config import RunConfig, config_text
from ccssl.experiments.flags import add_flags, values_of
from ccssl.experiments.graph_run import config_from, load_run, train
from ccssl.graphs.config import METHODS, GraphConfig
from ccssl.graphs.predictor import LinkPredictor
from ccssl.reports import graph_answers, graph_figures
from ccssl.reports import graph_report as words
from ccssl.reports.graph_answers import DELTA, look, new_facts
from ccssl.reports.graph_page import render
from ccssl.reports.graph_report import over_facts, report
from ccssl.reports.graph_runs import command, config_of, groups, read_all
from ccssl.reports.runs import FinishedRun

STRANGE = {
    "e00": "<script>alert(1)</script>",
    "e01": "\"&'",
    "e02": "{{ 7 * 7 }} $x^2$ ☃",
    "e03": "a_name_that_is_far_longer_than_any_column_of_a_table_or_a_telephone_is_wide",
    "e04": "anamewithoutanyplacewhereitcouldbebroken" * 3,
    "like": "<b>like</b>",
    "shift 1": "followed_by & <i>more</i>",
}
MOST_BYTES = 3_000_000


def facts_of(folder, seed=0, parts=("train", "valid", "test")):
    """Write the toy graph under strange names."""
    folder.mkdir()
    facts = toy_facts()
    order = np.random.default_rng(seed).permutation(len(facts))
    for part, rows in zip(("train", "valid", "test"), np.split(order, [100, 120]), strict=True):
        if part in parts:
            lines = ("\t".join(STRANGE.get(name, name) for name in facts[row]) for row in rows)
            (folder / f"{part}.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def made(folder, graph, **changes):
    small = {"epochs": 30, "eval_every": 10, "dim": 16, "lr": 0.05, "ramp_up": 5}
    train(toy_config(dataset=str(graph), **{**small, **changes}), folder, quiet=True)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture(scope="module")
def data(home):
    return facts_of(home / "strange")


@pytest.fixture(scope="module")
def links(home, data):
    """Runs by method and seed: folders."""
    return {
        (method, seed): made(home / f"{method}-{seed}", data, method=method, seed=seed)
        for method in ("supervised", "ccssl-diff", "pseudo-label")
        for seed in (0, 1)
    }


@pytest.fixture(scope="module")
def special(home, data):
    """Runs with less to tell."""
    alone = {"method": "supervised", "split": "all"}
    train_alone = facts_of(home / "bare", parts=("train", "test"))
    return {
        "validation": made(home / "validation", data, **alone),
        "nothing to calibrate by": made(home / "nothing", train_alone, **alone),
        "paper": made(home / "paper", data, split_mode="paper", method="ccssl-prop", options={"gamma": 0.5}),
        "per relation": made(home / "each", data, per_relation=True, split_mode="random"),
    }


CASES = {
    "one": [("ccssl-diff", 0)],
    "pair": [("supervised", 0), ("ccssl-diff", 0)],
    "many": [(method, seed) for method in ("pseudo-label", "ccssl-diff", "supervised") for seed in (0, 1)],
    "supervised": [("supervised", 0)],
}


@pytest.fixture(scope="module")
def found(links, special):
    reports = {name: report([links[key] for key in keys]) for name, keys in CASES.items()}
    return reports | {name: report([folder]) for name, folder in special.items()}


@pytest.fixture(scope="module")
def texts(found):
    return {name: render(one) for name, one in found.items()}


EVERY = [*CASES, "validation", "nothing to calibrate by", "paper", "per relation"]


@pytest.fixture(params=EVERY)
def text(request, texts):
    return texts[request.param]


# ---- runs ---------------------------------------------------------------------------------------------------------


def test_a_run_that_cannot_be_told_of_is_refused(links, special, home, data, tmp_path):
    run = links["ccssl-diff", 0]
    with pytest.raises(InputError, match=r"there is no folder .*nowhere"):
        read_all([tmp_path / "nowhere"])
    with pytest.raises(InputError, match="no run to report"):
        read_all([])
    with pytest.raises(InputError, match="runs on different graphs cannot be compared"):
        read_all([run, special["nothing to calibrate by"]])
    other = shutil.copytree(links["ccssl-diff", 1], tmp_path / "other")
    split = json.loads((other / "split.json").read_text())
    (other / "split.json").write_text(json.dumps({**split, "checksum": "0"}))
    with pytest.raises(InputError, match=r"runs on different graphs .* with other triples"):
        read_all([run, other])
    with pytest.raises(InputError, match="one run made twice"):
        read_all([run, shutil.copytree(run, tmp_path / "again")])
    begun = shutil.copytree(run, tmp_path / "begun")
    (begun / "result.json").unlink()
    with pytest.raises(InputError, match="holds no finished run"):
        read_all([begun])
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "config.yaml").write_text(config_text(RunConfig()))
    with pytest.raises(InputError, match="is a run on images"):
        read_all([tmp_path / "images"])
    untested = made(tmp_path / "untested", facts_of(tmp_path / "graph", parts=("train", "valid")), epochs=1)
    with pytest.raises(InputError, match="on a graph without test facts"):
        read_all([untested])


def test_a_folder_named_twice_counts_once(links):
    folder = links["ccssl-diff", 0]
    assert len(read_all([folder, folder / ".." / folder.name])) == 1


def finished(folder="run", mrr=0.5, **changes):
    return FinishedRun(Path(folder), toy_config(**changes), {"test": {"mrr": mrr}}, (), {})


def test_runs_that_differ_in_the_seed_alone_belong_together():
    named = groups(
        [
            finished(seed=2),
            finished(method="supervised"),
            finished(seed=1, device="auto"),
            finished(dim=16),
            finished(method="ccssl-prop", options={"gamma": 0.1}),
            finished(method="ccssl-prop", seed=1),
            finished(method="ccssl-prop", options={"gamma": 1.0}),
        ]
    )
    assert [(group.name, [run.config.seed for run in group.runs]) for group in named] == [
        ("ccssl-diff, dim 8", [1, 2]),
        ("supervised, dim 8", [0]),
        ("ccssl-diff, dim 16", [0]),
        ("ccssl-prop, dim 8, gamma 0.1", [0, 1]),
        ("ccssl-prop, dim 8, gamma 1.0", [0]),
    ]


@pytest.mark.parametrize(
    ("changes", "suits"),
    [
        ({}, True),
        ({"split": "40:60"}, True),
        ({"split": "2:3"}, True),
        ({"dim": 32, "lr": 0.1}, True),
        ({"split": "60:20:20"}, False),
        ({"split": "all"}, False),
        ({"model": "qmult"}, False),
        ({"split_mode": "random"}, False),
        ({"method": "pseudo-label"}, False),
    ],
)
def test_the_baseline_learned_from_the_same_facts(changes, suits):
    from ccssl.reports.graph_runs import baseline_of

    ours, theirs = groups([finished(), finished(**{"method": "supervised", **changes})])
    assert (baseline_of(ours, [ours, theirs]) is theirs) == suits
    assert baseline_of(theirs, [ours, theirs]) is None or theirs.config.method != "supervised"


@pytest.mark.parametrize(
    "config",
    [
        GraphConfig(),
        toy_config(dataset="a folder/with spaces", exclude_known=False, per_relation=True, teacher="ema"),
        toy_config(method="ccssl-prop", options={"gamma": 0.5, "normalization": "top"}, split="all", n3=1e-5),
        toy_config(method="pseudo-label", options={"threshold": 0.9}, seed=7, loss="bce"),
    ],
)
def test_a_command_line_says_the_whole_configuration(config, tmp_path):
    parser = argparse.ArgumentParser()
    add_flags(parser, GraphConfig, METHODS)
    parser.add_argument("--out", type=Path)
    parser.set_defaults(resume=False)
    said = shlex.split(command(config, tmp_path / "a run"))
    assert said[:3] == ["ccssl", "graph", "train"]
    args = parser.parse_args(said[3:])
    assert args.out == tmp_path / "a run"
    assert config_from(values_of(args, GraphConfig)) == config


# ---- answers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def predictor(links):
    return LinkPredictor.of(load_run(links["ccssl-diff", 0]))


@pytest.fixture(scope="module")
def seen(links):
    return look(links["ccssl-diff", 0])


def test_what_is_seen_are_the_figures_of_the_run(links, seen, predictor):
    result = json.loads((links["ccssl-diff", 0] / "result.json").read_text())
    assert seen.ranks.figures()["mrr"] == pytest.approx(result["test"]["mrr"])
    assert seen.sets == predictor.coverage(DELTA)
    assert seen.sizes.mean() == pytest.approx(seen.sets["size"])
    at_delta = seen.misses.missed[np.isclose(seen.misses.level, DELTA)]
    assert at_delta == pytest.approx([1 - seen.sets["coverage"]])
    assert np.all(np.diff(seen.misses.missed) >= 0)
    band = np.isclose(seen.misses.level, DELTA)
    assert (1 - seen.misses.high[band][0], 1 - seen.misses.low[band][0]) == pytest.approx(tuple(seen.sets["band"]))


def test_new_facts_are_the_most_probable_ones_a_few_of_each_relation(seen, predictor):
    every = sorted(predictor.predict(top=1), key=lambda link: -link.probability)
    expected = []
    for link in every:
        if [other.relation for other in expected].count(link.relation) < graph_answers.OF_A_RELATION:
            expected.append(link)
    assert [link[:3] for link in seen.new] == [link[:3] for link in expected[: graph_answers.NEW_FACTS]]
    asked = 4 * int(predictor.training.trained.sum())  # each trained entity, each relation
    assert seen.asked == (asked, asked)
    names = predictor.graph.entities, predictor.graph.relations, predictor.graph.entities
    known = {
        tuple(all_[n] for all_, n in zip(names, fact, strict=True)) for fact in predictor.graph.known[:140].tolist()
    }
    assert not known & {link[:3] for link in seen.new}


def test_on_a_large_graph_not_every_query_is_asked(predictor, monkeypatch):
    monkeypatch.setattr(graph_answers, "ENTRIES", 25 * 20)
    chosen, asked = new_facts(predictor)
    assert asked == (25, 76)
    assert len({link.relation for link in chosen}) == 4
    assert {link[:3] for link in chosen} <= {link[:3] for link in predictor.predict(top=1)}
    assert new_facts(predictor) == (chosen, asked)


def test_cards_are_what_they_say(seen, predictor):
    assert len(seen.cards) == graph_answers.CARDS
    for card in seen.cards:
        query = (card.head, card.relation, card.tail)
        assert query.count("?") == 1
        (members,) = predictor.predict_sets([query], DELTA)
        assert (card.size, card.held) == (len(members), card.answer in members)
        assert [bar.name for bar in card.bars if bar.answer] == [card.answer]
        assert all(bar.in_set == (bar.name in members) for bar in card.bars)
        others = [bar.possibility for bar in card.bars if not bar.answer]
        assert others == sorted(others, reverse=True)
    assert not all(card.held for card in seen.cards)
    assert any(card.held for card in seen.cards)
    assert len({card.relation for card in seen.cards}) >= 3


def test_looking_changes_nothing(links):
    folder = links["ccssl-diff", 0]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    one, other = look(folder), look(folder, "cpu")
    assert one.sets == other.sets
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


# ---- words --------------------------------------------------------------------------------------------------------


def test_the_summary_tells_the_figures(found, links):
    result = json.loads((links["ccssl-diff", 0] / "result.json").read_text())
    alone = json.loads((links["supervised", 0] / "result.json").read_text())
    told = " ".join(found["pair"].summary())
    assert "From 40 labeled facts of strange, 40 further ones kept aside for calibration and 40 queries" in told
    assert f"a mean reciprocal rank (MRR) of {result['test']['mrr']:.3f} on 20 test facts" in told
    assert f"{result['test']['hits@1']:.1%} of the answers" in told
    assert f"taught by the labeled facts alone, reaches {alone['test']['mrr']:.3f}" in told
    assert f"hold the answer of {found['pair'].seen.sets['coverage']:.1%} of test queries" in told
    assert "is not known" not in told
    assert "What the unlabeled queries brought is not known" in " ".join(found["one"].summary())
    alone = " ".join(found["supervised"].summary())
    assert "queries without an answer" not in alone
    assert "brought" not in alone


def test_within_seeds_the_difference_is_students(found):
    many = found["many"]
    mrr = {group.config.method: [run.result["test"]["mrr"] for run in group.runs] for group in many.groups}
    focus = many.focus.config.method
    assert focus == "pseudo-label"
    differences = np.array(mrr[focus]) - np.array(mrr["supervised"])
    low, high = scipy.stats.t.interval(0.95, 1, differences.mean(), scipy.stats.sem(differences))
    assert many.brought.mean == pytest.approx(differences.mean())
    assert (many.brought.low, many.brought.high) == pytest.approx((low, high))
    assert many.brought.over == "2 divisions of the facts"
    assert "on average over 2 divisions of the facts" in " ".join(many.summary())


def test_of_a_single_pair_the_difference_is_within_facts(found):
    pair = found["pair"]
    gains = 1 / pair.seen.ranks.realistic - 1 / pair.reference_ranks.realistic
    facts = (gains[:20] + gains[20:]) / 2
    assert pair.brought.mean == pytest.approx(facts.mean())
    half = scipy.stats.norm.ppf(0.975) * facts.std(ddof=1) / np.sqrt(20)
    assert pair.brought.high - pair.brought.mean == pytest.approx(half, rel=1e-5)
    assert over_facts(np.zeros(8)).sure is False
    assert over_facts(np.full(8, 0.1)).sure


def test_without_a_seed_in_common_nothing_is_compared(links):
    apart = report([links["ccssl-diff", 0], links["supervised", 1]])
    assert apart.brought is None
    assert "without a seed in common" in " ".join(apart.summary())


def test_a_coverage_below_its_band_is_told_as_what_it_is(found):
    one = found["one"]
    low = one.seen.sets["band"][0]
    for coverage, told in (
        (low - 0.01, "below what chance allows in 95% of cases"),
        (low, "the promise is kept"),
        (1.0, "the promise is kept"),
    ):
        seen = replace(one.seen, sets={**one.seen.sets, "coverage": coverage})
        changed = replace(one, seen=seen)
        assert told in " ".join(changed.summary())
        assert "broken" not in " ".join(changed.summary())
        assert ('class="verdict broken"' in render(changed)) == told.startswith("below")


def test_cautions(found, special, links):
    def told(name):
        return " ".join(found[name].cautions())

    assert "one division of the facts, seed 0" in told("one")
    assert "seed" not in told("many")
    assert "divided as in the published experiments" in told("paper")
    assert "whose answer a symmetric model then knows" in told("per relation")
    assert "rest on the validation facts, by which the weights were chosen" in told("validation")
    unequal = report([links["ccssl-diff", 0], links["supervised", 0]])
    assert "differs in more than the method" not in " ".join(unequal.cautions())


def test_an_unequal_baseline_is_told(links, home, data):
    other = made(home / "unequal", data, method="supervised", lr=0.02, dim=8)
    told = " ".join(report([links["ccssl-diff", 0], other]).cautions())
    assert "differs in more than the method: dim 8, not 16; lr 0.02, not 0.05" in told


def test_strangers_are_told(tmp_path):
    graph = facts_of(tmp_path / "graph")
    with (graph / "test.tsv").open("a") as file:
        file.write("nobody\t<b>like</b>\te07\n")
    cautions = " ".join(report([made(tmp_path / "run", graph, epochs=2)]).cautions())
    assert "The test part names 1 entities without a training fact: nobody." in cautions
    assert re.search(
        r"\d+ facts of the test part name an entity without a labeled fact: they rank last\.", cautions
    )


def test_relations_are_those_of_the_result(found, links):
    pair = found["pair"]
    rows = words.relation_rows(pair)
    assert sum(row["facts"] for row in rows) == 20
    assert [row["facts"] for row in rows] == sorted((row["facts"] for row in rows), reverse=True)
    for row in rows:
        assert row["mrr"] == pair.run.result["relations"][row["name"]]["mrr"]
        assert row["alone"] == pair.reference.result["relations"][row["name"]]["mrr"]
        assert row["coverage"] == pair.seen.sets["relations"][row["name"]]["coverage"]
    assert all(row["alone"] is None for row in words.relation_rows(found["one"]))


def test_figures_are_json_and_those_of_the_runs(found):
    told = json.loads(json.dumps(found["many"].figures(), allow_nan=False))
    assert [run["method"] for run in told["runs"]] == ["pseudo-label"] * 2 + ["ccssl-diff"] * 2 + ["supervised"] * 2
    for run in told["runs"]:
        assert run["test"] == json.loads((Path(run["folder"]) / "result.json").read_text())["test"]
    assert told["brought"]["mrr"] == found["many"].brought.mean
    assert told["sets"]["coverage"] == found["many"].seen.sets["coverage"]
    assert len(told["new"]) == len(found["many"].seen.new)


# ---- the page -----------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Checks that tags close in order, and collects them and the text between them."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "wbr", "img"):
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
        return re.sub(r"\s+", " ", "".join(self.words))


def test_the_page_is_well_formed_and_small(text):
    page = Page(text)
    assert text.startswith("<!doctype html>")
    assert len(text.encode()) < MOST_BYTES
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all(link["href"][1:] in ids for link in page.all("a"))
    assert all(drawing["aria-label"] for drawing in page.all("svg"))
    assert len(page.all("h1")) == 1
    assert not re.search(r"\bNone\b|\bnan\b|Undefined|\{%|%\}|\binf\b", page.text)


def test_the_page_asks_for_nothing(text):
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "embed", "form", "img"} & {tag for tag, _ in page.tags}
    without_names = re.sub(r'xmlns(:\w+)?="http://www\.w3\.org/[^"]*"', "", text)
    assert not re.search(r"https?:|//[a-z]|@import|javascript:", without_names)
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        assert all(attributes.get(name, "#").startswith("#") for name in ("src", "href", "xlink:href"))


def test_names_are_shown_as_they_are(text, texts):
    page = Page(text)
    assert "<script" not in text
    assert "<b>like</b>" not in text
    assert "49 $x^2$" not in page.text
    every = " ".join(Page(one).text for one in texts.values())
    for name in STRANGE.values():
        assert name in every, name
    assert html.escape(STRANGE["like"]) in text


def test_sections_and_figures_follow_what_there_is(texts):
    pages = {name: Page(text) for name, text in texts.items()}
    for page in pages.values():
        assert {s["id"] for s in page.all("section")} >= {
            "result",
            "training",
            "sets",
            "relations",
            "repeat",
            "new",
        }
    drawn = {name: " | ".join(d["aria-label"] for d in page.all("svg")) for name, page in pages.items()}
    assert all("Loss over training" in told for told in drawn.values())
    for name in EVERY:
        assert ("hidden answer" in drawn[name]) == (name in ("one", "pair", "many", "paper", "per relation"))
        assert ("prediction set" in drawn[name]) == (name != "nothing to calibrate by")
        assert ("Mean reciprocal rank on validation" in drawn[name]) == (name != "nothing to calibrate by")
    assert "no entity can be excluded" in pages["nothing to calibrate by"].text
    assert "train on the labeled facts alone and name both runs" in pages["one"].text
    for name in ("pair", "many", "supervised"):
        assert "name both runs" not in pages[name].text
    assert "makes it hold there" in pages["one"].text
    assert "for each of them." in pages["per relation"].text


def test_the_numbers_of_the_table_are_those_of_the_runs(found, texts):
    many = found["many"]
    page = Page(texts["many"])
    for group in many.groups:
        values = [run.result["test"]["mrr"] for run in group.runs]
        assert f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}" in page.text
    test = many.run.result["test"]
    for side in ("", "tail.", "head."):
        assert f"{test[side + 'mrr']:.3f}{test[side + 'hits@1']:.1%}" in page.text.replace(" ", "")


def test_ties_are_told_where_they_matter(found):
    one = found["one"]
    test = dict(one.run.result["test"])
    for name in list(test):
        if name.startswith(("optimistic.", "pessimistic.")):
            test[name] = test[name.partition(".")[2]]

    def text(test):
        return render(replace(one, run=replace(one.run, result={**one.run.result, "test": test})))

    assert "ties against it" not in text(test)
    assert "ties against it" not in text({**test, "pessimistic.mrr": test["mrr"] - 1e-9})
    tied = text({**test, "pessimistic.mrr": 0.01})
    assert "ties against it" in tied
    assert "0.010" in tied
    assert "ties in its favour" not in tied


def test_commands_can_be_repeated(found, texts):
    lines = [html.unescape(re.sub(r"<[^>]*>", "", pre)) for pre in re.findall(r"<pre>(.*?)</pre>", texts["many"])]
    for group in found["many"].groups:
        for run in group.runs:
            assert command(config_of(run), run.folder) in lines
    assert any(line.startswith("ccssl graph report ") for line in lines)
    assert any(line.startswith("ccssl graph predict ") for line in lines)


def test_equal_runs_give_equal_pages(links, texts):
    again = render(report([links[key] for key in CASES["pair"]]))
    assert again == texts["pair"]


def test_a_drawing_of_hits_ends_at_all_entities():
    ranks = np.array([1.0, 1.0, 2.5, 20.0])
    assert graph_figures.hits([(ranks, 0), (ranks, None)], 20).count("<path") > 4
    graph_figures.set_sizes(np.zeros(4, int), 20)  # all sets are empty
    graph_figures.set_sizes(np.array([0, 40_000]), 40_000)


# ---- the command --------------------------------------------------------------------------------------------------


def graph(capsys, *arguments):
    try:
        code = cli.main(["graph", "report", *map(str, arguments)])
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_writes_a_page_and_prints_a_table(links, found, texts, tmp_path, capsys):
    page = tmp_path / "new" / "page.html"
    pair = [links[key] for key in CASES["pair"]]
    code, out, err = graph(capsys, *pair, "--out", page)
    assert (code, err) == (0, "")
    assert page.read_text(encoding="utf-8") == texts["pair"]
    assert out.splitlines()[0].split()[:3] == ["filtered", "ranks", "MRR"]
    assert out.rstrip().endswith(f"The page with figures, sets and new facts: {page}")
    code, out, _ = graph(capsys, *pair, "--out", page, "--json")
    assert code == 0
    assert json.loads(out) == {"page": str(page), **json.loads(json.dumps(found["pair"].figures()))}


def test_the_page_of_a_single_run_goes_into_its_folder(links, texts, capsys):
    folder = links["supervised", 0]
    try:
        assert graph(capsys, folder)[0] == 0
        assert (folder / "report.html").read_text(encoding="utf-8") == texts["supervised"]
    finally:
        (folder / "report.html").unlink()


def test_bad_input_gets_a_sentence_and_code_2(links, tmp_path, capsys):
    one, other = links["ccssl-diff", 0], links["supervised", 0]
    for arguments, message in [
        ([one, other], "--out must name the page"),
        ([one, "--out", tmp_path], "--out must name a file"),
        ([tmp_path / "nowhere"], "there is no folder"),
        ([tmp_path], "is not the folder of a run"),
        ([], "RUN"),
        ([one, "--dvice", "cpu"], "Did you mean --device?"),
    ]:
        code, out, err = graph(capsys, *arguments)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1


# ---- in a browser -------------------------------------------------------------------------------------------------


OVERFLOW = """
const wide = document.documentElement.clientWidth;
for (const d of document.querySelectorAll('details')) d.open = true;
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
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_nothing_reaches_beyond_the_window(chromium, pages, width, dark):
    for name in ("many", "nothing to calibrate by"):
        chromium.show(pages / f"{name}.html", width, dark)
        scroll, client, out = chromium.run(OVERFLOW)
        assert client == width
        assert scroll <= width
        assert out == []
    paper = chromium.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 150) == dark


@pytest.mark.browser
@needs_browser
def test_the_browser_asks_for_nothing_else(chromium, pages):
    chromium.show(pages / "one.html")
    chromium.requested()
    chromium.show(pages / "pair.html")
    assert [a for a in chromium.requested() if not a.startswith("data:")] == [(pages / "pair.html").as_uri()]
