"""The rendezvous table: keys and values that the members of an epoch exchange while they build its communicator.

Keys belong to an epoch. When a later epoch begins, the keys of earlier ones are dropped and waits for them end with
`Revoked`. Every member has a copy, in which it sets and awaits keys; changes are passed on from copy to copy
(`holdfast.ft.node.table_sharing`). What several members may change goes to the first member's copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from holdfast.comms.errors import Revoked, again
from holdfast.ft.control.errors import KeyTimeout

OnChange = Callable[[int, tuple[str, ...]], None]
"""(epoch, keys)."""


class _Waiter:
    """A wait for the keys in `missing`; `done` is called with None once all are there, or with the error."""

    __slots__ = ("done", "missing")

    def __init__(self, missing: set[str], done: Callable[[Revoked | None], None]) -> None:
        self.missing, self.done = missing, done


class RendezvousTable:
    """A member's copy of the table. Thread-safe.

    Every method raises `Revoked` once the epoch is over. Methods with a `timeout` (seconds) wait until all their keys
    are there, and raise `KeyTimeout` after it; the others do not block.

    `on_change` is called with the keys that a method set, in the thread that set them, but not with their values:
    threads that set the same key may call it in another order than they set it. The thread that sends changes reads the
    newest values with `values`, so that it never sends an older value after a newer one.
    """

    def __init__(self, on_change: OnChange | None = None) -> None:
        self._on_change = on_change
        self._lock = threading.Lock()
        self._values: dict[int, dict[str, bytes]] = {}
        self._waiters: dict[int, list[_Waiter]] = {}
        self._first = 0
        self._reason = ""

    def drop_before(self, epoch: int, reason: str = "a later epoch has begun") -> None:
        """Drop the keys of all epochs before `epoch`; waits for them end with `Revoked`."""
        with self._lock:
            self._first, self._reason = max(self._first, epoch), reason
            for old in [each for each in self._values if each < self._first]:
                del self._values[old]
            ended = [(old, self._waiters.pop(old)) for old in list(self._waiters) if old < self._first]
        for old, waiters in ended:
            for waiter in waiters:
                waiter.done(Revoked(old, reason))

    def put(self, epoch: int, items: Mapping[str, bytes]) -> None:
        """Set keys, replacing their values."""
        self._changed(epoch, tuple(items), self._set(epoch, items))

    def receive(self, epoch: int, items: Mapping[str, bytes]) -> None:
        """Set the keys of this copy to what another copy has; `on_change` is not called."""
        _end(self._set(epoch, items))

    def fetch(self, epoch: int, keys: Sequence[str], timeout: float) -> list[bytes]:
        """The values of `keys`, once all are there."""
        self.wait(epoch, keys, timeout)
        return self._read(epoch, keys)

    def wait(self, epoch: int, keys: Sequence[str], timeout: float) -> None:
        """Return once all of `keys` are there."""
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

    def when(self, epoch: int, keys: Sequence[str], done: Callable[[Revoked | None], None]) -> None:
        """Call `done(None)` once all of `keys` are there, or `done(error)` if the epoch ends before; at once if so."""
        if self._enter(epoch, keys, done) is None:
            done(None)

    def add(self, epoch: int, key: str, amount: int) -> int:
        """Add to a decimal number (0 if the key is not there); return the sum. ValueError if it is not a number."""
        with self._lock:
            values = self._of(epoch)
            total = int(values.get(key, b"0")) + amount
            values[key] = str(total).encode()
            arrived = self._arrived(epoch, (key,))
        self._changed(epoch, (key,), arrived)
        return total

    def append(self, epoch: int, key: str, value: bytes) -> None:
        """Append to the value of the key (empty if it is not there)."""
        with self._lock:
            values = self._of(epoch)
            values[key] = values.get(key, b"") + value
            arrived = self._arrived(epoch, (key,))
        self._changed(epoch, (key,), arrived)

    def compare_set(self, epoch: int, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set the key if it holds `expected`, or is not there and `expected` is empty; return its value afterwards.

        If it is not there and `expected` is not empty, nothing is set and `expected` is returned.
        """
        with self._lock:
            values = self._of(epoch)
            found = values.get(key)
            if (found or b"") != expected:
                return expected if found is None else found
            values[key] = desired
            arrived = self._arrived(epoch, (key,))
        self._changed(epoch, (key,), arrived)
        return desired

    def check(self, epoch: int, keys: Sequence[str]) -> bool:
        """Whether all of `keys` are there."""
        with self._lock:
            values = self._of(epoch)
            return all(key in values for key in keys)

    def delete(self, epoch: int, key: str) -> bool:
        """Remove the key from this copy alone; whether it was there."""
        with self._lock:
            return self._of(epoch).pop(key, None) is not None

    def count(self, epoch: int) -> int:
        """The number of keys."""
        with self._lock:
            return len(self._of(epoch))

    def items(self, epoch: int) -> dict[str, bytes]:
        """All keys and values of the epoch."""
        with self._lock:
            return dict(self._of(epoch))

    def values(self, epoch: int, keys: Iterable[str]) -> dict[str, bytes]:
        """The keys among `keys` that are there, with their values."""
        held = self.items(epoch)
        return {key: held[key] for key in keys if key in held}

    def _set(self, epoch: int, items: Mapping[str, bytes]) -> list[_Waiter]:
        """Set keys; returns the waits that this ends."""
        with self._lock:
            self._of(epoch).update(items)
            return self._arrived(epoch, items)

    def _changed(self, epoch: int, keys: tuple[str, ...], arrived: Sequence[_Waiter]) -> None:
        """End the waits for the keys that were set, and report these."""
        _end(arrived)
        if self._on_change is not None:
            self._on_change(epoch, keys)

    def _of(self, epoch: int) -> dict[str, bytes]:
        if epoch < self._first:
            raise Revoked(epoch, self._reason)
        return self._values.setdefault(epoch, {})

    def _read(self, epoch: int, keys: Sequence[str]) -> list[bytes]:
        with self._lock:
            values = self._of(epoch)
            return [values.get(key, b"") for key in keys]

    def _enter(self, epoch: int, keys: Sequence[str], done: Callable[[Revoked | None], None]) -> _Waiter | None:
        """Register a wait; None if all keys are there."""
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
        """Remove and return the waits that lack no key any more, now that `keys` are here."""
        waiters = self._waiters.get(epoch)
        if not waiters:
            return []
        for waiter in waiters:
            waiter.missing.difference_update(keys)
        self._waiters[epoch] = [waiter for waiter in waiters if waiter.missing]
        return [waiter for waiter in waiters if not waiter.missing]


def _end(waiters: Sequence[_Waiter]) -> None:
    for waiter in waiters:
        waiter.done(None)
