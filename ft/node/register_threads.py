"""The register of a real node: requests that may block are made in threads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from holdfast.comms.errors import CorruptData
from holdfast.ft.membership.events import CasFailed, CasLost, CasWon, ViewRead
from holdfast.ft.membership.view import View
from holdfast.ft.node.ports import Answer
from holdfast.ft.node.register import Register
from holdfast.ft.registers import RegisterAway, RegisterBusy

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
        return self.register.pushes

    def read(self, done: Callable[[ViewRead | None], None]) -> None:
        if self.register.local:
            with contextlib.suppress(RegisterBusy):
                self._loop.call_soon(done, self._read(self.register.try_read))
                return
        self._submit(self._requests, lambda: self._read(self.register.read), done)

    def compare_and_set(self, expected: int, view: View, done: Callable[[Answer], None]) -> None:
        if self.register.local:
            try:
                answer = self._compare_and_set(self.register.try_compare_and_set, expected, view)
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
