"""MATLAB 5 files, against SciPy's reader and writer."""

import struct

import numpy as np
import pytest
import scipy.io

from ccssl.errors import InputError
from ccssl.images.matlab import variables

ARRAYS = {
    "bytes": np.random.default_rng(0).integers(0, 256, (4, 3, 2, 5), np.uint8),
    "a": np.array([[7]], np.uint8),
    "two": np.array([[1, 2]], np.int16),
    "long_name_of_an_array": np.arange(12, dtype=np.float64).reshape(3, 4),
    "single": np.ones((2, 2), np.float32),
    "wide": np.array([[2**40, -1]], np.int64),
    "unsigned": np.array([[2**63]], np.uint64),
    "none": np.zeros((0, 3), np.uint8),
    "large": np.arange(300_000, dtype=np.int32).reshape(300, 1000),
}
OTHERS = {
    "text": "hello",
    "cell": np.array([1, "x"], object),
    "struct": {"field": np.eye(2)},
    "complex": np.array([[1j]]),
    "sparse": scipy.sparse.eye_array(3, format="csc"),
}


@pytest.mark.parametrize("compressed", [False, True])
def test_arrays_are_those_that_scipy_wrote(compressed, tmp_path):
    path = tmp_path / "some.mat"
    scipy.io.savemat(path, {**OTHERS, **ARRAYS}, do_compression=compressed)
    found = variables(path)
    assert set(found) == set(ARRAYS)
    told = scipy.io.loadmat(path)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name].values(), told[name])
        np.testing.assert_array_equal(found[name].values(), array)
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape


@pytest.mark.parametrize("compressed", [False, True])
def test_values_in_pieces(compressed, tmp_path):
    scipy.io.savemat(tmp_path / "some.mat", ARRAYS, do_compression=compressed)
    array = ARRAYS["large"]
    with variables(tmp_path / "some.mat")["large"].open() as content:
        pieces = [content.read(100_001) for _ in range(12)]
    assert b"".join(pieces)[: array.nbytes] == array.tobytes("F")


def test_the_other_byte_order_and_smaller_storage(tmp_path):
    def element(kind, content):
        return struct.pack(">II", kind, len(content)) + content + bytes(-len(content) % 8)

    flags = element(6, struct.pack(">II", 6, 0))  # an array of doubles, ...
    values = element(4, np.array([1, 2, 500], ">u2").tobytes())  # stored in two bytes each
    small_name = struct.pack(">HH4s", 1, 1, b"y")
    body = flags + element(5, struct.pack(">ii", 3, 1)) + small_name + values
    header = b"MATLAB 5.0".ljust(124) + struct.pack(">H", 0x0100) + b"MI"
    path = tmp_path / "big.mat"
    path.write_bytes(header + element(14, body))
    np.testing.assert_array_equal(scipy.io.loadmat(path)["y"], [[1], [2], [500]])
    found = variables(path)["y"]
    np.testing.assert_array_equal(found.values(), [[1], [2], [500]])


def test_other_files(tmp_path):
    for content in (b"", b"x" * 500, b"\x89HDF\r\n\x1a\n" * 40):
        (tmp_path / "other.mat").write_bytes(content)
        with pytest.raises(InputError, match=r"other.mat is no MATLAB 5 file"):
            variables(tmp_path / "other.mat")
