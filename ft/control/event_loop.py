"""asyncio event loops that signals do not harm, and listening sockets that limit unauthenticated connections.

Every asyncio listener of holdfast is a `BoundedListener`: it limits them in number and in time. A connection is a
stranger's until it is admitted with `admit`. When one too many comes, the oldest is dropped, so that a flood of idle
connections does not keep a peer out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Literal, Protocol, TypeVar, cast

from holdfast.comms.system import forks
from holdfast.comms.system.files import OwnedDescriptor
from holdfast.comms.system.signal_safety import run_shielded

T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """As asyncio's, but Ctrl-C leaves no loop half made, about which the interpreter would complain."""
    made: list[asyncio.AbstractEventLoop] = []
    try:
        run_shielded(lambda: made.append(asyncio.new_event_loop()))
    except BaseException:
        for loop in made:
            loop.close()
        raise
    return made[0]


def run(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, but Ctrl-C leaves no loop half made, and no coroutine that was never awaited."""
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(work)
    finally:
        work.close()  # the loop may not have taken it


class LoopThread:
    """Runs an event loop in a daemon thread until `close`.

    `close` cancels the tasks that still run in it and joins the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop = new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        forks.refuse_in_children(self, f"the event loop {name}")

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def run(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run a coroutine in the loop and wait for its result; TimeoutError after `timeout` seconds."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    @property
    def native_id(self) -> int | None:
        """The kernel's number of the thread."""
        return self._thread.native_id

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop the loop and join the thread. Idempotent. Must not be called from the loop itself."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


_log = logging.getLogger(__name__)

SHARE = 8
"""Strangers may use at most one part in so many of the process's descriptors: recovery needs the rest."""
_BACKLOG = 128  # connections that may be accepted in one go
_SAY_SECONDS = 60.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


Departure = Literal["late", "full", "closed"]
"""Why a stranger is dropped: it took too long, newer ones need its place, or the listener was closed."""


class Stranger(Protocol):
    """The asyncio protocol of a connection that may be dropped."""

    def turn_away(self, why: Departure) -> None:
        """Close the connection."""


class BoundedListener:
    """Belongs to one event loop. `make` makes the protocol of each connection."""

    def __init__(self, make: Callable[[], Stranger], *, most: int, seconds: float) -> None:
        """`most` strangers at a time, fewer where descriptors are scarce; each for at most `seconds`."""
        self._make, self._most, self._seconds = make, most, seconds
        self._strangers: dict[Stranger, asyncio.TimerHandle] = {}
        self._socket: socket.socket | None = None
        self._spare: OwnedDescriptor | None = None
        self._opening: set[asyncio.Task[object]] = set()
        self._said = float("-inf")

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address and port. Raises OSError if it cannot be bound."""
        loop = asyncio.get_running_loop()
        family, kind, number, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        listener = socket.socket(family, kind, number)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(address)
            listener.listen(_BACKLOG)
            self._spare = _new_spare()
        except BaseException:
            listener.close()
            raise
        self._socket = listener
        forks.release_socket_in_children(self)
        loop.add_reader(listener, self._accept)
        bound = listener.getsockname()
        return str(bound[0]), int(bound[1])

    @property
    def most(self) -> int:
        """The number of strangers that are allowed now."""
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return self._most if soft == resource.RLIM_INFINITY else max(1, min(self._most, soft // SHARE))

    def fileno(self) -> int:
        """The listening socket's number; -1 when there is none."""
        return -1 if self._socket is None else self._socket.fileno()

    def limit(self, guest: Stranger) -> None:
        """Count a new connection as a stranger's. For a library that accepts connections itself: then nothing starts.

        Drops the oldest strangers if there are too many.
        """
        while len(self._strangers) >= self.most:
            self._turn_away(next(iter(self._strangers)), "full")
        timer = asyncio.get_running_loop().call_later(self._seconds, self._turn_away, guest, "late")
        self._strangers[guest] = timer

    def admit(self, guest: Stranger) -> None:
        """Lift the limits for this connection: it is authenticated, or closed. Idempotent."""
        timer = self._strangers.pop(guest, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Stop listening, and drop all strangers. Idempotent."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
            if self._spare is not None:
                self._spare.close()
        for guest in list(self._strangers):
            self._turn_away(guest, "closed")

    def _accept(self) -> None:
        assert self._socket is not None
        for _ in range(_BACKLOG):
            try:
                connection, _address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._refuse_one(error)
                return
            self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        guest = self._make()
        self.limit(guest)
        task: asyncio.Task[object] = loop.create_task(
            loop.connect_accepted_socket(lambda: cast(asyncio.Protocol, guest), connection)
        )
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _turn_away(self, guest: Stranger, why: Departure) -> None:
        self.admit(guest)
        guest.turn_away(why)

    def _refuse_one(self, error: OSError) -> None:
        """Handle a lack of descriptors: drop the oldest stranger, and close the connection that waits.

        The reserved descriptor makes it possible to accept that connection.
        """
        assert self._socket is not None
        if self._strangers:
            self._turn_away(next(iter(self._strangers)), "full")
        if self._spare is not None:
            self._spare.close()
        try:
            with contextlib.suppress(OSError):
                self._socket.accept()[0].close()
        finally:
            self._spare = _new_spare()
        if time.monotonic() - self._said > _SAY_SECONDS:
            self._said = time.monotonic()
            _log.warning("a listener turns connections away: %s; raise `ulimit -n`", error.strerror)


def _new_spare() -> OwnedDescriptor:
    return OwnedDescriptor(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
