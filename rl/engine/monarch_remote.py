"""Actors on other hosts. This process has no pidfd of them, so an observer there sees their ends and kills them."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Mapping
from typing import Any

from holdfast.ft.processes.fork_shim import shim_command
from holdfast.rl.engine.calls_in_flight import START_SECONDS
from holdfast.rl.engine.engine import OnExit
from holdfast.rl.engine.monarch_calls import MonarchCalls, plain_name, stop_procs

_KILL_SECONDS = 5.0


class RemoteProcess(MonarchCalls):
    """A Monarch proc of one process on another host, with one actor in it."""

    def __init__(self, name: str, kind: type[Any], host: RemoteHost, procs: Any, on_exit: OnExit | None) -> None:
        super().__init__(name, kind, 0, host.address, on_exit, procs)
        self._observer: Any = None
        self._host = host
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, recipe: bytes, timeout: float) -> None:
        """Make the actor, and have its process observed. Raises `ActorStartFailed`."""
        self._observer = await self._host.observer()
        await self._make(recipe, timeout)
        self.pid = await self._body.pid.call_one()
        self._start(self._observe())

    def kill(self) -> None:
        """See `ActorProcess.kill`. One that its host does not kill in time is given up."""
        if self.alive:
            self._start(self._kill())

    async def _observe(self) -> None:
        try:
            how = str(await self._observer.watch.call_one(self.pid))
        except Exception as error:
            how = f"its host {self.host} cannot be reached: {error}"
        await self._over(how)

    async def _kill(self) -> None:
        try:
            async with asyncio.timeout(_KILL_SECONDS):
                await self._observer.kill.call_one(self.pid)
                await self._gone.wait()
        except Exception as error:
            await self._over(f"its host {self.host} did not end it: {type(error).__name__}: {error}")

    async def _over(self, how: str) -> None:
        if self.alive:
            self._ended(how)
            await self._let_go()

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class RemoteHost:
    """A host that runs `holdfast.rl.engine.monarch_host`."""

    def __init__(self, address: str, mesh: Any, command: Any) -> None:
        self.address = address
        self._mesh, self._command = mesh, command
        self._procs: Any = None
        self._observing: Any = None
        self._lock = asyncio.Lock()

    async def start(
        self, name: str, kind: type[Any], recipe: bytes, environ: Mapping[str, str], on_exit: OnExit | None
    ) -> RemoteProcess:
        """Start an actor there. Raises `ActorStartFailed`."""
        found = RemoteProcess(name, kind, self, self._spawn(name, environ), on_exit)
        try:
            await found.begin(recipe, START_SECONDS)
        except BaseException:
            await asyncio.shield(found.stop(0.0))
            raise
        return found

    async def observer(self) -> Any:
        """The actor there that watches and kills processes."""
        from holdfast.rl.engine.monarch_actor import HostObserver

        async with self._lock:
            if self._observing is None:
                self._procs = self._spawn("observer", {})
                self._observing = self._procs.spawn("observer", HostObserver)
        return self._observing

    async def close(self) -> None:
        """End the observer. The host stays."""
        if self._procs is not None:
            await stop_procs(self._procs)

    def _spawn(self, name: str, environ: Mapping[str, str]) -> Any:
        command = self._command(sys.executable, None, shim_command(secrets.token_hex(16)), dict(environ))
        return self._mesh.spawn_procs(per_host={"replica": 1}, name=plain_name(name), bootstrap_command=command)
