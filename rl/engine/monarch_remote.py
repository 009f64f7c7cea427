"""Actors on other hosts. This process has no pidfd of them, so an observer there sees their ends and kills them.

The observer also beats for its host. When that is silent for too long, all of its processes have ended as far as this
process is concerned. If the host is heard again, or another one listens at its address, they are killed there before it
is given others.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from holdfast.ft.processes.fork_shim import shim_command
from holdfast.rl.engine.calls_in_flight import START_SECONDS
from holdfast.rl.engine.engine import OnExit
from holdfast.rl.engine.errors import ActorStartFailed, HostAway
from holdfast.rl.engine.monarch_calls import MonarchCalls, plain_name, stop_procs
from holdfast.rl.engine.monarch_host import whereabouts

_KILL_SECONDS = 5.0
_PID_SECONDS = 30.0
_BEATS = 4
"""The unanswered beats in a row, all within the time of silence, after which a host is away."""
_ATTACH_SECONDS = 20.0
"""Seconds in which a host that was started again must answer."""
_LOOK_SECONDS = 0.25
"""Seconds between two looks whether a host was started."""


class _Attached(NamedTuple):
    """The observer on a host: its procs, itself, and what `this_host` is there; `at` is Monarch's address."""

    at: str
    mesh: Any
    procs: Any
    observer: Any
    identity: str


