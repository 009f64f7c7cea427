"""Registers hold the few bytes that all processes of a job must agree on. The scheme of a URL selects one.

A register is a `Cell`, the interface of plugins: one cell of bytes, replaced only by compare-and-set. `MemoryCell` is
one of this process.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeVar

from holdfast.comms.errors import HoldfastError
from holdfast.comms.plugins.registry import plugin_manager
from holdfast.comms.system import forks

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
    """Replace the value of a cell by what `transition` makes of it, as often as others are faster.

    The cell is of the register `url`: `read()` gives version and value, `write(version, value)` compares and sets.
    Returns the version, what was there before, and what is there now: the same object if nothing was to be changed.
    Raises what they raise, and `RegisterAway` after `CHANGE_SECONDS`.
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


class _SharedCell:
    """The state that all handles of one cell share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.version = 0
        self.value = b""


_values: weakref.WeakValueDictionary[tuple[str, str], _SharedCell] = weakref.WeakValueDictionary()
_opening = threading.Lock()


class MemoryCell(Cell):
    """One handle on a cell of this process. A forked child must open its own, and shares nothing with its parent."""

    local = True

    def __init__(self, url: str, name: str) -> None:
        self._url = url
        forks.refuse_in_children(self, f"register {url}, which is memory of one process,")
        with _opening:
            value = _values.get((url, name))
            if value is None:
                value = _values[url, name] = _SharedCell()
        self._shared: _SharedCell | None = value

    @property
    def lasts(self) -> bool:
        return False

    def _open(self) -> _SharedCell:
        shared = self._shared
        if shared is None:
            raise RegisterAway(self._url, "this handle is closed")
        return shared

    def read(self) -> tuple[int, bytes]:
        shared = self._open()
        with shared.changed:
            return shared.version, shared.value

    def compare_and_set(self, expected: int, value: bytes) -> bool:
        shared = self._open()
        with shared.changed:
            if shared.version != expected:
                return False
            shared.version, shared.value = expected + 1, bytes(value)
            shared.changed.notify_all()
            return True

    def wait(self, newer_than: int, timeout: float) -> tuple[int, bytes] | None:
        shared = self._open()
        with shared.changed:
            shared.changed.wait_for(lambda: self._shared is None or shared.version > newer_than, timeout)
            self._open()
            return (shared.version, shared.value) if shared.version > newer_than else None

    def close(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            with shared.changed:
                shared.changed.notify_all()


_log = logging.getLogger(__name__)


def schemes() -> dict[str, Callable[[str, str], Cell]]:
    """URL scheme -> factory(url, cell_name), from every plugin; a plugin that raises is left out and logged.

    Raises ValueError if two plugins claim one scheme.
    """
    found: dict[str, Callable[[str, str], Cell]] = {}
    for implementation in plugin_manager().hook.holdfast_registers.get_hookimpls():
        try:
            offered: dict[str, Callable[[str, str], Cell]] = dict(implementation.function())  # type: ignore[call-overload]
        except Exception:
            _log.exception("plugin %s offers no registers: it failed", implementation.plugin_name)
            continue
        if twice := found.keys() & offered.keys():
            raise ValueError(f"two plugins offer registers for {', '.join(sorted(twice))}://; remove one")
        found.update(offered)
    return found


def open_cell(url: str, name: str) -> Cell:
    """Open the cell `name` of the register at `url`, such as `memory://job` or `sqlite:///run/user/1000/job.sqlite`.

    A missing register is created if its kind allows that. Raises ValueError for a URL that is not a register's,
    `RegisterAway` if the register cannot be reached or used, `CorruptData` if something else is in its place.
    """
    if not name:
        raise ValueError("a cell needs a name")
    scheme, separator, _ = url.partition("://")
    known = schemes()
    if not separator or scheme not in known:
        raise ValueError(
            f"{url!r} is not a register URL; known are {', '.join(f'{each}://' for each in sorted(known))}"
        )
    return known[scheme](url, name)
