"""Clients of a store's register cells: read, change by compare-and-set, wait; and what ends the waits of a call.

A call looks for a cancellation where it waits and between the pieces that it copies; it then ends with `CallCancelled`,
as it would with any other error: what it had begun to publish is withdrawn.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import is_gone, this_host
from holdfast.ft.registers import RegisterAway, change_cell, open_cell
from holdfast.store.catalog import fan_out, transitions
from holdfast.store.catalog.failure_domains import HostBeats
from holdfast.store.catalog.fan_out import ReaderGroup
from holdfast.store.catalog.records import Catalog, CellRecord
from holdfast.store.errors import CallCancelled

PAUSE_SECONDS = 0.1
"""Seconds between two looks for a register that is away."""
UNKNOWN_SECONDS = 60.0
"""Nothing is known of an outage after so many seconds without a failed call: the next failure begins another."""


Value = TypeVar("Value", bound=CellRecord)
Answer = TypeVar("Answer")
_call = threading.local()
_log = logging.getLogger("holdfast.store")


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """Calls of this thread inside wait for a register that is away no longer than this, by the monotonic clock."""
    outer = getattr(_call, "deadline", math.inf)
    _call.deadline = min(deadline, outer)
    try:
        yield
    finally:
        _call.deadline = outer


SLICE_SECONDS = 0.05
"""The longest time that a call which can be cancelled waits before it looks."""


class Cancellation:
    """Ends the calls that run in its `scope`, in whatever thread, once `cancel` was called."""

    def __init__(self, op: str) -> None:
        self.op = op
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """End the calls in the scope. Idempotent, from any thread."""
        self._cancelled.set()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Calls of this thread can be cancelled inside."""
        outer = getattr(_call, "cancellation", None)
        _call.cancellation = self
        try:
            yield
        finally:
            _call.cancellation = outer


def check_cancelled() -> None:
    """Raise `CallCancelled` if the call that runs in this thread was cancelled."""
    found: Cancellation | None = getattr(_call, "cancellation", None)
    if found is not None and found.cancelled:
        raise CallCancelled(found.op)


def longest_wait(seconds: float) -> float:
    """The time that a wait of `seconds` may take until the next `check_cancelled`."""
    return seconds if getattr(_call, "cancellation", None) is None else min(seconds, SLICE_SECONDS)


@dataclass(slots=True)
class _Outage:
    """Since when the register has answered no call of a kind, by the monotonic clock, and the last that failed."""

    since: float | None = None
    failed: float = 0.0

    def note_failure(self) -> bool:
        """Whether this failure is the first of an outage."""
        now = time.monotonic()
        begins = self.since is None or now - self.failed > UNKNOWN_SECONDS
        if begins:
            self.since = now
        self.failed = now
        return begins


