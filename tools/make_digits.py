"""Make src/ccssl/images/data/digits.npz, the data set that the package carries, from scikit-learn's digits.

    python tools/make_digits.py [FILE]          needs scikit-learn, which carries the originals

The 1,797 images of 8 x 8 pixels are the test part of "Optical Recognition of Handwritten Digits" by
E. Alpaydin and C. Kaynak (1998), UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, licensed
under CC BY 4.0. Changed here: the 17 grey levels are stretched to 0..255, and the images are divided into
1,297 for training and 500 for testing, each part in the original order.

The file is the same, byte for byte, wherever it is made: images are drawn for testing by a hash of their
number, not by a random generator, and the archive is written without compression and without times.
"""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from pathlib import Path

import numpy as np

TARGET = Path(__file__).parent.parent / "src" / "ccssl" / "images" / "data" / "digits.npz"
LEVELS = 16
TEST = 500


def archive(levels: np.ndarray, labels: np.ndarray) -> bytes:
    """Return the archive of images (N, 8, 8) with grey levels from 0 to 16 and their labels (N,)."""
    images = np.rint(levels * (255 / LEVELS)).astype(np.uint8)
    in_test = drawn_for_testing(len(labels))
    arrays = {
        "train_images": images[~in_test],
        "train_labels": labels[~in_test].astype(np.uint8),
        "test_images": images[in_test],
        "test_labels": labels[in_test].astype(np.uint8),
        "class_names": np.array([str(digit) for digit in range(10)], "<U1"),
        "flip": np.array(False),
    }
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as bundle:
        for key, array in arrays.items():
            member = zipfile.ZipInfo(f"{key}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            member.create_system = 3  # as on Unix, wherever this runs
            member.external_attr = 0o644 << 16
            content = io.BytesIO()
            np.lib.format.write_array(content, array, version=(1, 0), allow_pickle=False)
            bundle.writestr(member, content.getvalue())
    return target.getvalue()


def drawn_for_testing(count: int) -> np.ndarray:
    """Tell of each image whether it is a test image."""
    drawn = sorted(range(count), key=lambda number: hashlib.sha256(str(number).encode()).digest())[:TEST]
    in_test = np.zeros(count, bool)
    in_test[drawn] = True
    return in_test


def main() -> None:
    """Write the file named on the command line, by default the one of the package."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    content = archive(digits.images, digits.target)
    target.write_bytes(content)
    print(f"{target}: {len(content)} bytes, MD5 {hashlib.md5(content, usedforsecurity=False).hexdigest()}")


if __name__ == "__main__":
    main()
