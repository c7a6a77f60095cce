"""The packed form: complete or absent, mapped, checked, and never whole in memory while it is written."""

import dataclasses
import errno
import json
import shutil
import tracemalloc
import types

import numpy as np
import pytest
from official import labels, pictures

from ccssl.errors import InputError
from ccssl.images import ImageData, open_packed, pack, packed
from ccssl.images.dataset import ImageStream, Part, in_chunks

SHAPE = (5, 6, 3)
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def some(**changes):
    data = ImageData(
        name="some",
        train_images=pictures(7, SHAPE, 0),
        train_labels=labels(7, 3, 1),
        test_images=pictures(4, SHAPE, 2),
        test_labels=labels(4, 3, 3),
        class_names=("a", "ü", "c"),
        flip=True,
        folds=np.array([[0, 1], [2, 3]]),
    )
    return dataclasses.replace(data, **changes)


def draft(folder, **changes):
    plan = {"train": 7, "test": 4, "shape": SHAPE, "class_names": ("a", "b"), **changes}
    return packed.create(folder, **plan)


@pytest.mark.parametrize("folds", [None, np.array([[0, 1], [2, 3]])])
def test_what_is_packed_comes_back(folds, tmp_path):
    data = some(folds=folds)
    pack(data, tmp_path / "new" / "some")
    back = open_packed(tmp_path / "new" / "some")
    for key in (*ARRAYS, "folds"):
        one, two = getattr(back, key), getattr(data, key)
        assert (one is None) == (two is None)
        if one is not None:
            np.testing.assert_array_equal(one, two)
            assert one.dtype == two.dtype
    assert (back.name, back.class_names, back.flip) == (data.name, data.class_names, data.flip)
    for images in (back.train_images, back.test_images):
        assert isinstance(images, np.memmap)
        assert images.mode == "r"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["some"]


def test_a_set_is_filled_in_place_for_benchmarks(tmp_path):
    with draft(tmp_path / "made", flip=True) as data:
        data.train_images[3:5] = 9
        data.train_labels[:] = -1
        data.test_labels[0] = 1
    back = open_packed(tmp_path / "made")
    assert back.train_images[3:5].min() == 9
    assert back.train_images.sum() == 2 * 90 * 9
    assert (back.train_labels == -1).all()
    assert (back.name, back.flip, back.class_names) == ("made", True, ("a", "b"))


def test_an_error_leaves_nothing_behind(tmp_path):
    with pytest.raises(KeyboardInterrupt), draft(tmp_path / "made"):
        raise KeyboardInterrupt
    with (
        pytest.raises(InputError, match="train_labels must be from 0 to 1, or -1"),
        draft(tmp_path / "made") as data,
    ):
        data.train_labels[2] = 2
    with (
        pytest.raises(InputError, match="test_labels must be from 0 to 1; got -1"),
        draft(tmp_path / "made") as data,
    ):
        data.test_labels[2] = -1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"class_names": ("a",)}, "at least 2 classes, got 1"),
        ({"class_names": ("a", "b", "a")}, "'a' twice"),
        ({"shape": (5, 6, 2)}, "1 or 3 channels"),
        ({"train": 0}, "train_images is empty"),
        ({"test": 0}, "test_images is empty"),
    ],
)
def test_what_cannot_become_a_data_set_is_refused_before_it_is_filled(changes, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence), draft(tmp_path / "made", **changes):
        pytest.fail("nothing may be filled")


def test_a_folder_with_something_in_it_is_kept(tmp_path):
    (tmp_path / "mine").mkdir()
    pack(some(), tmp_path / "mine")  # it was empty
    with pytest.raises(InputError, match="mine exists already and is not empty"):
        pack(some(), tmp_path / "mine")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="file exists already"):
        pack(some(), tmp_path / "file")


