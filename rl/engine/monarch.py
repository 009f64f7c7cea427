"""The engine over Monarch: procs that are forks of the zygote, calls by Monarch's messages, deaths by pidfd."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from holdfast.comms.transport.liveness import this_host
from holdfast.ft.launch.held_directory import HeldDirectory
from holdfast.ft.launch.launcher import StartFailed
from holdfast.ft.processes.executed_process import ExecutedProcess
from holdfast.ft.processes.fork_shim import ForkRequest, ShimServer, shim_command
from holdfast.ft.processes.remote_calls import ObjectRecipe, pack
from holdfast.ft.processes.spawning import ChildProcess, spawned
from holdfast.ft.processes.zygote_client import zygote_with
from holdfast.rl.engine.calls_in_flight import START_SECONDS, merged
from holdfast.rl.engine.death_watch import DeathWatch
from holdfast.rl.engine.engine import EngineContext, OnExit
from holdfast.rl.engine.errors import ActorStartFailed, NoEngine
from holdfast.rl.engine.monarch_calls import MonarchCalls, exit_code, plain_name, stop_procs
from holdfast.rl.engine.monarch_host import PRELOAD, listen_on
from holdfast.rl.engine.monarch_remote import RemoteHost, RemoteProcess
from holdfast.rl.engine.monarch_worker import become_proc

_log = logging.getLogger(__name__)
_STOP_SECONDS = 5.0
_REAP_SECONDS = 15.0


class MonarchProcess(MonarchCalls):
    """A Monarch proc of one process on this host, with one actor in it."""

    def __init__(
        self,
        name: str,
        kind: type[Any],
        procs: Any,
        process: ChildProcess,
        request: ForkRequest,
        on_exit: OnExit | None,
    ) -> None:
        super().__init__(name, kind, process.pid, "", on_exit, procs)
        self._process, self._request = process, request
        self._watch = DeathWatch(process.pid, process.pidfd, self._died)
        self._releasing: asyncio.Task[None] | None = None

    async def begin(self, recipe: bytes, timeout: float) -> None:
        """Make the actor. Raises `ActorStartFailed`."""
        await self._make(recipe, timeout)
        self._watch.follow_threads()

    def kill(self) -> None:
        """See `ActorProcess.kill`."""
        self._process.kill()

    def _died(self, how: str) -> None:
        self._ended(how or self._process.epitaph())
        self._releasing = asyncio.create_task(self._release())

    async def _release(self) -> None:
        self._request.end(await asyncio.to_thread(exit_code, self._process))
        await self._let_go()


class MonarchEngine(EngineContext):
    """Implements `Engine`. Processes write to `logs`, by name; the default is a directory that `close` removes.

    `environ` is added to the environment of all processes, `preload` names modules to import in the zygotes.
    `listen` is the address where other hosts reach this process, needed if there are any; what Monarch listens on stays
    for the life of the process. A host that has not answered for `silence` seconds is away, its processes with it.
    """

    def __init__(
        self,
        logs: Path | None = None,
        environ: Mapping[str, str] | None = None,
        preload: tuple[str, ...] = (),
        listen: str | None = None,
        silence: float = 5.0,
    ) -> None:
        self._monarch = _monarch(listen)
        self._silence = silence
        self._own = HeldDirectory("holdfast-actors-") if logs is None else None
        self._logs = logs if logs is not None or self._own is None else self._own.path
        self._environ, self._preload = dict(environ or {}), preload
        self._shims: ShimServer | None = None
        self._expected: dict[str, asyncio.Future[ForkRequest]] = {}
        self._processes: dict[str, MonarchProcess] = {}
        self._hosts: dict[str, RemoteHost] = {}
        self._remote: set[RemoteProcess] = set()
        self._on_host_away: list[Callable[[str], None]] = []

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
    ) -> MonarchProcess | RemoteProcess:
        """See `Engine.start`. `host` is the address of a `holdfast.rl.engine.monarch_host`, such as tcp://10.0.0.2:26600."""
        if host:
            if python is not None:
                raise ActorStartFailed(name, f"python={python!r} cannot be chosen on another host: {host}")
            if self._monarch.listen is None:
                raise ActorStartFailed(name, f"{host} cannot reach this process: MonarchEngine(listen=ADDRESS)")
            own = merged({PRELOAD: ",".join(self._preload)}, self._environ, environ)
            remote = await self._host(host).start(name, actor, pack(ObjectRecipe(actor, args, kwargs)), own, on_exit)
            self._remote.add(remote)
            return remote
        if python is not None and shutil.which(python) is None:  # Monarch would wait long for its process
            raise ActorStartFailed(name, f"there is no interpreter {python}")
        recipe = pack(ObjectRecipe(actor, args, kwargs))
        shims = await self._server()
        token = secrets.token_hex(16)
        expected = self._expected[token] = asyncio.get_running_loop().create_future()
        command = self._monarch.BootstrapCommand(sys.executable, None, shim_command(token, shims.path), {})
        procs = self._monarch.this_host().spawn_procs(
            per_host={"replica": 1}, name=plain_name(name), bootstrap_command=command
        )
        request: ForkRequest | None = None
        try:
            async with asyncio.timeout(START_SECONDS):
                request = await expected
            own = merged(request.environ, self._environ, environ)
            process = await spawned(partial(self._spawn, name, own, python))
        except BaseException as error:
            if request is not None:
                request.end(1)
            await asyncio.shield(stop_procs(procs))
            if isinstance(error, TimeoutError):
                raise ActorStartFailed(name, f"Monarch did not start it within {START_SECONDS:.3g} s") from None
            if isinstance(error, StartFailed):
                raise ActorStartFailed(name, str(error)) from error
            raise
        finally:
            del self._expected[token]
        found = MonarchProcess(name, actor, procs, process, request, on_exit)
        self._processes[token] = found
        try:
            await found.begin(recipe, START_SECONDS)
        except BaseException:
            await asyncio.shield(found.stop(0.0))
            raise
        return found

    def on_host_away(self, told: Callable[[str], None]) -> None:
        """See `Engine.on_host_away`."""
        self._on_host_away.append(told)

    def host_identity(self, host: str) -> str:
        """See `Engine.host_identity`."""
        if not host:
            return this_host()
        return self._hosts[host].identity if host in self._hosts else ""

    async def close(self) -> None:
        """See `Engine.close`. Monarch itself stays, with its threads and sockets, until this process ends."""
        await asyncio.gather(*[each.stop() for each in (*self._processes.values(), *self._remote)])
        await asyncio.gather(*[each.close() for each in self._hosts.values()])
        self._hosts.clear()
        if self._shims is not None:
            await self._shims.close()
            self._shims = None
        if self._own is not None:
            self._own.close()

    def _host(self, address: str) -> RemoteHost:
        if address not in self._hosts:
            monarch = self._monarch
            self._hosts[address] = RemoteHost(
                address, monarch.attach, monarch.BootstrapCommand, self._silence, self._host_away
            )
        return self._hosts[address]

    def _host_away(self, identity: str) -> None:
        for told in self._on_host_away:
            told(identity)

    async def _server(self) -> ShimServer:
        if self._shims is None:
            self._shims = ShimServer(self._arrived, self._left)
            await self._shims.start()
        return self._shims

    def _arrived(self, request: ForkRequest) -> None:
        expected = self._expected.get(request.token)
        if expected is None or expected.done():
            request.end(1)
        else:
            expected.set_result(request)

    def _left(self, token: str) -> None:
        """The shim has ended: Monarch killed it, or we ended it together with the process."""
        if (process := self._processes.pop(token, None)) is not None:
            process.kill()

    def _spawn(self, name: str, environ: Mapping[str, str], python: str | None) -> ChildProcess:
        assert self._logs is not None
        output = self._logs / f"{name}.log"
        if python is None:
            source = zygote_with("holdfast.rl.engine.actor_host", *self._preload)
            return source.spawn(become_proc, name=name, output=output, environ=environ)
        command = [python, "-P", "-m", "monarch._src.actor.bootstrap_main"]
        return ExecutedProcess(command, name=name, output=output, environ=environ)


