"""Make src/ccssl/graphs/data/*.npz, the knowledge graphs that the package carries, from text files.

    python tools/make_graphs.py FOLDER          FOLDER/umls/train.txt, valid.txt, test.txt, FOLDER/kinship/...

The three graphs in the division that T. Dettmers, P. Minervini, P. Stenetorp and S. Riedel published with
"Convolutional 2D knowledge graph embeddings" (AAAI 2018) and that the literature on link prediction uses:

* ``umls``, the semantic network of the Unified Medical Language System (A. T. McCray, 2003);
* ``kinship``, kin terms of the Alyawarra (W. W. Denham, 1973);
* ``nations``, relations between fourteen nations (R. J. Rummel, 1976).

The file is the same, byte for byte, wherever it is made: names are sorted, the archive is neither compressed nor
dated. Triples are numbers of a byte each, names one string with a line for each.
"""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

import numpy as np

TARGET = Path(__file__).parent.parent / "src" / "ccssl" / "graphs" / "data"
NAMES = ("umls", "kinship", "nations")
PARTS = ("train", "valid", "test")


def archive(parts: dict[str, list[list[str]]]) -> bytes:
    """Return the archive of a graph whose parts are lists of head, relation and tail."""
    every = [triple for part in parts.values() for triple in part]
    entities = sorted({name for head, _, tail in every for name in (head, tail)})
    relations = sorted({relation for _, relation, _ in every})
    place = {name: number for number, name in enumerate(entities)}
    kind = {name: number for number, name in enumerate(relations)}
    arrays = {
        part: np.array([(place[h], kind[r], place[t]) for h, r, t in triples], np.uint8)
        for part, triples in parts.items()
    }
    for title, names in {"entities": entities, "relations": relations}.items():
        arrays[title] = np.frombuffer("\n".join(names).encode(), np.uint8)
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


def main() -> None:
    """Write the graphs of the folder named on the command line."""
    source = Path(sys.argv[1])
    for name in NAMES:
        parts = {part: read(source / name / f"{part}.txt") for part in PARTS}
        content = archive(parts)
        (TARGET / f"{name}.npz").write_bytes(content)
        print(f"{name}.npz: {len(content)} bytes")


def read(path: Path) -> list[list[str]]:
    """Return the triples of a file, tabs between their fields."""
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
