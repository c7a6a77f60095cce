"""Archives of plain arrays: what they may hold, how they are opened, and what is said of the others."""

import io
import tracemalloc
import zipfile

import numpy as np
import pytest
from official import labels, pictures

from ccssl.errors import InputError
from ccssl.images import dataset, load, npz, packed

SHAPE = (5, 6, 3)


def arrays(shape=SHAPE, **changes):
    """Return the arrays of an archive; a change to None takes one out."""
    given = {
        "train_images": pictures(7, shape, 0),
        "train_labels": labels(7, 3, 1).astype(np.uint8),
        "test_images": pictures(4, shape, 2),
        "test_labels": labels(4, 3, 3).astype(np.int32),
        **changes,
    }
    return {key: array for key, array in given.items() if array is not None}


def write(path, compressed=False, **given):
    (np.savez_compressed if compressed else np.savez)(path, **given)
    return path


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("shape", [(5, 6), (5, 6, 1), SHAPE])
def test_plain_arrays(compressed, shape, tmp_path):
    given = arrays(shape)
    data = load(str(write(tmp_path / "mine.npz", compressed, **given)))
    images = given["train_images"] if len(shape) == 3 else given["train_images"][..., None]
    np.testing.assert_array_equal(data.train_images, images)
    np.testing.assert_array_equal(data.test_images.reshape(given["test_images"].shape), given["test_images"])
    np.testing.assert_array_equal(data.train_labels, given["train_labels"])
    np.testing.assert_array_equal(data.test_labels, given["test_labels"])
    assert data.train_labels.dtype == data.test_labels.dtype == np.int64
    assert data.train_images.flags.writeable  # torch warns of others
    assert (data.name, data.class_names, data.flip, data.folds) == ("mine", ("0", "1", "2"), False, None)
    assert not data.flip_told


def test_what_may_be_added(tmp_path):
    given = arrays(
        unlabeled_images=pictures(5, SHAPE, 4),
        class_names=np.array(["ape", "bee", "cät", "dog"]),
        flip=np.array(True),
    )
    given["train_labels"] = given["train_labels"].astype(np.int8)
    given["train_labels"][3] = -1
    data = load(write(tmp_path / "mine.npz", **given))
    np.testing.assert_array_equal(data.train_images[7:], given["unlabeled_images"])
    np.testing.assert_array_equal(data.train_labels, [*given["train_labels"], *[-1] * 5])
    assert data.class_names == ("ape", "bee", "cät", "dog")
    assert data.flip is True
    assert data.flip_told


def test_a_large_archive_is_mapped_where_it_lies(tmp_path, monkeypatch):
    monkeypatch.setattr(npz, "WHOLE_BYTES", 100)
    given = arrays()
    path = write(tmp_path / "large.npz", **given)
    data = load(path)
    for key in ("train_images", "test_images"):
        assert isinstance(getattr(data, key), np.memmap)
        np.testing.assert_array_equal(getattr(data, key), given[key])
    sentence = "is compressed and takes 0.0 GB: pack it once with `ccssl data pack .*small.npz --out FOLDER`"
    with pytest.raises(InputError, match=sentence):
        load(write(tmp_path / "small.npz", compressed=True, **given))
    with pytest.raises(InputError, match="has unlabeled_images, which have to be joined"):
        load(write(tmp_path / "more.npz", **given, unlabeled_images=pictures(1, SHAPE, 0)))


@pytest.mark.parametrize("compressed", [False, True])
def test_a_large_archive_is_packed_chunk_by_chunk(compressed, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "CHUNK_BYTES", 2**17)
    images = np.zeros((3000, 32, 32, 3), np.uint8)  # 9.2 MB
    images[:, 5, 6, 1] = np.arange(3000) % 251
    given = {"train_images": images, "train_labels": np.arange(3000) % 3, "unlabeled_images": images[:5]}
    path = write(tmp_path / "big.npz", compressed, **arrays((32, 32, 3), **given))
    del given
    tracemalloc.start()
    with npz.stream_npz(path) as stream:
        packed.write(stream, tmp_path / "big")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e6
    data = packed.open_packed(tmp_path / "big")
    np.testing.assert_array_equal(data.train_images[:3000], images)
    np.testing.assert_array_equal(data.train_images[3000:], images[:5])
    assert data.train_labels[-6:].tolist() == [2, *[-1] * 5]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"test_labels": None},
            r"lacks the array test_labels: it has train_images, train_labels, test_images, and",
        ),
        ({"train_images": np.zeros((7, *SHAPE))}, "train_images must be uint8, .*got float64"),
        ({"train_images": pictures(7, (5,), 0)}, r"train_images must have the shape .*got \(7, 5\)"),
        ({"train_images": pictures(7, (5, 6, 4), 0)}, r"1 or 3 channels, got \(7, 5, 6, 4\)"),
        ({"train_images": pictures(0, SHAPE, 0), "train_labels": np.zeros(0, int)}, "train_images is empty"),
        ({"test_images": pictures(4, (5, 5, 3), 0)}, "test_images must be of the shape of train_images"),
        ({"unlabeled_images": pictures(4, (5, 6), 0)}, "unlabeled_images must be of the shape of train_images"),
        ({"train_labels": np.zeros(7)}, "train_labels must be whole numbers, got float64"),
        ({"train_labels": np.zeros((7, 1), int)}, r"one label an image, shape \(7,\), got \(7, 1\)"),
        ({"test_labels": np.zeros(5, int)}, r"test_labels must hold one label an image, shape \(4,\), got \(5,\)"),
        ({"train_labels": np.full(7, -2)}, "train_labels must be from 0 to 2, or -1 .*; got -2"),
        ({"test_labels": np.full(4, -1)}, "test_labels must be from 0 to 2; got -1"),
        ({"train_labels": np.zeros(7, int), "test_labels": np.zeros(4, int)}, "at least 2 classes, got 1"),
        ({"class_names": np.array(["a", "b"])}, "train_labels must be from 0 to 1, or -1 .*; got 2"),
        ({"class_names": np.array(["a", "b", "a"])}, "class_names must differ .*'a' twice"),
        ({"class_names": np.arange(3)}, "class_names must be an array of strings, got int64"),
        ({"class_names": np.array([["a", "b", "c"]])}, "class_names must be an array of strings"),
        ({"flip": np.array(1)}, "flip must be one boolean, got int64"),
        ({"flip": np.array([True, False])}, "flip must be one boolean"),
        ({"train_images": np.asfortranarray(pictures(7, SHAPE, 0))}, "columns first: save numpy.ascontiguousarray"),
    ],
)
def test_archives_that_are_no_data_set(changes, sentence, tmp_path):
    path = write(tmp_path / "wrong.npz", **arrays(**changes))
    with pytest.raises(InputError, match=rf"wrong.npz.*{sentence}"):
        load(path)
    with pytest.raises(InputError, match=sentence), npz.stream_npz(path) as stream:
        packed.write(stream, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["train_images", "train_labels", "class_names"])
