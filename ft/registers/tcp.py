"""`tcp://host:port/name`: a register in a torch TCPStore. Easy, and a single point of failure.

The store lives in one process, and its content is lost with that process: a running job continues, but it cannot be
rebuilt any more. **It is open**: any process that can reach the port can read and write, the job's key does not protect
it, and nothing is encrypted. Use `sqlite://` on one host and `etcds://` on several where that matters.

A process that finds no server at the address and may bind it serves the store itself, as long as it has a handle open;
`serving` does so for a launcher. Any other TCPStore works too. A value is one key, "version and writer, then bytes",
replaced by the store's compare_set.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

import torch.distributed as dist

from holdfast.comms.errors import CorruptData
from holdfast.comms.rendezvous.tcp import dial, serve
from holdfast.comms.system import forks
from holdfast.ft.listen_address import join_address
from holdfast.ft.registers import Cell, RegisterAway

PATIENCE = 5.0
"""Seconds that one request to the store may take before `RegisterAway`."""
CONNECT_SECONDS = 2.0

_log = logging.getLogger(__name__)

_HEADER = struct.Struct("!4sQ8s")  # schema, version, writer
_SCHEMA = b"HFT1"
_PAUSES = (0.001, 0.025)  # seconds between two polls of a `wait`: at first, and at most

_opening = threading.Lock()
_servers: weakref.WeakValueDictionary[tuple[str, int], _StoreServer] = weakref.WeakValueDictionary()


def parse(url: str) -> tuple[str, int, str]:
    """Host, port and name of a `tcp://host:port/name` URL; ValueError for anything else."""
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} is not a tcp register: {error}") from error
    if not host or not port or parts.username is not None or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is not a tcp register: write tcp://host:port/name")
    return host, port, unquote(parts.path.strip("/"))


class _StoreServer:
    """A TCPStore that this process serves, on one interface; it ends with the last reference to it."""

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError if the address is not one of this machine, or in use."""
        self._store = serve(host, port, PATIENCE)
        self.port: int = self._store.port
        forks.refuse_in_children(self, f"the store at port {self.port}")
        _log.warning(
            "serving a tcp register at %s:%d: whoever can reach this port can read and change it, and it is lost with "
            "this process; use sqlite:// on one host, or etcds:// between hosts, where that matters",
            host,
            self.port,
        )


@contextlib.contextmanager
def serving(host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve a store on one interface (port 0: a free one) while the context lasts; yields its `tcp://` URL.

    Raises OSError if the address cannot be bound.
    """
    server = _StoreServer(host, port)
    try:
        yield f"tcp://{join_address(host, server.port)}"
    finally:
        del server


def _server_at(host: str, port: int) -> _StoreServer | None:
    """The store that this process serves there, started now if there is none; None if another process serves it.

    Raises OSError if no process serves it and this one cannot.
    """
    with _opening:
        mine = _servers.get((host, port))
        if mine is not None and forks.error_of(mine) is None:
            return mine
        for _ in range(3):  # two processes may start at the same moment; the later one finds the other
            try:
                with socket.create_connection((host, port), CONNECT_SECONDS):
                    return None
            except ConnectionRefusedError:
                pass
            with contextlib.suppress(OSError):
                server = _servers[host, port] = _StoreServer(host, port)
                return server
            time.sleep(0.05)
        with socket.create_connection((host, port), CONNECT_SECONDS):
            return None


class TcpCell(Cell):
    """One cell of a TCPStore. Costs two connections; a `wait` polls every 25 ms. A forked child opens its own.

    An answer comes within `PATIENCE`, or an error: then the connection is not used again (`dial` says why).
    """

    def __init__(self, url: str, name: str) -> None:
        self._url = url
        self._host, self._port, prefix = parse(url)
        self._key = f"holdfast/{prefix}/{name}"
        forks.refuse_in_children(self, f"register {url}")
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._store: dist.TCPStore | None = None
        self._identity = b""
        self._newest = b""
        try:
            self._server = _server_at(self._host, self._port)
        except OSError as error:
            raise RegisterAway(url, f"nobody serves it, and this process cannot: {error}") from error
        self._exchange(b"", b"")

    @property
    def lasts(self) -> bool:
        return self._server is None

    def _exchange(self, expected: bytes, desired: bytes) -> bytes:
        """compare_set: the value of the key afterwards. Two empty values read it (`get` would wait for the key).

        Uses the connection, or a new one if the last one failed.
        """
        with self._lock:
            if self._closed.is_set():
                raise RegisterAway(self._url, "this handle is closed")
            try:
                if self._store is None:
                    self._store = self._connected()
                return _compare_set(self._store, self._key, expected, desired)
            except (dist.DistError, OSError) as error:
                self._store = None
                raise RegisterAway(self._url, f"its server does not answer: {str(error).splitlines()[0]}") from error

    def _connected(self) -> dist.TCPStore:
        """A connection to the same store as before: a restarted store has lost the job's data."""
        store = dial(self._host, self._port, CONNECT_SECONDS, answer_seconds=PATIENCE)
        identity = _compare_set(store, "holdfast/store", b"", secrets.token_bytes(16))
        if self._identity not in (b"", identity):
            raise RegisterAway(self._url, "another store is at its address now: what it held went with its process")
        self._identity = identity
        return store

    def _decode(self, data: bytes) -> tuple[int, bytes]:
        if not data:
            return 0, b""
        if len(data) < _HEADER.size or data[:3] != _SCHEMA[:3]:
            raise CorruptData(f"key {self._key!r} of {self._url} is not a register's; name another register")
        schema, version, _ = _HEADER.unpack_from(data)
        if schema != _SCHEMA:
            raise CorruptData(f"register {self._url} has schema {schema!r}, this version of holdfast knows {_SCHEMA!r}")
        return version, data[_HEADER.size :]

    def read(self) -> tuple[int, bytes]:
        self._newest = data = self._exchange(b"", b"")
        return self._decode(data)

    def compare_and_set(self, expected: int, value: bytes) -> bool:
        known = self._newest
        if self._decode(known)[0] != expected:
            if self.read()[0] != expected:
                return False
            known = self._newest
        desired = _HEADER.pack(_SCHEMA, expected + 1, secrets.token_bytes(8)) + value
        self._newest = found = self._exchange(known, desired)
        return found == desired

    def wait(self, newer_than: int, timeout: float) -> tuple[int, bytes] | None:
        deadline = time.monotonic() + timeout
        pause, longest = _PAUSES
        while True:
            version, value = self.read()
            left = deadline - time.monotonic()
            if version > newer_than:
                return version, value
            if left <= 0:
                return None
            self._closed.wait(min(pause, left))
            pause = min(2 * pause, longest)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._store = self._server = None


def _compare_set(store: dist.TCPStore, key: str, expected: bytes, desired: bytes) -> bytes:
    return bytes(store.compare_set(key, expected, desired))  # type: ignore[arg-type]
