"""A record in a register cell: reads, compare-and-set changes, waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from holdfast.ft.registers import RegisterAway, open_cell
from holdfast.store import cancellation

CHANGE_SECONDS = 30.0
"""Seconds for which a change is retried against concurrent changes; one try takes microseconds."""


class CellRecord(Protocol):
    """An immutable value of a cell."""

    def encode(self) -> bytes: ...


Value = TypeVar("Value", bound=CellRecord)


class CellClient(Generic[Value]):
    """The record in cell `name` of the register at a URL. Safe to use from several threads.

    Every method raises `RegisterAway` while the register cannot be reached, and what `decode` raises if the cell holds
    something else. A change that raises `RegisterAway` may have been made; transitions may be applied again.
    `changed(before, after)` is called for each change that is known to have been made.
    """

    def __init__(
        self,
        url: str,
        name: str,
        empty: Value,
        decode: Callable[[bytes], Value],
        changed: Callable[[Value, Value], None] = lambda before, after: None,
    ) -> None:
        self.url = url
        self._empty, self._decode, self._changed = empty, decode, changed
        self._cell = open_cell(url, name)
        self._lock = threading.Lock()
        self._newest: tuple[int, Value] = (0, empty)

    def read(self) -> tuple[int, Value]:
        """The newest value, and its version in the register."""
        return self._note(*self._cell.read())

    def newest(self) -> tuple[int, Value]:
        """The newest value seen so far, without a read of the register."""
        with self._lock:
            return self._newest

    def change(self, transition: Callable[[Value], Value]) -> tuple[int, Value]:
        """Apply a transition; returns the version and the value after it.

        An error of the transition changes nothing.
        """
        deadline = time.monotonic() + CHANGE_SECONDS
        while time.monotonic() < deadline:
            version, before = self.read()
            after = transition(before)
            if after == before:
                return version, before
            if self._cell.compare_and_set(version, after.encode()):
                self._changed(before, after)
                return version + 1, after
        raise RegisterAway(self.url, f"no change got through in {CHANGE_SECONDS:g} s against those of others")

    def wait(self, newer_than: int, timeout: float) -> tuple[int, Value] | None:
        """The newest value once it is newer than `newer_than`; None after `timeout` seconds.

        Raises `CallCancelled` if this call of the store was cancelled.
        """
        deadline = time.monotonic() + timeout
        while True:
            cancellation.check()
            left = max(deadline - time.monotonic(), 0.0)
            found = self._cell.wait(newer_than, cancellation.longest_wait(left))
            if found:
                return self._note(*found)
            if time.monotonic() >= deadline:
                return None

    def close(self) -> None:
        """Close the register. Idempotent."""
        self._cell.close()

    def _note(self, version: int, value: bytes) -> tuple[int, Value]:
        with self._lock:
            if self._newest[0] == version:
                return self._newest
        decoded = version, self._decode(value) if version else self._empty
        with self._lock:
            if decoded[0] > self._newest[0]:
                self._newest = decoded
        return decoded
