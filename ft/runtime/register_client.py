"""Accesses the register from the event loop, with one request of a kind at a time.

A register of this host is used directly: that takes microseconds. If another process is using it just then (it may have
been stopped meanwhile), or if the register is on another host, a thread makes the request. A register that does not
answer then delays a rebuild, but neither heartbeats nor the fencing of the process that holds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor

from holdfast.comms.errors import CorruptData
from holdfast.ft.membership.events import CasFailed, CasLost, CasWon, ViewRead
from holdfast.ft.membership.view import View
from holdfast.ft.registers import RegisterAway, RegisterBusy
from holdfast.ft.runtime.register import Register

Answer = CasWon | CasLost | CasFailed

_log = logging.getLogger("holdfast.ft")


class RegisterClient:
    """Makes requests to `register`, in `pool` if they may block; calls `shown` and `answered` in the running loop.

    A compare-and-set that takes longer than `patience` seconds counts as not answered.
    """

    def __init__(
        self,
        register: Register,
        pool: Executor,
        patience: float,
        shown: Callable[[ViewRead], None],
        answered: Callable[[Answer], None],
    ) -> None:
        self._register, self._pool, self._patience = register, pool, patience
        self._shown, self._answered = shown, answered
        self._loop = asyncio.get_running_loop()
        self._deadline: asyncio.TimerHandle | None = None
        self._number = 0
        self._away_since: float | None = None
        self._reading = self._ended = False

    @property
    def away(self) -> float:
        """Seconds since the first compare-and-set in a row that was not answered; 0 if the last one was."""
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    def read(self) -> None:
        """Pass the newest view to `shown`, soon; nothing if the register is away."""
        if self._register.local:
            with contextlib.suppress(RegisterBusy):
                self._loop.call_soon(self._show, self._read(self._register.try_read))
                return
        if not self._reading:
            self._reading = True
            self._pool.submit(lambda: self._soon(self._show, self._read(self._register.read)))

    def propose(self, expected: int, view: View) -> None:
        """Compare-and-set from epoch `expected` (0: empty) to `view`."""
        self._number += 1
        if self._register.local:
            try:
                answer = self._compare_and_set(self._register.try_compare_and_set, expected, view)
            except RegisterBusy:
                pass
            else:
                self._take(self._number, answer)
                return
        number, late = self._number, CasFailed(f"the register did not answer within {self._patience:g} s")
        ask = self._register.compare_and_set
        self._deadline = self._loop.call_later(self._patience, self._take, number, late)
        self._pool.submit(lambda: self._soon(self._take, number, self._compare_and_set(ask, expected, view)))

    def end(self) -> None:
        """Pass on no more answers."""
        self._ended = True
        if self._deadline is not None:
            self._deadline.cancel()

    def _soon(self, take: Callable[..., None], *answer: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process has left
            self._loop.call_soon_threadsafe(take, *answer)

    def _show(self, found: ViewRead | None) -> None:
        self._reading = False
        if found is not None and not self._ended:
            self._shown(found)

    def _take(self, number: int, answer: Answer) -> None:
        if number != self._number or self._ended:
            return
        self._number += 1
        if self._deadline is not None:
            self._deadline.cancel()
        if not isinstance(answer, CasFailed):
            self._away_since = None
        elif self._away_since is None:
            self._away_since = time.monotonic()
            _log.warning("nothing can be agreed for now: %s", answer.reason)
        self._answered(answer)

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
            return CasLost(self._register.read())
        except RegisterBusy:
            raise
        except (RegisterAway, CorruptData) as error:
            return CasFailed(str(error))
