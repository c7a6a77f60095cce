"""A headless Chromium for tests of pages (marked ``browser``), told what to show by WebDriver and DevTools.

Debian has both parts: ``apt-get install chromium chromium-driver``. The browser is kept from doing anything by itself,
and it notes every address that a page asks for.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WIDTHS = {"phone": 390, "desktop": 1280}

needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs a browser: apt-get install chromium chromium-driver"
)

FLAGS = [
    "--headless=new",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-domain-reliability",
    "--disable-sync",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--metrics-recording-only",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    *(["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),
]


class Browser:
    """One window."""

    def __init__(self, port: int, profile: str) -> None:
        self.address = f"http://127.0.0.1:{port}"
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"performance": "ALL"}}
        answer = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{answer['sessionId']}"

    def show(self, page: Path, width: int = 1280, dark: bool = False, paper: bool = False) -> None:
        """Open a page in a window so wide."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", media="print" if paper else "screen", features=[scheme])
        self.ask("url", url=page.absolute().as_uri())

    def run(self, script: str) -> Any:
        """Return what a script returns."""
        return self.ask("execute/sync", script=script, args=[])

    def devtools(self, command: str, **parameters: Any) -> Any:
        """Send a command of the DevTools protocol."""
        return self.ask("goog/cdp/execute", cmd=command, params=parameters)

    def requested(self) -> list[str]:
        """Return the addresses that were asked for since the last call."""
        entries = [json.loads(entry["message"])["message"] for entry in self.ask("se/log", type="performance")]
        sent = [entry["params"] for entry in entries if entry["method"] == "Network.requestWillBeSent"]
        return [request["request"]["url"] for request in sent]

    def picture(self, path: Path) -> Path:
        """Keep a picture of the whole page."""
        height = self.run("return document.documentElement.scrollHeight")
        width = self.run("return window.innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def ask(self, command: str, **words: Any) -> Any:
        """Send a command of WebDriver."""
        return self._ask("POST", f"{self.session}/{command}", words)

    def close(self) -> None:
        """End the browser."""
        self._ask("DELETE", self.session, None)

    def _ask(self, method: str, path: str, words: Any) -> Any:
        body = None if words is None else json.dumps(words).encode()
        request = urllib.request.Request(self.address + path, body, method=method)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a browser, and end it by its process."""
    assert DRIVER is not None
    with tempfile.TemporaryDirectory(prefix="ccssl-browser-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "driver.log"
        process = subprocess.Popen(
            [DRIVER, "--port=0", f"--log-path={log}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "HOME": folder},
        )
        assert process.stdout is not None
        try:
            browser = Browser(_port(process), f"{folder}/profile")
            try:
                yield browser
            finally:
                browser.close()
        finally:
            process.terminate()
            process.wait(timeout=20)
            process.stdout.close()


def _port(process: subprocess.Popen[str]) -> int:
    """Return the port that the driver has chosen, from what it says."""
    assert process.stdout is not None
    until = time.monotonic() + 30
    while time.monotonic() < until:
        line = process.stdout.readline()
        if "started successfully on port" in line:
            return int(line.rsplit("port", 1)[1].strip(" .\n"))
    raise TimeoutError("the driver of the browser does not say its port")
