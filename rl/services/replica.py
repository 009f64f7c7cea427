"""One replica of a service: its processes, its heartbeats, its calls in flight."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.comms.errors import HoldfastError
from holdfast.comms.transport.liveness import is_stopped, read_proc_stat
from holdfast.rl.actors.engine import ActorProcess, Engine
from holdfast.rl.actors.errors import ActorDied, EndpointTimeout
from holdfast.rl.services.options import ServiceOptions
from holdfast.rl.services.status import Health, ReplicaStatus

_STOP_SECONDS = 10.0
_STOPPED = ([b"T"], [b"t"])
_PING_SECONDS = 1.0
"""Seconds after an answered ping until the next one, if no process is stopped; less if `silence` is short."""


class ServiceReplica:
    """The processes that one slot of a service has now, on the host that is `moves` after the slot's own.

    `on_lost(replica, served)` is called at most once, with whether it was in service.
    """

    def __init__(
        self,
        name: str,
        slot: int,
        options: ServiceOptions,
        gpus: tuple[str, ...],
        on_lost: Callable[[ServiceReplica, bool], None],
        moves: int = 0,
    ) -> None:
        self.name, self.slot, self.options = name, slot, options
        self.host = options.hosts[(slot + moves) % len(options.hosts)] if options.hosts else ""
        self.health: Health = "starting"
        self.why = ""
        self.outstanding = self.sessions = self.used = 0
        self.gone = asyncio.Event()
        """Set when it is lost."""
        self._gpus, self._on_lost = gpus, on_lost
        self._members: list[ActorProcess] = []
        self._beating: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        """Calls in flight and open sessions."""
        return self.outstanding + self.sessions

    @property
    def routable(self) -> bool:
        """Whether it may be given another call."""
        return self.health == "ready" and self.outstanding < self.options.concurrency

    async def start(self, engine: Engine, actor: type[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Start all processes. Raises `ActorStartFailed`, and leaves none."""
        starting = [
            engine.start(
                self.name if self.options.procs == 1 else f"{self.name}-rank{rank}",
                actor,
                *args,
                on_exit=self.lose,
                environ=self._environ(rank),
                python=self.options.python,
                host=self.host or None,
                **kwargs,
            )
            for rank in range(self.options.procs)
        ]
        found = await asyncio.gather(*starting, return_exceptions=True)
        self._members = [each for each in found if not isinstance(each, BaseException)]
        for each in found:
            if isinstance(each, BaseException):
                raise each
        if self.health == "lost":
            raise HoldfastError(f"replica {self.name} was lost: {self.why}")
        self._beating = asyncio.create_task(self._beat())

    async def call(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call all processes; the result is that of the first. Raises what the engine's `call` does."""
        if len(self._members) == 1:
            return await self._members[0].call(method, *args, timeout=timeout, **kwargs)
        calls = [each.call(method, *args, timeout=timeout, **kwargs) for each in self._members]
        return (await asyncio.gather(*calls))[0]

    def lose(self, why: str) -> None:
        """Kill what is left of it, and have it replaced. Does nothing to one that is stopped or lost."""
        if self.health == "lost":
            return
        served = self.health != "starting"
        self.health, self.why = "lost", why
        for each in self._members:
            each.kill()
        self.gone.set()
        self._on_lost(self, served)

    async def stop(self) -> None:
        """End its processes, in good order unless it is lost. Idempotent."""
        if self._beating is not None:
            self._beating.cancel()
        patience = 0.0 if self.health == "lost" else _STOP_SECONDS
        self.health, self.why = "lost", self.why or "it was stopped"
        await asyncio.gather(*[each.stop(patience) for each in self._members])

    def status(self, restarts: int) -> ReplicaStatus:
        """What is known of it now."""
        return ReplicaStatus(
            name=self.name,
            slot=self.slot,
            host=self.host,
            pids=tuple(each.pid for each in self._members),
            health=self.health,
            load=self.load,
            restarts=restarts,
        )

    def _environ(self, rank: int) -> dict[str, str]:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.options.procs)}
        if self._gpus:
            own["CUDA_VISIBLE_DEVICES"] = self._gpus[rank]
        return {**own, **self.options.environ}

    async def _beat(self) -> None:
        """Look at all processes again and again; lose the replica when one is stopped, or silent for too long.

        A ping costs more than anything else that an idle run does. So every interval has a look at the processes of
        this host, which finds those that are stopped, and a ping follows a stop, or `_PING_SECONDS` without any.
        """
        interval, silence = self.options.heartbeat, self.options.silence
        calm = min(_PING_SECONDS, silence / 5)
        missed, most = 0, max(1, math.ceil((silence - calm) / interval))
        answered = -math.inf
        while self.health != "lost":
            if not missed and time.monotonic() - answered < calm and not self._is_stopped():
                await asyncio.sleep(interval)
                continue
            try:
                await asyncio.gather(*[each.ping(interval) for each in self._members])
            except EndpointTimeout as late:
                missed += 1
                if not self.host and is_stopped(late.pid):
                    self.lose(f"process {late.pid} is stopped, by SIGSTOP or a debugger")
                elif missed >= most:  # counted, so that a pause of this process is not taken for theirs
                    self.lose(f"process {late.pid} has answered no heartbeat for {silence:.3g} s")
            except ActorDied:
                return
            else:
                missed, answered = 0, time.monotonic()
                await asyncio.sleep(interval)

    def _is_stopped(self) -> bool:
        """Whether the kernel says that a process is stopped; one in a frozen cgroup is found by its silence."""
        try:
            return not self.host and any(read_proc_stat(each.pid)[:1] in _STOPPED for each in self._members)
        except OSError:  # this process has no free descriptor
            return False


def as_error(error: BaseException) -> HoldfastError:
    """A typed error for what a replica said."""
    return error if isinstance(error, HoldfastError) else HoldfastError(f"{type(error).__name__}: {error}")
