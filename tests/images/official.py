"""Small archives in the official formats, written from their descriptions and not with the readers' code.

``FIXTURES[name](folder)`` writes the archives of a named data set into a folder and returns what must be read
from them: train_images, train_labels, test_images, test_labels, and class_names where the archive has them.
"""

import gzip
import io
import struct
import tarfile
import zipfile

import numpy as np
import scipy.io

CIFAR_NAMES = [f"kind {number}" for number in range(10)]
STL_NAMES = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]


def pictures(count, shape, seed):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8)


def labels(count, classes, seed):
    """Return labels in which the first and the last class occur."""
    drawn = np.random.default_rng(seed).integers(0, classes, count)
    drawn[:2] = 0, classes - 1
    return drawn


def planes(images):
    """Return images (N, H, W, C) with one channel after the other, row by row: (N, C * H * W)."""
    return np.stack([np.concatenate([image[:, :, c].ravel() for c in range(3)]) for image in images])


def standing_planes(images):
    """The same column by column."""
    return np.stack([np.concatenate([image[:, :, c].T.ravel() for c in range(3)]) for image in images])


# ---------------------------------------------------------------------------------------------------- pickles


def python2_pickle(value):
    """Write what Python 2 and the numpy of its time wrote: strings of bytes, numpy.core.multiarray."""
    return b"\x80\x02" + _python2(value) + b"."


def _python2(value):
    if isinstance(value, dict):
        pairs = b"".join(_python2(key) + _python2(item) for key, item in value.items())
        return b"}(" + pairs + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(_python2, value)) + b"e"
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, bytes):
        return b"T" + struct.pack("<i", len(value)) + value
    assert value.dtype == np.uint8
    kind = b"cnumpy\ndtype\n(" + _python2(b"u1") + b"K\x00K\x01tR"
    kind += b"(K\x03" + _python2(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85" + _python2(b"b") + b"tR"
    columns_first = value.flags.f_contiguous and not value.flags.c_contiguous
    shape = b"(" + b"".join(map(_python2, value.shape)) + b"t"
    raw = value.tobytes("F" if columns_first else "C")
    state = b"(K\x01" + shape + kind + (b"\x88" if columns_first else b"\x89") + _python2(raw) + b"t"
    return empty + state + b"b"


def tar_gz(path, members):
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if content is None:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def cifar10(folder):
    images, truth = pictures(25, (32, 32, 3), 1), labels(25, 10, 2)
    tests, test_truth = pictures(7, (32, 32, 3), 3), labels(7, 10, 4)
    members = {"cifar-10-batches-py": None, "cifar-10-batches-py/readme.html": b"<html>"}
    for number in (4, 1, 2, 3, 5):  # not in order, as in the published archive
        rows = slice(5 * number - 5, 5 * number)
        members[f"cifar-10-batches-py/data_batch_{number}"] = cifar_batch(images[rows], truth[rows], b"labels")
    members["cifar-10-batches-py/test_batch"] = cifar_batch(tests, test_truth, b"labels", columns_first=True)
    names = [name.encode() for name in CIFAR_NAMES]
    meta = {b"num_cases_per_batch": 10000, b"label_names": names, b"num_vis": 3072}
    members["cifar-10-batches-py/batches.meta"] = python2_pickle(meta)
    tar_gz(folder / "cifar-10-python.tar.gz", members)
    return images, truth, tests, test_truth, CIFAR_NAMES


def cifar_batch(images, truth, key, columns_first=False):
    data = planes(images)
    return python2_pickle(
        {
            b"batch_label": b"training batch 1 of 5",
            key: [int(label) for label in truth],
            b"data": np.asfortranarray(data) if columns_first else data,
            b"filenames": [b"a.png"] * len(truth),
        }
    )


def cifar100(folder):
    images, truth = pictures(9, (32, 32, 3), 1), labels(9, 100, 2)
    tests, test_truth = pictures(5, (32, 32, 3), 3), labels(5, 100, 4)
    names = [f"fine {number:02d}" for number in range(100)]
    meta = {b"fine_label_names": [name.encode() for name in names], b"coarse_label_names": [b"coarse"]}
    members = {
        "cifar-100-python": None,
        "cifar-100-python/file.txt~": b"",
        "cifar-100-python/meta": python2_pickle(meta),
        "cifar-100-python/test": cifar_batch(tests, test_truth, b"fine_labels"),
        "cifar-100-python/train": cifar_batch(images, truth, b"fine_labels"),
    }
    tar_gz(folder / "cifar-100-python.tar.gz", members)
    return images, truth, tests, test_truth, names


# ------------------------------------------------------------------------------------------------------- SVHN


def mat(path, images, truth, **options):
    published = np.where(truth == 0, 10, truth)[:, None]
    options = {"do_compression": True, **options}
    scipy.io.savemat(path, {"X": images.transpose(1, 2, 3, 0), "y": published.astype(np.uint8)}, **options)


def svhn(folder, extra=False):
    images, truth = pictures(12, (32, 32, 3), 1), labels(12, 10, 2)
    more, more_truth = pictures(6, (32, 32, 3), 5), labels(6, 10, 6)
    tests, test_truth = pictures(5, (32, 32, 3), 3), labels(5, 10, 4)
    mat(folder / "train_32x32.mat", images, truth)
    mat(folder / "test_32x32.mat", tests, test_truth)
    if extra:
        mat(folder / "extra_32x32.mat", more, more_truth)
        images, truth = np.concatenate([images, more]), np.concatenate([truth, more_truth])
    return images, truth, tests, test_truth, [str(digit) for digit in range(10)]


# ----------------------------------------------------------------------------------------------------- STL-10


def stl10(folder):
    images, truth = pictures(8, (96, 96, 3), 1), labels(8, 10, 2)
    more = pictures(5, (96, 96, 3), 5)
    tests, test_truth = pictures(4, (96, 96, 3), 3), labels(4, 10, 4)
    members = {
        "stl10_binary": None,
        "stl10_binary/test_X.bin": standing_planes(tests).tobytes(),
        "stl10_binary/test_y.bin": (test_truth + 1).astype(np.uint8).tobytes(),
        "stl10_binary/train_X.bin": standing_planes(images).tobytes(),
        "stl10_binary/train_y.bin": (truth + 1).astype(np.uint8).tobytes(),
        "stl10_binary/unlabeled_X.bin": standing_planes(more).tobytes(),
        "stl10_binary/class_names.txt": "\n".join(STL_NAMES).encode() + b"\n",
        "stl10_binary/fold_indices.txt": b"".join(
            b"%d %d %d \n" % (i % 8, (i + 3) % 8, 7 - i % 4) for i in range(10)
        ),
    }
    tar_gz(folder / "stl10_binary.tar.gz", members)
    truth = np.concatenate([truth, np.full(5, -1)])
    return np.concatenate([images, more]), truth, tests, test_truth, STL_NAMES


# -------------------------------------------------------------------------------------------------------- IDX


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">I", size) for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


