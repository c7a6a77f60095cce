"""Predictions as files, CSV or Parquet by the ending, written a piece at a time: memory does not grow with the file."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from ccssl.errors import InputError
from ccssl.training.checkpoint import write

Chunks = Iterable[Mapping[str, np.ndarray]]  # columns by name, the same in each


def write_links(path: Path, chunks: Chunks) -> int:
    """Write new facts, one a row; return how many."""
    return _written(path, chunks)


def write_sets(path: Path, chunks: Chunks) -> int:
    """Write prediction sets, a query a row; return how many."""
    return _written(path, chunks)


def _written(path: Path, chunks: Chunks) -> int:
    if path.suffix not in FORMATS:
        raise InputError(f"a file of predictions ends with {' or '.join(FORMATS)}, got {path}.")
    count = 0

    def fill(temporary: Path) -> None:
        nonlocal count
        count = FORMATS[path.suffix](temporary, chunks)

    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, fill)
    return count


def _csv(path: Path, chunks: Chunks) -> int:
    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        for number, chunk in enumerate(chunks):
            if number == 0:
                writer.writerow(chunk)
            rows = list(zip(*(column.tolist() for column in chunk.values()), strict=True))
            writer.writerows(rows)
            count += len(rows)
    return count


def _parquet(path: Path, chunks: Chunks) -> int:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError("a .parquet file needs pyarrow: install it with pip install 'ccssl[parquet]'.") from None
    count, writer = 0, None
    try:
        for chunk in chunks:
            # A column of names is one even where it is empty, in a piece without any new fact.
            columns = {
                name: pyarrow.array(column, pyarrow.string() if column.dtype.kind in "OU" else None)
                for name, column in chunk.items()
            }
            table = pyarrow.table(columns)
            writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
            count += table.num_rows
    finally:
        if writer is not None:
            writer.close()
    return count


FORMATS: dict[str, Callable[[Path, Chunks], int]] = {".csv": _csv, ".parquet": _parquet}
