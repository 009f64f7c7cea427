"""Monarch's actors in the procs of a `MonarchEngine`: the shell of an actor, and the observer of a host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from monarch.actor import Actor, concurrent_endpoint

from holdfast.comms.system.descriptors import OwnedDescriptor
from holdfast.comms.transport.liveness import start_time, this_host
from holdfast.rl.actors.engine import ActorHost, DeathWatch


class MonarchBody(Actor):  # type: ignore[misc]
    """Passes requests to an `ActorHost`. Its endpoint never raises: to Monarch that would be a fault."""

    def __init__(self) -> None:
        self._host = ActorHost()

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def ask(self, request: bytes) -> bytes:
        """The answer of `ActorHost`."""
        return await asyncio.wrap_future(self._host.answer(request))


class HostObserver(Actor):  # type: ignore[misc]
    """Watches and kills the other processes of its host for a `MonarchEngine` elsewhere."""

    def __init__(self) -> None:
        self._watched: dict[int, int] = {}

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def beat(self) -> str:
        """Answer at once, with what `this_host` is here."""
        return this_host()

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def watch(self, pid: int) -> str:
        """Return how a process ends, when it does."""
        try:
            pidfd = OwnedDescriptor(os.pidfd_open(pid))
        except ProcessLookupError:
            return f"process {pid} has ended"
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        watching = DeathWatch(pid, pidfd, ended.set_result)
        watching.follow_threads()
        self._watched[pid] = pidfd
        try:
            return await ended or f"process {pid} ended"
        finally:
            watching.close()
            del self._watched[pid]
            pidfd.close()

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def kill(self, pid: int) -> None:
        """Send SIGKILL to a process that is watched; a number that another process has by now means none."""
        if (pidfd := self._watched.get(pid)) is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def fence(self, pid: int, started: int) -> None:
        """Send SIGKILL to a process by its number and start time, whether or not it is watched."""
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                if start_time(pid) == started:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)
