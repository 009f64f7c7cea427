"""The Monarch actor that every process of a `MonarchEngine` holds, around an actor that knows nothing of Monarch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from monarch.actor import Actor, concurrent_endpoint

from holdfast.comms.system.descriptors import OwnedDescriptor
from holdfast.comms.transport.liveness import start_time, this_host
from holdfast.rl.engine.actor_host import ActorHost, Answer
from holdfast.rl.engine.death_watch import DeathWatch


class MonarchBody(Actor):  # type: ignore[misc]
    """Passes packed calls to an `ActorHost`. Its endpoints never raise: to Monarch that would be a fault."""

    def __init__(self, recipe: bytes) -> None:
        self._recipe = recipe
        self._host = ActorHost()

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def make(self) -> bytes:
        """Make the actor; a packed `CallResult` without a value."""
        return await _answer(lambda answer: self._host.make(self._recipe, answer))

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def call(self, request: bytes) -> bytes:
        """Do a packed `MethodCall`; a packed `CallResult`."""
        return await _answer(lambda answer: self._host.call(request, answer))

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def ping(self) -> bytes:
        """Answer at once."""
        return b"pong"

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def pid(self) -> tuple[int, int]:
        """This process, and its start time, which tells it from a later one of that number."""
        return os.getpid(), start_time(os.getpid())


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


async def _answer(begin: Callable[[Answer], None]) -> bytes:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[bytes] = loop.create_future()

    def arrive(found: bytes) -> None:
        if not answer.done():
            answer.set_result(found)

    begin(lambda found: loop.call_soon_threadsafe(arrive, found))
    return await answer
