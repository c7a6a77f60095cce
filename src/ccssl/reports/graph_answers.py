"""What the predictor of a finished run answers, asked once more: test queries, their prediction sets, and new facts.

*New facts* are those with the highest probabilities, a few of each relation. On a large graph not every query can be
asked: then as many as ``ENTRIES`` allows are drawn at random, which the page tells.

Shapes: N test facts, E entities; what has an entry for each query has those for tails first, then those for heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ccssl.experiments.graph_run import load_run
from ccssl.graphs.predictor import Link, LinkPredictor
from ccssl.graphs.ranking import Ranks, pieces
from ccssl.graphs.triples import Graph
from ccssl.reports.graph_figures import Misses

DELTA = 0.1  # at which prediction sets are told of
LEVELS = np.arange(1, 101) / 200  # of the figure of misses: up to 0.5
ENTRIES = 2**27  # scores looked at for new facts
NEW_FACTS, OF_A_RELATION = 15, 3
CANDIDATES = 1000  # for these, of a piece of the queries
CARDS, BARS = 6, 6


@dataclass(frozen=True)
class Bar:
    """What is said of one entity."""

    name: str
    possibility: float
    in_set: bool
    answer: bool


@dataclass(frozen=True)
class Card:
    """A test query with its prediction set."""

    head: str
    relation: str
    tail: str  # ? for what is asked, here or in the head
    answer: str
    rank: float
    held: bool  # whether the answer is in the set
    size: int
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Look:
    """What the run looked at closely was asked again."""

    graph: Graph
    notices: list[str]
    ranks: Ranks
    sets: dict[str, Any]  # coverage and sizes at DELTA
    sizes: np.ndarray  # (2N,) of the prediction sets of test queries
    misses: Misses
    cards: list[Card]
    new: list[Link]
    asked: tuple[int, int]  # queries that were asked for new facts, of how many


def look(folder: Path, device: str | None = None) -> Look:
    """Ask the predictor of a run."""
    training = load_run(folder, device=device)
    predictor = LinkPredictor.of(training)
    graph, ranks = predictor.graph, predictor.ranks()
    facts = graph.both_ways(graph.test)
    p_values, held, sizes = np.empty(len(facts)), np.empty(len(facts), bool), np.empty(len(facts), np.int64)
    for rows in pieces(len(facts), len(graph.entities)):
        found = predictor.degrees(facts[rows], DELTA)
        answer = np.arange(len(found.p_value)), facts[rows, 2]
        p_values[rows], held[rows], sizes[rows] = found.p_value[answer], found.in_set[answer], found.in_set.sum(-1)
    sets = predictor.coverage(DELTA)
    new, asked = new_facts(predictor)
    return Look(
        graph,
        [*graph.notices, *training.notices()],
        ranks,
        sets,
        sizes,
        _misses(p_values, predictor, facts),
        cards(predictor, facts, held, sizes, ranks),
        new,
        asked,
    )


def _misses(p_values: np.ndarray, predictor: LinkPredictor, facts: np.ndarray) -> Misses:
    # p-values are fractions with a small denominator, rounded to float32: a hair below the level is at it.
    missed = np.array([(p_values < level - 1e-6).mean() for level in LEVELS])
    bands = np.array([predictor.band(level, facts) for level in LEVELS.tolist()])
    return Misses(LEVELS, missed, 1 - bands[:, 1], 1 - bands[:, 0])


def new_facts(predictor: LinkPredictor) -> tuple[list[Link], tuple[int, int]]:
    """Return the most probable new facts, not too many of a relation, and how many queries were asked, of how many."""
    graph = predictor.graph
    queries = predictor.tail_queries()
    asked = queries
    if len(queries) * len(graph.entities) > ENTRIES:
        drawn = np.random.default_rng(0).permutation(len(queries))[: max(1, ENTRIES // len(graph.entities))]
        asked = queries[np.sort(drawn)]
    best: list[Link] = []
    for links in predictor.links(asked, top=1, delta=DELTA):
        most = np.argsort(-links.probability, kind="stable")[:CANDIDATES]
        columns = [column[most].tolist() for column in links.columns(graph).values()]
        best += [Link(*row) for row in zip(*columns, strict=True)]
    best.sort(key=lambda link: -link.probability)
    chosen: list[Link] = []
    for link in best:
        if sum(other.relation == link.relation for other in chosen) < OF_A_RELATION:
            chosen.append(link)
    return chosen[:NEW_FACTS], (len(asked), len(queries))


def cards(
    predictor: LinkPredictor, facts: np.ndarray, held: np.ndarray, sizes: np.ndarray, ranks: Ranks
) -> list[Card]:
    """Return test queries worth a look: small sets that hold the answer, large ones, and sets that miss it."""
    order = np.argsort(sizes, kind="stable")
    kinds = (order[held[order]].tolist(), order[::-1].tolist(), order[~held[order]].tolist())
    chosen: list[int] = []
    for rows in CARDS // len(kinds) * kinds:
        fresh = [row for row in rows if row not in chosen]
        of_another_relation = [row for row in fresh if facts[row, 1] not in facts[chosen, 1]]
        chosen += (of_another_relation or fresh)[:1]
    chosen.sort(key=lambda row: (not held[row], sizes[row]))
    return [_card(predictor, facts[row], float(ranks.realistic[row])) for row in chosen]


def _card(predictor: LinkPredictor, fact: np.ndarray, rank: float) -> Card:
    graph = predictor.graph
    found = predictor.degrees(fact[None, :2], DELTA)
    answer, size = int(fact[2]), int(found.in_set.sum())
    shown = np.lexsort((-found.probability[0], -found.p_value[0]))[:BARS].tolist()
    shown = [entity for entity in shown if found.p_value[0, entity] > 0]
    if answer not in shown:
        shown[-1] = answer
    head, relation, tail = graph.named(int(fact[0]), int(fact[1]))
    return Card(
        head or "?",
        relation,
        tail or "?",
        graph.entities[answer],
        rank,
        bool(found.in_set[0, answer]),
        size,
        tuple(
            Bar(graph.entities[e], float(found.possibility[0, e]), bool(found.in_set[0, e]), e == answer)
            for e in shown
        ),
    )
