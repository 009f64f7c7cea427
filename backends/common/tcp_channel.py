"""TCP connections for the windows of gloo and MPI.

gloo's receives cannot be polled or given up; MPI's messages need a thread that polls. Each pair of ranks has a TCP
connection here. A rank accepts those that know the secret which it told the others over the transport. One thread
receives; a caller sends at once what the kernel takes, and the thread sends the rest.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque

from holdfast.comms.errors import CorruptData, HoldfastError, OpTimeout
from holdfast.comms.onesided.requests import HEAD, PIECE_BYTES, Channel, Requests, Source
from holdfast.comms.system import forks
from holdfast.comms.system.files import OwnedDescriptor
from holdfast.comms.transport.base import Transport, gather_bytes
from holdfast.comms.transport.liveness import PeerWatch

_CARD = struct.Struct("=46s16sH")
"""Address, secret and port of a rank's listener."""
_HELLO = struct.Struct("=16sI")
_BODY = struct.Struct("=I")
_GOODBYE, _ABORTED = 0xFFFFFFFF, 0xFFFFFFFE
"""What a rank sends last."""
_READS = 64
"""The number of reads from one rank before it is the turn of the others."""
_LOOK_SECONDS = 0.05


class TcpChannel(Channel):
    """See the module."""

    def __init__(self, transport: Transport, host: str, watch: PeerWatch, deadline: float, requests: Requests) -> None:
        """`host`: the address of this host at which the other ranks reach it."""
        self.broken: set[int] = set()
        self.aborted: set[int] = set()
        self._requests = requests
        self._poll = select.epoll()
        self._wake = OwnedDescriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._poll.register(self._wake, select.EPOLLIN)
        self._links: dict[int, _Link] = {}
        self._ended = False
        self._thread: threading.Thread | None = None
        try:
            for rank, connection in _connect(transport, host, watch, deadline).items():
                self._links[rank] = _Link(rank, connection, self._poll)
        except BaseException:
            self.close()
            raise
        self._of = {link.socket.fileno(): link for link in self._links.values()}
        self._thread = threading.Thread(target=self._run, name="holdfast-windows", daemon=True)
        self._thread.start()

    def send(self, to: Source, head: bytes, body: bytes | memoryview = b"") -> None:
        self._links[to].send(_BODY.pack(len(body)) + head, body)

    def _run(self) -> None:
        while not self._ended:
            for number, mask in self._poll.poll():
                if (link := self._of.get(number)) is None:
                    continue  # to look at `_ended`
                if mask & select.EPOLLOUT:
                    link.flush()
                if mask & ~select.EPOLLOUT and not link.receive(self._requests):
                    self._poll.unregister(number)
                    if link.last_word == _ABORTED:
                        self.aborted.add(link.rank)
                    if link.last_word != _GOODBYE:
                        self.broken.add(link.rank)

    def shut_down(self) -> None:
        """Tell the others that this rank aborts, and end all connections. From any thread."""
        for link in self._links.values():
            link.send(_BODY.pack(_ABORTED))
            with contextlib.suppress(OSError):
                link.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for link in self._links.values():
            link.send(_BODY.pack(_GOODBYE))
        self._ended = True
        if self._thread is not None:
            self._wake.wake()
            self._thread.join()
        self._poll.close()
        self._wake.close()
        for link in self._links.values():
            link.socket.close()


