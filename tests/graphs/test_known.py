"""Known tails of a query, against a plain dict of sets."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ccssl.graphs.known import Known

ENTITIES, RELATIONS = 5, 4
fact = st.tuples(st.integers(0, ENTITIES - 1), st.integers(0, RELATIONS - 1), st.integers(0, ENTITIES - 1))
facts = st.lists(fact, max_size=30).map(lambda rows: np.array(rows, np.int64).reshape(-1, 3))


def by_dict(rows):
    found = {}
    for head, relation, tail in rows.tolist():
        found.setdefault((head, relation), set()).add(tail)
    return found


EVERY = np.array([(e, r) for e in range(ENTITIES) for r in range(RELATIONS)])


@given(facts, st.lists(st.integers(0, len(EVERY) - 1), max_size=12))
def test_known_tails_of_any_batch(rows, chosen):
    """Queries may repeat, come in any order, and have no known tail."""
    known, expected = Known(rows, RELATIONS), by_dict(rows)
    queries = EVERY[chosen].reshape(-1, 2)
    places = known.of(queries[:, 0], queries[:, 1])
    found = [[] for _ in queries]
    for row, column in zip(places.rows.tolist(), places.columns.tolist(), strict=True):
        found[row].append(column)
    for (entity, relation), tails in zip(queries.tolist(), found, strict=True):
        assert tails == sorted(expected.get((entity, relation), ()))
    assert np.all(np.diff(places.rows) >= 0)


@given(facts)
def test_counts_and_queries(rows):
    known, expected = Known(rows, RELATIONS), by_dict(rows)
    counts = known.count(EVERY[:, 0], EVERY[:, 1])
    assert counts.tolist() == [len(expected.get((e, r), ())) for e, r in EVERY.tolist()]
    assert sorted(map(tuple, known.queries().tolist())) == sorted(expected)


@given(facts)
def test_places_index_a_matrix(rows):
    known, expected = Known(rows, RELATIONS), by_dict(rows)
    mask = torch.zeros(len(EVERY), ENTITIES, dtype=torch.bool)
    mask[known.of(EVERY[:, 0], EVERY[:, 1]).on("cpu")] = True
    for row, query in zip(mask, map(tuple, EVERY.tolist()), strict=True):
        assert set(row.nonzero().flatten().tolist()) == expected.get(query, set())
