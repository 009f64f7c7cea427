"""A record in a register cell: reads, compare-and-set changes, waits."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Generic, Protocol, TypeVar

from holdfast.ft.registers import RegisterAway, change_cell, open_cell
from holdfast.store import cancellation

PAUSE_SECONDS = 0.1
"""Seconds between two looks for a register that is away."""


class CellRecord(Protocol):
    """An immutable value of a cell."""

    def encode(self) -> bytes: ...


Value = TypeVar("Value", bound=CellRecord)
_log = logging.getLogger("holdfast.store")


Answer = TypeVar("Answer")
_call = threading.local()


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """Calls of this thread inside wait for a register that is away no longer than this, by the monotonic clock."""
    outer = getattr(_call, "deadline", math.inf)
    _call.deadline = min(deadline, outer)
    try:
        yield
    finally:
        _call.deadline = outer


class CellClient(Generic[Value]):
    """The record in cell `name` of the register at a URL. Safe to use from several threads.

    A register that is away is waited for: `RegisterAway` is raised once it was away for `patience` seconds, or a call's
    own time is over (see `until`). `decode` may raise if the cell holds something else. A change that raises
    `RegisterAway` may have been made; transitions may be applied again.
    `changed(before, after)` is called for each change that is known to have been made.
    """

    def __init__(
        self,
        url: str,
        name: str,
        empty: Value,
        decode: Callable[[bytes], Value],
        changed: Callable[[Value, Value], None] = lambda before, after: None,
        patience: float = 0.0,
    ) -> None:
        self.url, self.patience = url, patience
        self._away_since: float | None = None
        self._closed = threading.Event()
        self._empty, self._decode, self._changed = empty, decode, changed
        self._cell = open_cell(url, name)
        self._lock = threading.Lock()
        self._newest: tuple[int, Value] = (0, empty)

    def read(self) -> tuple[int, Value]:
        """The newest value, and its version in the register."""
        return self._note(*self._patiently(self._cell.read))

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
        return self._patiently(partial(self._cell.compare_and_set, version, value.encode()))

    def wait(self, newer_than: int, timeout: float) -> tuple[int, Value] | None:
        """The newest value once it is newer than `newer_than`; None after `timeout` seconds.

        Raises `CallCancelled` if this call of the store was cancelled.
        """
        deadline = time.monotonic() + timeout
        while True:
            cancellation.check()
            left = max(deadline - time.monotonic(), 0.0)
            try:
                found = self._cell.wait(newer_than, cancellation.longest_wait(left))
            except RegisterAway as error:
                if self._is_given_up(error):
                    raise
                self._closed.wait(min(left, PAUSE_SECONDS))
            else:
                self._away_since = None
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
        """Whether the register has been away for longer than `patience`."""
        away = self._away_since
        return away is not None and time.monotonic() - away >= self.patience

    def _patiently(self, ask: Callable[[], Answer]) -> Answer:
        """The answer of the register, which is asked again while it is away. A change may be made twice so."""
        deadline: float = getattr(_call, "deadline", math.inf)
        while True:
            try:
                answer = ask()
            except RegisterAway as error:
                if self._is_given_up(error) or time.monotonic() + PAUSE_SECONDS > deadline:
                    raise
                cancellation.check()
                self._closed.wait(PAUSE_SECONDS)
            else:
                self._away_since = None
                return answer

    def _is_given_up(self, error: RegisterAway) -> bool:
        if self._away_since is None:
            self._away_since = time.monotonic()
            if self.patience and not self._closed.is_set():
                _log.warning("the store waits for its register, up to %.3g s: %s", self.patience, error)
        return self._closed.is_set() or not error.retryable or self.gave_up

    def _note(self, version: int, value: bytes) -> tuple[int, Value]:
        with self._lock:
            if self._newest[0] == version:
                return self._newest
        decoded = version, self._decode(value) if version else self._empty
        with self._lock:
            if decoded[0] > self._newest[0]:
                self._newest = decoded
        return decoded
