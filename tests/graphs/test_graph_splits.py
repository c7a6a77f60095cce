"""Divisions of the training facts: nothing in two parts, shares as asked, and what each mode promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_graph import toy_graph

from ccssl.errors import InputError
from ccssl.graphs.config import SPLIT_MODES, shares_of
from ccssl.graphs.files import load_graph
from ccssl.graphs.splits import split_of

PARTS = ("labeled", "calibration", "unlabeled")
GRAPH = toy_graph()
N = len(GRAPH.train)

ratios = st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))


def rows_of(split):
    return [getattr(split, part) for part in PARTS]


@given(st.sampled_from(SPLIT_MODES), ratios, st.integers(0, 5))
def test_every_query_is_in_one_part_and_the_parts_have_their_shares(mode, ratio, seed):
    split = split_of(GRAPH, ":".join(map(str, ratio)), mode, seed)
    parts = rows_of(split)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(2 * N))
    shares = np.array(ratio) / sum(ratio)
    for part, share in zip(parts, shares, strict=True):
        assert abs(len(part) - 2 * N * share) <= 2  # one fact, which is two queries
        assert np.all(np.diff(part) > 0)
        assert len(part) == 0 or share > 0


@given(st.sampled_from(("paired", "random")), st.integers(0, 10**6))
def test_a_split_is_a_function_of_its_seed(mode, seed):
    one, two, other = (split_of(GRAPH, "40:40:20", mode, s) for s in (seed, seed, seed + 1))
    assert one.to_json() == two.to_json() != other.to_json()


@given(ratios, st.integers(0, 5))
def test_paired_keeps_a_fact_and_its_inverse_together(ratio, seed):
    split = split_of(GRAPH, ":".join(map(str, ratio)), "paired", seed)
    for part, rows in zip(PARTS, rows_of(split), strict=True):
        facts, inverses = rows[rows < N], rows[rows >= N] - N
        assert np.array_equal(facts, inverses)
        found = split.rows(GRAPH, part)
        half = len(found) // 2
        assert np.array_equal(found[:half], GRAPH.train[facts])
        assert np.array_equal(found[half:, ::-1] - [0, len(GRAPH.relations), 0], GRAPH.train[facts])


def test_random_parts_facts_from_their_inverses():
    split = split_of(GRAPH, "50:25:25", "random")
    for rows in rows_of(split):
        alone = set(rows[rows < N]) ^ set(rows[rows >= N] - N)
        assert len(alone) > len(rows) / 4


@pytest.mark.parametrize(("ratio", "cuts"), [("40:40:20", (80, 160)), ("30:50:20", (60, 160)), ("40:60", (80, 80))])
def test_paper_slices_facts_and_then_inverses_in_order(ratio, cuts):
    split = split_of(GRAPH, ratio, "paper", seed=3)
    assert np.array_equal(split.labeled, np.arange(cuts[0]))
    assert np.array_equal(split.calibration, np.arange(*cuts))
    assert np.array_equal(split.unlabeled, np.arange(cuts[1], 2 * N))
    assert split_of(GRAPH, ratio, "paper", seed=4).to_json() == split.to_json()


def test_paper_trains_on_no_head_query():
    split = split_of(load_graph("umls"), "40:40:20", "paper")
    assert split.to_json()["labeled"]["head"] == []
    assert len(split.to_json()["labeled"]["tail"]) == round(0.8 * 5216)
    assert split.to_json()["unlabeled"]["tail"] == []
    honest = split_of(load_graph("umls"), "40:40:20", "paired").to_json()["labeled"]
    assert honest["head"] == honest["tail"]


@pytest.mark.parametrize("mode", SPLIT_MODES)
def test_the_record_numbers_the_facts_of_both_directions(mode):
    split = split_of(GRAPH, "40:40:20", mode, seed=1)
    told = split.to_json()
    assert (told["mode"], told["facts"]) == (mode, N)
    for part, rows in zip(PARTS, rows_of(split), strict=True):
        again = [*told[part]["tail"], *(N + np.array(told[part]["head"], int))]
        assert sorted(again) == rows.tolist()


def test_all_labels_every_fact():
    for mode in SPLIT_MODES:
        split = split_of(GRAPH, "all", mode)
        assert np.array_equal(split.labeled, np.arange(2 * N))
        assert len(split.calibration) == len(split.unlabeled) == 0


def test_a_method_without_calibration_charges_nobody_with_it():
    """Equal labeled facts, whoever calibrates: 40:40:20 and 40:60 differ in what is beside them."""
    ours, theirs = split_of(GRAPH, "40:40:20"), split_of(GRAPH, "40:60")
    assert np.array_equal(ours.labeled, theirs.labeled)
    assert set(ours.unlabeled) < set(theirs.unlabeled)


@given(ratios)
def test_shares_are_those_of_the_numbers(ratio):
    assert np.allclose(shares_of(":".join(map(str, ratio))), np.array(ratio) / sum(ratio))
    assert np.allclose(
        shares_of(f"{ratio[0]}:{ratio[1]}"), (ratio[0] / sum(ratio[:2]), 0, ratio[1] / sum(ratio[:2]))
    )
    assert sum(shares_of(":".join(map(str, ratio)))) == pytest.approx(1)


@pytest.mark.parametrize(
    "ratio", ["", "40", "a:b", "0:1:1", "-1:2:1", "1:2:3:4", "nan:1:1", "inf:1:1", "40:40:", "All"]
)
def test_what_is_no_ratio_is_refused(ratio):
    with pytest.raises(InputError, match="split must be all, or numbers such as 40:40:20") as refused:
        split_of(GRAPH, ratio)
    assert repr(ratio) in str(refused.value)


def test_a_ratio_that_leaves_no_labels_and_an_unknown_mode_are_refused():
    with pytest.raises(InputError, match="leaves none of 100 facts to learn from"):
        split_of(GRAPH, "1:1000:1000")
    with pytest.raises(InputError, match="split_mode must be one of paired, random, paper, got 'pared'"):
        split_of(GRAPH, "all", "pared")