def test_pickled_arrays_are_never_loaded(key, tmp_path):
    class Evil:
        def __reduce__(self):
            return (tmp_path.joinpath("done").write_text, ("x",))

    path = tmp_path / "wrong.npz"
    np.savez(path, allow_pickle=True, **arrays(**{key: np.array([Evil()] * 7, object)}))
    (tmp_path / "done").unlink(missing_ok=True)
    with pytest.raises(InputError, match=f"{key} holds pickled Python objects, which are never loaded"):
        load(path)
    assert not (tmp_path / "done").exists()


def test_files_that_are_no_archives(tmp_path):
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(InputError, match=r"text.npz is not an .npz archive"):
        load(tmp_path / "text.npz")
    with zipfile.ZipFile(tmp_path / "zip.npz", "w") as bundle:
        for key in npz.REQUIRED:
            bundle.writestr(f"{key}.npy", "no array")
    with pytest.raises(InputError, match=r"zip.npz is damaged or no .npz archive of plain arrays"):
        load(tmp_path / "zip.npz")


@pytest.mark.parametrize("compressed", [False, True])
def test_a_bit_that_fell_over_is_noticed(compressed, tmp_path):
    path = write(tmp_path / "mine.npz", compressed, **arrays())
    raw = bytearray(path.read_bytes())
    raw[400] ^= 16  # among the pixels
    path.write_bytes(raw)
    with pytest.raises(InputError, match=r"mine.npz is damaged"):
        load(path)
    with pytest.raises(InputError, match=r"mine.npz is damaged"), npz.stream_npz(path) as stream:
        packed.write(stream, tmp_path / "out")


def test_an_array_that_is_shorter_than_it_says(tmp_path):
    whole = io.BytesIO()
    np.save(whole, pictures(7, SHAPE, 0))
    path = write(tmp_path / "mine.npz", **arrays(train_images=None))
    with zipfile.ZipFile(path, "a") as bundle:
        bundle.writestr("train_images.npy", whole.getvalue()[:-1])
    with pytest.raises(InputError, match=r"mine.npz is damaged"):
        load(path)
    with pytest.raises(InputError, match=r"ends within image 6 of 7"), npz.stream_npz(path) as stream:
        packed.write(stream, tmp_path / "out")


def test_an_array_that_is_longer_than_it_says(tmp_path):
    whole = io.BytesIO()
    np.save(whole, pictures(7, SHAPE, 0))
    path = write(tmp_path / "mine.npz", **arrays(train_images=None))
    with zipfile.ZipFile(path, "a") as bundle:
        bundle.writestr("train_images.npy", whole.getvalue() + b"x")
    with pytest.raises(InputError, match=r"mine.npz is damaged .*does not have the length that it says"):
        load(path)


def test_an_array_of_version_two(tmp_path):
    path = write(tmp_path / "mine.npz", **arrays(train_images=None))
    with zipfile.ZipFile(path, "a") as bundle, bundle.open("train_images.npy", "w") as file:
        np.lib.format.write_array(file, pictures(7, SHAPE, 0), version=(2, 0))
    np.testing.assert_array_equal(load(path).train_images, pictures(7, SHAPE, 0))


@pytest.mark.parametrize("label", [11, 2_000_000_000])
def test_a_label_beyond_the_number_of_images_is_refused_at_once(label, tmp_path):
    wild = np.array([0, 1, 2, 0, 1, 2, label], np.int64)
    tracemalloc.start()
    with pytest.raises(
        InputError, match=f"a label is {label}, more than there are images: number the classes from 0"
    ):
        load(str(write(tmp_path / "mine.npz", **arrays(train_labels=wild))))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 10_000_000


def test_equal_data_have_equal_digests_and_other_data_others(tmp_path):
    def found(**changes):
        return dataset.digest(load(str(write(tmp_path / "mine.npz", **arrays(**changes)))))

    assert found() == found()
    images, names = arrays()["train_images"], np.array(["a", "b", "c"])
    others = [
        found(train_images=255 - images),
        found(test_labels=np.array([2, 1, 0, 0])),
        found(class_names=names),
        found(class_names=names, flip=np.True_),
    ]
    assert len({found(), *others}) == 5


def test_class_names_that_are_no_unicode_are_refused(tmp_path):
    names = np.array(["a", "kl\udcff", "c"])
    with pytest.raises(InputError, match=r"class_names must be Unicode, got 'kl\\udcff': rename the class"):
        load(str(write(tmp_path / "mine.npz", **arrays(class_names=names))))
