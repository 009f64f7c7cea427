"""The epoch register, which holds the newest view of a job. Two views of one epoch cannot exist."""

from __future__ import annotations

from holdfast.comms.errors import CorruptData
from holdfast.ft.membership.view import View
from holdfast.ft.registers import Cell, open_cell

CELL = "view"
"""The name of the cell that holds a job's view."""


class Register:
    """Views in a `Cell`: the cell's version is the view's epoch. As safe and as fast as the cell; close it after use.

    Every method raises `RegisterAway` while the register cannot be reached, `CorruptData` if it does not hold a view.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    @property
    def local(self) -> bool:
        """Whether `try_read` and `try_compare_and_set` take microseconds and never block."""
        return self._cell.local

    @property
    def pushes(self) -> bool:
        """Whether a `watch` costs nothing while nothing happens."""
        return self._cell.pushes

    @property
    def lasts(self) -> bool:
        """Whether its view outlives this process's handles."""
        return self._cell.lasts

    @classmethod
    def open(cls, url: str) -> Register:
        """The register at `url`; raises what `holdfast.ft.registers.open_cell` raises."""
        return cls(open_cell(url, CELL))

    def read(self) -> View | None:
        """The newest view; None before the first."""
        version, value = self._cell.read()
        return _decode(version, value) if version else None

    def compare_and_set(self, expected_epoch: int, view: View) -> bool:
        """Make `view` the newest if the newest epoch is `expected_epoch` (0: none yet); return whether it was done.

        After `RegisterAway` it may or may not have been done: read, and compare.
        """
        _check_next(expected_epoch, view)
        return self._cell.compare_and_set(expected_epoch, view.encode())

    def try_read(self) -> View | None:
        """Like `read`; a `local` register raises `RegisterBusy` rather than wait for another process."""
        version, value = self._cell.try_read()
        return _decode(version, value) if version else None

    def try_compare_and_set(self, expected_epoch: int, view: View) -> bool:
        """Like `compare_and_set`; a `local` register raises `RegisterBusy` rather than wait for another process."""
        _check_next(expected_epoch, view)
        return self._cell.try_compare_and_set(expected_epoch, view.encode())

    def watch(self, newer_than_epoch: int, timeout: float) -> View | None:
        """The newest view as soon as its epoch exceeds `newer_than_epoch`; None after `timeout` seconds."""
        found = self._cell.wait(newer_than_epoch, timeout)
        return _decode(*found) if found else None

    def close(self) -> None:
        """Close the register; a `watch` in another thread ends at once. Idempotent."""
        self._cell.close()

    def __enter__(self) -> Register:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_next(expected_epoch: int, view: View) -> None:
    if view.epoch != expected_epoch + 1:
        raise ValueError(f"the view after epoch {expected_epoch} has epoch {expected_epoch + 1}, not {view.epoch}")


def _decode(version: int, value: bytes) -> View:
    view = View.decode(value)
    if view.epoch != version:
        raise CorruptData(f"the register says epoch {version}, the view in it {view.epoch}")
    return view
