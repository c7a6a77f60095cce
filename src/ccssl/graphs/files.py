"""Where graphs come from: those of the package, folders of text files, and PyKEEN's data sets.

A folder holds ``train``, and may hold ``valid``, ``test`` and ``unlabeled``, each with the ending .tsv or .txt (tabs
between the fields) or .csv (commas; fields in double quotes may hold commas)::

    train.tsv        HEAD  RELATION  TAIL       facts to learn from
    valid.tsv        the same                   facts to stop training by
    test.tsv         the same                   facts to judge by
    unlabeled.tsv    HEAD  RELATION  ?          queries whose answers nobody knows;  ?  RELATION  TAIL  asks for heads

One fact a line; empty lines are passed over, and ``head relation tail`` where nothing but empty lines stands before it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np

from ccssl.errors import InputError, did_you_mean
from ccssl.graphs.config import GRAPHS
from ccssl.graphs.triples import PARTS, Graph, Query, graph_of, make_graph, with_queries

EMBEDDED = Path(__file__).parent / "data"
ENDINGS = (".tsv", ".txt", ".csv")
HEADER = ["head", "relation", "tail"]
PYKEEN = "pykeen:"


def load_graph(name: str | Path) -> Graph:
    """Return a graph by its name: one of ``GRAPHS``, a folder, or ``pykeen:NAME`` for a data set of PyKEEN.

    >>> load_graph("nations")
    Graph('nations', entities=14, relations=55, train=1592, valid=199, test=201, queries=0)
    """
    if name in GRAPHS:
        return _embedded(str(name))
    if str(name).startswith(PYKEEN):
        return _from_pykeen(str(name).removeprefix(PYKEEN))
    folder = Path(name)
    if not folder.is_dir():
        raise InputError(
            f"a graph is one of {', '.join(GRAPHS)}, a folder of text files, or pykeen:NAME, got {str(name)!r}."
            f"{did_you_mean(str(name), GRAPHS)}"
        )
    return _from_folder(folder)


def _embedded(name: str) -> Graph:
    with np.load(EMBEDDED / f"{name}.npz", allow_pickle=False) as found:
        names = {kind: bytes(found[kind]).decode().split("\n") for kind in ("entities", "relations")}
        parts = {part: found[part].astype(np.int64) for part in PARTS}
    return graph_of(name, names["entities"], names["relations"], parts)


def _from_folder(folder: Path) -> Graph:
    paths = {part: _path(folder, part) for part in (*PARTS, "unlabeled")}
    if paths["train"] is None:
        raise InputError(f"{folder} holds no graph: it needs train{', train'.join(ENDINGS)} with a fact a line.")
    train, valid, test = ([] if (path := paths[part]) is None else _facts(path) for part in PARTS)
    graph = make_graph(str(folder), train, valid, test)
    unlabeled = paths["unlabeled"]
    return graph if unlabeled is None else with_queries(graph, read_queries(unlabeled, graph))


def _facts(path: Path) -> list[list[str]]:
    """Return the facts of a file; one that asks for something belongs elsewhere."""
    found = []
    for line, fields in read(path):
        if "?" in fields:
            raise InputError(
                f"{path}, line {line}: a fact has no ?, got {' '.join(fields)}: queries go to unlabeled."
            )
        found.append(fields)
    return found


def read_queries(path: Path, graph: Graph) -> list[Query]:
    """Return the queries of a file, having looked up their names."""
    queries: list[Query] = []
    for line, (head, relation, tail) in read(path):
        query = (None if head == "?" else head, relation, None if tail == "?" else tail)
        graph.query(query, f"{path}, line {line}: ")
        queries.append(query)
    return queries


def read(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the three fields of each row, and the number of the line in which it begins."""
    comma = path.suffix == ".csv"
    first = True
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in _quoted(file, path) if comma else _tabbed(file):
                fields = [field.strip() for field in row]
                if not any(fields):
                    continue
                header, first = first and [field.lower() for field in fields] == HEADER, False
                if header:
                    continue
                if len(fields) != 3 or not all(fields):
                    between = "commas" if comma else "tabs"
                    raise InputError(
                        f"{path}, line {number}: expected head, relation and tail with {between} between them, "
                        f"got {len([f for f in fields if f])} of them: {(',' if comma else chr(9)).join(row)!r}."
                    )
                yield number, fields
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}.") from None


def _tabbed(file: TextIO) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(file, 1):
        yield number, line.rstrip("\r\n").split("\t")


def _quoted(file: TextIO, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of CSV and the lines in which they begin; a quoted field may run over several."""
    rows = csv.reader(file, strict=True)
    while True:
        begin = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(
                f"{path}, line {begin}: the row that begins here is not CSV: {error}. Look for a double quote that is "
                "not closed, or not doubled inside of a field."
            ) from None
        yield begin, row


def _path(folder: Path, part: str) -> Path | None:
    found = [folder / f"{part}{ending}" for ending in ENDINGS if (folder / f"{part}{ending}").exists()]
    if len(found) > 1:
        raise InputError(f"{folder} holds {found[0].name} and {found[1].name}: keep one of them.")
    return found[0] if found else None


def _from_pykeen(name: str) -> Graph:
    try:
        from pykeen.datasets import dataset_resolver  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError(f"{PYKEEN}{name} needs PyKEEN: install it with pip install 'ccssl[graphs]'.") from None
    if dataset_resolver.normalize(name) not in dataset_resolver.lookup_dict:
        names = sorted(dataset_resolver.lookup_dict)
        raise InputError(f"PyKEEN has no data set {name!r}.{did_you_mean(dataset_resolver.normalize(name), names)}")
    data = dataset_resolver.make(name)
    entities, relations = ([names[n] for n in range(len(names))] for names in _names_of(data))
    found = {"train": data.training, "valid": data.validation, "test": data.testing}
    parts = {
        part: np.empty((0, 3), np.int64) if triples is None else triples.mapped_triples.numpy().astype(np.int64)
        for part, triples in found.items()
    }
    return graph_of(f"{PYKEEN}{name}", entities, relations, parts)


def _names_of(data: object) -> tuple[dict[int, str], dict[int, str]]:
    training = getattr(data, "training")  # noqa: B009 - PyKEEN need not be here when types are checked
    return training.entity_id_to_label, training.relation_id_to_label
