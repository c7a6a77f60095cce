"""A PostgreSQL server of a test's own: in a temporary folder, on a free port of this machine, ended by its process.

The server refuses to be run by root, so that tests run as root start it as another user.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

USER = "tester"  # of the database


def _program(name: str) -> str | None:
    """Return the newest program of this name, where Debian keeps it or on the path."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: float(path.parts[-3]))
    return str(found[-1]) if found else shutil.which(name)


INITDB, POSTGRES = _program("initdb"), _program("postgres")
ROOT = hasattr(os, "geteuid") and os.geteuid() == 0

needs_postgres = pytest.mark.skipif(
    not (INITDB and POSTGRES) or (ROOT and not shutil.which("setpriv")),
    reason="needs a database server: apt-get install postgresql (and setpriv, of util-linux, where tests run as root)",
)


class Server:
    """A server, which can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, _free_port()
        self.url = f"postgresql://{USER}@127.0.0.1:{self.port}/postgres"
        self._process: subprocess.Popen[bytes] | None = None
        self._prefix: list[str] = []
        if ROOT:
            user = _somebody()
            os.chown(folder, user.pw_uid, user.pw_gid)
            numbers = [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}"]
            self._prefix = ["setpriv", *numbers, "--clear-groups"]
        assert INITDB is not None
        words = [INITDB, "-D", str(folder / "data"), "-U", USER, "--auth=trust", "--encoding=UTF8", "--no-locale"]
        subprocess.run(
            [*self._prefix, *words, "--no-sync"], check=True, cwd=folder, capture_output=True, timeout=120
        )

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        assert POSTGRES is not None
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self.folder,
            "fsync": "off",
            "max_connections": 30,
            "shared_buffers": "16MB",
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._prefix, POSTGRES, "-D", str(self.folder / "data"), *words],
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + 60
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError((self.folder / "server.log").read_text())
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop the server at once, as a crash or a pulled plug would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(timeout=60)
            self._process = None

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url, connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True


def _somebody() -> pwd.struct_passwd:
    """Return a user who is not root."""
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError("there is neither a user postgres nor a user nobody to run the server")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def open_server() -> Iterator[Server]:
    """Make a server in a folder of its own, which is short, as the path of a socket has to be."""
    with tempfile.TemporaryDirectory(prefix="ccssl-pg-", ignore_cleanup_errors=True) as folder:
        server = Server(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()
