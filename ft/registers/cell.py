"""The interface of register plugins: one cell of bytes, replaced only by compare-and-set."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from holdfast.comms.errors import HoldfastError

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


def change_cell(cell: Cell, url: str, transition: Callable[[bytes], bytes]) -> None:
    """Replace the value (b"" before the first write) of a cell of the register `url` by what `transition` makes of it.

    That is applied again if another writer was faster. If it returns the same value, nothing is written. Raises what it
    raises, and `RegisterAway` after `CHANGE_SECONDS`.
    """
    deadline = time.monotonic() + CHANGE_SECONDS
    while time.monotonic() < deadline:
        version, before = cell.read()
        after = transition(before)
        if after == before or cell.compare_and_set(version, after):
            return
    raise RegisterAway(url, f"no change got through in {CHANGE_SECONDS:g} s against those of others")
