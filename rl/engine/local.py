"""The engine without Monarch: actors in forks of the zygote of this host, calls over a socket pair each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.comms.transport.liveness import this_host
from holdfast.ft.launch.held_directory import HeldDirectory
from holdfast.ft.launch.launcher import StartFailed
from holdfast.ft.processes.executed_process import ExecutedProcess
from holdfast.ft.processes.remote_calls import ObjectRecipe, pack
from holdfast.ft.processes.spawning import ChildProcess, spawned
from holdfast.ft.processes.zygote_client import zygote_with
from holdfast.rl.engine.calls_in_flight import MADE, START_SECONDS, CallsInFlight, merged
from holdfast.rl.engine.death_watch import DeathWatch
from holdfast.rl.engine.engine import EngineContext, OnExit
from holdfast.rl.engine.errors import ActorStartFailed
from holdfast.rl.engine.local_worker import NUMBER, serve_actor

_LENGTH = NUMBER
_REAP_SECONDS = 15.0


class LocalProcess(CallsInFlight):
    """An actor's process, as its parent sees it."""

    def __init__(
        self,
        process: ChildProcess,
        kind: type[Any],
        on_exit: OnExit | None,
        on_release: Callable[[LocalProcess], None],
    ) -> None:
        super().__init__(process.name, kind, process.pid, "", on_exit)
        self._on_release = on_release
        self._process = process
        self._gone = asyncio.Event()
        self._watch = DeathWatch(process.pid, process.pidfd, self._died)
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._releasing: asyncio.Task[None] | None = None

    async def begin(self, timeout: float) -> None:
        """Wait until the actor is made. Raises `ActorStartFailed`."""
        made = self._waiting[MADE] = asyncio.get_running_loop().create_future()
        reader, self._writer = await asyncio.open_unix_connection(sock=self._process.channel.detach())
        self._reading = asyncio.create_task(self._read(reader))
        await self._until_made(made, timeout)
        self._watch.follow_threads()

    def kill(self) -> None:
        """See `ActorProcess.kill`."""
        self._process.kill()

    async def stop(self, timeout: float = 10.0) -> None:
        """See `ActorProcess.stop`. The process may also run its exit functions in that time."""
        deadline = time.monotonic() + timeout
        await self._close_actor(timeout)
        if self._writer is not None:
            self._writer.close()
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._gone.wait()
        except TimeoutError:
            self.kill()
            async with asyncio.timeout(_REAP_SECONDS):
                await self._gone.wait()

    def _send(self, number: int, request: bytes) -> None:
        if self._writer is not None:
            self._writer.writelines((_LENGTH.pack(NUMBER.size + len(request)), NUMBER.pack(number), request))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                (number,) = NUMBER.unpack(await reader.readexactly(NUMBER.size))
                self._answered(number, await reader.readexactly(length - NUMBER.size))
        except (asyncio.IncompleteReadError, OSError):
            pass  # the process is ending: the watch will say how

    def _died(self, how: str) -> None:
        self._ended(how or self._process.epitaph())
        self._releasing = asyncio.create_task(self._release())

    async def _release(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        if self._reading is not None:
            self._reading.cancel()
        await asyncio.to_thread(self._process.close)  # the kernel may take 100 ms more to free its memory
        self._gone.set()
        self._on_release(self)


class LocalEngine(EngineContext):
    """Implements `Engine`. Processes write to `logs`, by name; the default is a directory that `close` removes.

    `environ` is added to the environment of all processes, `preload` names modules to import in the zygote.
    """

    def __init__(
        self, logs: Path | None = None, environ: Mapping[str, str] | None = None, preload: tuple[str, ...] = ()
    ) -> None:
        self._own = HeldDirectory("holdfast-actors-") if logs is None else None
        self._logs = logs if logs is not None or self._own is None else self._own.path
        self._environ, self._preload = dict(environ or {}), preload
        self._processes: set[LocalProcess] = set()

    async def start(
        self,
        name: str,
        actor: type[Any],
        /,
        *args: Any,
        on_exit: OnExit | None = None,
        environ: Mapping[str, str] | None = None,
        python: str | None = None,
        host: str | None = None,
        **kwargs: Any,
    ) -> LocalProcess:
        """See `Engine.start`. There is no `host` but this one."""
        if host:
            raise ActorStartFailed(name, f"the local engine reaches no host {host!r}: use the Monarch engine")
        recipe = pack(ObjectRecipe(actor, args, kwargs))
        try:
            process = await spawned(partial(self._spawn, name, recipe, merged(self._environ, environ), python))
        except StartFailed as error:
            raise ActorStartFailed(name, str(error)) from error
        found = LocalProcess(process, actor, on_exit, self._processes.discard)
        self._processes.add(found)
        try:
            await found.begin(START_SECONDS)
        except BaseException:
            found.kill()
            await asyncio.shield(found.stop(0.0))
            raise
        return found

    def on_host_away(self, told: Callable[[str], None]) -> None:
        """See `Engine.on_host_away`. There is no host but this one."""

    def host_identity(self, host: str) -> str:
        """See `Engine.host_identity`."""
        return "" if host else this_host()

    async def close(self) -> None:
        """See `Engine.close`."""
        await asyncio.gather(*[each.stop() for each in tuple(self._processes)])
        if self._own is not None:
            self._own.close()

    def _spawn(self, name: str, recipe: bytes, environ: Mapping[str, str], python: str | None) -> ChildProcess:
        assert self._logs is not None
        output = self._logs / f"{name}.log"
        if python is None:
            source = zygote_with("holdfast.rl.engine.local_worker", *self._preload)
            return source.spawn(partial(serve_actor, recipe), name=name, output=output, environ=environ)
        command = [python, "-P", "-m", "holdfast.rl.engine.local_worker"]
        process = ExecutedProcess(command, name=name, output=output, environ=environ)
        process.channel.send(recipe)
        return process
