"""The rendezvous table: what the members of an epoch tell each other while they build its communicator.

Keys live under their epoch. When a later epoch begins the earlier ones are dropped, and whoever still waits
there is told at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from holdfast.comms.errors import Revoked, again
from holdfast.ft.control.errors import KeyTimeout


class Table(Protocol):
    """The table as its users see it, here or over the network. Every method raises `Revoked` once the epoch
    is over.

    Methods with a `timeout` (seconds) wait until all their keys are there and then raise `KeyTimeout`.
    """

    def put(self, epoch: int, items: Mapping[str, bytes]) -> None:
        """Set keys, replacing what they held."""

    def fetch(self, epoch: int, keys: Sequence[str], timeout: float) -> list[bytes]:
        """The values of `keys`, when all are there."""

    def wait(self, epoch: int, keys: Sequence[str], timeout: float) -> None:
        """Return when all of `keys` are there."""

    def add(self, epoch: int, key: str, amount: int) -> int:
        """Add to a decimal number (0 if not there) and return the sum. ValueError if the key holds something
        else.
        """

    def append(self, epoch: int, key: str, value: bytes) -> None:
        """Add to the end of what the key holds (nothing if not there)."""

    def compare_set(self, epoch: int, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set the key if it holds `expected`, or if it is not there and `expected` is empty; what it then
        holds.

        If it is not there and `expected` is not empty, nothing is set and `expected` comes back.
        """

    def check(self, epoch: int, keys: Sequence[str]) -> bool:
        """Whether all of `keys` are there."""

    def delete(self, epoch: int, key: str) -> bool:
        """Remove the key; whether it was there."""

    def count(self, epoch: int) -> int:
        """How many keys there are."""


class _Waiter:
    """Somebody who waits until `missing` is empty; `done` gets None then, or the error that ends the wait."""

    __slots__ = ("done", "missing")

    def __init__(self, missing: set[str], done: Callable[[Revoked | None], None]) -> None:
        self.missing, self.done = missing, done


class KeyValue:
    """The table itself, in the process that serves it. Thread-safe; nothing but the waiting methods ever
    blocks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[int, dict[str, bytes]] = {}
        self._waiters: dict[int, list[_Waiter]] = {}
        self._first = 0
        self._reason = ""

    def drop_before(self, epoch: int, reason: str = "a later epoch has begun") -> None:
        """End every epoch before `epoch`: forget its keys, and let those who wait or come later have
        `Revoked`.
        """
        with self._lock:
            self._first, self._reason = max(self._first, epoch), reason
            for old in [each for each in self._values if each < self._first]:
                del self._values[old]
            ended = [(old, self._waiters.pop(old)) for old in list(self._waiters) if old < self._first]
        for old, waiters in ended:
            for waiter in waiters:
                waiter.done(Revoked(old, reason))

    def put(self, epoch: int, items: Mapping[str, bytes]) -> None:
        with self._lock:
            self._of(epoch).update(items)
            arrived = self._arrived(epoch, items)
        for waiter in arrived:
            waiter.done(None)

    def fetch(self, epoch: int, keys: Sequence[str], timeout: float) -> list[bytes]:
        self.wait(epoch, keys, timeout)
        return self._read(epoch, keys)

    def wait(self, epoch: int, keys: Sequence[str], timeout: float) -> None:
        ended: list[Revoked | None] = []
        event = threading.Event()

        def done(error: Revoked | None) -> None:
            ended.append(error)
            event.set()

        waiter = self._enter(epoch, keys, done)
        if waiter is None:
            return
        if not event.wait(timeout):
            self._leave(epoch, waiter)
        if not ended:
            raise KeyTimeout(sorted(waiter.missing), timeout)
        if ended[0] is not None:
            raise again(ended[0])

    async def fetch_later(self, epoch: int, keys: Sequence[str], timeout: float) -> list[bytes]:
        """`fetch` for an event loop."""
        await self.wait_later(epoch, keys, timeout)
        return self._read(epoch, keys)

    async def wait_later(self, epoch: int, keys: Sequence[str], timeout: float) -> None:
        """`wait` for an event loop."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Revoked | None] = loop.create_future()

        def finish(error: Revoked | None) -> None:
            if not ended.done():
                ended.set_result(error)

        waiter = self._enter(epoch, keys, lambda error: _call_in(loop, finish, error))
        if waiter is None:
            return
        try:
            async with asyncio.timeout(timeout):
                error = await ended
        except TimeoutError as late:
            raise KeyTimeout(sorted(waiter.missing), timeout) from late
        finally:
            self._leave(epoch, waiter)
        if error is not None:
            raise again(error)

    def add(self, epoch: int, key: str, amount: int) -> int:
        with self._lock:
            values = self._of(epoch)
            total = int(values.get(key, b"0")) + amount
            values[key] = str(total).encode()
            arrived = self._arrived(epoch, (key,))
        for waiter in arrived:
            waiter.done(None)
        return total

    def append(self, epoch: int, key: str, value: bytes) -> None:
        with self._lock:
            values = self._of(epoch)
            values[key] = values.get(key, b"") + value
            arrived = self._arrived(epoch, (key,))
        for waiter in arrived:
            waiter.done(None)

    def compare_set(self, epoch: int, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._lock:
            values = self._of(epoch)
            found = values.get(key)
            if (found or b"") != expected:
                return expected if found is None else found
            values[key] = desired
            arrived = self._arrived(epoch, (key,))
        for waiter in arrived:
            waiter.done(None)
        return desired

    def check(self, epoch: int, keys: Sequence[str]) -> bool:
        with self._lock:
            values = self._of(epoch)
            return all(key in values for key in keys)

    def delete(self, epoch: int, key: str) -> bool:
        with self._lock:
            return self._of(epoch).pop(key, None) is not None

    def count(self, epoch: int) -> int:
        with self._lock:
            return len(self._of(epoch))

    def items(self, epoch: int) -> dict[str, bytes]:
        """Everything that an epoch holds now."""
        with self._lock:
            return dict(self._of(epoch))

    def _of(self, epoch: int) -> dict[str, bytes]:
        if epoch < self._first:
            raise Revoked(epoch, self._reason)
        return self._values.setdefault(epoch, {})

    def _read(self, epoch: int, keys: Sequence[str]) -> list[bytes]:
        with self._lock:
            values = self._of(epoch)
            return [values.get(key, b"") for key in keys]

    def _enter(self, epoch: int, keys: Sequence[str], done: Callable[[Revoked | None], None]) -> _Waiter | None:
        """Begin to wait; None if all keys are there."""
        with self._lock:
            values = self._of(epoch)
            missing = {key for key in keys if key not in values}
            if not missing:
                return None
            waiter = _Waiter(missing, done)
            self._waiters.setdefault(epoch, []).append(waiter)
            return waiter

    def _leave(self, epoch: int, waiter: _Waiter) -> None:
        with self._lock:
            waiters = self._waiters.get(epoch, [])
            if waiter in waiters:
                waiters.remove(waiter)

    def _arrived(self, epoch: int, keys: Iterable[str]) -> list[_Waiter]:
        """Those whose last missing key is among `keys`; they wait no more."""
        waiters = self._waiters.get(epoch)
        if not waiters:
            return []
        for waiter in waiters:
            waiter.missing.difference_update(keys)
        self._waiters[epoch] = [waiter for waiter in waiters if waiter.missing]
        return [waiter for waiter in waiters if not waiter.missing]


def _call_in(
    loop: asyncio.AbstractEventLoop, function: Callable[[Revoked | None], None], error: Revoked | None
) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and with it all that waited in it
        loop.call_soon_threadsafe(function, error)
