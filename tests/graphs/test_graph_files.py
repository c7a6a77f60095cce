"""Graphs from files: three kinds of text, plain sentences with file and line for what is wrong, and PyKEEN's sets."""

import pytest
from toy_graph import toy_graph

from ccssl.errors import InputError
from ccssl.graphs.config import GRAPHS
from ccssl.graphs.files import load_graph, read_queries

TRAIN = [("ada", "parent of", "bob"), ("bob", "parent of", "cy, junior"), ("ada", "knows", 'the "cat"')]


def written(folder, **files):
    """Write files; the double underscore of a name is its dot."""
    for name, text in files.items():
        data = text if isinstance(text, bytes) else text.encode()
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


def named(graph, part="train"):
    return [(graph.entities[h], graph.relations[r], graph.entities[t]) for h, r, t in getattr(graph, part).tolist()]


def lines(rows, between="\t", quote=False, end="\n"):
    def field(text):
        return '"' + text.replace('"', '""') + '"' if quote and ("," in text or '"' in text) else text

    return "".join(between.join(map(field, row)) + end for row in rows)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train__tsv", lines(TRAIN)),
        ("train__txt", lines(TRAIN)),
        ("train__csv", lines(TRAIN, ",", quote=True)),
        ("train__tsv", lines(TRAIN, end="\r\n")),
        ("train__csv", lines(TRAIN, ",", quote=True, end="\r\n")),
        ("train__tsv", lines(TRAIN).rstrip("\n")),
        ("train__tsv", "\n" + lines(TRAIN, end="\n\n") + "\t\t\n"),
        ("train__tsv", "head\trelation\ttail\n" + lines(TRAIN)),
        ("train__tsv", "\n\t\t\nhead\trelation\ttail\n" + lines(TRAIN)),
        ("train__csv", "\n\nHead, Relation, Tail\n" + lines(TRAIN, ",", quote=True)),
        ("train__csv", "Head, Relation, Tail\n" + lines(TRAIN, ",", quote=True)),
        ("train__tsv", b"\xef\xbb\xbf" + lines(TRAIN).encode()),
        ("train__csv", b"\xef\xbb\xbfhead,relation,tail\n" + lines(TRAIN, ",", quote=True).encode()),
        ("train__tsv", lines([[f" {name}  " for name in row] for row in TRAIN])),
    ],
)
def test_the_same_facts_in_every_kind_of_file(tmp_path, name, text):
    graph = load_graph(written(tmp_path, **{name: text}))
    assert named(graph) == TRAIN
    assert len(graph.valid) == len(graph.test) == len(graph.queries) == 0


def test_a_header_counts_only_before_all_facts(tmp_path):
    graph = load_graph(written(tmp_path, train__tsv=lines([*TRAIN, ("head", "relation", "tail")])))
    assert named(graph)[-1] == ("head", "relation", "tail")


def test_all_parts_of_a_folder(tmp_path):
    graph = load_graph(
        written(
            tmp_path,
            train__tsv=lines(TRAIN),
            valid__csv="bob,knows,ada\n",
            test__txt="ada\tparent of\tdan\n",
            unlabeled__tsv="ada\tknows\t?\n?\tknows\tada\nada\tknows\t?\n",
        )
    )
    assert named(graph, "valid") == [("bob", "knows", "ada")]
    assert named(graph, "test") == [("ada", "parent of", "dan")]
    assert {graph.named(*query) for query in graph.queries.tolist()} == {
        ("ada", "knows", None),
        (None, "knows", "ada"),
    }
    assert graph.name == str(tmp_path)
    assert any("dan" in notice for notice in graph.notices)