class _Link:
    """The connection to one rank: frames that leave, and the one that arrives."""

    def __init__(self, rank: int, connection: socket.socket, poll: select.epoll) -> None:
        self.rank, self.socket, self.last_word = rank, connection, 0
        self._poll, self._lock = poll, threading.RLock()
        self._leaving: deque[memoryview] = deque()
        self._watched = select.EPOLLIN
        self._prefix = bytearray(_BODY.size + HEAD.size)
        self._body: bytearray | memoryview | None = None
        self._filled = 0
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        forks.release_socket_in_children(connection)
        poll.register(connection, self._watched)

    def send(self, *parts: bytes | memoryview) -> None:
        with self._lock:
            self._leaving += [memoryview(part) for part in parts if len(part)]
            self.flush()

    def flush(self) -> None:
        """Send what the kernel takes, and watch for room for the rest."""
        with self._lock:
            try:
                while self._leaving:
                    sent = self.socket.sendmsg([self._leaving[0], *list(self._leaving)[1:4]])
                    while self._leaving and sent >= len(self._leaving[0]):
                        sent -= len(self._leaving.popleft())
                    if sent:
                        self._leaving[0] = self._leaving[0][sent:]
            except BlockingIOError:
                pass
            except OSError:  # the rank is gone: the receiving side notices
                self._leaving.clear()
            watched = select.EPOLLIN | (select.EPOLLOUT if self._leaving else 0)
            if watched != self._watched:
                with contextlib.suppress(OSError, ValueError):  # unregistered, since the rank is gone
                    self._poll.modify(self.socket, watched)
                    self._watched = watched

    def receive(self, requests: Requests) -> bool:
        """Take what has arrived; False once no more can come."""
        try:
            for _ in range(_READS):
                target = self._prefix if self._body is None else self._body
                if self._filled < len(target):
                    count = self.socket.recv_into(memoryview(target)[self._filled :])
                    if not count:
                        return False
                    self._filled += count
                    if self._body is None and self._filled >= _BODY.size and self._has_ended():
                        return False
                if self._filled == len(target):
                    self._take(requests)
        except BlockingIOError:
            pass
        except (OSError, CorruptData):
            return False
        return True

    def _has_ended(self) -> bool:
        """Whether the frame that arrives is the last word of the rank."""
        (size,) = _BODY.unpack_from(self._prefix)
        self.last_word = size if size in (_GOODBYE, _ABORTED) else 0
        return self.last_word != 0

    def _take(self, requests: Requests) -> None:
        """Go on to the body of a frame, or pass the frame on."""
        self._filled = 0
        if self._body is None:
            (nbytes,) = _BODY.unpack_from(self._prefix)
            if nbytes > PIECE_BYTES:
                raise CorruptData(f"rank {self.rank} sent a window message of {nbytes} bytes, more than {PIECE_BYTES}")
            head = bytes(self._prefix[_BODY.size :])
            self._body = requests.room(self.rank, head, nbytes) or bytearray(nbytes)
            if nbytes:
                return
        body, self._body = self._body, None
        requests.received(self.rank, bytes(self._prefix[_BODY.size :]), body)


def _connect(transport: Transport, host: str, watch: PeerWatch, deadline: float) -> dict[int, socket.socket]:
    """Connect all ranks with each other; collective: each rank connects to those below it."""
    if transport.size == 1:
        return {}
    made: dict[int, socket.socket] = {}
    secret = secrets.token_bytes(16)
    family, *_, bound = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.create_server(bound, family=family, backlog=transport.size) as listener:
        listener.settimeout(_LOOK_SECONDS)
        own, port = listener.getsockname()[:2]
        cards = gather_bytes(transport, _CARD.pack(own.encode(), secret, port), deadline)
        try:
            for rank in range(transport.rank):
                made[rank] = _dial(rank, cards[rank], transport.rank, watch, deadline)
            while len(made) < transport.size - 1:
                _accept(listener, secret, made, transport.rank)
                watch.look()
                if time.monotonic() >= deadline and len(made) < transport.size - 1:
                    missing = [rank for rank in range(transport.size) if rank not in {*made, transport.rank}]
                    raise OpTimeout("window", 0, 0.0, missing)
        except BaseException:
            for connection in made.values():
                connection.close()
            raise
    return made


def _dial(rank: int, card: bytes, me: int, watch: PeerWatch, deadline: float) -> socket.socket:
    """Connect to a rank. Raises `RegionGone` if it has ended, `HoldfastError` if its address cannot be reached."""
    address, secret, port = _CARD.unpack(card)
    host = address.rstrip(b"\0").decode()
    try:
        with contextlib.ExitStack() as if_it_fails:
            connection = socket.create_connection((host, port), max(deadline - time.monotonic(), 0.001))
            if_it_fails.enter_context(connection)
            connection.sendall(_HELLO.pack(secret, me))
            if_it_fails.pop_all()
        return connection
    except OSError as error:
        watch.look()
        watch.check(rank)
        raise HoldfastError(
            f"rank {rank} cannot be reached at {host}:{port} for a window: {error}; set HOLDFAST_INTERFACE there to an "
            "address that this rank reaches"
        ) from error


def _accept(listener: socket.socket, secret: bytes, made: dict[int, socket.socket], rank: int) -> None:
    """Accept a connection, if one comes soon, of a rank above this one that knows the secret."""
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        return
    try:
        connection.settimeout(1.0)
        hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
        told, peer = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", 0)
        if hmac.compare_digest(told, secret) and peer > rank and peer not in made:
            made[peer] = connection
            return
    except OSError:
        pass
    connection.close()
