"""Predictions as files: what was written is read back, whatever the pieces, and nothing is left half done."""

import csv
from itertools import pairwise

import numpy as np
import pytest

from ccssl.errors import InputError
from ccssl.graphs.export import FORMATS, joined, names_of, write_links, write_sets

NAMES = ["ada", 'the "cat"', "bob, junior", "Ωμέγα", "line\nbreak", ""]


def chunk(start, stop):
    rows = np.arange(start, stop)
    return {
        "head": np.array([NAMES[row % len(NAMES)] for row in rows], object),
        "asked": np.where(rows % 2 == 0, "head", "tail"),
        "place": rows + 1,
        "score": (rows / 7).astype(np.float32),
        "in_set": rows % 3 == 0,
    }


def columns(path):
    """Return what a file holds, as texts."""
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            head, *rows = csv.reader(file)
        return {name: [row[place] for row in rows] for place, name in enumerate(head)}
    pyarrow = pytest.importorskip("pyarrow.parquet")
    return {name: list(map(str, column)) for name, column in pyarrow.read_table(path).to_pydict().items()}


@pytest.mark.parametrize("cuts", [[0, 20], [0, 1, 2, 20], [0, 0, 5, 5, 20, 20]])
@pytest.mark.parametrize("ending", FORMATS)
def test_what_is_written_is_read_back(tmp_path, ending, cuts):
    """Some pieces may hold no fact, the first of them too."""
    path = tmp_path / "new" / f"links{ending}"
    assert write_links(path, (chunk(*part) for part in pairwise(cuts))) == 20
    found = columns(path)
    assert list(found) == list(chunk(0, 0))
    whole = chunk(0, 20)
    for name in ("head", "asked", "place", "in_set"):
        assert found[name] == list(map(str, whole[name].tolist()))
    assert np.array_equal(np.array(found["score"], np.float32), whole["score"])
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("ending", FORMATS)
def test_a_file_without_rows_has_its_columns(tmp_path, ending):
    path = tmp_path / f"links{ending}"
    assert write_sets(path, [chunk(0, 0), chunk(0, 0)]) == 0
    assert columns(path) == {name: [] for name in chunk(0, 0)}


SETS = [["ada", "a|b", "c\\"], [], ["\\|", "|", "\\\\"], ["line\nbreak|", 'the "cat"'], ["bob"]]


def test_any_names_are_joined_and_parted_again():
    assert joined(["ada", "bob"]) == "ada|bob"
    assert [names_of(joined(names)) for names in SETS] == SETS
    assert len(set(map(joined, [["a|b"], ["a", "b"], ["a\\", "b"], ["a\\|b"]]))) == 4


@pytest.mark.parametrize("ending", FORMATS)
def test_sets_of_any_names_are_read_back(tmp_path, ending):
    path = tmp_path / f"sets{ending}"
    column = np.empty(len(SETS), object)
    column[:] = SETS
    whole = {"set_size": np.array([len(names) for names in SETS]), "set": column}
    none = {name: values[:0] for name, values in whole.items()}
    assert write_sets(path, [none, whole, none]) == len(SETS)
    if ending == ".csv":
        assert [names_of(field) for field in columns(path)["set"]] == SETS
    else:
        pyarrow = pytest.importorskip("pyarrow.parquet")
        assert pyarrow.read_table(path)["set"].to_pylist() == SETS


@pytest.mark.parametrize("ending", FORMATS)
def test_columns_may_be_left_empty(tmp_path, ending):
    path = tmp_path / f"links{ending}"
    write_links(path, [chunk(0, 2), chunk(2, 5)], empty=("score", "in_set"))
    found = columns(path)
    nothing = ["" if ending == ".csv" else "None"] * 5
    assert found["score"] == found["in_set"] == nothing
    assert found["place"] == list("12345")


def test_parquet_keeps_types(tmp_path):
    pyarrow = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "links.parquet"
    write_links(path, [chunk(0, 0), chunk(0, 5)])
    types = {field.name: str(field.type) for field in pyarrow.read_schema(path)}
    assert types == {"head": "string", "asked": "string", "place": "int64", "score": "float", "in_set": "bool"}


def failing():
    yield chunk(0, 3)
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize("ending", FORMATS)
def test_a_failure_leaves_the_file_before(tmp_path, ending):
    path = tmp_path / f"links{ending}"
    write_links(path, [chunk(0, 7)])
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError):
        write_links(path, failing())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_memory_does_not_grow_with_the_file(tmp_path):
    """A piece is asked for only when the one before it is written."""
    order = []

    def told():
        for number in range(3):
            order.append(number)
            part = chunk(0, 2)
            part["place"] = Told(part["place"], order, number)
            yield part

    class Told(np.ndarray):
        def __new__(cls, values, order, number):
            found = np.asarray(values).view(cls)
            found.order, found.number = order, number
            return found

        def __array_finalize__(self, source):
            pass

        def tolist(self):
            self.order.append(f"written {self.number}")
            return super().tolist()

    write_links(tmp_path / "links.csv", told())
    assert order == [0, "written 0", 1, "written 1", 2, "written 2"]


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"a file of predictions ends with \.csv or \.parquet, got .*links\.json"):
        write_links(tmp_path / "links.json", [])
    assert list(tmp_path.iterdir()) == []


def test_without_pyarrow_the_user_is_told(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        InputError, match=r"a \.parquet file needs pyarrow: install it with pip install 'ccssl\[parquet\]'"
    ):
        write_links(tmp_path / "links.parquet", [chunk(0, 2)])