def test_an_empty_unlabeled_file_asks_nothing(tmp_path):
    graph = load_graph(written(tmp_path, train__tsv=lines(TRAIN), unlabeled__tsv="\n"))
    assert graph.queries.shape == (0, 2)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"train__tsv": "a\tb\n"},
            r"train\.tsv, line 1: expected head, relation and tail with tabs .* got 2 of them",
        ),
        ({"train__tsv": "a\tr\tb\n\na\tr\t\n"}, r"train\.tsv, line 3: .* got 2 of them: 'a\\tr\\t'"),
        ({"train__tsv": "a\tr\tb\tc\n"}, r"train\.tsv, line 1: .* got 4 of them"),
        ({"train__tsv": "a r b\n"}, r"train\.tsv, line 1: .* got 1 of them: 'a r b'"),
        ({"train__csv": "a,r,b\na,r\n"}, r"train\.csv, line 2: .* with commas .* got 2 of them: 'a,r'"),
        ({"train__csv": 'a,r,"b" c\n'}, r"train\.csv, line 1: the row that begins here is not CSV"),
        (
            {"train__csv": 'a,r,b\nc,r,"d\ne,r,f\n'},
            r"train\.csv, line 2: .* not CSV: unexpected end of data\. Look",
        ),
        ({"train__csv": f"a,r,b\n\na,r,{'x' * 200_000}\n"}, r"train\.csv, line 3: .* not CSV: field larger"),
        ({"train__csv": 'a,r,"b\nc"\na,r\n'}, r"train\.csv, line 3: .* got 2 of them: 'a,r'"),
        ({"train__csv": 'a,r,b\n"a\nb",r\n'}, r"train\.csv, line 2: .* got 2 of them"),
        ({"train__tsv": b"a\tr\t\xff\n"}, r"train\.tsv is not text in UTF-8: .* at byte 4"),
        ({"train__tsv": "a\tr\tb\na\tr\t?\n"}, r"train\.tsv, line 2: a fact has no \?, got a r \?: .* unlabeled"),
        (
            {"train__tsv": "a\tr\tb\n", "test__tsv": "?\tr\tb\n"},
            r"test\.tsv, line 1: a fact has no \?, got \? r b: queries go to unlabeled",
        ),
        (
            {"train__tsv": "a\tr\tb\n", "train__csv": "a,r,b\n"},
            r"holds train\.tsv and train\.csv: keep one of them",
        ),
        ({"test__tsv": "a\tr\tb\n"}, r"holds no graph: it needs train\.tsv, train\.txt, train\.csv"),
        ({"train__tsv": ""}, "has no training facts"),
        (
            {"train__tsv": "ada\tknows\tbob\n", "unlabeled__tsv": "\nadda\tknows\t?\n"},
            r"unlabeled\.tsv, line 2: the graph has no entity 'adda'\. Did you mean ada\?",
        ),
        (
            {"train__tsv": "ada\tknows\tbob\n", "unlabeled__csv": "ada,know,?\n"},
            r"unlabeled\.csv, line 1: the graph has no relation 'know'\. Did you mean knows\?",
        ),
        (
            {"train__tsv": "ada\tknows\tbob\n", "unlabeled__tsv": "ada\tknows\tbob\n"},
            r"unlabeled\.tsv, line 1: a query asks for its head or for its tail with \?, got ada knows bob",
        ),
        ({"train__tsv": "a\tr\tb\n", "unlabeled__tsv": "?\tr\t?\n"}, r"line 1: a query asks .* got \? r \?"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path, files, message):
    with pytest.raises(InputError, match=message):
        load_graph(written(tmp_path, **files))


def test_queries_are_read_with_their_names(tmp_path):
    graph = toy_graph()
    path = written(tmp_path, ask__tsv="e03\tlike\t?\n?\tshift 1\te00\n") / "ask.tsv"
    assert read_queries(path, graph) == [("e03", "like", None), (None, "shift 1", "e00")]
    with pytest.raises(FileNotFoundError):
        read_queries(tmp_path / "none.tsv", graph)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kinshp", "a graph is one of umls, kinship, nations, a folder .* got 'kinshp'. Did you mean kinship"),
        ("no/such/folder", "got 'no/such/folder'"),
        ("pykeen:natoins", "PyKEEN has no data set 'natoins'. Did you mean nations"),
    ],
)
def test_unknown_graphs_are_refused(name, message):
    pytest.importorskip("pykeen")
    with pytest.raises(InputError, match=message):
        load_graph(name)


def test_without_pykeen_its_data_sets_say_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pykeen.datasets", None)
    with pytest.raises(
        InputError, match=r"pykeen:nations needs PyKEEN: install it with pip install 'ccssl\[graphs\]'"
    ):
        load_graph("pykeen:nations")


@pytest.mark.parametrize("name", GRAPHS)
def test_the_embedded_graphs_are_those_of_pykeen(name):
    """Both took them from the same publication, by different ways: equal but for the numbering."""
    pytest.importorskip("pykeen")
    ours, theirs = load_graph(name), load_graph(f"pykeen:{'kinships' if name == 'kinship' else name}")
    assert set(ours.entities) == set(theirs.entities)
    assert set(ours.relations) == set(theirs.relations)
    for part in ("train", "valid", "test"):
        assert set(named(ours, part)) == set(named(theirs, part))
        assert len(getattr(ours, part)) == len(getattr(theirs, part)) > 100
    assert theirs.name.startswith("pykeen:")
    assert load_graph(name).checksum == ours.checksum != theirs.checksum
