"""Converts any file path to and from URLs, and binds and connects Unix sockets at paths of any length."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes, urlsplit

_LONGEST_ADDRESS = 107
"""The longest Unix socket address that the kernel accepts, in bytes."""


def url_of(scheme: str, path: str | os.PathLike[str]) -> str:
    """The URL of an absolute path, such as `sqlite:///run/job.sqlite`. `path_of` reverses it."""
    if not Path(path).is_absolute():
        raise ValueError(f"{os.fspath(path)!r} is not an absolute path")
    return f"{scheme}:///{quote(os.fsencode(path).lstrip(b'/'))}"


def path_of(url: str, scheme: str, example: str) -> Path:
    """The absolute path that a URL of this scheme names. Raises ValueError, showing `example`, for other URLs.

    `#`, `?` and `%` in a path must be quoted (`%23`, `%3F`, `%25`): a URL with a fragment or a query is refused.
    """
    wrong = f"{url!r} does not name a file: write {example}"
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"{wrong}: {error}") from error
    if parts.scheme != scheme or parts.netloc or not parts.path.startswith("/") or parts.path.endswith("/"):
        raise ValueError(f"{wrong}, an absolute path")
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise ValueError(f"{wrong}; quote '#' as %23 and '?' as %3F")
    if re.search("%(?![0-9A-Fa-f]{2})", parts.path):
        raise ValueError(f"{wrong}; quote '%' as %25")
    name = unquote_to_bytes(parts.path)
    if b"\0" in name:
        raise ValueError(f"{wrong}, without null characters")
    return Path(os.fsdecode(b"/" + name.lstrip(b"/")))


def bind_unix(sock: socket.socket, path: str | os.PathLike[str]) -> None:
    """Bind a Unix socket to a path of any length."""
    with _short(path) as address:
        sock.bind(address)


def connect_unix(sock: socket.socket, path: str | os.PathLike[str]) -> None:
    """Connect a Unix socket to a path of any length."""
    with _short(path) as address:
        sock.connect(address)


@contextlib.contextmanager
def _short(path: str | os.PathLike[str]) -> Iterator[str]:
    """An address for `path`: the path, or if that is too long, its name below its open folder in /proc/self/fd."""
    path = Path(path)
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
