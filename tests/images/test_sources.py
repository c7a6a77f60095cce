"""Every named data set in its official format, and everything else that can be loaded."""

import dataclasses
import hashlib
import importlib.util
import os
import shutil
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from official import FIXTURES, pictures
from PIL import Image

from ccssl.errors import InputError
from ccssl.images import SOURCES, ImageData, formats, load, open_packed, packed, sources

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("CCSSL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def publish(monkeypatch, tmp_path):
    """Return a function that writes a fixture and enters its checksums into the table."""

    def write(name):
        folder = tmp_path / "published"
        folder.mkdir(exist_ok=True)
        expected = FIXTURES[name](folder)
        trust(monkeypatch, name, folder)
        return folder, expected

    return write


def trust(monkeypatch, name, folder):
    """Take what lies in a folder for what was published."""
    archives = tuple(
        dataclasses.replace(archive, md5=(hashlib.md5((folder / archive.file).read_bytes()).hexdigest(),))
        for archive in SOURCES[name].archives
    )
    monkeypatch.setitem(SOURCES, name, dataclasses.replace(SOURCES[name], archives=archives))


def assert_equal(data, expected):
    images, truth, tests, test_truth, class_names = expected
    np.testing.assert_array_equal(data.train_images, images)
    np.testing.assert_array_equal(data.train_labels, truth)
    np.testing.assert_array_equal(data.test_images, tests)
    np.testing.assert_array_equal(data.test_labels, test_truth)
    assert data.train_labels.dtype == data.test_labels.dtype == np.int64
    assert data.train_images.dtype == data.test_images.dtype == np.uint8
    if class_names is not None:
        assert data.class_names == tuple(class_names)


def test_every_fetched_source_has_a_fixture():
    assert set(FIXTURES) == {name for name, source in SOURCES.items() if not source.embedded}


@pytest.mark.parametrize("name", FIXTURES)
def test_official_archives_become_the_images_they_were_made_of(name, publish, home):
    folder, expected = publish(name)
    assert sources.state(name) == "not fetched"
    fetched = sources.fetch(name, files=[folder])
    assert sorted(path.name for path in fetched) == sorted(archive.file for archive in SOURCES[name].archives)
    assert all(path.parent == home / SOURCES[name].home for path in fetched)
    assert sources.state(name) == "ready"

    data = load(name)
    assert_equal(data, expected)
    assert data.name == name
    assert data.flip == SOURCES[name].flip
    assert data.train_images.shape[1:] == SOURCES[name].shape
    assert len(data.class_names) == SOURCES[name].classes
    assert isinstance(data.train_images, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        data.train_images[0] = 0
    assert {finding.state for finding in sources.verify(name)} == {"ok"}

    # Once packed, the archives are not needed any more.
    for path in fetched:
        path.unlink()
    assert_equal(load(name), expected)
    assert sources.fetch(name) == []


@pytest.mark.parametrize("name", SOURCES)
def test_the_table_says_what_a_user_must_know(name):
    source = SOURCES[name]
    assert source.archives
    assert source.licence
    for archive in source.archives:
        assert source.embedded or archive.url.startswith(("http://", "https://"))
        assert archive.url.endswith(archive.file) or source.embedded
        assert archive.size > 1000
        assert all(len(md5) == 32 and int(md5, 16) for md5 in archive.md5)


def test_emnist_classes():
    classes = formats.EMNIST_CLASSES
    assert classes["byclass"][9:12] + classes["byclass"][35:37] == ("9", "A", "B", "Z", "a")
    assert "".join(classes["bymerge"][36:]) == "abdefghnqrt"


def test_archives_placed_by_hand_are_packed_at_the_first_load(publish, home):
    folder, expected = publish("mnist")
    with pytest.raises(InputError, match=r"mnist is not on this machine.*`ccssl data fetch mnist`"):
        load("mnist")
    shutil.copytree(folder, home / "mnist")
    assert sources.state("mnist") == "fetched"
    assert_equal(load("mnist"), expected)


def test_an_archive_that_was_changed_is_neither_read_nor_accepted(publish, home, tmp_path):
    folder, _ = publish("cifar10")
    archive = folder / "cifar-10-python.tar.gz"
    broken = bytearray(archive.read_bytes())
    broken[len(broken) // 2] ^= 1
    (home / "cifar10").mkdir(parents=True)
    (home / "cifar10" / archive.name).write_bytes(broken)
    expected = SOURCES["cifar10"].archives[0].md5[0]
    found = hashlib.md5(broken).hexdigest()
    sentence = rf"cifar-10-python.tar.gz has the wrong checksum: expected MD5 {expected}, found {found}.*data fetch"
    with pytest.raises(InputError, match=sentence):
        load("cifar10")
    assert [finding.state for finding in sources.verify("cifar10")] == ["wrong"]
    (tmp_path / "mine.tar.gz").write_bytes(broken)
    with pytest.raises(InputError, match=rf"wrong checksum: expected MD5 {expected}, found {found}"):
        sources.fetch("cifar10", files=[tmp_path / "mine.tar.gz"])
    sources.fetch("cifar10", files=[archive])  # takes the place of the damaged one
    assert load("cifar10").name == "cifar10"


def test_the_second_checksum_counts_as_well(publish, monkeypatch):
    folder, expected = publish("fashion-mnist")
    archives = tuple(
        dataclasses.replace(archive, md5=("0" * 32, *archive.md5)) for archive in SOURCES["fashion-mnist"].archives
    )
    monkeypatch.setitem(SOURCES, "fashion-mnist", dataclasses.replace(SOURCES["fashion-mnist"], archives=archives))
    sources.fetch("fashion-mnist", files=[folder / archive.file for archive in archives])
    assert_equal(load("fashion-mnist"), expected)


def test_a_source_without_checksum_says_so(publish, monkeypatch):
    folder, _ = publish("emnist-digits")
    source = SOURCES["emnist-digits"]
    archives = (dataclasses.replace(source.archives[0], md5=()),)
    monkeypatch.setitem(SOURCES, "emnist-digits", dataclasses.replace(source, archives=archives))
    sources.fetch("emnist-digits", files=[folder])
    first = sources.verify("emnist-digits")[0]
    assert (first.state, first.expected) == ("no checksum published", None)


def test_splits_of_one_archive_share_it(publish, home):
    folder, _ = publish("emnist-letters")
    sources.fetch("emnist-letters", files=[folder])
    assert (home / "emnist" / "gzip.zip").exists()
    assert (home / "emnist" / "packed" / "emnist-letters" / "meta.json").exists()


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (["train-images-idx3-ubyte.gz"], "mnist needs train-labels-idx1-ubyte.gz as well"),
        (["nothing.gz"], "nothing.gz is none of the archives: they are named train-images"),
        (["."], "None of train-images.* is in"),
    ],
)
def test_files_that_do_not_fit(files, sentence, publish, tmp_path):
    folder, _ = publish("mnist")
    (tmp_path / "empty").mkdir()
    given = [tmp_path / "empty" if file == "." else folder / file for file in files]
    with pytest.raises(InputError, match=sentence):
        sources.fetch("mnist", files=given)


def test_fetch_refuses_what_makes_no_sense(publish):
    folder, _ = publish("mnist")
    with pytest.raises(InputError, match="either files or an address"):
        sources.fetch("mnist", files=[folder], url="http://127.0.0.1/")
    with pytest.raises(InputError, match="digits comes with ccssl"):
        sources.fetch("digits")


@pytest.mark.parametrize(
    ("wrong", "meant"), [("cifar-10", "cifar10"), ("CIFAR100", "cifar100"), ("emnist_byclass", "emnist-byclass")]
)
def test_unknown_names_get_the_nearest(wrong, meant):
    for ask in (load, sources.fetch, sources.verify, sources.state):
        with pytest.raises(InputError, match=rf"no data set named '{wrong}'.*Did you mean {meant}\?"):
            ask(wrong)


@pytest.mark.parametrize("path", ["nowhere/at/all", "missing.npz", Path("digits")])
def test_paths_that_do_not_exist(path):
    with pytest.raises(InputError, match=r"does not exist: give an .npz archive, a folder, or one of digits, "):
        load(path)


def test_a_folder_of_a_known_name_is_reached_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    packed.pack(load("digits"), Path("mnist"))
    assert load("./mnist").name == load(Path("mnist")).name == "digits"


def test_threads_that_load_at_once_pack_once(publish, home, monkeypatch):
    folder, expected = publish("mnist")
    shutil.copytree(folder, home / "mnist")
    written, found = [], []
    write = packed.write
    monkeypatch.setattr(packed, "write", lambda *args: (written.append(1), write(*args)))
    threads = [threading.Thread(target=lambda: found.append(load("mnist"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert written == [1]
    for data in found:
        assert_equal(data, expected)


# ----------------------------------------------------------------------------------------------------- digits


def test_digits_need_no_network_and_are_divided_fairly():
    data = load("digits")
    assert data.train_images.shape == (1297, 8, 8, 1)
    assert data.test_images.shape == (500, 8, 8, 1)
    assert data.class_names == tuple("0123456789")
    assert not data.flip
    assert data.flip_told
    assert data.train_images.max() == 255
    assert np.bincount(data.train_labels).min() > 100
    assert np.bincount(data.test_labels).min() > 40
    assert sources.state("digits") == "embedded"
    assert [finding.state for finding in sources.verify("digits")] == ["ok"]


@pytest.fixture(scope="module")
def make_digits():
    spec = importlib.util.spec_from_file_location("make_digits", ROOT / "tools" / "make_digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_digits_are_the_same_byte_for_byte_wherever_they_are_made(make_digits):
    data = load("digits")
    in_test = make_digits.drawn_for_testing(1797)
    levels, truth = np.zeros((1797, 8, 8)), np.zeros(1797, np.int64)
    for part, images, theirs in (
        (~in_test, data.train_images, data.train_labels),
        (in_test, data.test_images, data.test_labels),
    ):
        levels[part] = np.rint(images[..., 0] / 255 * 16)
        truth[part] = theirs
    assert make_digits.archive(levels, truth) == make_digits.TARGET.read_bytes()


def test_digits_are_those_of_scikit_learn(make_digits):
    from sklearn.datasets import load_digits

    digits = load_digits()
    assert make_digits.archive(digits.images, digits.target) == make_digits.TARGET.read_bytes()


# ------------------------------------------------------------------------------------------------------ folds


def test_folds_of_stl10(publish):
    folder, (_, truth, *_) = publish("stl10")
    sources.fetch("stl10", files=[folder])
    whole = load("stl10")
    assert whole.folds.tolist()[1] == [1, 4, 6]
    assert whole.folds.shape == (10, 3)
    for fold in (0, 9):
        data = load("stl10", fold=fold)
        chosen = whole.folds[fold]
        assert data.train_labels[chosen].tolist() == truth[chosen].tolist()
        assert (np.delete(data.train_labels, chosen) == -1).all()
        np.testing.assert_array_equal(data.test_labels, whole.test_labels)
    for fold in (-1, 10):
        with pytest.raises(InputError, match=f"fold must be from 0 to 9 for stl10, got {fold}"):
            load("stl10", fold=fold)
    with pytest.raises(InputError, match="digits has no folds of its own, got fold 0"):
        load("digits", fold=0)


# --------------------------------------------------------------------------------------------------- pictures


@pytest.fixture
def folder(tmp_path):
    """Return a folder of colour pictures of 10 x 12 pixels, as PNG files, which lose nothing."""
    return write_pictures(tmp_path / "animals", pictures(10, (10, 12, 3), 0))


def write_pictures(root, images):
    places = ["train/cat/1.png", "train/cat/2.PNG", "train/dog/a/3.png", "train/dog/4.png"]
    places += ["test/cat/5.png", "test/dog/6.png", "unlabeled/7.png", "unlabeled/deep/8.png"]
    for place, image in zip(places, images, strict=False):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.squeeze()).save(root / place)
    return root


@pytest.mark.parametrize("channels", [1, 3])
def test_a_folder_of_pictures(channels, tmp_path):
    images = pictures(10, (10, 12, channels), 0)
    data = load(write_pictures(tmp_path / "animals", images))
    # Within a class in the order of their places: 4.png before a/3.png.
    np.testing.assert_array_equal(data.train_images, images[[0, 1, 3, 2, 6, 7]])
    np.testing.assert_array_equal(data.test_images, images[[4, 5]])
    assert data.train_labels.tolist() == [0, 0, 1, 1, -1, -1]
    assert data.test_labels.tolist() == [0, 1]
    assert data.class_names == ("cat", "dog")
    assert data.name == "animals"
    assert isinstance(data.train_images, np.memmap)


def test_pictures_are_decoded_once_and_again_when_one_changes(folder, home, monkeypatch):
    decoded = []
    decode = sources.stream_folder
    monkeypatch.setattr(sources, "stream_folder", lambda *args: (decoded.append(1), decode(*args))[1])
    first = load(folder)
    assert np.array_equal(load(folder).train_images, first.train_images)
    assert decoded == [1]
    Image.new("RGB", (12, 10), "red").save(folder / "train" / "cat" / "1.png")
    second = load(folder)
    assert decoded == [1, 1]
    assert (second.train_images[0] == (255, 0, 0)).all()
    assert (first.train_images[0] != second.train_images[0]).any()  # still mapped, though its files are gone
    assert len([path for path in (home / "folders").glob("*/*") if path.is_dir()]) == 1


def test_a_picture_that_changed_in_place_is_noticed(folder):
    picture = folder / "train" / "cat" / "0.bmp"
    Image.new("RGB", (12, 10), "red").save(picture)
    before, size = load(folder).train_images[0].copy(), picture.stat().st_size
    Image.new("RGB", (12, 10), "blue").save(picture)
    os.utime(picture, ns=(0, 0))
    assert picture.stat().st_size == size
    after = load(folder).train_images[0]
    assert before[0, 0].tolist() == [255, 0, 0]
    assert after[0, 0].tolist() == [0, 0, 255]


@pytest.mark.parametrize(
    ("what", "value", "expected"),
    [
        ("palette", "P", 200),
        ("grey beside colour", "L", 200),
        ("transparent", "RGBA", 255),
        ("bilevel", "1", 255),
        ("print colours", "CMYK", 200),
    ],
)
def test_modes_are_what_they_look_like(what, value, expected, tmp_path):
    root = write_pictures(tmp_path / "mixed", pictures(10, (10, 12, 3), 0))
    image = Image.new("RGB", (12, 10), (200, 200, 200))
    image = image.quantize(2) if value == "P" else image.convert(value, dither=Image.Dither.NONE)
    if value == "RGBA":
        image.putalpha(0)
    suffix = "tif" if value == "CMYK" else "png"
    image.save(root / "train" / "cat" / f"0.{suffix}")
    first = load(root).train_images[0]
    assert first.shape == (10, 12, 3)
    assert (first == expected).all()


def test_sixteen_grey_bits_are_cut_to_eight(tmp_path):
    root = write_pictures(tmp_path / "scans", pictures(10, (10, 12, 1), 0))
    levels = np.arange(120, dtype=np.uint16).reshape(10, 12) * 500
    Image.fromarray(levels).save(root / "train" / "cat" / "0.png")
    np.testing.assert_array_equal(load(root).train_images[0, :, :, 0], levels // 256)


def test_pictures_are_turned_as_the_camera_noted(tmp_path):
    root = write_pictures(tmp_path / "photos", pictures(10, (10, 12, 3), 0))
    standing = Image.fromarray(pictures(1, (10, 12, 3), 9)[0])
    exif = Image.Exif()
    exif[0x0112] = 8  # to be turned by a quarter, anticlockwise
    lying = standing.transpose(Image.Transpose.ROTATE_270)
    lying.save(root / "train" / "cat" / "0.png", exif=exif)
    np.testing.assert_array_equal(load(root).train_images[0], np.asarray(standing))


def test_pictures_of_different_sizes(folder):
    Image.new("RGB", (30, 40)).save(folder / "test" / "dog" / "big.png")
    sentence = r"one size, but .*1.png has 12 x 10 pixels and .*big.png has 30 x 40: bring them to one"
    with pytest.raises(InputError, match=sentence):
        load(folder)
    data = load(folder, size=8)
    assert data.train_images.shape == (6, 8, 8, 3)
    with pytest.raises(InputError, match="size must be at least 1 pixel, got 0"):
        load(folder, size=0)


def test_size_cuts_the_middle_of_the_longer_side(tmp_path):
    root = write_pictures(tmp_path / "strips", pictures(10, (10, 12, 3), 0))
    strip = np.zeros((20, 60, 3), np.uint8)
    strip[:, 20:40] = 200  # the middle third is bright
    Image.fromarray(strip).save(root / "train" / "cat" / "0.png")
    Image.fromarray(strip.transpose(1, 0, 2)).save(root / "train" / "cat" / "00.png")
    for image in load(root, size=10).train_images[:2]:
        assert (image[2:8, 2:8] == 200).all()
    for image in load(root, size=20).train_images[:2]:
        assert (image == 200).all()  # no pixel is interpolated


@pytest.mark.parametrize(
    ("place", "content", "sentence"),
    [
        ("train/cat/notes.txt", b"hello", r"notes.txt is not a picture \(.bmp, .*convert it or move it away"),
        ("train/cat/9.png", b"hello", "9.png cannot be decoded"),
        ("train/loose.png", b"", "loose.png lies beside the folders of the classes"),
        ("test/bird/1.png", b"", "bird is the folder of a class that .*train does not have"),
    ],
)
def test_folders_with_what_does_not_belong(place, content, sentence, folder):
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        load(folder)


def test_a_truncated_picture_is_named_and_leaves_nothing_behind(folder, home):
    photo = folder / "train" / "dog" / "5.jpg"
    Image.fromarray(pictures(1, (10, 12, 3), 5)[0]).save(photo)
    photo.write_bytes(photo.read_bytes()[:-40])
    with pytest.raises(InputError, match=r"5.jpg cannot be decoded: .*truncated"):
        load(folder)
    assert not [path for path in (home / "folders").glob("*/*") if path.is_dir()]


def test_pictures_with_an_unknown_range_are_refused(folder):
    Image.fromarray(np.ones((10, 12), np.float32)).save(folder / "train" / "cat" / "0.tif")
    with pytest.raises(InputError, match=r"0.tif has 32 bits a pixel"):
        load(folder)


def test_a_picture_that_would_exhaust_memory_is_refused(folder, monkeypatch):
    warnings.simplefilter("ignore")  # as far as the user is concerned
    for limit in (100, 10):  # the pictures have 120; Pillow itself refuses more than twice the limit
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(InputError, match=r"1.png cannot be decoded: Image size \(120 pixels\) exceeds limit"):
            load(folder)


def test_litter_is_passed_over(folder):
    for place in ("train/.DS_Store", "train/cat/Thumbs.db", ".git", "unlabeled/.hidden.png"):
        (folder / place).write_bytes(b"x")
    assert len(load(folder).train_images) == 6


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("test", "has no folder 'test'"),
        ("train", "neither a packed data set"),
        ("train/dog", "at least 2 classes, got 1"),
        ("train/*/*", "train holds no pictures"),
    ],
)
def test_folders_that_lack_something(missing, sentence, folder):
    for path in list(folder.glob(missing)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if missing == "train/*/*":
        assert (folder / "train" / "dog").exists()
    with pytest.raises(InputError, match=sentence):
        load(folder)


def test_size_belongs_to_pictures(tmp_path):
    packed.pack(load("digits"), tmp_path / "digits")
    for place in ("digits", tmp_path / "digits"):
        with pytest.raises(InputError, match="size belongs to a folder of pictures"):
            load(place, size=8)


def test_open_stream_gives_what_load_gives(folder, publish, tmp_path):
    archives, _ = publish("stl10")
    sources.fetch("stl10", files=[archives])
    packed.pack(load("digits"), tmp_path / "digits")
    whole = {
        key: getattr(load(folder), key) for key in ("train_images", "train_labels", "test_images", "test_labels")
    }
    np.savez_compressed(tmp_path / "some.npz", **whole)
    for place in (folder, str(folder), "stl10", "digits", tmp_path / "digits", tmp_path / "some.npz"):
        with sources.open_stream(place) as stream:
            packed.write(stream, tmp_path / "out")
        copy, data = open_packed(tmp_path / "out"), load(place)
        assert isinstance(copy, ImageData)
        assert_equal(copy, (data.train_images, data.train_labels, data.test_images, data.test_labels, None))
        assert (copy.flip, copy.name) == (data.flip, data.name)
        assert copy.folds is data.folds or np.array_equal(copy.folds, data.folds)
        shutil.rmtree(tmp_path / "out")
