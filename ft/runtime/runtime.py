"""The membership of a process in a thread of its own, and the methods of it that a session calls.

Three threads: the event loop of the `Reactor`, one that accesses the register, one that watches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch.distributed as dist

from holdfast.comms.errors import CorruptData, HoldfastError, Revoked, StaleEpoch
from holdfast.comms.transport.liveness import this_process
from holdfast.ft.control.errors import CONNECTION_ERRORS, ConnectionLost, RemoteError
from holdfast.ft.control.loop import LoopThread
from holdfast.ft.membership.events import EpochBroken, Event, LocalFailed, LocalFinished, ViewRead
from holdfast.ft.membership.step_error import StepError
from holdfast.ft.membership.view import Member, View
from holdfast.ft.registers import RegisterAway
from holdfast.ft.rendezvous.client import RendezvousClient
from holdfast.ft.rendezvous.messages import REPEATABLE
from holdfast.ft.rendezvous.store import RendezvousStore
from holdfast.ft.runtime.epoch_guard import EpochGuard
from holdfast.ft.runtime.reactor import Reactor
from holdfast.ft.runtime.register import Register
from holdfast.ft.runtime.table_sharing import neighbours
from holdfast.ft.settings import Settings, candidate_job
from holdfast.ft.telemetry.event_log import EventLog

T = TypeVar("T")

START_SECONDS = 30.0
WATCH_SECONDS = 1.0
AWAY_SECONDS = 0.2
READS_PER_SUSPECT_TIME = 2
"""Reads of the register within the suspect time, in case members could not announce a new view.