class RemoteProcess(MonarchCalls):
    """A Monarch proc of one process on another host, with one actor in it."""

    def __init__(self, name: str, kind: type[Any], host: RemoteHost, procs: Any, on_exit: OnExit | None) -> None:
        super().__init__(name, kind, 0, host.address, on_exit, procs)
        self._observer: Any = None
        self.started = 0
        """The start time of the process there."""
        self._host = host
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, observer: Any, recipe: bytes, timeout: float) -> None:
        """Make the actor, and have its process observed. Raises `ActorStartFailed`."""
        self._observer = observer
        await self._make(recipe, timeout)
        try:
            async with asyncio.timeout(_PID_SECONDS):
                self.pid, self.started = await self._body.pid.call_one()
        except TimeoutError:
            raise ActorStartFailed(self.name, f"its host {self.host} does not say its pid") from None
        self._start(self._observe())

    def kill(self) -> None:
        """See `ActorProcess.kill`. One that its host does not kill in time is given up."""
        if self.alive:
            self._start(self._kill())

    def lose(self, why: str) -> None:
        """Its host is away: it has ended, whatever it does there. Monarch would wait long for that host to end it."""
        if self.alive:
            self._ended(why)
            self._gone.set()

    async def _observe(self) -> None:
        try:
            how = str(await self._observer.watch.call_one(self.pid))
        except Exception as error:
            how = f"its host {self.host} cannot be reached: {error}"
        await self._over(how)

    async def _kill(self) -> None:
        if not self.pid:  # it never said which process it is: Monarch ends it
            return await self._over("it was given up before it was ready")
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
    """A host that runs `holdfast.rl.engine.monarch_host`. It is away when it has not answered for `silence` seconds.

    `on_away` is then called with what `this_host` was there.
    """

    def __init__(
        self, address: str, attach: Callable[[str], Any], command: Any, silence: float, on_away: Callable[[str], None]
    ) -> None:
        self.address, self.identity, self._on_away = address, "", on_away
        self._attach, self._command, self._silence = attach, command, silence
        self._attached: _Attached | None = None
        self._attaching: asyncio.Task[None] | None = None
        self._away = ""
        self._alive: set[RemoteProcess] = set()
        self._unfenced: set[tuple[int, int]] = set()
        self._lock = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    async def start(
        self, name: str, kind: type[Any], recipe: bytes, environ: Mapping[str, str], on_exit: OnExit | None
    ) -> RemoteProcess:
        """Start an actor there. Raises `ActorStartFailed`, `HostAway`."""
        attached = await self._reached(name)
        self._check(name)
        found = RemoteProcess(name, kind, self, self._spawn(attached.mesh, name, environ), on_exit)
        self._alive = {found, *(each for each in self._alive if each.alive)}
        try:
            await found.begin(attached.observer, recipe, START_SECONDS)
        except BaseException:
            self._alive.discard(found)
            await asyncio.shield(found.stop(0.0))
            self._check(name)
            raise
        return found

    async def close(self) -> None:
        """End the observer. The host stays."""
        for task in (self._watching, self._attaching):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._attached is not None and not self._away:
            await stop_procs(self._attached.procs)

    async def _reached(self, name: str) -> _Attached:
        """The observer there. Raises `HostAway` if the host does not answer."""
        async with self._lock:
            self._check(name)
            if self._attached is None:
                try:
                    self._attached = await self._attach_now(START_SECONDS)
                except Exception as error:
                    why = "it did not answer" if isinstance(error, TimeoutError) else str(error)
                    raise HostAway(name, self.address, why) from error
                self.identity = self._attached.identity
                self._watching = asyncio.create_task(self._watch())
        return self._attached

    async def _attach_now(self, seconds: float) -> _Attached:
        """Attach the host, and start an observer there. Raises TimeoutError, ValueError, or what Monarch does."""
        async with asyncio.timeout(seconds):
            while True:  # it may be about to start
                try:
                    at = await whereabouts(self.address)
                    break
                except OSError:
                    await asyncio.sleep(_LOOK_SECONDS)
            mesh = self._attach(at)
            procs = self._spawn(mesh, "observer", {})
            observer = procs.spawn("observer", _observer_type())
            try:
                return _Attached(at, mesh, procs, observer, str(await observer.beat.call_one()))
            except BaseException:
                await asyncio.shield(stop_procs(procs))
                raise

    def _check(self, name: str) -> None:
        if self._away:
            raise HostAway(name, self.address, self._away)

    async def _watch(self) -> None:
        """Beat for ever: counted, so that a pause of this process is not taken for one of the host."""
        missed, interval = 0, self._silence / _BEATS
        while True:
            asked = self._attached
            answered = asyncio.create_task(self._beat(interval))
            await asyncio.gather(answered, asyncio.sleep(min(interval, 0.25)))
            if self._attached is not asked:  # it was attached again meanwhile
                missed = 0
                continue
            missed = 0 if answered.result() else missed + 1
            if missed >= _BEATS and not self._away:
                self._lose(f"it has answered no beat for {self._silence:.3g} s")
                await self._cancel_attaching()
                self._attaching = asyncio.create_task(self._attach_again())
            elif self._away and not missed:
                await self._cancel_attaching()
                if self._away:
                    await self._take_back()

    async def _beat(self, seconds: float) -> bool:
        until = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(until):
                assert self._attached is not None
                await self._attached.observer.beat.call_one()
        except Exception:  # Monarch may say at once that it cannot be reached
            await asyncio.sleep(until - asyncio.get_running_loop().time())
            return False
        return True

    def _lose(self, why: str) -> None:
        self._away = why
        lost = [each for each in self._alive if each.alive]
        self._alive.clear()
        self._unfenced |= {(each.pid, each.started) for each in lost if each.pid}
        for each in lost:
            each.lose(f"its host {self.address} is away: {why}")
        self._on_away(self.identity)

    async def _take_back(self) -> None:
        """Kill what the host still has of the processes that were given up, then use it again."""
        assert self._attached is not None
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_KILL_SECONDS):
                for pid, started in tuple(self._unfenced):
                    await self._attached.observer.fence.call_one(pid, started)
                    self._unfenced.discard((pid, started))
                self._away = ""

    async def _attach_again(self) -> None:
        """While the host is away, look whether it was started again. Its old observer never answers then."""
        assert self._attached is not None
        while self._away:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(self._silence):
                    at = await whereabouts(self.address)
                if at != self._attached.at:
                    found = await self._attach_now(_ATTACH_SECONDS)
                    before, self._attached = self._attached, found
                    if found.identity != self.identity:  # the machine was started again: what ran there is gone
                        self._unfenced.clear()
                    self.identity = found.identity
                    await self._take_back()
                    await stop_procs(before.procs)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _cancel_attaching(self) -> None:
        if self._attaching is not None:
            self._attaching.cancel()
            await asyncio.gather(self._attaching, return_exceptions=True)

    def _spawn(self, mesh: Any, name: str, environ: Mapping[str, str]) -> Any:
        command = self._command(sys.executable, None, shim_command(secrets.token_hex(16)), dict(environ))
        return mesh.spawn_procs(per_host={"replica": 1}, name=plain_name(name), bootstrap_command=command)


def _observer_type() -> Any:
    from holdfast.rl.engine.monarch_actor import HostObserver

    return HostObserver
