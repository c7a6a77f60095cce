"""One process at a time: training on several devices must not unpack the same archive several times over."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Some network file systems have no locks. Work is then done twice, never wrongly: results appear by renaming.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def alone(path: Path, task: str) -> Iterator[None]:
    """Wait until no other process is in a context of the same ``path``, an empty file that stays behind.

    The system lets go of the lock when a process ends, however it ends. On Windows there is no waiting.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that is {task}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
