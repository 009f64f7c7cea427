"""`MeetingStore`: a rendezvous store with calls that time out, react to signals and raise typed errors; `fetch`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch.distributed as dist

from holdfast.comms.errors import UNDECODABLE, CorruptData, OpTimeout, PeerFailed
from holdfast.comms.system.keys import Seal, check_unsealed
from holdfast.comms.system.waiting import run_interruptible
from holdfast.comms.transport.liveness import Liveness

T = TypeVar("T")

_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.05
"""Seconds between polls for a key: the first, and the longest."""

_LEAST_SECONDS = 0.5
"""The time that a call gets even at the deadline; most calls take far less than a millisecond."""


class StoreLost(PeerFailed):
    """The rendezvous store is gone: the process that served it has ended."""


class StoreSilent(OpTimeout):
    """The rendezvous store does not answer."""

    def __init__(self, where: str, waited: float, missing_ranks: Sequence[int] = ()) -> None:
        super().__init__("connect", 0, waited, missing_ranks)
        self.args = (
            f"connect timed out after {waited:.3g} s: the store at {where} does not answer; is its process stopped, or "
            "is something else at this address?",
        )


class MeetingStore(dist.Store):
    """The keys of one meeting, under a prefix of a store that several meetings share.

    torch's stores wait for an answer without a limit. Here a call raises `StoreSilent` at `deadline`, or after
    `timeout` seconds if that is earlier or `deadline` is None. Values are sealed if there is a `seal`. A waiting call
    runs `check_abort`, which may raise. If the store goes away, `serving_rank` is reported as failed. Keys are neither
    deleted nor counted: no backend needs it.
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        *,
        where: str,
        timeout: float,
        deadline: float | None = None,
        seal: Seal | None = None,
        serving_rank: int | None = None,
        check_abort: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._store, self._prefix, self._where, self._seal = store, prefix, where, seal
        self._suspects = () if serving_rank is None else (serving_rank,)
        self._seconds, self._check_abort = timeout, check_abort
        self.deadline = deadline
        self.lost = False
        """True after a call got no answer, or the store is gone: later calls would get no answer either."""
        self.set_timeout(timedelta(seconds=timeout))

    # -- torch's Store interface

    def set(self, key: str, value: str | bytes) -> None:
        data = self.wrap(key, value)
        self._call(lambda: self._store.set(self._name(key), data))  # type: ignore[arg-type]  # it takes bytes

    def get(self, key: str) -> bytes:
        return self.unwrap(key, self._once_set([key], None, lambda: self._store.get(self._name(key))))

    def read_all(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that exist, as stored: see `unwrap`."""
        return list(self._call(lambda: self._store.multi_get(list(map(self._name, keys)))))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._once_set(keys, timeout, lambda: None)

    def _once_set(self, keys: Sequence[str], timeout: timedelta | None, then: Callable[[], T]) -> T:
        """Poll for the keys: torch's own waits cannot be interrupted, and a FileStore's last a second or more.

        Polls, and calls `then`, in one thread: for each call of the store, that would take most of the time.
        """
        names = list(map(self._name, keys))
        until = self._until(self._seconds if timeout is None else timeout.total_seconds())
        enough = threading.Event()

        def look_for_them() -> list[T]:
            pause = _FIRST_PAUSE
            while not self._store.check(names):
                if enough.is_set() or time.monotonic() >= until:
                    return []
                enough.wait(pause)
                pause = min(2 * pause, _LAST_PAUSE)
            return [then()]

        try:
            if not (found := self._call(look_for_them)):
                raise TimeoutError(f"no rank has set {', '.join(keys)} in time")
            return found[0]
        finally:
            enough.set()

    def present(self, keys: Sequence[str]) -> list[str]:
        """Those of the keys that exist."""
        return self._call(lambda: [key for key in keys if self._store.check([self._name(key)])])

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call(lambda: self._store.check([self._name(key) for key in keys])))

    def add(self, key: str, value: int) -> int:
        return int(self._call(lambda: self._store.add(self._name(key), value)))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected = self.wrap(key, expected_value) if expected_value else b""
        return self.unwrap(key, self.swap(key, expected, self.wrap(key, desired_value)))

    def swap(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """`compare_set` on the stored (sealed) bytes."""
        return bytes(
            self._call(lambda: self._store.compare_set(self._name(key), expected, desired))  # type: ignore[arg-type]
        )

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> MeetingStore:
        return MeetingStore(
            self._store,
            self._prefix,
            where=self._where,
            timeout=self._seconds,
            seal=self._seal,
            serving_rank=next(iter(self._suspects), None),
        )

    # -- sealing, deadlines

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def wrap(self, key: str, value: str | bytes) -> bytes:
        """The bytes to store under `key` for `value`."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        return data if self._seal is None else self._seal.wrap(self._name(key), data)

    def unwrap(self, key: str, data: bytes) -> bytes:
        """The value in the bytes stored under `key`. Raises `CorruptData`, `Mismatch`."""
        data, name = bytes(data), self._name(key)
        return check_unsealed(name, data) if self._seal is None else self._seal.unwrap(name, data)

    def stop_checking(self) -> None:
        """Do not call `check_abort` any more."""
        self._check_abort = lambda: None

    def _until(self, seconds: float) -> float:
        until = time.monotonic() + seconds
        return until if self.deadline is None else min(until, self.deadline)

    def _call(self, call: Callable[[], T]) -> T:
        began = time.monotonic()
        until = max(self._until(self._seconds), began + _LEAST_SECONDS)

        def check_abort() -> None:
            self._check_abort()
            if time.monotonic() >= until:
                self.lost = True
                raise StoreSilent(self._where, time.monotonic() - began, self._suspects)

        try:
            return run_interruptible(call, check_abort, every=0.05, delays_exit=False)
        except dist.DistNetworkError as error:
            self.lost = True
            raise StoreLost(self._suspects, f"the store at {self._where} is gone: {first_line(error)}") from error


_MOMENT = 0.05
"""Seconds between two looks of a long wait."""

MAX_BYTES = 1 << 16
"""The longest value that a rank may publish to the others."""


def wait_for(store: dist.Store, keys: Sequence[str], deadline: float, look: Callable[[], object]) -> None:
    """Wait for keys; raise TimeoutError at `deadline`, and what `look()` raises, which a long wait calls now and then.

    A store written in Python, such as that of a session, says when a key is set. torch's own are polled: a wait of
    TCPStore that times out asks the DNS about the store's address, which may take seconds.
    """
    keys, pause, is_told = list(keys), _FIRST_PAUSE, type(store).wait is not dist.Store.wait
    try:
        while True:
            moment = max(min(deadline - time.monotonic(), _MOMENT), 0.001)
            if is_told:
                with contextlib.suppress(TimeoutError):
                    store.wait(keys, timedelta(seconds=moment))
                    return
            elif store.check(keys):
                return
            look()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no rank has set {', '.join(keys)} in time")
            if not is_told:
                time.sleep(min(pause, moment))
                pause = min(2 * pause, _LAST_PAUSE)
    except dist.DistNetworkError as error:
        raise PeerFailed((), f"the store of {keys[0]!r} is gone: {first_line(error)}") from error


def fetch(store: dist.Store, key: str, deadline: float, liveness: Liveness | None = None) -> bytes:
    """Wait for the value of `key`; raise TimeoutError at `deadline`.

    Raises `PeerFailed` as soon as a peer that `liveness` watches is gone; only a short look may do without, and plugins
    that were built for API 1.0. Raises `CorruptData` for a value of more than `MAX_BYTES`.
    """

    def look() -> None:
        if liveness is not None and (dead := liveness.dead()):
            raise PeerFailed(dead, f"its process ended before it published {key!r}")

    wait_for(store, [key], deadline, look)
    value = bytes(store.get(key))
    if len(value) > MAX_BYTES:
        raise CorruptData(f"{key!r} at the rendezvous has {len(value)} bytes, more than {MAX_BYTES}")
    return value


def fetch_as(store: dist.Store, key: str, kind: type[T], deadline: float, liveness: Liveness | None = None) -> T:
    """`fetch` a value and decode it from JSON as type `kind`. Raises `CorruptData` if it does not decode."""
    return decode(key, fetch(store, key, deadline, liveness), kind)


def decode(key: str, value: bytes, kind: type[T]) -> T:
    """Decode `value`, found under `key`, from JSON as type `kind`. Raises `CorruptData`."""
    try:
        return msgspec.json.decode(value, type=kind)
    except UNDECODABLE as error:
        raise CorruptData(
            f"{key!r} at the rendezvous cannot be read: {error}; another program, or another version of holdfast, "
            "writes there"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of a torch error, without its C++ traceback."""
    return (str(error).splitlines() or [type(error).__name__])[0]
