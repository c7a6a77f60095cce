"""Official formats that are damaged, incomplete or hostile; and the readers on larger files."""

import gzip
import io
import os
import pickle
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from official import FIXTURES, cifar_batch, idx, labels, mat, pictures, planes, python2_pickle, tar_gz

from ccssl.errors import InputError
from ccssl.images import SOURCES, dataset, formats, packed


def read(name, home):
    """Read a data set to the end."""
    with SOURCES[name].read(home) as stream:
        packed.write(stream, home / "out")
    return packed.open_packed(home / "out")


def members(path):
    with tarfile.open(path) as tar:
        return {info.name: tar.extractfile(info).read() if info.isreg() else None for info in tar}


def rewrite(path, **changes):
    """Write a tar archive anew with members (named by their last part) replaced, or taken out with None."""
    content = members(path)
    for name in list(content):
        last = name.rpartition("/")[2].replace(".", "_")
        if last in changes:
            content[name] = changes[last]
            if changes[last] is None:
                del content[name]
    tar_gz(path, content)


# ---------------------------------------------------------------------------------------------------- pickles


class Call:
    """Pickled, it calls a function when it is loaded."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def hostile(tmp_path):
    """Return pickles that would do something, by name."""
    target = str(tmp_path / "done")
    data = planes(pictures(5, (32, 32, 3), 0))
    system = b"cos\nsystem\n(" + b"U" + bytes([len(f"touch {target}")]) + f"touch {target}".encode() + b"tR."
    return {
        "system": system,
        "open": pickle.dumps({"data": data, "labels": Call(open, target, "w")}, 2),
        "eval": pickle.dumps({b"labels": Call(eval, f"open({target!r}, 'w')")}, 2),
        "mkdir": pickle.dumps(Call(os.mkdir, target)),
        "codec": pickle.dumps({b"labels": Call(__import__("_codecs").encode, "x", "rot13")}, 2),
        "function of an allowed module": b"cnumpy\nsave\n(" + python2_pickle(target.encode())[2:-1] + b"K\x01tR.",
        "attribute path": b"\x80\x04\x8c\x05numpy\x8c\x0bf2py.os.sys\x93.",
        "persistent name": b"Psomething\n.",
        "extension": b"\x80\x02\x82\x01.",
    }


@pytest.mark.parametrize("which", hostile(Path()))
def test_hostile_pickles_in_a_well_formed_archive_do_nothing(which, tmp_path):
    FIXTURES["cifar10"](tmp_path)
    rewrite(tmp_path / "cifar-10-python.tar.gz", data_batch_3=hostile(tmp_path)[which])
    with pytest.raises(InputError, match=r"cifar-10-python.tar.gz: cifar-10-batches-py/data_batch_3 is not read: "):
        read("cifar10", tmp_path)
    assert not (tmp_path / "done").exists()
    assert not (tmp_path / "out").exists()


def test_the_hostile_pickles_are_hostile(tmp_path):
    for which in ("system", "open", "eval", "mkdir"):
        target = tmp_path / which
        target.mkdir()
        found = pickle.loads(hostile(target)[which], encoding="bytes")
        if isinstance(found, dict):
            for value in found.values():
                getattr(value, "close", lambda: None)()
        assert (target / "done").exists(), which


@pytest.mark.parametrize("protocol", range(5))
def test_pickles_of_python_3_are_read_too(protocol, tmp_path):
    images, truth, *_ = FIXTURES["cifar10"](tmp_path)
    batch = {"data": planes(images[10:15]), "labels": truth[10:15].tolist(), "more": ("a", 1.5, None, True)}
    rewrite(tmp_path / "cifar-10-python.tar.gz", data_batch_3=pickle.dumps(batch, protocol))
    np.testing.assert_array_equal(read("cifar10", tmp_path).train_images, images)


def test_the_fixtures_are_what_python_2_wrote():
    images = pictures(3, (32, 32, 3), 0)
    for columns_first in (False, True):
        # numpy itself restores them. Its old name has a warning of its own.
        raw = cifar_batch(images, [1, 2, 3], b"labels", columns_first)
        batch = pickle.loads(raw.replace(b"numpy.core.multiarray", b"numpy._core.multiarray"), encoding="bytes")
        np.testing.assert_array_equal(batch[b"data"], planes(images))
        assert batch[b"labels"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ([], "must hold a list labels|must hold an array data"),
        ({b"data": np.zeros((2, 3072), np.uint8)}, "must hold a list labels"),
        ({b"labels": [1, 2]}, "must hold an array data"),
        ({b"data": [1], b"labels": [1]}, "must hold an array data"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, r"must have the shape \(1, 3072\)"),
        ({b"data": np.zeros((1, 3000), np.uint8), b"labels": [1]}, r"shape \(1, 3072\), .*got shape \(1, 3000\)"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [b"x"]}, "labels in .* must be whole numbers"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}, "train_labels must be from 0 to 9.*; got 10"),
    ],
)
def test_pickles_of_other_things(batch, sentence, tmp_path):
    FIXTURES["cifar10"](tmp_path)
    rewrite(tmp_path / "cifar-10-python.tar.gz", data_batch_3=python2_pickle(batch))
    with pytest.raises(InputError, match=sentence):
        read("cifar10", tmp_path)


@pytest.mark.parametrize("kind", [np.int64, np.float32, object])
def test_pickled_arrays_of_other_types(kind, tmp_path):
    FIXTURES["cifar10"](tmp_path)
    batch = {"data": np.zeros((2, 3072), kind), "labels": [1, 2]}
    rewrite(tmp_path / "cifar-10-python.tar.gz", data_batch_3=pickle.dumps(batch, 2))
    with pytest.raises(InputError, match=r"data_batch_3 is not read: it holds an array of .*, expected u1"):
        read("cifar10", tmp_path)


# ---------------------------------------------------------------------------------------------- tar, zip, gzip


@pytest.mark.parametrize(
    ("name", "file", "member"),
    [
        ("cifar10", "cifar-10-python.tar.gz", "data_batch_5"),
        ("cifar10", "cifar-10-python.tar.gz", "batches_meta"),
        ("cifar100", "cifar-100-python.tar.gz", "test"),
        ("stl10", "stl10_binary.tar.gz", "unlabeled_X_bin"),
        ("stl10", "stl10_binary.tar.gz", "train_y_bin"),
        ("stl10", "stl10_binary.tar.gz", "fold_indices_txt"),
    ],
)
def test_members_that_are_missing(name, file, member, tmp_path):
    FIXTURES[name](tmp_path)
    rewrite(tmp_path / file, **{member: None})
    with pytest.raises(InputError, match=rf"{file} lacks .*{member.replace('_', '.')}: it is not the archive that"):
        read(name, tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
@pytest.mark.parametrize(("name", "last"), [("cifar10", "data_batch_2"), ("stl10", "train_X.bin")])
def test_members_that_are_no_files(kind, name, last, tmp_path):
    FIXTURES[name](tmp_path)
    path = tmp_path / SOURCES[name].archives[0].file
    content = members(path)
    (tmp_path / "secret").write_bytes(bytes(96 * 96 * 3))
    with tarfile.open(path, "w:gz") as tar:
        for member, raw in content.items():
            info = tarfile.TarInfo(member)
            if member.endswith(last):
                info.type, info.linkname = kind, str(tmp_path / "secret")
                tar.addfile(info)
            elif raw is not None:
                info.size = len(raw)
                tar.addfile(info, io.BytesIO(raw))
    with pytest.raises(InputError, match=rf"{last} is no file|lacks stl10_binary/{last}"):
        read(name, tmp_path)


def test_a_member_that_claims_to_be_huge_is_not_read(tmp_path, monkeypatch):
    FIXTURES["cifar10"](tmp_path)
    monkeypatch.setattr(formats, "LARGEST_PICKLE", 1000)
    with pytest.raises(InputError, match="is no file, or larger than 1000 bytes"):
        read("cifar10", tmp_path)


def test_nothing_is_written_beside_the_packed_folder(tmp_path):
    FIXTURES["cifar10"](tmp_path)
    path = tmp_path / "cifar-10-python.tar.gz"
    tar_gz(path, {"../outside": b"x", str(tmp_path / "absolute"): b"x", **members(path)})
    read("cifar10", tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cifar-10-python.tar.gz", "out"]
    assert not (tmp_path.parent / "outside").exists()


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.98])
def test_truncated_archives(name, kept, tmp_path):
    FIXTURES[name](tmp_path)
    path = max(tmp_path.iterdir(), key=lambda file: file.stat().st_size)
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(InputError, match=rf"{path.name}.* (is damaged|is not read|lacks|is no MATLAB 5 file)"):
        read(name, tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["cifar10", "svhn", "stl10", "mnist", "emnist-digits"])
def test_missing_archives(name, tmp_path):
    with pytest.raises(InputError, match=r"is missing: fetch it with `ccssl data fetch`"):
        read(name, tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train_X_bin": bytes(27648 * 8 - 1)}, "the length of train_X.bin is no multiple of an image, 27648"),
        ({"train_X_bin": bytes(27648 * 7)}, "more labels than images|7 images"),
        ({"train_y_bin": bytes(8)}, "folds must hold ids of labeled training images"),
        ({"test_y_bin": bytes(4)}, "test_labels must be from 0 to 9; got -1"),
        ({"fold_indices_txt": b"1 2\n3\n"}, "fold_indices.txt must hold equally many whole numbers"),
        ({"fold_indices_txt": b"1 x\n"}, "fold_indices.txt must hold equally many whole numbers"),
        ({"fold_indices_txt": b"1 8\n"}, "folds must hold ids of labeled training images"),
    ],
)
def test_stl10_that_does_not_fit_together(changes, sentence, tmp_path):
    FIXTURES["stl10"](tmp_path)
    rewrite(tmp_path / "stl10_binary.tar.gz", **changes)
    with pytest.raises(InputError, match=sentence):
        read("stl10", tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("train-images-idx3-ubyte.gz", b"\0\0\x0d\3" + bytes(12), "begins otherwise than with 00000d03"),
        ("train-labels-idx1-ubyte.gz", idx(np.zeros((11, 1))), "begins otherwise than with 00000802"),
        ("train-labels-idx1-ubyte.gz", idx(np.zeros(10)), r"holds 11 images, and .*labels.* 10 labels"),
        ("train-labels-idx1-ubyte.gz", idx(np.zeros(11)) + b"x", "does not have the length that it says"),
        ("train-images-idx3-ubyte.gz", idx(np.zeros((11, 28, 28))) + b"x", "does not have the length that it says"),
        ("train-images-idx3-ubyte.gz", idx(np.zeros((11, 28, 28)))[:-1], "ends within image 10 of 11"),
        (
            "t10k-images-idx3-ubyte.gz",
            idx(np.zeros((6, 28, 27))),
            r"must give 6 more images of shape \(28, 28, 1\)",
        ),
        ("t10k-labels-idx1-ubyte.gz", idx(np.full(6, 10)), "test_labels must be from 0 to 9; got 10"),
        ("t10k-labels-idx1-ubyte.gz", b"\0\0", "begins otherwise"),
        ("t10k-labels-idx1-ubyte.gz", b"\0\0\x08\1\0", "is damaged"),
    ],
)
def test_idx_that_does_not_fit_together(file, content, sentence, tmp_path):
    FIXTURES["mnist"](tmp_path)
    (tmp_path / file).write_bytes(gzip.compress(content))
    with pytest.raises(InputError, match=sentence):
        read("mnist", tmp_path)


def test_emnist_lacks_a_split(tmp_path):
    FIXTURES["emnist-letters"](tmp_path)
    with pytest.raises(InputError, match=r"gzip.zip lacks gzip/emnist-digits-train-images"):
        read("emnist-digits", tmp_path)


def test_svhn_that_does_not_fit_together(tmp_path):
    FIXTURES["svhn"](tmp_path)
    mat(tmp_path / "test_32x32.mat", pictures(5, (32, 32, 3), 0), np.array([1, 2, 3, 4]))
    with pytest.raises(
        InputError, match=r"X must be uint8 of shape \(32, 32, 3, 4\).*got uint8 of shape \(32, 32, 3, 5\)"
    ):
        read("svhn", tmp_path)
    mat(tmp_path / "test_32x32.mat", pictures(2, (32, 32, 3), 0), np.array([11, 1]))
    with pytest.raises(InputError, match=r"y - 1 must be from 0 to 9; got 10"):
        read("svhn", tmp_path)


# ------------------------------------------------------------------------------------------------------ memory


def large_idx(folder, name, images, truth):
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images[..., 0]), 1))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(truth), 1))


def large_zip(folder, name, images, truth):
    with zipfile.ZipFile(folder / "gzip.zip", "w") as bundle:
        for part in ("train", "test"):
            for kind, array in (("images-idx3", images[..., 0]), ("labels-idx1", truth)):
                bundle.writestr(f"gzip/emnist-digits-{part}-{kind}-ubyte.gz", gzip.compress(idx(array), 1))


def large_mat(folder, name, images, truth):
    for part in ("train", "test"):
        mat(folder / f"{part}_32x32.mat", images, truth)


def large_tar(folder, name, images, truth):
    content = {f"{part}_X.bin": images.tobytes() for part in ("train", "test", "unlabeled")}
    content |= {f"{part}_y.bin": (truth + 1).astype(np.uint8).tobytes() for part in ("train", "test")}
    content |= {"class_names.txt": " ".join("abcdefghij").encode(), "fold_indices.txt": b"0 1\n"}
    tar_gz(folder / "stl10_binary.tar.gz", {f"stl10_binary/{key}": raw for key, raw in content.items()})


@pytest.mark.parametrize(
    ("name", "make", "shape"),
    [
        ("mnist", large_idx, (28, 28, 1)),
        ("emnist-digits", large_zip, (28, 28, 1)),
        ("svhn", large_mat, (32, 32, 3)),
        ("stl10", large_tar, (96, 96, 3)),
    ],
)
def test_readers_hold_some_chunks_and_not_the_set(name, make, shape, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "CHUNK_BYTES", 2**17)
    count = 8_000_000 // int(np.prod(shape))
    images = np.zeros((count, *shape), np.uint8)
    images[:, 0, 0, 0] = np.arange(count) % 251
    make(tmp_path, name, images, labels(count, 10, 0))
    del images
    tracemalloc.start()
    data = read(name, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5e6  # the training images alone have 8e6 bytes
    expected = np.arange(count) % 251
    np.testing.assert_array_equal(data.train_images[:count, 0, 0, 0], expected)


def test_a_reader_closes_its_archive(tmp_path):
    FIXTURES["stl10"](tmp_path)
    with SOURCES["stl10"].read(tmp_path) as stream:
        first = next(iter(stream.train[0].chunks))
    assert first.shape == (8, 96, 96, 3)
    with pytest.raises(OSError, match="closed"):
        list(stream.train[1].chunks)
