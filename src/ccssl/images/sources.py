"""Where images come from: data sets with a name, archives, folders; and one function that loads any of them.

``SOURCES`` is the table of the data sets that ccssl knows by name. Each is fetched once, as its authors
published it, into a folder of its own below ``data_folder()``; its checksums are compared; it is brought into
packed form (``packed``) beside the archives, and mapped from there ever after. Archives may then be deleted.
Data sets out of one archive share its folder. ``digits`` comes with the package.

The checksums of CIFAR, SVHN, STL-10, EMNIST, Fashion-MNIST and MNIST are those with which torchvision compares
the same files. Debian's package ``dataset-fashion-mnist`` compresses the files of Fashion-MNIST anew, without
their names and times: the second checksum of each.

How to add a data set: write its reader (``formats``), put a line into ``SOURCES`` and a fixture into the
contract test, which fails until then.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ccssl.errors import InputError, did_you_mean
from ccssl.folders import data_folder
from ccssl.images import fetch as fetching
from ccssl.images import formats, packed
from ccssl.images.dataset import UNKNOWN, ImageData, ImageStream
from ccssl.images.image_folder import find_files, fingerprint, is_image_folder, stream_folder
from ccssl.images.lock import alone
from ccssl.images.npz import open_npz, stream_npz

EMBEDDED = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Archive:
    """A published file: where it lies, and the MD5 sums it may have; none where none is published."""

    file: str
    url: str
    md5: tuple[str, ...]
    size: int  # bytes


@dataclass(frozen=True)
class Source:
    """A data set with a name, and what is known of it before it is fetched."""

    title: str
    shape: tuple[int, int, int]
    classes: int
    train: int
    test: int
    flip: bool  # whether a mirrored image keeps its class
    licence: str
    archives: tuple[Archive, ...]
    read: Callable[[Path], AbstractContextManager[ImageStream]]
    home: str  # the folder of the archives, below the folder for data
    unlabeled: int = 0
    embedded: bool = False

    @property
    def size(self) -> int:
        """Return the bytes to fetch."""
        return sum(archive.size for archive in self.archives)


def load(
    name_or_path: str | Path, folder: Path | None = None, *, fold: int | None = None, size: int | None = None
) -> ImageData:
    """Return a data set: a name of ``SOURCES``, PATH.npz, a packed folder or a folder of pictures.

    A string that is a name means the named data set; write ``./name`` for a folder of that name. Named data
    sets are looked for in ``folder``, ``data_folder()`` by default; none is fetched here. ``fold`` keeps the
    labels of one of the data set's own folds alone and makes the other training images unlabeled. ``size`` is
    the side to which a folder's pictures are brought.

    >>> digits = load("digits")
    >>> digits.train_images.shape, digits.test_images.shape, len(digits.class_names)
    ((1297, 8, 8, 1), (500, 8, 8, 1), 10)
    """
    home = folder or data_folder()
    if isinstance(name_or_path, str) and name_or_path in SOURCES:
        if size is not None:
            raise InputError(f"size belongs to a folder of pictures, and {name_or_path} is none.")
        data = _load_named(name_or_path, home)
    else:
        path = _existing_path(name_or_path)
        if size is not None and not is_image_folder(path):
            raise InputError(f"size belongs to a folder of pictures, and {path} is none.")
        if path.is_file():
            data = open_npz(path)
        elif packed.is_packed(path):
            data = packed.open_packed(path)
        else:
            data = _load_pictures(path, home, size)
    return data if fold is None else only_fold(data, fold)


@contextmanager
def open_stream(name_or_path: str | Path, size: int | None = None) -> Iterator[ImageStream]:
    """Give a data set, as ``load`` names them, chunk by chunk: what may be larger than memory is never whole."""
    named = isinstance(name_or_path, str) and name_or_path in SOURCES
    path = None if named else _existing_path(name_or_path)
    if path is not None and path.is_file() and size is None:
        with stream_npz(path) as stream:
            yield stream
    elif path is not None and is_image_folder(path) and not packed.is_packed(path):
        with stream_folder(path, size) as stream:
            yield stream
    else:
        yield packed.as_stream(load(name_or_path, size=size))


def fetch(
    name: str, folder: Path | None = None, *, files: Sequence[Path] = (), url: str | None = None
) -> list[Path]:
    """Bring the archives of a named data set here, check and pack them; return the archives that were fetched.

    ``files`` are archives that are on this machine already, or folders that hold them. ``url`` is another
    address: of the file, or, for data sets of several files, of the folder that holds them.
    """
    source, home = find_source(name), _home(name, folder)
    if files and url:
        raise InputError("Give either files or an address to fetch from, not both.")
    if source.embedded:
        raise InputError(f"{name} comes with ccssl: there is nothing to fetch.")
    fetched = []
    # Named files are taken even where the data set is packed already: whoever names them wants them checked.
    if files or not packed.is_packed(_packed_folder(name, home)):
        chosen = _match(source, files)
        for archive in source.archives:
            target = home / archive.file
            if target.exists() and fetching.is_right(target, archive.md5):
                continue
            if chosen:
                if archive.file not in chosen:
                    raise InputError(f"{name} needs {archive.file} as well: name it, or the folder it is in.")
                fetching.copy(chosen[archive.file], target, archive.md5)
            else:
                fetching.download(_address(archive, url, len(source.archives)), target, archive.md5)
            fetched.append(target)
    _pack_named(name, home)
    return fetched


def verify(name: str, folder: Path | None = None) -> list[packed.Finding]:
    """Compare what is here of a named data set with its checksums: the archives and the packed arrays."""
    source, home = find_source(name), _home(name, folder)
    findings = []
    for archive in source.archives:
        path = home / archive.file
        if path.exists():
            found = fetching.checksum(path)
            state = "no checksum published" if not archive.md5 else "ok" if found in archive.md5 else "wrong"
            expected = found if state == "ok" else " or ".join(archive.md5) or None
            findings.append(packed.Finding(path, state, expected, found))
    if packed.is_packed(_packed_folder(name, home)):
        findings += packed.verify(_packed_folder(name, home))
    return findings


def state(name: str, folder: Path | None = None) -> str:
    """Return embedded, ready (packed), fetched (to be packed at its first use), partly fetched or not fetched."""
    source, home = find_source(name), _home(name, folder)
    if source.embedded:
        return "embedded"
    if packed.is_packed(_packed_folder(name, home)):
        return "ready"
    here = [(home / archive.file).exists() for archive in source.archives]
    begun = any((home / f"{archive.file}.part").exists() for archive in source.archives)
    return "fetched" if all(here) else "partly fetched" if any(here) or begun else "not fetched"


def place(name: str, folder: Path | None = None) -> Path:
    """Return the folder of a named data set."""
    return _home(name, folder)


def find_source(name: str) -> Source:
    """Return a named data set, or say which name was probably meant."""
    if name in SOURCES:
        return SOURCES[name]
    meant = did_you_mean(name.lower(), SOURCES)
    raise InputError(f"There is no data set named {name!r}: it must be one of {', '.join(SOURCES)}.{meant}")


def _load_named(name: str, folder: Path) -> ImageData:
    source, home = SOURCES[name], _home(name, folder)
    if source.embedded:
        data = open_npz(home / source.archives[0].file)
        return dataclasses.replace(data, name=name, flip=source.flip, flip_told=True)
    _pack_named(name, home)
    target = _packed_folder(name, home)
    try:
        return packed.open_packed(target)
    except InputError as error:
        raise InputError(
            f"{error} Delete {target}, and it will be made anew from the archives or by `ccssl data fetch {name}`."
        ) from None


def _pack_named(name: str, home: Path) -> None:
    source, target = SOURCES[name], _packed_folder(name, home)
    if packed.is_packed(target):
        return
    missing = [archive.file for archive in source.archives if not (home / archive.file).exists()]
    if missing:
        raise InputError(
            f"{name} is not on this machine: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in "
            f"{home}. Fetch it with `ccssl data fetch {name}`."
        )
    with alone(home / ".packing", f"packing {name}"):
        if packed.is_packed(target):
            return  # another process was quicker
        for archive in source.archives:
            path = home / archive.file
            if archive.md5 and (found := fetching.checksum(path)) not in archive.md5:
                raise InputError(
                    f"{path} has the wrong checksum: expected MD5 {' or '.join(archive.md5)}, found {found}. "
                    f"Fetch it anew with `ccssl data fetch {name}`."
                )
        with source.read(home) as stream:
            packed.write(dataclasses.replace(stream, name=name, flip=source.flip), target)


def _load_pictures(root: Path, folder: Path, size: int | None) -> ImageData:
    place = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:8]
    cache = folder / "folders" / f"{root.resolve().name}-{place}"
    target = cache / fingerprint(root, find_files(root), size)
    if not packed.is_packed(target):
        with alone(cache / ".packing", f"packing {root}"):
            if not packed.is_packed(target):
                with stream_folder(root, size) as stream:
                    packed.write(stream, target)
                # What the folder held before is of no more use; who has it mapped keeps it until the end.
                for old in cache.iterdir():
                    if old != target and packed.is_packed(old):
                        shutil.rmtree(old, ignore_errors=True)
    return packed.open_packed(target)


def only_fold(data: ImageData, fold: int) -> ImageData:
    """Return the data set with the labels of one of its own folds alone; other training images become unlabeled."""
    if data.folds is None:
        raise InputError(f"{data.name} has no folds of its own, got fold {fold}.")
    if not 0 <= fold < len(data.folds):
        raise InputError(f"fold must be from 0 to {len(data.folds) - 1} for {data.name}, got {fold}.")
    labels = np.full_like(data.train_labels, UNKNOWN)
    labels[data.folds[fold]] = data.train_labels[data.folds[fold]]
    return dataclasses.replace(data, train_labels=labels)


def _existing_path(name_or_path: str | Path) -> Path:
    path = Path(name_or_path).expanduser()
    if path.exists():
        if path.is_dir() and not packed.is_packed(path) and not is_image_folder(path):
            raise InputError(
                f"{path} is neither a packed data set ({packed.META}) nor a folder of pictures (train/CLASS/ and "
                "test/CLASS/)."
            )
        return path
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or path.suffix or "/" in text or "\\" in text:
        raise InputError(f"{path} does not exist: give an .npz archive, a folder, or one of {', '.join(SOURCES)}.")
    find_source(text)
    raise AssertionError(text)  # a name of SOURCES never gets here


def _home(name: str, folder: Path | None) -> Path:
    source = find_source(name)
    return EMBEDDED if source.embedded else (folder or data_folder()) / source.home


def _packed_folder(name: str, home: Path) -> Path:
    return home / "packed" / name


def _match(source: Source, files: Sequence[Path]) -> dict[str, Path]:
    """Return which of the given files, or of the files in the given folders, is which archive."""
    if not files:
        return {}
    names = [archive.file for archive in source.archives]
    found = {}
    for file in files:
        if file.is_dir():
            found |= {name: file / name for name in names if (file / name).exists()}
        elif file.name in names:
            found[file.name] = file
        elif len(names) == 1:
            found[names[0]] = file
        else:
            raise InputError(f"{file} is none of the archives: they are named {', '.join(names)}.")
    if not found:
        raise InputError(f"None of {', '.join(names)} is in {', '.join(map(str, files))}.")
    return found


def _address(archive: Archive, url: str | None, archives: int) -> str:
    if url is None:
        return archive.url
    return url if archives == 1 and not url.endswith("/") else f"{url.rstrip('/')}/{archive.file}"


def _idx_archives(base: str, *told: tuple[str, int, tuple[str, ...]]) -> tuple[Archive, ...]:
    return tuple(Archive(file, base + file, md5, size) for file, size, md5 in told)


_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_CIFAR_LICENCE = "no licence stated; cite Krizhevsky 2009"
_SVHN = "http://ufldl.stanford.edu/housenumbers/"
_SVHN_LICENCE = "non-commercial use only; cite Netzer et al. 2011"
_SVHN_TRAIN = Archive(
    "train_32x32.mat", _SVHN + "train_32x32.mat", ("e26dedcc434d2e4c54c9b2d4a06d8373",), 182_040_794
)
_SVHN_TEST = Archive("test_32x32.mat", _SVHN + "test_32x32.mat", ("eb5a983be6a315427106f1b164d9cef3",), 64_275_384)
_SVHN_EXTRA = Archive(
    "extra_32x32.mat", _SVHN + "extra_32x32.mat", ("a93ce644f1a588dc4d68dda5feec44a7",), 1_329_278_602
)
_EMNIST = Archive(
    "gzip.zip",
    "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
    ("58c8d27c78d21e728a6bc7b3cc06412e",),
    561_753_746,
)


def _emnist(split: str, train: int, test: int) -> Source:
    return Source(
        title=f"EMNIST {split}",
        shape=(28, 28, 1),
        classes=len(formats.EMNIST_CLASSES[split]),
        train=train,
        test=test,
        flip=False,
        licence="no licence stated (NIST Special Database 19); cite Cohen et al. 2017",
        archives=(_EMNIST,),
        read=partial(formats.emnist, archive=_EMNIST.file, split=split),
        home="emnist",
    )


SOURCES: dict[str, Source] = {
    "digits": Source(
        title="Optical recognition of handwritten digits",
        shape=(8, 8, 1),
        classes=10,
        train=1297,
        test=500,
        flip=False,
        licence="CC BY 4.0, Alpaydin and Kaynak 1998, UCI; taken from scikit-learn (BSD-3-Clause)",
        archives=(Archive("digits.npz", "", ("fbd87998d7489b030cd0e1c240186122",), 118_262),),
        read=lambda home: stream_npz(home / "digits.npz"),
        home="",
        embedded=True,
    ),
    "cifar10": Source(
        title="CIFAR-10",
        shape=(32, 32, 3),
        classes=10,
        train=50_000,
        test=10_000,
        flip=True,
        licence=_CIFAR_LICENCE,
        archives=(
            Archive(
                "cifar-10-python.tar.gz",
                _CIFAR + "cifar-10-python.tar.gz",
                ("c58f30108f718f92721af3b95e74349a",),
                170_498_071,
            ),
        ),
        read=partial(
            formats.cifar,
            archive="cifar-10-python.tar.gz",
            train=tuple(f"cifar-10-batches-py/data_batch_{number}" for number in range(1, 6)),
            test="cifar-10-batches-py/test_batch",
            meta="cifar-10-batches-py/batches.meta",
            prefix="",
        ),
        home="cifar10",
    ),
    "cifar100": Source(
        title="CIFAR-100, fine labels",
        shape=(32, 32, 3),
        classes=100,
        train=50_000,
        test=10_000,
        flip=True,
        licence=_CIFAR_LICENCE,
        archives=(
            Archive(
                "cifar-100-python.tar.gz",
                _CIFAR + "cifar-100-python.tar.gz",
                ("eb9058c3a382ffc7106e4002c42a8d85",),
                169_001_437,
            ),
        ),
        read=partial(
            formats.cifar,
            archive="cifar-100-python.tar.gz",
            train=("cifar-100-python/train",),
            test="cifar-100-python/test",
            meta="cifar-100-python/meta",
            prefix="fine_",
        ),
        home="cifar100",
    ),
    "svhn": Source(
        title="Street View House Numbers, cropped",
        shape=(32, 32, 3),
        classes=10,
        train=73_257,
        test=26_032,
        flip=False,
        licence=_SVHN_LICENCE,
        archives=(_SVHN_TRAIN, _SVHN_TEST),
        read=partial(formats.svhn, train=(_SVHN_TRAIN.file,), test=_SVHN_TEST.file),
        home="svhn",
    ),
    "svhn-extra": Source(
        title="the same with its 531,131 easier images",
        shape=(32, 32, 3),
        classes=10,
        train=604_388,
        test=26_032,
        flip=False,
        licence=_SVHN_LICENCE,
        archives=(_SVHN_TRAIN, _SVHN_EXTRA, _SVHN_TEST),
        read=partial(formats.svhn, train=(_SVHN_TRAIN.file, _SVHN_EXTRA.file), test=_SVHN_TEST.file),
        home="svhn",
    ),
    "stl10": Source(
        title="STL-10",
        shape=(96, 96, 3),
        classes=10,
        train=5_000,
        unlabeled=100_000,
        test=8_000,
        flip=True,
        licence="no licence stated (images of ImageNet); cite Coates et al. 2011",
        archives=(
            Archive(
                "stl10_binary.tar.gz",
                "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
                ("91f7769df0f17e558f3565bffb0c7dfb",),
                2_640_397_119,
            ),
        ),
        read=partial(formats.stl10, archive="stl10_binary.tar.gz"),
        home="stl10",
    ),
    "emnist-byclass": _emnist("byclass", 697_932, 116_323),
    "emnist-bymerge": _emnist("bymerge", 697_932, 116_323),
    "emnist-balanced": _emnist("balanced", 112_800, 18_800),
    "emnist-letters": _emnist("letters", 124_800, 20_800),
    "emnist-digits": _emnist("digits", 240_000, 40_000),
    "emnist-mnist": _emnist("mnist", 60_000, 10_000),
    "fashion-mnist": Source(
        title="Fashion-MNIST",
        shape=(28, 28, 1),
        classes=10,
        train=60_000,
        test=10_000,
        flip=True,
        licence="MIT; cite Xiao et al. 2017",
        archives=_idx_archives(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            (
                "train-images-idx3-ubyte.gz",
                26_421_880,
                ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "cf8536b0aa1a6ac5fa3f23001093305c"),
            ),
            (
                "train-labels-idx1-ubyte.gz",
                29_515,
                ("25c81989df183df01b3e8a0aad5dffbe", "10bea18fdb374794d4bb42e356e600c9"),
            ),
            (
                "t10k-images-idx3-ubyte.gz",
                4_422_102,
                ("bef4ecab320f06d8554ea6380940ec79", "f78720b4224f21cce2f2ccf2d7a94c9a"),
            ),
            (
                "t10k-labels-idx1-ubyte.gz",
                5_148,
                ("bb300cfdad3c16e7a12a480ee83cd310", "0d30e22e447f3c33dab9ed536400ac01"),
            ),
        ),
        read=partial(formats.mnist, class_names=formats.FASHION_CLASSES),
        home="fashion-mnist",
    ),
    "mnist": Source(
        title="MNIST",
        shape=(28, 28, 1),
        classes=10,
        train=60_000,
        test=10_000,
        flip=False,
        licence="CC BY-SA 3.0; cite LeCun et al. 1998",
        # The address of the authors asks for a password at times: this is the copy that PyTorch keeps.
        archives=_idx_archives(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            ("train-images-idx3-ubyte.gz", 9_912_422, ("f68b3c2dcbeaaa9fbdd348bbdeb94873",)),
            ("train-labels-idx1-ubyte.gz", 28_881, ("d53e105ee54ea40749a09fcbcd1e9432",)),
            ("t10k-images-idx3-ubyte.gz", 1_648_877, ("9fb629c4189551a2d022fa330f9573f3",)),
            ("t10k-labels-idx1-ubyte.gz", 4_542, ("ec29112dd5afa0611ce80d1b7f02629c",)),
        ),
        read=formats.mnist,
        home="mnist",
    ),
}
