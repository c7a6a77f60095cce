"""Getting a published file onto this disk: whole, checked, and not from the start again when the line breaks.

Bytes go to ``FILE.part``, which stays behind when something goes wrong; the next attempt asks the server for
the rest. Only a file with the right checksum gets its name. A server that cannot continue sends everything,
and what was there is replaced. Attempts are repeated while they get further; one that got nothing counts
against a small number of retries.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ccssl._version import __version__
from ccssl.errors import InputError
from ccssl.images.lock import alone
from ccssl.images.packed import need_room
from ccssl.images.progress import progress

RETRIES = 4
PAUSE = 1.0  # seconds before the first retry, doubled before each further one
TIMEOUT = 30.0  # seconds without a byte
BLOCK = 2**20
PASSING = (408, 425, 429, 500, 502, 503, 504)  # answers that may be others a moment later


def download(url: str, path: Path, md5: Sequence[str]) -> None:
    """Fetch a file; ``md5`` are the checksums it may have, none if none is published."""
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise InputError(f"The address must begin with http:// or https://, got {url!r}: use --from for a file.")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part(path)
    with alone(path.parent / ".fetching", f"fetching {path.name}"):
        if path.exists() and is_right(path, md5):
            return  # another process was quicker
        resumed = _get(url, part)
        if resumed and not is_right(part, md5):
            # What was begun earlier may have been another file, or a broken one.
            part.unlink()
            _get(url, part)
        _accept(part, path, md5, f"It came from {url}: try again, or get it elsewhere and pass it with --from.")


def copy(source: Path, path: Path, md5: Sequence[str]) -> None:
    """Take a file that is already on this machine; it is checked like any other."""
    if not source.is_file():
        raise InputError(f"{source} is not a file: name the archive that you have, or the folder it is in.")
    need_room(path.parent, source.stat().st_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part(path)
    with alone(path.parent / ".fetching", f"fetching {path.name}"):
        with (
            source.open("rb") as read,
            _full_disk(part),
            part.open("wb") as write,
            progress(f"copying {path.name}", source.stat().st_size, "bytes") as advance,
        ):
            while block := read.read(BLOCK):
                write.write(block)
                advance(len(block))
        _accept(part, path, md5, f"It was copied from {source}: take the file as it was published.")


def checksum(path: Path) -> str:
    """Return the MD5 of a file: what the authors of these data sets have published."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def is_right(path: Path, md5: Sequence[str]) -> bool:
    """Tell whether a file has one of the checksums; without any, whatever is there is right."""
    return not md5 or checksum(path) in md5


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _accept(part: Path, path: Path, md5: Sequence[str], advice: str) -> None:
    if md5 and (found := checksum(part)) not in md5:
        size = part.stat().st_size
        part.unlink()
        raise InputError(
            f"{path.name} has the wrong checksum: expected MD5 {' or '.join(md5)}, found {found} ({size:,} bytes). "
            f"{advice}"
        )
    os.replace(part, path)


def _get(url: str, part: Path) -> bool:
    """Bring ``part`` to its full length; return whether some of it had been there before."""
    resumed = _size(part) > 0
    failures, reason, best = 0, "it sent nothing", _size(part)
    while failures <= RETRIES:
        if failures:
            time.sleep(PAUSE * 2 ** (failures - 1))
        try:
            if _attempt(url, part):
                return resumed
            reason = f"the connection broke after {_size(part):,} bytes"
        except urllib.error.HTTPError as error:
            error.close()
            if error.code not in PASSING:
                raise InputError(
                    f"{url} answered {error.code} {error.reason}: pass another address with --url, or get "
                    "the file elsewhere and pass it with --from."
                ) from None
            reason = f"it answered {error.code} {error.reason}"
        except urllib.error.URLError as error:
            reason = str(error.reason)
        except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
            reason = str(error) or type(error).__name__
        failures = 0 if _size(part) > best else failures + 1
        best = max(best, _size(part))
    kept = f" {_size(part):,} bytes are kept: the same command goes on from there." if _size(part) else ""
    raise InputError(
        f"{url} cannot be fetched ({reason}).{kept} Without a network, get the file on another machine and "
        "pass it with --from."
    )


def _attempt(url: str, part: Path) -> bool:
    """Ask for what is missing and write what comes; return whether the file is complete."""
    start = _size(part)
    headers = {"User-Agent": f"ccssl/{__version__}", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        # Nothing is left to send: the file is complete, or what is here belongs to another one.
        total = re.fullmatch(r"bytes \*/(\d+)", error.headers.get("Content-Range", ""))
        error.close()
        if total and int(total[1]) == start:
            return True
        part.unlink()
        return False
    with answer:
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", ""))
        goes_on = answer.status == 206 and span is not None and int(span[1]) == start
        if answer.status == 206 and not goes_on:
            part.unlink()  # a piece of something, but not the one that was asked for
            return False
        start = start if goes_on else 0
        length = answer.headers.get("Content-Length", "")
        left = int(length) if length.isdecimal() else None
        need_room(part.parent, left or 0)
        total = None if left is None else start + left
        with (
            _full_disk(part),
            part.open("ab" if goes_on else "wb") as file,
            progress(f"fetching {part.stem}", total, "bytes", start) as advance,
        ):
            while block := answer.read(BLOCK):
                file.write(block)
                advance(len(block))
    return total is None or _size(part) == total


@contextmanager
def _full_disk(part: Path) -> Iterator[None]:
    """Say what to do where there is no room to write, which may come out when the file is closed."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(part.parent).free
        raise InputError(
            f"The disk of {part.parent} is full ({free / 1e9:.2f} GB free): make room and run the same command "
            "again, or set CCSSL_HOME to a folder on another disk."
        ) from None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