A read takes 0.4 ms of code that has left the caches: with one at each heartbeat, that was a third of what a session
costs while nothing fails.
"""


class Runtime:
    """One process in a job, from construction to `close`."""

    def __init__(self, settings: Settings, epoch_guard: EpochGuard, events: EventLog, identity: str) -> None:
        """Listen, and join the job or be a spare of it. Raises what `candidate_job` raises."""
        self._identity, self._settings, self._epoch_guard = identity, settings, epoch_guard
        self._calls: dict[Future[Any], int] = {}
        self._calls_lock = threading.RLock()  # a signal's handler that leaves may come in
        self._begun, self._closing = threading.Event(), threading.Event()
        with contextlib.ExitStack() as undo:
            self._register = undo.enter_context(Register.open(settings.register))
            view = self._register.read()
            job = candidate_job(settings, view)
            self._pool = ThreadPoolExecutor(1, f"holdfast-register-{identity}")
            undo.callback(self._pool.shutdown)
            self._thread = LoopThread(f"holdfast-ft-{identity}")
            undo.callback(self._thread.close)
            self._reactor = self._thread.run(self._make_reactor(events), START_SECONDS)
            undo.callback(self._end_reactor)
            watched = undo.enter_context(Register.open(settings.register))
            self._watcher = threading.Thread(
                target=self._watch, args=(watched,), name=f"holdfast-watch-{identity}", daemon=True
            )
            self._watcher.start()
            undo.callback(self._watcher.join)
            undo.callback(watched.close)
            undo.callback(self._begun.set)
            undo.callback(self._closing.set)
            threads = (os.getpid(), self._thread.native_id, self._watcher.native_id)
            lasting = tuple(number for number in threads if number is not None)
            self._thread.run(self._reactor.begin(settings.host, job, view, lasting), START_SECONDS)
            self._begun.set()
            epoch_guard.on_over(self._end_calls)
            self._undo = undo.pop_all()

    @property
    def was_spare(self) -> bool:
        """Whether this process has waited outside of a running view."""
        return self._reactor.was_spare

    @property
    def missed_heartbeats(self) -> int:
        """The number of heartbeats of others that did not arrive, so far."""
        return self._reactor.missed_heartbeats

    def ready(self) -> None:
        """This process waits for a view that it can work in: a spare may be promoted from now on."""
        with contextlib.suppress(RuntimeError):
            self._thread.loop.call_soon_threadsafe(self._reactor.ready)

    def at_step(self, step: int) -> None:
        """Set the step that is passed to fault points."""
        self._reactor.step = step

    def failed(self, failure: HoldfastError) -> None:
        """An op of this process's communicator has failed: its error is evidence about other members."""
        with contextlib.suppress(RuntimeError):
            self._thread.loop.call_soon_threadsafe(self._reactor.failed, failure)

    def broken(self, epoch: int, failure: HoldfastError) -> None:
        """An op of `epoch` has failed, and no member was found to be dead: the members need another epoch."""
        self._feed_soon(EpochBroken(epoch, str(failure)))

    def finish(self, epoch: int) -> None:
        """All steps are committed on this rank, which works in `epoch`."""
        self._feed_soon(LocalFinished(epoch))

    def stop(self, epoch: int, reason: str) -> None:
        """All members of `epoch` have left the steps before the last one: the job is finished."""
        self._feed_soon(LocalFinished(epoch, reason, stopped=True))

    def fail(self, error: StepError, reason: str) -> None:
        """The user's code raised `error` here, and the job has to end with it."""
        self._feed_soon(LocalFailed(error, reason))

    def another_member_continues(self) -> bool:
        """Whether another member of this host was seen to have entered more ops of the epoch than this process."""
        return self._reactor.ahead(self._epoch_guard.place())

    def leave(self, reason: str, error: str = "") -> None:
        """Tell the others that this process has left the job, as if it had died; `error` as in `Death`."""
        self._epoch_guard.end(StaleEpoch(f"this process has left the job: {reason}"))
        with contextlib.suppress(RuntimeError):
            self._thread.loop.call_soon_threadsafe(self._reactor.leave, reason, error)

    def store(self, view: View) -> dist.Store:
        """The store with which the members of `view` build its communicator."""
        rank, table = view.rank_of(self._identity), self._reactor.sharing.table
        timeouts = self._settings.timeouts
        timeout = max(timeouts.rebuild, timeouts.operation)
        if not rank:
            return RendezvousStore(table, view.epoch, timeout, self._delete_key)
        call = functools.partial(self._call, neighbours(view, rank)[0], view.epoch)
        return RendezvousStore(RendezvousClient(call, table, timeout), view.epoch, timeout)

    def close(self) -> None:
        """End every thread, connection and descriptor. Idempotent."""
        self._undo.close()

    async def _make_reactor(self, events: EventLog) -> Reactor:
        return Reactor(self._identity, self._settings, self._epoch_guard, events, self._register, self._pool)

    def _end_reactor(self) -> None:
        with contextlib.suppress(TimeoutError):
            self._thread.run(self._reactor.end(), START_SECONDS)

    def _feed_soon(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._thread.loop.call_soon_threadsafe(self._reactor.feed, event)

    # Remote calls of the session's thread, cancelled when their epoch ends ----------------------------------------

    def _call(self, member: Member, epoch: int, method: str, body: bytes, timeout: float) -> bytes:
        """Make a remote call.

        A `REPEATABLE` call is repeated over the next connection if one is lost while the epoch is valid.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                return self._call_once(member, epoch, method, body, max(deadline - time.monotonic(), 0.0))
            except ConnectionLost:
                if method not in REPEATABLE or self._epoch_guard.is_over(epoch) or time.monotonic() >= deadline:
                    raise

    def _call_once(self, member: Member, epoch: int, method: str, body: bytes, timeout: float) -> bytes:
        try:
            return self._within_epoch(epoch, self._reactor.links.call(member, method, body, timeout), timeout)
        except RemoteError as error:
            if error.kind in CONNECTION_ERRORS:  # further up
                raise ConnectionLost(member.id, str(error)) from error
            raise

    def _delete_key(self, epoch: int, key: str) -> bool:
        """Remove a key of the rendezvous table from all members' copies; on the first member."""
        timeouts = self._settings.timeouts
        return self._within_epoch(
            epoch, self._reactor.sharing.delete(epoch, key), max(timeouts.rebuild, timeouts.operation)
        )

    def _within_epoch(self, epoch: int, call: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run `call` in the reactor's thread, and wait for it. Raises `Revoked` when the epoch ends."""
        answer = asyncio.run_coroutine_threadsafe(call, self._thread.loop)
        with self._calls_lock:
            self._calls[answer] = epoch
        try:
            if self._epoch_guard.is_over(epoch):
                answer.cancel()
            return answer.result(timeout + 1.0)
        except CancelledError:
            raise Revoked(epoch, "it was revoked while its communicator was being built") from None
        finally:
            with self._calls_lock:
                del self._calls[answer]

    def _end_calls(self, epoch: int) -> None:
        """Cancel the calls of all epochs up to `epoch`."""
        with self._calls_lock:
            ended = [answer for answer, of in self._calls.items() if of <= epoch]
        for answer in ended:
            answer.cancel()

    # The thread that watches the register -------------------------------------------------------------------------

    def _watch(self, register: Register) -> None:
        """Pass new views to the reactor, at once while the job is being formed.

        Later the members announce views to each other, and the register is read now and then in case they could not: a
        thread that woke at each change would compete with a rebuild for the processor. A register that pushes changes
        is watched all the time: to read it would ask another machine, to wait costs nothing.
        """
        self._begun.wait()
        view: View | None = None
        while not self._closing.is_set():
            try:
                if view is None or view.phase == "forming" or register.pushes:
                    newest = register.watch(view.epoch if view is not None else 0, WATCH_SECONDS)
                else:
                    self._closing.wait(self._settings.timeouts.suspect / READS_PER_SUSPECT_TIME)
                    newest = register.read()
            except (RegisterAway, CorruptData):
                self._closing.wait(AWAY_SECONDS)
                continue
            if newest is not None and newest != view:
                view = newest
                self._feed_soon(ViewRead(view))


def new_identity() -> str:
    """A name for this process that no other process ever has."""
    return f"p{this_process().pid}-{secrets.token_hex(3)}"
