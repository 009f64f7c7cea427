"""The rendezvous table, through which the members of an epoch build its communicator, and torch's store over it.

Keys belong to an epoch. When a later epoch begins, the keys of earlier ones are dropped and waits for them end with
`Revoked`. Every member has a copy, in which it sets and awaits keys; changes are passed on from copy to copy
(`holdfast.ft.node.table_sharing`). What several members may change (`CALLS`) goes to the first member's copy, by remote
calls that `handlers` serve there.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from types import NoneType
from typing import Any, NamedTuple

import msgspec
import torch.distributed as dist

from holdfast.comms.errors import UNDECODABLE, CorruptData, Revoked, Unsupported, again
from holdfast.comms.system.signal_safety import HandlerEvent
from holdfast.ft.control.errors import KeyTimeout, RemoteError
from holdfast.ft.control.rpc import Handler

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
        event = HandlerEvent()

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


Ask = Callable[..., Any]
"""(method, epoch, *arguments): the answer of a method of `CALLS`, at the first member. Raises what that raises."""


class _Call(NamedTuple):
    """The types of a method's arguments, the epoch first, and of its answer."""

    arguments: Any
    answer: Any


CALLS: Mapping[str, _Call] = {
    "add": _Call(tuple[int, str, int], int),
    "append": _Call(tuple[int, str, bytes], NoneType),
    "compare_set": _Call(tuple[int, str, bytes, bytes], bytes),
    "check": _Call(tuple[int, list[str]], bool),
}
"""The methods of `RendezvousTable` that the first member answers."""

REPEATABLE = frozenset({"kv.check"})
"""The remote calls that can be made again when it is not known whether the first one was executed."""

encode = msgspec.msgpack.Encoder().encode


class RendezvousStore(dist.Store):
    """One epoch of a rendezvous table as a `torch.distributed.Store`; `PrefixStore` and every backend can use it.

    `copy` is this member's copy of the table. `ask` reaches that of the first member; by default `copy` is that one.
    The methods have the names that torch calls; `timeout` (seconds) bounds those that wait. Keys are not deleted or
    counted: no group of torch needs it, and an epoch's keys go with it.
    """

    def __init__(self, copy: RendezvousTable, epoch: int, timeout: float = 30.0, ask: Ask | None = None) -> None:
        super().__init__()
        self._copy, self._epoch, self._ask = copy, epoch, ask or ask_here(copy)
        self.set_timeout(timedelta(seconds=timeout))

    def _seconds(self, timeout: timedelta | None = None) -> float:
        wait: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        return wait.total_seconds()

    def clone(self) -> RendezvousStore:
        return RendezvousStore(self._copy, self._epoch, self._seconds(), self._ask)

    def set(self, key: str, value: str | bytes) -> None:
        self._copy.put(self._epoch, {key: _bytes(value)})

    def get(self, key: str) -> bytes:
        return self._copy.fetch(self._epoch, [key], self._seconds())[0]

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", self._epoch, key, value))

    def check(self, keys: Sequence[str]) -> bool:
        return self._copy.check(self._epoch, keys) or bool(self._ask("check", self._epoch, keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._copy.wait(self._epoch, keys, self._seconds(timeout))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return bytes(self._ask("compare_set", self._epoch, key, _bytes(expected_value), _bytes(desired_value)))

    def delete_key(self, key: str) -> bool:
        raise Unsupported("the deletion of a key of a session's store", "its keys go with their epoch")

    def num_keys(self) -> int:
        raise Unsupported("the number of keys of a session's store", "ask for the keys that you need by check()")

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", self._epoch, key, _bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._copy.fetch(self._epoch, keys, self._seconds())

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._copy.put(self._epoch, dict(zip(keys, map(_bytes, values), strict=True)))

    def has_extended_api(self) -> bool:
        return True

    deleteKey = delete_key  # noqa: N815  (torch's C++ side calls these two under their C++ names)
    getNumKeys = num_keys  # noqa: N815


def _bytes(value: str | bytes | Sequence[int]) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def ask_here(table: RendezvousTable) -> Ask:
    """Asks `table` itself, which is the first member's copy."""
    return lambda method, *arguments: getattr(table, method)(*arguments)


def ask_remotely(call: Callable[[str, bytes, float], bytes], timeout: float) -> Ask:
    """Asks by remote calls: `call(method, body, timeout)` reaches the first member, with `timeout` seconds.

    Raises what `call` raises (`ConnectionLost` at once when a process on the way dies), and `Revoked`.
    """

    def ask(method: str, epoch: int, *arguments: object) -> Any:
        try:
            body = call(f"kv.{method}", encode((epoch, *arguments)), timeout)
        except RemoteError as error:
            if error.kind == "Revoked":
                raise Revoked(epoch, "its rendezvous was dropped") from error
            raise
        try:
            return msgspec.msgpack.decode(body, type=CALLS[method].answer)
        except UNDECODABLE as error:
            raise CorruptData(f"the answer to kv.{method} is not one: {error}") from error

    return ask


Forward = Callable[[int, str, bytes], Awaitable[bytes | None]]
"""(epoch, method, body): passes a call on towards the first member of the epoch; None if this process is it."""


def handlers(table: RendezvousTable, forward: Forward) -> dict[str, Handler]:
    """The handlers of an RPC server for the remote calls that `ask_remotely` makes."""

    def serve(name: str) -> Handler:
        decode = msgspec.msgpack.Decoder(CALLS[name].arguments).decode
        work: Callable[..., Any] = getattr(table, name)

        async def handler(peer: str, body: bytes) -> bytes:
            arguments = decode(body)
            answer = await forward(arguments[0], f"kv.{name}", body)
            return encode(work(*arguments)) if answer is None else answer

        return handler

    return {f"kv.{name}": serve(name) for name in CALLS}
