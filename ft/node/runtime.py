"""A node of a real process: its thread and its ports, and what a session asks of it.

Three threads: the event loop of the `Node`, one that accesses the register, one that watches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

import torch.distributed as dist

from holdfast.comms.errors import Revoked, StaleEpoch
from holdfast.comms.plugins.registry import registry
from holdfast.comms.transport.liveness import this_process
from holdfast.ft import faultpoints
from holdfast.ft.control.errors import CONNECTION_ERRORS, ConnectionLost, RemoteError
from holdfast.ft.control.event_loop import LoopThread
from holdfast.ft.control.rpc import Handler
from holdfast.ft.detectors.process_watch import HostProcesses
from holdfast.ft.membership.events import Event
from holdfast.ft.membership.state_machine import Membership
from holdfast.ft.membership.topology import Shape
from holdfast.ft.membership.view import Job, Member, View
from holdfast.ft.node import messages
from holdfast.ft.node.connections import MemberConnections
from holdfast.ft.node.epoch_guard import EpochGuard
from holdfast.ft.node.node import Node
from holdfast.ft.node.register import RegisterThreads
from holdfast.ft.node.rendezvous import REPEATABLE, RendezvousStore, ask_remotely
from holdfast.ft.node.table_sharing import neighbours
from holdfast.ft.ports import Ports
from holdfast.ft.settings import Settings, candidate_job, one_host_backends
from holdfast.ft.telemetry.event_log import EventLog

T = TypeVar("T")

START_SECONDS = 30.0


class Runtime:
    """One process in a job, from construction to `close`."""

    def __init__(
        self, settings: Settings, epoch_guard: EpochGuard, events: EventLog, identity: str, step: Callable[[], int]
    ) -> None:
        """Listen, and join the job or be a spare of it. `step()` is passed to fault points.

        Raises what `candidate_job` raises.
        """
        self._step = step
        self.identity, self.settings, self.epoch_guard, self._events = identity, settings, epoch_guard, events
        self._patience = max(settings.timeouts.rebuild, settings.timeouts.operation)
        """Seconds that a call of the rendezvous may take: members come late to a rebuild if they compute."""
        self._calls: dict[Future[Any], int] = {}
        self._calls_lock = threading.RLock()  # a signal's handler that leaves may come in
        with contextlib.ExitStack() as undo:
            self._thread = LoopThread(f"holdfast-ft-{identity}")
            undo.callback(self._thread.close)
            self._register = RegisterThreads(settings.register, self._thread.loop, identity)
            undo.callback(self._register.close)
            view = self._register.register.read()
            self._thread.run(self._begin(candidate_job(settings, view), view), START_SECONDS)
            undo.callback(self._end)
            epoch_guard.on_over(self._end_calls)
            self._undo = undo.pop_all()

    async def _begin(self, job: Job, view: View | None) -> None:
        settings, timeouts = self.settings, self.settings.timeouts
        handlers: dict[str, Handler] = {}
        self.links = MemberConnections(
            self.identity,
            key=settings.key,
            job=settings.name,
            handlers=handlers,
            on_link=lambda member_id: self.node.linked(member_id),
            on_refused=lambda member_id: self.node.refused(member_id),
        )
        try:
            address = await self.links.start(settings.host)
        except BaseException:
            await self.links.close()
            raise
        threads = (os.getpid(), self._thread.native_id, self._register.watcher)
        lasting = tuple(number for number in threads if number is not None)
        me = Member(self.identity, address, this_process(), lasting)
        core = Membership(me, job, timeouts, one_host_backends(job.backends), Shape(mesh=settings.mesh))
        self.node = Node(
            core,
            self.epoch_guard,
            Ports(self._thread.loop, self.links, self._register, HostProcesses()),
            self._events.emit,
            registry().detectors.values(),
            self._reach,
            settings.register,
        )
        table = self.node.sharing.handlers(self.links.call, self._patience)
        handlers.update({**table, **messages.handlers(self.node.hear)})
        self.node.watch()
        self.node.begin(view)

    def soon(self, act: Callable[..., None], *arguments: object) -> None:
        """Call a method of the node in its thread; nothing once that has ended."""
        with contextlib.suppress(RuntimeError):
            self._thread.loop.call_soon_threadsafe(act, *arguments)

    def feed(self, event: Event) -> None:
        """Pass an event of this process's session to the membership."""
        self.soon(self.node.feed, event)

    def leave(self, reason: str, error: str = "") -> None:
        """Tell the others that this process has left the job, as if it had died; `error` as in `Death`."""
        self.epoch_guard.end(StaleEpoch(f"this process has left the job: {reason}"))
        self.soon(self.node.leave, reason, error)

    def store(self, view: View) -> dist.Store:
        """The store with which the members of `view` build its communicator."""
        rank, table, timeout = view.rank_of(self.identity), self.node.sharing.table, self._patience
        ask = None
        if rank:
            ask = ask_remotely(functools.partial(self._call, neighbours(view, rank)[0], view.epoch), timeout)
        return RendezvousStore(table, view.epoch, timeout, ask)

    def close(self) -> None:
        """End every thread, connection and descriptor. Idempotent."""
        self._undo.close()

    def _end(self) -> None:
        async def end() -> None:
            self.node.close()
            await self.links.close()

        with contextlib.suppress(TimeoutError):
            self._thread.run(end(), START_SECONDS)

    def _reach(self, point: str, go_on: Callable[[], None]) -> None:
        if faultpoints.armed is not None:
            view = self.epoch_guard.view
            rank = view.rank_of(self.identity) if view is not None else None
            faultpoints.reach(point, self._step(), -1 if rank is None else rank, view.epoch if view is not None else 0)
        go_on()

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
                if method not in REPEATABLE or self.epoch_guard.is_over(epoch) or time.monotonic() >= deadline:
                    raise

    def _call_once(self, member: Member, epoch: int, method: str, body: bytes, timeout: float) -> bytes:
        try:
            return self._within_epoch(epoch, self.links.call(member, method, body, timeout), timeout)
        except RemoteError as error:
            if error.kind in CONNECTION_ERRORS:  # further up
                raise ConnectionLost(member.id, str(error)) from error
            raise

    def _within_epoch(self, epoch: int, call: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run `call` in the node's thread, and wait for it. Raises `Revoked` when the epoch ends."""
        answer = asyncio.run_coroutine_threadsafe(call, self._thread.loop)
        with self._calls_lock:
            self._calls[answer] = epoch
        try:
            if self.epoch_guard.is_over(epoch):
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


def new_identity() -> str:
    """A name for this process that no other process ever has."""
    return f"p{this_process().pid}-{secrets.token_hex(3)}"
