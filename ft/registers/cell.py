"""The interface of register plugins: one cell of bytes, replaced only by compare-and-set."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeVar

from holdfast.comms.errors import HoldfastError

Value = TypeVar("Value")

CHANGE_SECONDS = 30.0
"""How long `change_cell` tries against the changes of others; one try takes microseconds."""


class RegisterAway(HoldfastError):
    """The register cannot be reached or used now. The operation may or may not have been done: read again."""

    retryable = True

    def __init__(self, url: str, reason: str) -> None:
        self.url, self.reason = url, reason
        super().__init__(f"register {url} is away: {reason}")


class RegisterBusy(RegisterAway):
    """Another process is using the register, and the caller asked not to wait. Nothing was done."""


class Cell(ABC):
    """A linearizable versioned cell. Versions start at 0 (never written, no value) and grow by one with each write.

    Thread-safe. Every method raises `RegisterAway` when the register cannot be reached, and after `close`; a `wait` in
    another thread then ends at once.
    """

    local: ClassVar[bool] = False
    """Whether `try_read` and `try_compare_and_set` take microseconds and never block."""

    pushes: ClassVar[bool] = False
    """Whether a `wait` costs nothing while nothing happens: the register reports changes, without polling."""

    @property
    def lasts(self) -> bool:
        """Whether the value outlives this process's handles; if not, keep one open for as long as it must live."""
        return True

    @abstractmethod
    def read(self) -> tuple[int, bytes]:
        """The newest version and its value; (0, b"") before the first write."""

    @abstractmethod
    def compare_and_set(self, expected: int, value: bytes) -> bool:
        """Write `value` as version expected + 1 if the newest version is `expected`; return whether it was written."""

    def try_read(self) -> tuple[int, bytes]:
        """Like `read`; a `local` cell raises `RegisterBusy` rather than wait for another process."""
        return self.read()

    def try_compare_and_set(self, expected: int, value: bytes) -> bool:
        """Like `compare_and_set`; a `local` cell raises `RegisterBusy` rather than wait for another process."""
        return self.compare_and_set(expected, value)

    @abstractmethod
    def wait(self, newer_than: int, timeout: float) -> tuple[int, bytes] | None:
        """The newest (version, value) as soon as its version exceeds `newer_than`; None after `timeout` seconds."""

    @abstractmethod
    def close(self) -> None:
        """Close the cell. Idempotent."""


def change_cell(
    url: str,
    read: Callable[[], tuple[int, Value]],
    write: Callable[[int, Value], bool],
    transition: Callable[[Value], Value],
) -> tuple[int, Value, Value]:
    """Replace what a cell of the register `url` holds by what `transition` makes of it, as often as others are faster.

    `read()` gives version and value, `write(version, value)` compares and sets. Returns the version, what was there
    before, and what is there now: the same object if nothing was to be changed. Raises what they raise, and
    `RegisterAway` after `CHANGE_SECONDS`.
    """
    deadline = time.monotonic() + CHANGE_SECONDS
    while time.monotonic() < deadline:
        version, before = read()
        after = transition(before)
        if after == before:
            return version, before, before
        if write(version, after):
            return version + 1, before, after
    raise RegisterAway(url, f"no change got through in {CHANGE_SECONDS:g} s against those of others")
