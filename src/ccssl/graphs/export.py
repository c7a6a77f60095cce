r"""Predictions as files, CSV or Parquet by the ending, written a piece at a time: memory does not grow with the file.

A prediction set is a list of names: in Parquet a list, in CSV one field with ``|`` between the names, and a backslash
before each ``|`` and each backslash within a name, so that any name can be read back (``names_of``).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ccssl.errors import InputError
from ccssl.training.checkpoint import write

Chunks = Iterable[Mapping[str, np.ndarray]]  # columns by name, the same in each
LISTS = ("set",)  # columns whose entries are lists of names


def write_links(path: Path, chunks: Chunks, empty: Collection[str] = ()) -> int:
    """Write new facts, one a row, and nothing into the columns ``empty``; return how many."""
    return _written(path, chunks, empty)


def write_sets(path: Path, chunks: Chunks, empty: Collection[str] = ()) -> int:
    """Write prediction sets, a query a row, and nothing into the columns ``empty``; return how many."""
    return _written(path, chunks, empty)


def check_ending(path: Path) -> None:
    """Refuse a file whose ending names no format."""
    if path.suffix not in FORMATS:
        raise InputError(f"a file of predictions ends with {' or '.join(FORMATS)}, got {path}.")


def joined(names: Iterable[str]) -> str:
    r"""Return names as one field.

    >>> print(joined(["ada", "a|b", "c\\d"]))
    ada|a\|b|c\\d
    """
    return "|".join(re.sub(r"[|\\]", r"\\\g<0>", name) for name in names)


def names_of(field: str) -> list[str]:
    r"""Return the names that were joined; an empty field holds none.

    >>> names_of(joined(["ada", "a|b", "c\\d"])) == ["ada", "a|b", "c\\d"]
    True
    """
    found = re.findall(r"((?:[^|\\]|\\.)*)\|", f"{field}|") if field else []
    return [re.sub(r"\\(.)", r"\1", name) for name in found]


def _written(path: Path, chunks: Chunks, empty: Collection[str]) -> int:
    check_ending(path)
    count = 0

    def fill(temporary: Path) -> None:
        nonlocal count
        count = FORMATS[path.suffix](temporary, chunks, empty)

    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, fill)
    return count


def _csv(path: Path, chunks: Chunks, empty: Collection[str]) -> int:
    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        for number, chunk in enumerate(chunks):
            if number == 0:
                writer.writerow(chunk)
            rows = list(zip(*(_fields(name, column, empty) for name, column in chunk.items()), strict=True))
            writer.writerows(rows)
            count += len(rows)
    return count


def _fields(name: str, column: np.ndarray, empty: Collection[str]) -> list[Any]:
    if name in empty:
        return [""] * len(column)
    return [joined(names) for names in column] if name in LISTS else column.tolist()


def _parquet(path: Path, chunks: Chunks, empty: Collection[str]) -> int:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError("a .parquet file needs pyarrow: install it with pip install 'ccssl[parquet]'.") from None
    count, writer = 0, None
    try:
        for chunk in chunks:
            # A column of names is one even where it is empty, in a piece without any new fact.
            columns = {}
            for name, column in chunk.items():
                text = pyarrow.list_(pyarrow.string()) if name in LISTS else pyarrow.string()
                array = pyarrow.array(column, text if column.dtype.kind in "OU" else None)
                columns[name] = pyarrow.nulls(len(array), array.type) if name in empty else array
            table = pyarrow.table(columns)
            writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
            count += table.num_rows
    finally:
        if writer is not None:
            writer.close()
    return count


FORMATS: dict[str, Callable[[Path, Chunks, Collection[str]], int]] = {".csv": _csv, ".parquet": _parquet}
