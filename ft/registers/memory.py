"""`memory://name`: cells in this process, for tests, notebooks and ranks that are threads.

Cells of the same URL and cell name are one cell. Its value lives as long as any handle in the process is open.
"""

from __future__ import annotations

import threading
import weakref

from holdfast.comms.system import forks
from holdfast.ft.registers.cell import Cell, RegisterAway


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
