"""The commands of ``ccssl data``: parse and call, nothing else.

As in ``ccssl.cli``, a command adds its arguments to a parser and returns what to call with the parsed ones,
and imports what is heavy when it is called.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from ccssl.errors import InputError

Run = Callable[[argparse.Namespace], int | None]
Command = Callable[[argparse.ArgumentParser], Run]


def list_(parser: argparse.ArgumentParser) -> Run:
    """Show the data sets that have a name, and which of them are on this machine."""
    parser.add_argument("--json", action="store_true", help="print the list as JSON")

    def run(args: argparse.Namespace) -> None:
        from ccssl.folders import data_folder
        from ccssl.images.sources import SOURCES, place, state

        sets = [
            {
                "name": name,
                "title": source.title,
                "train": source.train,
                "unlabeled": source.unlabeled,
                "test": source.test,
                "shape": list(source.shape),
                "classes": source.classes,
                "download": 0 if source.embedded else source.size,
                "licence": source.licence,
                "folder": str(place(name)),
                "state": state(name),
            }
            for name, source in SOURCES.items()
        ]
        if args.json:
            print(json.dumps(sets, indent=2))
            return
        rows = [
            (
                told["name"],
                told["state"],
                " + ".join(f"{told[part]:,}" for part in ("train", "unlabeled", "test") if told[part]),
                "x".join(map(str, told["shape"])),
                str(told["classes"]),
                _size(told["download"]) if told["download"] else "-",
                told["licence"],
            )
            for told in sets
        ]
        print(_table(("name", "state", "images", "shape", "classes", "download", "licence"), rows))
        print(f"\nFetched data sets are kept in {data_folder()}; CCSSL_HOME names another folder.")

    return run


def fetch(parser: argparse.ArgumentParser) -> Run:
    """Fetch a data set, check its checksums and pack it; what broke off is taken up again."""
    parser.add_argument("name", metavar="NAME", help="its name; `ccssl data list` shows them")
    parser.add_argument(
        "--from",
        dest="files",
        metavar="FILE",
        type=Path,
        nargs="+",
        default=[],
        help="take archives that are on this machine: files, or a folder that holds them",
    )
    parser.add_argument(
        "--url", help="another address: of the archive or, where there are several, of the folder they are in"
    )
    parser.add_argument("--extra", action="store_true", help="SVHN: with the 531,131 extra images (svhn-extra)")

    def run(args: argparse.Namespace) -> None:
        from ccssl.images import sources

        name = args.name
        if args.extra:
            if name not in ("svhn", "svhn-extra"):
                raise InputError(f"--extra belongs to svhn, got {name}.")
            name = "svhn-extra"
        fetched = sources.fetch(name, files=args.files, url=args.url)
        for path in fetched:
            print(f"fetched {path}")
        data = sources.load(name)
        print(
            f"{name} is ready: {len(data.train_images):,} training and {len(data.test_images):,} test images of "
            f"{len(data.class_names)} classes in {sources.place(name)}"
        )

    return run


def verify(parser: argparse.ArgumentParser) -> Run:
    """Compare archives and packed data sets with their checksums."""
    parser.add_argument(
        "names", metavar="NAME|FOLDER", nargs="*", help="data sets or packed folders (default: all that is here)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")

    def run(args: argparse.Namespace) -> None:
        from ccssl.images import packed, sources

        findings: list[packed.Finding] = []
        for name in args.names or sources.SOURCES:
            if name not in sources.SOURCES and packed.is_packed(Path(name)):
                found = packed.verify(Path(name))
            else:
                found = sources.verify(name)
                if args.names and not found:
                    raise InputError(f"{name} is not on this machine: fetch it with `ccssl data fetch {name}`.")
            # Data sets may share an archive.
            findings += [finding for finding in found if finding not in findings]
        if args.json:
            print(json.dumps([finding._asdict() for finding in findings], indent=2, default=str))
        else:
            print(_table(("state", "file"), [(finding.state, str(finding.file)) for finding in findings]))
        wrong = [finding for finding in findings if finding.state in ("wrong", "missing")]
        if wrong:
            first = wrong[0]
            raise InputError(
                f"{first.file} is damaged: expected checksum {first.expected}, found {first.found or 'no file'}. "
                "Delete it and fetch or pack the data set again."
                + (f" So are {len(wrong) - 1} other files." if len(wrong) > 1 else "")
            )

    return run


def pack(parser: argparse.ArgumentParser) -> Run:
    """Bring pictures or an .npz archive into the packed form, which is mapped instead of read."""
    parser.add_argument("path", metavar="PATH", help="a folder of pictures, an .npz archive, or a name")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the folder to make")
    parser.add_argument(
        "--size", type=int, metavar="S", help="bring pictures to S x S: resize the shorter side, cut the longer"
    )
    parser.add_argument(
        "--flip",
        action=argparse.BooleanOptionalAction,
        help="whether a mirrored image keeps its class (default: what PATH says, else no)",
    )

    def run(args: argparse.Namespace) -> None:
        import dataclasses

        from ccssl.images import packed, sources

        with sources.open_stream(args.path, args.size) as stream:
            if args.flip is not None:
                stream = dataclasses.replace(stream, flip=args.flip, flip_told=True)
            packed.write(stream, args.out)
        data = packed.open_packed(args.out)
        print(
            f"{args.out}: {len(data.train_images):,} training and {len(data.test_images):,} test images of "
            f"{len(data.class_names)} classes, {'x'.join(map(str, data.train_images.shape[1:]))}"
        )

    return run


COMMANDS: dict[str, Command] = {"list": list_, "fetch": fetch, "verify": verify, "pack": pack}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join(line.rstrip() for line in lines)


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