def mnist(folder, class_names=None):
    images, truth = pictures(11, (28, 28), 1), labels(11, 10, 2)
    tests, test_truth = pictures(6, (28, 28), 3), labels(6, 10, 4)
    for prefix, some, theirs in (("train", images, truth), ("t10k", tests, test_truth)):
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(some), 1))
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(theirs), 1))
    return images[..., None], truth, tests[..., None], test_truth, class_names


def emnist(split):
    classes = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}[split]

    def write(folder):
        images, truth = pictures(130, (28, 28), 1), labels(130, classes, 2)
        tests, test_truth = pictures(6, (28, 28), 3), labels(6, classes, 4)
        first = 1 if split == "letters" else 0
        with zipfile.ZipFile(folder / "gzip.zip", "w", zipfile.ZIP_DEFLATED) as bundle:
            bundle.writestr("gzip/emnist-other-mapping.txt", "0 48\n")
            for part, some, theirs in (("train", images, truth), ("test", tests, test_truth)):
                lying = np.stack([image.T for image in some])
                bundle.writestr(f"gzip/emnist-{split}-{part}-images-idx3-ubyte.gz", gzip.compress(idx(lying), 1))
                raw = gzip.compress(idx(theirs + first), 1)
                bundle.writestr(f"gzip/emnist-{split}-{part}-labels-idx1-ubyte.gz", raw)
        return images[..., None], truth, tests[..., None], test_truth, None

    return write


FIXTURES = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "svhn": svhn,
    "svhn-extra": lambda folder: svhn(folder, extra=True),
    "stl10": stl10,
    "mnist": mnist,
    "fashion-mnist": mnist,
    **{
        f"emnist-{split}": emnist(split)
        for split in ("byclass", "bymerge", "balanced", "letters", "digits", "mnist")
    },
}
