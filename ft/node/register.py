"""The epoch register, which holds the newest view of a job. Two views of one epoch cannot exist.

`Register` asks it. A node asks through a `RegisterClient`, which has one request of a kind at a time, each with a
deadline, and repeats reads alone; `RegisterThreads` is its port, so that a request that blocks holds up nothing else.
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
from holdfast.ft.membership.view import Timeouts, View
from holdfast.ft.ports import Answer, RegisterPort, Time, Timer
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


AWAY_SECONDS = 0.2
"""The pause after a register that was away, before it is asked for a newer view again."""
READS_PER_SUSPECT_TIME = 2
"""Reads of the register within the suspect time, in case members could not announce a new view.

A read takes 0.4 ms of code that has left the caches: with one at each heartbeat, that was a third of what a session
costs while nothing fails.
"""


class RegisterClient:
    """Makes requests to `register`; calls `shown` and `answered` with what it holds and answers.

    A compare-and-set that takes longer than `timeouts.rebuild` counts as not answered.
    """

    def __init__(
        self,
        register: RegisterPort,
        time: Time,
        timeouts: Timeouts,
        shown: Callable[[ViewRead], None],
        answered: Callable[[Answer], None],
    ) -> None:
        self._register, self._time, self._timeouts = register, time, timeouts
        self._shown, self._answered = shown, answered
        self._deadline: Timer | None = None
        self._pause: Timer | None = None
        self._number = 0
        """The current compare-and-set: an answer to an earlier one comes too late, and counts no more."""
        self._away_since: float | None = None
        self._newest: View | None = None
        """The newest view that the register was seen to hold."""
        self._reading = self._ended = False

    @property
    def away(self) -> float:
        """Seconds since the first compare-and-set in a row that was not answered; 0 if the last one was."""
        return 0.0 if self._away_since is None else self._time.time() - self._away_since

    def read(self) -> None:
        """Pass the newest view to `shown`, soon; nothing if the register is away."""
        if not self._reading:
            self._reading = True
            self._register.read(self._show)

    def propose(self, expected: int, view: View) -> None:
        """Compare-and-set from epoch `expected` (0: empty) to `view`."""
        self._number += 1
        number = self._number
        self._register.compare_and_set(expected, view, partial(self._take, number))
        if number == self._number:  # a register of this host has answered at once
            patience = self._timeouts.rebuild
            late = CasFailed(f"the register did not answer within {patience:g} s")
            self._deadline = self._time.call_later(patience, self._take, number, late)

    def follow(self) -> None:
        """Pass new views to `shown`: at once while the job is being formed, later now and then.

        Later the members announce views to each other, and the register is read in case they could not: a thread that
        woke at each change would compete with a rebuild for the processor. A register that pushes changes is watched
        all the time: a read would ask another machine, a wait costs nothing.
        """
        if self._ended:
            return
        newest = self._newest
        if newest is None or newest.phase == "forming" or self._register.pushes:
            self._register.watch(0 if newest is None else newest.epoch, self._followed)
        else:
            pause = self._timeouts.suspect / READS_PER_SUSPECT_TIME
            self._pause = self._time.call_later(pause, self._register.read, self._followed)

    def end(self) -> None:
        """Pass on no more answers."""
        self._ended = True
        for timer in (self._deadline, self._pause):
            if timer is not None:
                timer.cancel()

    def _followed(self, found: ViewRead | None) -> None:
        if self._ended:
            return
        if found is None:
            self._pause = self._time.call_later(AWAY_SECONDS, self.follow)
            return
        if found.view is not None and found.view != self._newest:
            self._newest = found.view
            self._shown(found)
        self.follow()

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
            self._deadline = None
        if not isinstance(answer, CasFailed):
            self._away_since = None
        elif self._away_since is None:
            self._away_since = self._time.time()
        self._answered(answer)
