"""Graphs of named triples: each fact once, inverses that nobody sees, names looked up with a hint at the nearest."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_graph import ENTITIES, toy_facts, toy_graph

from ccssl.errors import InputError
from ccssl.graphs.triples import make_graph, with_queries

FAMILY = [("ada", "parent of", "bob"), ("bob", "parent of", "cy"), ("ada", "knows", "cy")]


def named(graph, part):
    return {(graph.entities[h], graph.relations[r], graph.entities[t]) for h, r, t in getattr(graph, part).tolist()}


def test_names_become_numbers_and_back():
    graph = toy_graph()
    assert named(graph, "train") | named(graph, "valid") | named(graph, "test") == set(toy_facts())
    assert (len(graph.train), len(graph.valid), len(graph.test)) == (100, 20, 20)
    assert len(graph.entities) == ENTITIES
    assert graph.relations == ("like", "shift 1", "shift 2", "shift 5")
    assert graph.notices == ()


def test_both_ways_puts_the_inverse_of_each_fact_after_all_facts():
    graph = make_graph("family", FAMILY)
    relations = len(graph.relations)
    both = graph.both_ways(graph.train)
    assert len(both) == 6
    for fact, inverse in zip(both[:3].tolist(), both[3:].tolist(), strict=True):
        head, relation, tail = fact
        assert inverse == [tail, relation + relations, head]
    assert np.array_equal(both[:3], graph.train)
    assert len(graph.known) == 6


@given(st.integers(0, ENTITIES - 1), st.integers(0, 7))
def test_a_query_is_named_without_inverses_and_found_again(entity, relation):
    graph = toy_graph()
    head, kind, tail = graph.named(entity, relation)
    assert kind in graph.relations
    assert (head is None) == (relation >= 4)
    assert (tail is None) == (relation < 4)
    assert graph.query((head, kind, tail)) == (entity, relation)
    assert graph.query(("?" if head is None else head, kind, "?" if tail is None else tail)) == (entity, relation)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (("adda", "knows", None), r"here: the graph has no entity 'adda'\. Did you mean ada\?"),
        ((None, "knows", "zzzz"), r"here: the graph has no entity 'zzzz'\.$"),
        (("ada", "parent", None), r"here: the graph has no relation 'parent'\. Did you mean parent of\?"),
        (("ada", "knows", "cy"), "here: a query asks for its head or for its tail with [?], got ada knows cy"),
        (("?", "knows", "?"), r"got \? knows \?"),
        (("ada", None, None), r"got ada \? \?"),
    ],
)
def test_bad_queries_are_refused_with_the_nearest_name(query, message):
    with pytest.raises(InputError, match=message):
        make_graph("family", FAMILY).query(query, "here: ")


def test_what_is_judged_by_is_not_learned_from():
    """A fact counts in the last of the parts train, valid, test that hold it; what is left out is told."""
    graph = make_graph(
        "family",
        [*FAMILY, ("cy", "knows", "bob"), ("cy", "knows", "ada"), FAMILY[0]],
        [("cy", "knows", "bob"), ("bob", "knows", "ada")],
        [("cy", "knows", "ada"), ("bob", "knows", "ada"), ("bob", "knows", "ada")],
    )
    assert named(graph, "train") == set(FAMILY)
    assert named(graph, "valid") == {("cy", "knows", "bob")}
    assert named(graph, "test") == {("cy", "knows", "ada"), ("bob", "knows", "ada")}
    assert [len(getattr(graph, part)) for part in ("train", "valid", "test")] == [3, 1, 2]
    assert sorted(graph.notices) == [
        "1 facts of the valid part are in the test part, too: they are left out of the valid part",
        "1 facts stand twice in the test part: each counts once",
        "1 facts stand twice in the train part: each counts once",
        "2 facts of the train part are in the valid or test part, too: they are left out of the train part",
    ]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 3), st.integers(0, 2)), min_size=1))
def test_parts_are_disjoint_and_lose_no_fact(rows):
    parts = [[("abcd"[h], "rs"[r], "abcd"[t]) for h, r, t, part in rows if part == wanted] for wanted in range(3)]
    wanted = [set(parts[0]) - set(parts[1]) - set(parts[2]), set(parts[1]) - set(parts[2]), set(parts[2])]
    names = {name for part in parts for h, _, t in part for name in (h, t)}
    if not wanted[0] or len(names) < 2:
        with pytest.raises(InputError, match=r"no training facts|a single entity"):
            make_graph("drawn", *parts)
        return
    graph = make_graph("drawn", *parts)
    for part, expected in zip(("train", "valid", "test"), wanted, strict=True):
        assert named(graph, part) == expected
        assert len(getattr(graph, part)) == len(expected)
    assert bool(graph.notices) >= (sum(map(len, parts)) > sum(map(len, wanted)))


def test_facts_keep_the_order_in_which_they_were_given():
    facts = toy_facts()
    shuffled = [facts[i] for i in np.random.default_rng(1).permutation(len(facts))]
    graph = make_graph("toy", [*shuffled, *facts])
    found = [(graph.entities[h], graph.relations[r], graph.entities[t]) for h, r, t in graph.train.tolist()]
    assert found == shuffled


def test_names_without_a_training_fact_are_told():
    graph = make_graph(
        "family", FAMILY, [("ada", "knows", "dan")], [("eve", "likes", "dan"), ("eve", "likes", "bob")]
    )
    assert "the valid part names 1 entities without a training fact: dan" in graph.notices
    assert "the test part names 2 entities without a training fact: dan, eve" in graph.notices
    assert "the test part names 1 relations without a training fact: likes" in graph.notices


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([], "family has no training facts"),
        ([("ada", "knows", "ada")], "family has a single entity, 'ada': there is nothing to predict"),
        ([("ada", "knows")], r"a train fact must be head, relation and tail, three names, got \('ada', 'knows'\)"),
        ([("ada", "", "bob")], "three names"),
        ([("ada", 3, "bob")], "three names"),
    ],
)
def test_what_is_no_graph_is_refused(train, message):
    with pytest.raises(InputError, match=message):
        make_graph("family", train)


def test_a_graph_whose_training_facts_are_all_judged_by_is_refused():
    with pytest.raises(InputError, match="or none that is not in its valid or test part as well"):
        make_graph("family", FAMILY, [], FAMILY)


def test_unlabeled_queries_count_once_and_keep_their_direction():
    asked = [("ada", "knows", None), (None, "knows", "ada"), ("ada", "knows", "?"), ("cy", "parent of", None)]
    graph = make_graph("family", FAMILY, queries=asked)
    assert {graph.named(*query) for query in graph.queries.tolist()} == {asked[0], asked[1], asked[3]}
    assert len(graph.queries) == 3
    assert len(with_queries(graph, []).queries) == 0


def test_the_checksum_tells_graphs_apart():
    graph = toy_graph()
    assert toy_graph().checksum == graph.checksum
    assert replace(graph, notices=("told",), name="another").checksum == graph.checksum
    others = [
        toy_graph(seed=1),
        replace(graph, train=graph.train[::-1]),
        replace(graph, valid=graph.valid[:-1]),
        replace(graph, test=graph.valid, valid=graph.test),
        replace(graph, queries=np.array([[0, 1]])),
        replace(graph, entities=(*graph.entities[:-1], "another")),
        replace(graph, relations=(*graph.relations[:-1], "another")),
        replace(graph, entities=graph.entities[:-1], relations=(graph.entities[-1], *graph.relations)),
    ]
    assert len({graph.checksum, *(other.checksum for other in others)}) == len(others) + 1
