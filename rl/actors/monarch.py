"""The engine over Monarch: procs that are forks of the zygote, calls by Monarch's messages, deaths by pidfd.

Of actors on other hosts this process has no pidfd, so an observer there sees their ends and kills them. It also beats
for its host. When that is silent for too long, all of its processes have ended as far as this process is concerned. If
the host is heard again, or another one listens at its address, they are killed there before it is given others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import this_host
from holdfast.ft.detectors.process_watch import HostProcesses, ProcessWatch
from holdfast.ft.launch.launcher import StartFailed
from holdfast.ft.launch.process_proxies import ProcessProxy, proxy_command
from holdfast.ft.processes.child_process import ChildProcess
from holdfast.rl.actors.engine import (
    ActorHost,
    ActorOrder,
    ActorProcess,
    Child,
    Engine,
    OwnProcess,
    how_killed,
    process_of,
)
from holdfast.rl.actors.errors import ActorDied, ActorHostAway, ActorStartFailed, EndpointTimeout, NoEngine
from holdfast.rl.actors.monarch_host import PRELOAD, Forks, become_proc, listen_on, whereabouts

os.environ.setdefault("MONARCH_FILE_LOG", "error")  # its log file grows without end
try:
    from monarch import actor as monarch_actor
    from monarch._src.actor.host_mesh import BootstrapCommand
except ImportError as error:
    raise NoEngine(f"Monarch is not installed: {error}; pip install 'holdfast[rl]'") from error

_log = logging.getLogger(__name__)
_START_SECONDS = 180.0
_STOP_SECONDS = 5.0
_KILL_SECONDS = 5.0
_IDENTITY_SECONDS = 30.0
_BEATS = 4
"""The unanswered beats in a row, all within the time of silence, after which a host is away."""
_ATTACH_SECONDS = 20.0
"""Seconds in which a host that was started again must answer."""
_LOOK_SECONDS = 0.25
"""Seconds between two looks whether a host was started."""


class MonarchBody(monarch_actor.Actor):  # type: ignore[misc]
    """Passes requests to an `ActorHost`. Its endpoint never raises: to Monarch that would be a fault."""

    def __init__(self) -> None:
        self._host = ActorHost()

    @monarch_actor.concurrent_endpoint  # type: ignore[untyped-decorator]
    async def ask(self, request: bytes) -> bytes:
        """The answer of `ActorHost`."""
        return await asyncio.wrap_future(self._host.answer(request))


class HostObserver(monarch_actor.Actor):  # type: ignore[misc]
    """Watches and kills the other processes of its host for a `MonarchEngine` elsewhere."""

    @monarch_actor.concurrent_endpoint  # type: ignore[untyped-decorator]
    async def beat(self) -> str:
        """Answer at once, with what `this_host` is here."""
        return this_host()

    @monarch_actor.concurrent_endpoint  # type: ignore[untyped-decorator]
    async def watch(self, pid: int) -> str:
        """Return how a process ends, when it does."""
        ended = asyncio.Event()
        with contextlib.closing(ProcessWatch(lambda deaths: ended.set())) as watch:
            watch.follow([process_of(pid, threads=True)])
            await ended.wait()
            return how_killed(pid) or f"process {pid} has ended"

    @monarch_actor.concurrent_endpoint  # type: ignore[untyped-decorator]
    async def kill(self, pid: int, started: int) -> None:
        """Send SIGKILL to the process with this number and start time, if it is still there."""
        HostProcesses().kill(Peer(this_host(), pid, started))


class MonarchProcess(OwnProcess):
    """A Monarch proc of one process on this host, with one actor in it."""

    def __init__(self, order: ActorOrder, child: Child, procs: Any) -> None:
        super().__init__(order, child)
        self._procs, self._body = procs, procs.spawn(_plain(order.name), MonarchBody)

    def _send(self, request: bytes, answer: asyncio.Future[bytes]) -> None:
        _ask_body(self._body, request, answer, self.kill)

    def _leave(self) -> None:
        self.kill()  # Monarch takes 20 s to stop a process that does not answer

    async def _release(self) -> None:
        await super()._release()
        await stop_procs(self._procs)


class RemoteProcess(ActorProcess):
    """A Monarch proc of one process on another host, with one actor in it."""

    def __init__(self, order: ActorOrder, procs: Any, host: RemoteHost, observer: Any) -> None:
        super().__init__(order, 0)
        self._procs, self._body = procs, procs.spawn(_plain(order.name), MonarchBody)
        self._host, self._observer = host, observer
        self.started = 0
        """The start time of the process there."""
        self._lost = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def make(self, recipe: bytes) -> None:
        """See `ActorProcess.make`. Raises `ActorHostAway` if that is why."""
        try:
            self.pid, self.started = await self.ping(_IDENTITY_SECONDS)
            self._start(self._observe())
            await super().make(recipe)
        except (ActorDied, EndpointTimeout, ActorStartFailed) as error:
            self._host.check(self.name)
            if isinstance(error, ActorStartFailed):
                raise
            raise ActorStartFailed(self.name, f"its host {self.host} does not say its pid") from None

    def kill(self) -> None:
        """See `ActorProcess.kill`. One that its host does not kill in time is given up."""
        if self.alive:
            self._start(self._kill())

    def lose(self, why: str) -> None:
        """Its host is away: it has ended, whatever it does there. Monarch would wait long for that host to end it."""
        self._lost = True
        self._died(why)

    def _send(self, request: bytes, answer: asyncio.Future[bytes]) -> None:
        _ask_body(self._body, request, answer, self.kill)

    async def _release(self) -> None:
        for task in self._tasks:
            task.cancel()
        if not self._lost:
            await stop_procs(self._procs)

    async def _observe(self) -> None:
        try:
            how = str(await self._observer.watch.call_one(self.pid))
        except Exception as error:
            how = f"its host {self.host} cannot be reached: {error}"
        self._died(how)

    async def _kill(self) -> None:
        if not self.pid:  # it never said which process it is: Monarch ends it
            return self._died("it was given up before it was ready")
        try:
            async with asyncio.timeout(_KILL_SECONDS):
                await self._observer.kill.call_one(self.pid, self.started)
                await self._released.wait()
        except Exception as error:
            self._died(f"its host {self.host} did not end it: {type(error).__name__}: {error}")

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class MonarchEngine(Engine):
    """Starts actors in procs of Monarch; see `Engine`. A `host` is the address of a `monarch_host`, as tcp://10.0.0.2:26600.

    `listen` is the address where other hosts reach this process, needed if there are any; what Monarch listens on stays
    for the life of the process. A host that has not answered for `silence` seconds is away, its processes with it.
    """

    def __init__(
        self,
        logs: Path | None = None,
        preload: tuple[str, ...] = (),
        listen: str | None = None,
        silence: float = 5.0,
    ) -> None:
        self._listens = _use_monarch(listen)
        self.silence = silence
        super().__init__(logs, preload)
        self._forks: Forks | None = None
        self._hosts: dict[str, RemoteHost] = {}

    def host_identity(self, host: str) -> str:
        """See `Engine.host_identity`."""
        return self._hosts[host].identity if host in self._hosts else super().host_identity(host)

    def lose_host(self, host: RemoteHost, why: str) -> set[tuple[int, int]]:
        """End what runs on a host that is away, and tell so. The processes, and when they started."""
        lost = {each for each in self._processes if isinstance(each, RemoteProcess) and each.host == host.address}
        running = {(each.pid, each.started) for each in lost if each.pid and each.alive}
        for each in lost:
            each.lose(f"its host {host.address} is away: {why}")
        for told in self._on_host_away:
            told(host.identity)
        return running

    async def close(self) -> None:
        """See `Engine.close`. Monarch itself stays, with its threads and sockets, until this process ends."""
        await super().close()
        await asyncio.gather(*[each.close() for each in self._hosts.values()])
        self._hosts.clear()
        if self._forks is not None:
            await self._forks.close()
            self._forks = None

    async def _process(self, order: ActorOrder) -> ActorProcess:
        if order.host:
            return await self._process_elsewhere(order)
        if self._forks is None:
            self._forks = Forks()
            await self._forks.start()
        token = secrets.token_hex(16)
        expected = self._forks.expect(token, partial(self._start_proc, order))
        procs = self.spawn_procs(monarch_actor.this_host(), order.name, {}, token, self._forks.path)
        try:
            async with asyncio.timeout(_START_SECONDS):
                child = await expected
        except BaseException as error:
            await asyncio.shield(stop_procs(procs))
            if isinstance(error, TimeoutError):
                raise StartFailed(f"Monarch did not start it within {_START_SECONDS:.3g} s") from None
            raise
        return MonarchProcess(order, child, procs)

    async def _process_elsewhere(self, order: ActorOrder) -> RemoteProcess:
        if order.python is not None:
            raise StartFailed(f"python={order.python!r} cannot be chosen on another host: {order.host}")
        if not self._listens:
            raise StartFailed(f"{order.host} cannot reach this process: MonarchEngine(listen=ADDRESS)")
        host = self._hosts.setdefault(order.host, RemoteHost(order.host, self))
        return await host.process(order, {PRELOAD: ",".join(self._preload), **order.environ})

    def spawn_procs(self, mesh: Any, name: str, environ: Mapping[str, str], token: str, path: str = "") -> Any:
        """Have Monarch start one process on a host: a proxy, which asks for a fork there."""
        command = BootstrapCommand(sys.executable, None, proxy_command(token, path), dict(environ))
        return mesh.spawn_procs(per_host={"replica": 1}, name=_plain(name), bootstrap_command=command)

    def _start_proc(self, order: ActorOrder, proxy: ProcessProxy) -> ChildProcess:
        environ = {**proxy.environ, **order.environ}
        return self._spawn(order, become_proc, "monarch._src.actor.bootstrap_main", environ)


class RemoteHost:
    """A host that runs `holdfast.rl.actors.monarch_host`. It is away when it did not answer for the time of silence.

    `identity` is what `this_host` is there.
    """

    def __init__(self, address: str, engine: MonarchEngine) -> None:
        self.address, self.identity, self.engine = address, "", engine
        self._at = ""
        """Monarch's address there; empty until the host was reached."""
        self._mesh: Any = None
        self._observer: Any = None
        self._observer_procs: Any = None
        self._away = ""
        self._unfenced: set[tuple[int, int]] = set()
        self._lock = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    async def process(self, order: ActorOrder, environ: Mapping[str, str]) -> RemoteProcess:
        """A new process there. Raises `ActorHostAway`."""
        async with self._lock:
            self.check(order.name)
            if not self._at:
                try:
                    await self._attach(_START_SECONDS)
                except Exception as error:
                    why = "it did not answer" if isinstance(error, TimeoutError) else str(error)
                    raise ActorHostAway(order.name, self.address, why) from error
                self._watching = asyncio.create_task(self._watch())
        procs = self.engine.spawn_procs(self._mesh, order.name, environ, secrets.token_hex(16))
        return RemoteProcess(order, procs, self, self._observer)

    def check(self, name: str) -> None:
        """Raise `ActorHostAway` if it is away."""
        if self._away:
            raise ActorHostAway(name, self.address, self._away)

    async def close(self) -> None:
        """End the observer. The host stays."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            if not self._away:
                await stop_procs(self._observer_procs)

    async def _attach(self, seconds: float) -> None:
        """Attach the host, and start an observer there. Raises TimeoutError, ValueError, or what Monarch does."""
        async with asyncio.timeout(seconds):
            while True:  # it may be about to start
                try:
                    at = await whereabouts(self.address)
                    break
                except OSError:
                    await asyncio.sleep(_LOOK_SECONDS)
            mesh = monarch_actor.attach_to_workers(ca="trust_all_connections", workers=[at])
            procs = self.engine.spawn_procs(mesh, "observer", {}, secrets.token_hex(16))
            observer = procs.spawn("observer", HostObserver)
            try:
                identity = str(await observer.beat.call_one())
            except BaseException:
                await asyncio.shield(stop_procs(procs))
                raise
        if identity != self.identity:  # the machine was started again: what ran there is gone
            self._unfenced.clear()
        self._at, self._mesh, self.identity = at, mesh, identity
        self._observer, self._observer_procs = observer, procs

    async def _watch(self) -> None:
        while True:
            await self._until_silent()
            self._away = f"it has answered no beat for {self.engine.silence:.3g} s"
            self._unfenced |= self.engine.lose_host(self, self._away)
            while self._away:
                await asyncio.sleep(_LOOK_SECONDS)
                with contextlib.suppress(Exception):
                    await self._take_back()

    async def _until_silent(self) -> None:
        """Return once the host has answered no beat for the time of silence.

        Missed beats are counted, not seconds: a pause of this process is not taken for one of the host.
        """
        missed, interval, time = 0, self.engine.silence / _BEATS, asyncio.get_running_loop().time
        while missed < _BEATS:
            began, pause = time(), min(interval, 0.25)
            try:
                async with asyncio.timeout(interval):
                    await self._observer.beat.call_one()
                missed = 0
            except Exception:  # Monarch may say at once that it cannot be reached
                missed, pause = missed + 1, interval
            await asyncio.sleep(began + pause - time())

    async def _take_back(self) -> None:
        """Use the host again if it answers; before, kill what it still has of the processes that were given up.

        Its old observer never answers if it was started again: then it has another address, and gets another one.
        """
        async with asyncio.timeout(self.engine.silence):
            at = await whereabouts(self.address)
            if at == self._at:
                await self._observer.beat.call_one()
        before = self._observer_procs
        if at != self._at:
            await self._attach(_ATTACH_SECONDS)
        try:
            async with asyncio.timeout(_KILL_SECONDS):
                for pid, started in tuple(self._unfenced):
                    await self._observer.kill.call_one(pid, started)
                    self._unfenced.discard((pid, started))
            self._away = ""
        finally:  # last: it may take all of its time where the old observer is gone
            if before is not self._observer_procs:
                await stop_procs(before)


async def stop_procs(procs: Any, seconds: float = _STOP_SECONDS) -> None:
    """Have Monarch forget procs, bounded: it has its own words for one that is gone already.

    Monarch stops them in a task of the loop that awaits it, and cancelling the wait does not end that task. So the loop
    is another one, which cancels all of its tasks when it ends.
    """

    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await procs.stop()

    with contextlib.suppress(Exception):
        await asyncio.to_thread(asyncio.run, bounded())


def _ask_body(body: Any, request: bytes, answer: asyncio.Future[bytes], kill: Callable[[], None]) -> None:
    """Call the one endpoint. A process that Monarch cannot reach is killed: its end, when seen, ends the call."""

    def take(told: asyncio.Future[bytes]) -> None:
        if told.cancelled():
            return
        if (error := told.exception()) is not None:
            _log.debug("Monarch cannot reach an actor, so it is killed: %s", error)
            kill()
        elif not answer.done():
            answer.set_result(told.result())

    told = body.ask.call_one(request).as_asyncio()
    told.add_done_callback(take)
    answer.add_done_callback(lambda _: told.cancel())


def _plain(name: str) -> str:
    """A name that Monarch accepts."""
    return re.sub(r"\W", "_", name)


_listening: list[str | None] = []
"""What Monarch listens on in this process, once an engine was made."""


def _use_monarch(listen: str | None) -> bool:
    """Have Monarch listen on an address, for the life of this process; returns whether other hosts reach it."""
    if not _listening:
        if listen is not None:
            listen_on(listen)
        _listening.append(listen)
        # An unhandled fault would end this process: pidfds have told of the death before.
        monarch_actor.unhandled_fault_hook = lambda failure: _log.debug("Monarch: %s", failure)
    [before] = _listening
    if listen not in (None, before):
        raise NoEngine(f"Monarch listens on {before or 'this host alone'} in this process already, not {listen}")
    return before is not None
