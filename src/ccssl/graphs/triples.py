r"""A knowledge graph: facts (head, relation, tail), and the two questions that each of them answers.

A fact (h, r, t) says that the relation r holds from h to t. Which facts are missing is asked in two directions ::

    tail query  (h, r, ?)           head query  (?, r, t).

Inside, there are tail queries only: every relation r gets an *inverse* r + R, R the number of relations, so that
(h, r, t) is also (t, r + R, h), and the head query (?, r, t) is the tail query (t, r + R, ?). A model then needs one
function, the scores of all tails, and learns both directions as classification over all entities (1vsAll). No user
ever sees an inverse: names, files and results speak of heads and tails.

Every fact counts once. A fact that is in the test part is left out of the validation and training parts, and one in
the validation part out of the training part, so that nothing is judged by what was learned from; what was left out
is told in ``notices``, as are entities that only these two parts name: nothing can be learned about them, and a fact
that names one ranks last (``ranking``).

Shapes: N facts, E entities, R relations; a fact is a row of three numbers, a query a row of two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ccssl.errors import InputError, did_you_mean

PARTS = ("train", "valid", "test")

Triple = Sequence[str]
Query = tuple[str | None, str, str | None]  # what is asked for is None


@dataclass(frozen=True, eq=False)
class Graph:
    """Facts of a graph, as numbers of its entities and relations."""

    name: str
    entities: tuple[str, ...]
    relations: tuple[str, ...]
    train: np.ndarray  # (N, 3) int64: head, relation, tail
    valid: np.ndarray
    test: np.ndarray
    queries: np.ndarray  # (Q, 2) int64: entity and relation of unlabeled queries; from R on, a head is asked for
    notices: tuple[str, ...] = ()  # what a user should know of the data

    def __repr__(self) -> str:
        return (
            f"Graph({self.name!r}, entities={len(self.entities)}, relations={len(self.relations)}, "
            f"train={len(self.train)}, valid={len(self.valid)}, test={len(self.test)}, queries={len(self.queries)})"
        )

    @cached_property
    def entity_number(self) -> dict[str, int]:
        """The number of each entity."""
        return {name: number for number, name in enumerate(self.entities)}

    @cached_property
    def relation_number(self) -> dict[str, int]:
        """The number of each relation."""
        return {name: number for number, name in enumerate(self.relations)}

    def query(self, query: Query, where: str = "") -> tuple[int, int]:
        """Return entity and relation of a query, which has None (or "?") for its head or for its tail.

        >>> graph = make_graph("family", [("ada", "parent of", "bob"), ("bob", "parent of", "cy")])
        >>> graph.query(("ada", "parent of", None)), graph.query((None, "parent of", "cy"))
        ((0, 0), (2, 1))
        """
        head, relation, tail = (None if name == "?" else name for name in query)
        if (head is None) == (tail is None) or relation is None:
            raise InputError(f"{where}a query asks for its head or for its tail with ?, got {_shown(query)}.")
        known, asked_for_head = (tail if head is None else head), head is None
        assert known is not None
        entity = _number(self.entity_number, known, "entity", where)
        number = _number(self.relation_number, relation, "relation", where)
        return entity, number + len(self.relations) * asked_for_head

    def named(self, entity: int, relation: int) -> Query:
        """Return a query by names, the reverse of ``query``."""
        known, kind = self.entities[entity], self.relations[relation % len(self.relations)]
        return (None, kind, known) if relation >= len(self.relations) else (known, kind, None)

    def both_ways(self, facts: np.ndarray) -> np.ndarray:
        """Return facts (N, 3) and, after them, their inverses: (2N, 3)."""
        head, relation, tail = facts.T
        return np.concatenate([facts, np.stack([tail, relation + len(self.relations), head], 1)])

    @cached_property
    def checksum(self) -> str:
        """What tells this graph from another one: names, facts and queries count, their order in the files, too."""
        total = hashlib.sha256("\n".join((*self.entities, "", *self.relations)).encode())
        for part in (self.train, self.valid, self.test, self.queries):
            total.update(f"{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        return total.hexdigest()[:16]

    @cached_property
    def known(self) -> np.ndarray:
        """All facts of all parts, both ways."""
        return self.both_ways(np.concatenate([self.train, self.valid, self.test]))


def make_graph(
    name: str,
    train: Iterable[Triple],
    valid: Iterable[Triple] = (),
    test: Iterable[Triple] = (),
    queries: Iterable[Query] = (),
) -> Graph:
    """Return a graph of named triples; ``queries`` are unlabeled ones, with None (or "?") for what is asked.

    >>> make_graph("family", [("ada", "parent of", "bob"), ("bob", "parent of", "cy")])
    Graph('family', entities=3, relations=1, train=2, valid=0, test=0, queries=0)
    """
    named = {
        part: [_triple(triple, part) for triple in triples]
        for part, triples in zip(PARTS, (train, valid, test), strict=True)
    }
    every = [triple for triples in named.values() for triple in triples]
    entities = sorted({entity for head, _, tail in every for entity in (head, tail)})
    relations = sorted({relation for _, relation, _ in every})
    place, kind = ({name: number for number, name in enumerate(names)} for names in (entities, relations))
    parts = {
        part: np.array([(place[h], kind[r], place[t]) for h, r, t in triples], np.int64).reshape(-1, 3)
        for part, triples in named.items()
    }
    return with_queries(graph_of(name, entities, relations, parts), queries)


def graph_of(name: str, entities: Sequence[str], relations: Sequence[str], parts: dict[str, np.ndarray]) -> Graph:
    """Return a graph of triples that are numbered already; each fact is kept once."""
    parts, notices = _each_once(parts, len(entities), len(relations))
    if not len(parts["train"]):
        raise InputError(f"{name} has no training facts, or none that is not in its valid or test part as well.")
    if len(entities) < 2:
        raise InputError(f"{name} has a single entity, {entities[0]!r}: there is nothing to predict.")
    for part in ("valid", "test"):
        for what, names, columns in (("entities", entities, [0, 2]), ("relations", relations, [1])):
            unseen = np.setdiff1d(parts[part][:, columns], parts["train"][:, columns])
            if len(unseen):
                notices.append(
                    f"the {part} part names {len(unseen)} {what} without a training fact: "
                    f"{_some([names[n] for n in unseen])}"
                )
    nothing = np.empty((0, 2), np.int64)
    return Graph(name, tuple(entities), tuple(relations), **parts, queries=nothing, notices=tuple(notices))


def with_queries(graph: Graph, queries: Iterable[Query]) -> Graph:
    """Return the graph with other unlabeled queries, each once."""
    asked = sorted({graph.query(query) for query in queries})
    return replace(graph, queries=np.array(asked, np.int64).reshape(-1, 2))


def _triple(triple: Triple, part: str) -> tuple[str, str, str]:
    if len(triple) != 3 or not all(isinstance(name, str) and name for name in triple):
        raise InputError(f"a {part} fact must be head, relation and tail, three names, got {tuple(triple)!r}.")
    head, relation, tail = triple
    return head, relation, tail


def _each_once(
    parts: dict[str, np.ndarray], entities: int, relations: int
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Leave out repeated facts: within a part all but the first, and those of a part that is judged by."""
    kept, notices = {}, []
    taken = np.empty(0, np.int64)
    for part in reversed(PARTS):
        head, relation, tail = parts[part].T
        key = (head * relations + relation) * entities + tail
        first = np.sort(np.unique(key, return_index=True)[1])
        if len(first) < len(key):
            notices.append(f"{len(key) - len(first)} facts stand twice in the {part} part: each counts once")
        fresh = first[~np.isin(key[first], taken)]
        if len(fresh) < len(first):
            later = "test" if part == "valid" else "valid or test"
            notices.append(
                f"{len(first) - len(fresh)} facts of the {part} part are in the {later} part, too: they are left "
                f"out of the {part} part"
            )
        kept[part] = parts[part][fresh]
        taken = np.concatenate([taken, key[fresh]])
    return {part: kept[part] for part in PARTS}, notices


def _number(numbers: dict[str, int], name: str, what: str, where: str) -> int:
    if name not in numbers:
        raise InputError(f"{where}the graph has no {what} {name!r}.{did_you_mean(name, numbers)}")
    return numbers[name]


def _shown(query: Query) -> str:
    return " ".join("?" if name is None else str(name) for name in query)


def _some(names: Sequence[object], most: int = 5) -> str:
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