class CellClient(Generic[Value]):
    """The record in cell `name` of the register at a URL. Safe to use from several threads.

    A register that is away is waited for: `RegisterAway` is raised once it was away for `patience` seconds, or a call's
    own time is over (see `until`). Reads raise `CorruptData` if the cell holds something else. A change that raises
    `RegisterAway` may have been made; transitions may be applied again.
    `changed(before, after)` is called for each change that is known to have been made.
    """

    def __init__(
        self,
        url: str,
        name: str,
        empty: Value,
        changed: Callable[[Value, Value], None] = lambda before, after: None,
        patience: float = 0.0,
    ) -> None:
        self.url, self.patience = url, patience
        # Apart: a process that is stopped while it holds the register's lock keeps changes out, and no reads.
        self._reads, self._changes = _Outage(), _Outage()
        self._closed = threading.Event()
        self._empty, self._changed = empty, changed
        self._cell = open_cell(url, name)
        self._lock = threading.Lock()
        self._newest: tuple[int, Value] = (0, empty)

    def read(self) -> tuple[int, Value]:
        """The newest value, and its version in the register."""
        return self._note(*self._patiently(self._cell.read, self._reads))

    def newest(self) -> tuple[int, Value]:
        """The newest value seen so far, without a read of the register."""
        with self._lock:
            return self._newest

    def change(self, transition: Callable[[Value], Value]) -> tuple[int, Value]:
        """Apply a transition; returns the version and the value after it.

        An error of the transition changes nothing.
        """
        version, before, after = change_cell(self.url, self.read, self._write, transition)
        if after is not before:
            self._changed(before, after)
            with self._lock:
                if version > self._newest[0]:
                    self._newest = version, after
        return version, after

    def _write(self, version: int, value: Value) -> bool:
        return self._patiently(partial(self._cell.compare_and_set, version, value.encode()), self._changes)

    def wait(self, newer_than: int, timeout: float) -> tuple[int, Value] | None:
        """The newest value once it is newer than `newer_than`; None after `timeout` seconds.

        Raises `CallCancelled` if this call of the store was cancelled.
        """
        deadline = time.monotonic() + timeout
        while True:
            check_cancelled()
            left = max(deadline - time.monotonic(), 0.0)
            try:
                found = self._cell.wait(newer_than, longest_wait(left))
            except RegisterAway as error:
                if self._is_given_up(error, self._reads):
                    raise
                self._closed.wait(min(left, PAUSE_SECONDS))
            else:
                self._reads.since = None
                if found:
                    return self._note(*found)
            if time.monotonic() >= deadline:
                return None

    def close(self) -> None:
        """Close the register. Idempotent."""
        self._closed.set()
        self._cell.close()

    @property
    def gave_up(self) -> bool:
        """Whether the register has answered no read for longer than `patience`."""
        return self._is_over(self._reads)

    def _is_over(self, outage: _Outage) -> bool:
        since = outage.since
        return since is not None and time.monotonic() - since >= self.patience

    def _patiently(self, ask: Callable[[], Answer], outage: _Outage) -> Answer:
        """The answer of the register, which is asked again while it is away. A change may be made twice so."""
        deadline: float = getattr(_call, "deadline", math.inf)
        while True:
            try:
                answer = ask()
            except RegisterAway as error:
                if self._is_given_up(error, outage) or time.monotonic() + PAUSE_SECONDS > deadline:
                    raise
                check_cancelled()
                self._closed.wait(PAUSE_SECONDS)
            else:
                outage.since = None
                return answer

    def _is_given_up(self, error: RegisterAway, outage: _Outage) -> bool:
        if outage.note_failure() and self.patience and not self._closed.is_set():
            _log.warning("the store waits for its register, up to %.3g s: %s", self.patience, error)
        return self._closed.is_set() or not error.retryable or self._is_over(outage)

    def _note(self, version: int, value: bytes) -> tuple[int, Value]:
        with self._lock:
            if self._newest[0] == version:
                return self._newest
        decoded = version, self._empty.decode(value) if version else self._empty
        with self._lock:
            if decoded[0] > self._newest[0]:
                self._newest = decoded
        return decoded


DEFAULT = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)


def cell_of(name: str) -> str:
    """The register's cell for the store `name`. Raises ValueError for a name that cannot be one."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot name a store: use 1 to 63 letters, digits, '.', '_' and '-', a letter or digit first"
        )
    return "store" if name == DEFAULT else f"store/{name}"


class CatalogClient(CellClient[Catalog]):
    """The catalogue of the store `name` at a register URL."""

    def __init__(
        self, url: str, changed: Callable[[Catalog, Catalog], None], name: str = DEFAULT, patience: float = 0.0
    ) -> None:
        super().__init__(url, cell_of(name), Catalog(), changed, patience)
        self.name = name

    def remove_dead_holders(self) -> tuple[int, Catalog]:
        """Remove the dead processes of this host from the catalogue."""
        version, catalog = self.read()
        dead = gone(catalog.peers())
        return self.change(lambda now: transitions.remove_dead_holders(now, dead)) if dead else (version, catalog)


def open_beats(url: str, name: str) -> CellClient[HostBeats]:
    """The beats of the hosts of the store `name`."""
    return CellClient(url, f"{cell_of(name)}/beats", HostBeats())


class GroupClient(CellClient[ReaderGroup]):
    """A group of reader hosts, of the store `name`."""

    def __init__(self, url: str, name: str, number: int) -> None:
        super().__init__(url, f"{cell_of(name)}/readers/{number}", ReaderGroup())

    def remove_dead_readers(self, away: Collection[str] = ()) -> None:
        """Remove the dead processes of this host from the group, and those of hosts that are `away`."""
        peers = {copy.peer for part in self.read()[1].parts for copy in part.copies}
        if dead := gone(peers) | {peer for peer in peers if peer.host in away}:
            self.change(lambda now: fan_out.remove_readers(now, dead))


def gone(peers: Iterable[Peer]) -> frozenset[Peer]:
    """The processes of `peers` that are on this host and have ended."""
    return frozenset(peer for peer in peers if peer.host == this_host() and is_gone(peer))