def test_two_that_pack_the_same_folder(tmp_path):
    with pytest.raises(InputError, match="made by another process meanwhile"), draft(tmp_path / "made"):
        pack(some(), tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert open_packed(tmp_path / "made").name == "some"


def stream(chunks, count=4, **changes):
    test = Part(np.zeros(2, np.int64), in_chunks(pictures(2, SHAPE, 0)))
    one = ImageStream("stream", SHAPE, ("a", "b"), (Part(np.zeros(count, np.int64), chunks),), test)
    return dataclasses.replace(one, **changes)


@pytest.mark.parametrize(
    ("chunks", "sentence"),
    [
        ([pictures(3, SHAPE, 0)], "ended 1 images too early"),
        ([pictures(3, SHAPE, 0), pictures(2, SHAPE, 0)], r"must give 1 more images of shape \(5, 6, 3\), got"),
        ([pictures(4, (5, 7, 3), 0)], r"must give 4 more images of shape \(5, 6, 3\), got \(4, 5, 7, 3\)"),
    ],
)
def test_a_stream_that_does_not_keep_its_word(chunks, sentence, tmp_path):
    with pytest.raises(InputError, match=f"stream: train_images {sentence}"):
        packed.write(stream(chunks), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_packing_holds_some_chunks_and_not_the_set(tmp_path):
    count, shape = 2000, (32, 32, 3)  # 6.1 MB

    def chunks():
        for start in range(0, count, 100):
            yield np.full((100, *shape), start // 100, np.uint8)

    test = Part(np.zeros(2, np.int64), in_chunks(pictures(2, shape, 0)))
    given = ImageStream("big", shape, ("a", "b"), (Part(np.zeros(count, np.int64), chunks()),), test)
    tracemalloc.start()
    packed.write(given, tmp_path / "big")
    data = open_packed(tmp_path / "big")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5e6
    assert data.train_images[::100, 0, 0, 0].tolist() == list(range(20))


def test_slices_are_small_and_complete():
    images = pictures(5, (600, 1000, 3), 0)
    slices = list(in_chunks(images))
    assert [len(part) for part in slices] == [2, 2, 1]
    np.testing.assert_array_equal(np.concatenate(slices), images)


# ---------------------------------------------------------------------------------------------- damage and disk


def test_verify_finds_what_changed(tmp_path):
    pack(some(), tmp_path / "some")
    assert [finding.state for finding in packed.verify(tmp_path / "some")] == ["ok"] * 5
    with (tmp_path / "some" / "test_images.npy").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    (tmp_path / "some" / "folds.npy").unlink()
    found = {finding.file.stem: finding for finding in packed.verify(tmp_path / "some")}
    assert {name: finding.state for name, finding in found.items() if finding.state != "ok"} == {
        "test_images": "wrong",
        "folds": "missing",
    }
    assert found["test_images"].expected != found["test_images"].found
    assert found["folds"].found is None


def damage_lacking(folder):
    (folder / "train_labels.npy").unlink()


def damage_truncated(folder):
    file = folder / "train_images.npy"
    file.write_bytes(file.read_bytes()[:-1])


def damage_pickled(folder):
    np.save(folder / "train_labels.npy", np.array([{}] * 7, object), allow_pickle=True)


def damage_floats(folder):
    np.save(folder / "train_labels.npy", np.zeros(7))


def damage_lengths(folder):
    np.save(folder / "train_labels.npy", np.zeros(6, np.int64))


def damage_range(folder):
    np.save(folder / "test_labels.npy", np.full(4, 3))


def damage_shape(folder):
    np.save(folder / "test_images.npy", pictures(4, (6, 5, 3), 0))


def damage_type(folder):
    np.save(folder / "train_images.npy", pictures(7, SHAPE, 0).astype(np.int16))


def damage_folds(folder):
    np.save(folder / "folds.npy", np.array([[0, 7]]))


def damage_json(folder):
    (folder / "meta.json").write_text("{")


def damage_other(folder):
    (folder / "meta.json").write_text("[]")


def damage_version(folder):
    edit(folder, version=99)


def damage_files(folder):
    edit(folder, sha256={**json.loads((folder / "meta.json").read_text())["sha256"], "../../etc/passwd": ""})


def damage_flip(folder):
    edit(folder, flip="no")


def damage_names(folder):
    edit(folder, class_names="abc")


def damage_no_meta(folder):
    (folder / "meta.json").unlink()


def edit(folder, **changes):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, **changes}))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (damage_lacking, "lacks train_labels.npy: pack the data set again"),
        (damage_truncated, "train_images.npy is damaged"),
        (damage_pickled, "train_labels.npy is damaged .*allow_pickle"),
        (damage_floats, "train_labels must be whole numbers, got float64"),
        (damage_lengths, r"train_labels must hold one label an image, shape \(7,\), got \(6,\)"),
        (damage_range, "test_labels must be from 0 to 2; got 3"),
        (damage_shape, "test_images must be of the shape of train_images, 5 x 6 x 3, got 6 x 5 x 3"),
        (damage_type, "train_images must be uint8, .*got int16"),
        (damage_folds, "folds must hold ids of labeled training images"),
        (damage_json, "meta.json does not describe a packed data set"),
        (damage_other, "meta.json does not describe a packed data set"),
        (damage_version, "packed in form 99, and this ccssl reads form 1"),
        (damage_files, "meta.json does not describe a packed data set"),
        (damage_flip, "meta.json does not describe a packed data set"),
        (damage_names, "meta.json does not describe a packed data set"),
        (damage_no_meta, "is not a packed data set: it has no meta.json"),
    ],
)
def test_damaged_folders_are_refused(damage, sentence, tmp_path):
    pack(some(), tmp_path / "some")
    damage(tmp_path / "some")
    with pytest.raises(InputError, match=sentence):
        open_packed(tmp_path / "some")


def test_a_disk_that_is_too_small_is_noticed_first(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=100))
    with pytest.raises(InputError, match=r"too small: 0.00 GB are needed .*Make room, or set CCSSL_HOME"):
        pack(some(), tmp_path / "some")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_noticed_before_a_page_is_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full, raising=False)
    with pytest.raises(InputError, match="too small"):
        pack(some(), tmp_path / "some")
    assert list(tmp_path.iterdir()) == []

    def unable(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("os.posix_fallocate", unable, raising=False)
    pack(some(), tmp_path / "some")


def test_pack_refuses_what_is_no_data_set(tmp_path):
    with pytest.raises(InputError, match="some: train_images must be uint8"):
        pack(some(train_images=np.zeros((7, *SHAPE))), tmp_path / "some")
    with pytest.raises(InputError, match="at least 2 classes"):
        pack(some(class_names=("a",)), tmp_path / "some")
    assert list(tmp_path.iterdir()) == []
