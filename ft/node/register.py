"""The epoch register, which holds the newest view of a job. Two views of one epoch cannot exist.

`Register` asks it; a node asks through `RegisterThreads`, so that a request that blocks holds up nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from holdfast.comms.errors import CorruptData
from holdfast.ft.membership.events import CasFailed, CasLost, CasWon, ViewRead
from holdfast.ft.membership.view import View
from holdfast.ft.node.ports import Answer
from holdfast.ft.registers import Cell, RegisterAway, RegisterBusy, open_cell

CELL = "view"
"""The name of the cell that holds a job's view."""


class Register:
    """Views in a `Cell`: the cell's version is the view's epoch. As safe and as fast as the cell; close it after use.

    Every method raises `RegisterAway` while the register cannot be reached, `CorruptData` if it does not hold a view.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell = cell

    @classmethod
    def open(cls, url: str) -> Register:
        """The register at `url`; raises what `holdfast.ft.registers.open_cell` raises."""
        return cls(open_cell(url, CELL))

    def read(self, *, at_once: bool = False) -> View | None:
        """The newest view; None before the first.

        `at_once`: a `local` register raises `RegisterBusy` rather than wait for another process.
        """
        version, value = self.cell.try_read() if at_once else self.cell.read()
        return _decode(version, value) if version else None

    def compare_and_set(self, expected_epoch: int, view: View, *, at_once: bool = False) -> bool:
        """Make `view` the newest if the newest epoch is `expected_epoch` (0: none yet); return whether it was done.

        After `RegisterAway` it may or may not have been done: read, and compare. `at_once` as in `read`.
        """
        if view.epoch != expected_epoch + 1:
            raise ValueError(f"the view after epoch {expected_epoch} has epoch {expected_epoch + 1}, not {view.epoch}")
        write = self.cell.try_compare_and_set if at_once else self.cell.compare_and_set
        return write(expected_epoch, view.encode())

    def watch(self, newer_than_epoch: int, timeout: float) -> View | None:
        """The newest view as soon as its epoch exceeds `newer_than_epoch`; None after `timeout` seconds."""
        found = self.cell.wait(newer_than_epoch, timeout)
        return _decode(*found) if found else None

    def close(self) -> None:
        """Close the register; a `watch` in another thread ends at once. Idempotent."""
        self.cell.close()

    def __enter__(self) -> Register:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _decode(version: int, value: bytes) -> View:
    view = View.decode(value)
    if view.epoch != version:
        raise CorruptData(f"the register says epoch {version}, the view in it {view.epoch}")
    return view


WATCH_SECONDS = 1.0
"""The longest that one watch waits for a newer view."""

_log = logging.getLogger("holdfast.ft")


class RegisterThreads:
    """The register at `url`, for a node in `loop`. One thread makes its requests, another one waits for newer views.

    A register of this host is used directly: that takes microseconds. If another process is using it just then (it may
    have been stopped meanwhile), or if the register is on another host, a thread makes the request. A register that
    does not answer then delays a rebuild, but neither heartbeats nor the fencing of the process that holds it.
    """

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop, name: str = "") -> None:
        """Raises what `Register.open` raises."""
        self._loop = loop
        with contextlib.ExitStack() as undo:
            self.register = undo.enter_context(Register.open(url))
            self._requests = ThreadPoolExecutor(1, f"holdfast-register-{name}")
            undo.callback(self._requests.shutdown)
            self._watches = ThreadPoolExecutor(1, f"holdfast-watch-{name}")
            undo.callback(self._watches.shutdown)
            self._watched = undo.enter_context(Register.open(url))  # closed first, which ends a watch
            self.watcher: int = self._watches.submit(threading.get_native_id).result()
            """The kernel's number of the thread that watches."""
            self._undo = undo.pop_all()

    @property
    def pushes(self) -> bool:
        return self.register.cell.pushes

    def read(self, done: Callable[[ViewRead | None], None]) -> None:
        if self.register.cell.local:
            with contextlib.suppress(RegisterBusy):
                self._loop.call_soon(done, self._read(partial(self.register.read, at_once=True)))
                return
        self._submit(self._requests, lambda: self._read(self.register.read), done)

    def compare_and_set(self, expected: int, view: View, done: Callable[[Answer], None]) -> None:
        if self.register.cell.local:
            try:
                answer = self._compare_and_set(partial(self.register.compare_and_set, at_once=True), expected, view)
            except RegisterBusy:
                pass
            else:
                done(answer)
                return
        ask = self.register.compare_and_set
        self._submit(self._requests, lambda: self._compare_and_set(ask, expected, view), done)

    def watch(self, newer_than: int, done: Callable[[ViewRead | None], None]) -> None:
        self._submit(self._watches, lambda: self._read(lambda: self._watched.watch(newer_than, WATCH_SECONDS)), done)

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._undo.close()

    def _submit(self, pool: ThreadPoolExecutor, ask: Callable[[], object], done: Callable[..., None]) -> None:
        def request() -> None:
            answer = ask()
            with contextlib.suppress(RuntimeError):  # the loop is closed: this process has left
                self._loop.call_soon_threadsafe(done, answer)

        with contextlib.suppress(RuntimeError):  # the pool is closed: this process has left
            pool.submit(request)

    def _read(self, ask: Callable[[], View | None]) -> ViewRead | None:
        try:
            return ViewRead(ask())
        except RegisterBusy:
            raise
        except (RegisterAway, CorruptData) as error:
            _log.debug("the register cannot be read: %s", error)
            return None

    def _compare_and_set(self, ask: Callable[[int, View], bool], expected: int, view: View) -> Answer:
        try:
            if ask(expected, view):
                return CasWon(view)
            return CasLost(self.register.read())
        except RegisterBusy:
            raise
        except (RegisterAway, CorruptData) as error:
            return CasFailed(str(error))
