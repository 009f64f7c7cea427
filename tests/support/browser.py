"""Pages: the pictures in them, and what Chromium shows, which cannot reach another host than this one."""

from __future__ import annotations

import contextlib
import functools
import http.server
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from support.waiting import PROGRAM_SECONDS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")


def pictures(page: str) -> list[ElementTree.Element]:
    """The drawings of a page, which must be self-contained: it loads nothing from elsewhere, and runs no script."""
    addresses = set(re.findall(r"""https?://[^"'\s<]+""", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "the name of a format, which is not fetched"
    assert not [word for word in ("<script", "@import", "url(http") if word in page]
    assert len(page) < 1_000_000
    return [ElementTree.fromstring(text) for text in re.findall(r'<div class="chart"[^>]*>(<svg.*?</svg>)', page)]


def _chromium(address: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    quiet = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
    alone = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *quiet, alone]
    command += [f"--user-data-dir={folder / 'profile'}", *options, address]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PROGRAM_SECONDS)


def screenshot(address: str, folder: Path, width: int = 1200, dark: bool = False) -> tuple[Image.Image, str]:
    """A picture of a page, 1600 pixels high, and what the page's console printed."""
    picture = folder / "page.png"
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    size, limit = f"--window-size={width},1600", "--timeout=20000"
    done = _chromium(address, folder, scheme, size, limit, "--enable-logging=stderr", f"--screenshot={picture}")
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return Image.open(picture).convert("RGB"), console


def dom(address: str, folder: Path, *options: str) -> str:
    """What a page is once its scripts have run, as HTML."""
    return _chromium(address, folder, *options, "--dump-dom").stdout


class _SameOrigin(http.server.SimpleHTTPRequestHandler):
    """Serves files, and forbids the browser any request to another host: it prints those that a page makes."""

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", "default-src 'self' 'unsafe-inline' data: blob:")
        super().end_headers()

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of a server of the files in a folder on loopback."""
    handler = functools.partial(_SameOrigin, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