class _Monarch:
    """What is used of Monarch. An unhandled fault would end this process: pidfds have told of the death before."""

    def __init__(self, listen: str | None) -> None:
        self.listen = listen
        os.environ.setdefault("MONARCH_FILE_LOG", "error")  # its log file grows without end
        actor: Any = import_module("monarch.actor")
        if listen is not None:
            listen_on(listen)
        actor.unhandled_fault_hook = lambda failure: _log.debug("Monarch: %s", failure)
        self.this_host = actor.this_host
        self._attach = actor.attach_to_workers
        self.BootstrapCommand = import_module("monarch._src.actor.host_mesh").BootstrapCommand

    def attach(self, address: str) -> Any:
        """The host mesh of one host by its address."""
        return self._attach(ca="trust_all_connections", workers=[address])


_loaded: _Monarch | None = None


def _monarch(listen: str | None) -> _Monarch:
    global _loaded
    if _loaded is None:
        try:
            _loaded = _Monarch(listen)
        except ImportError as error:
            raise NoEngine(f"Monarch is not installed: {error}; pip install 'holdfast[rl]'") from error
    if listen is not None and _loaded.listen != listen:
        raise NoEngine(
            f"Monarch listens on {_loaded.listen or 'this host alone'} in this process already, not {listen}"
        )
    return _loaded
