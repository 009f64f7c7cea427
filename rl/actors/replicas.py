"""The replicas of a service: their options, processes and heartbeats, their replacement, and the choice for a call."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import xxhash

from holdfast.comms.errors import HoldfastError, again, describe
from holdfast.comms.transport.liveness import is_stopped, read_proc_stat
from holdfast.rl.actors.engine import ActorProcess, Engine
from holdfast.rl.actors.errors import (
    AWAY_SECONDS,
    ActorDied,
    ActorHostAway,
    ActorProcessLost,
    EndpointTimeout,
    Overloaded,
    ServiceClosed,
    ServiceFailed,
)

Health = Literal["starting", "ready", "draining", "lost"]
Policy = Literal["least_loaded", "round_robin"]

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.05, 5.0
_STOP_SECONDS = 10.0
_STOPPED = ([b"T"], [b"t"])
_PING_SECONDS = 1.0
"""Seconds after an answered ping until the next one, if no process is stopped; less if `silence` is short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """How a service runs its actor. Raises ValueError for what cannot be."""

    num_replicas: int = 1
    procs: int = 1
    """Processes of a replica. All of them do each call; its result is that of the first."""
    engine: Engine | None = None
    """None: the engine in use (`async with engine`)."""
    name: str = ""
    python: str | None = None
    """Another interpreter for the replicas."""
    hosts: tuple[str, ...] = ()
    """Addresses of hosts, which replicas are spread over; none: this host."""
    environ: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[ServiceReplica], Awaitable[None]] | None = None
    """Awaited for each new replica before it serves: it has a `name`, and `call(method, ...)`."""
    observer: Callable[[ReplicaEvent], None] | None = None
    concurrency: int = 16
    """Calls that a replica has at a time."""
    queue: int = 256
    """Calls that wait for a replica; one more is refused."""
    timeout: float = 600.0
    """Seconds in which a call must find a replica and be answered, with all its tries."""
    deadline: float | None = None
    """Seconds after which a call hangs, so that its replica is replaced; an endpoint's own deadline goes before."""
    tries: int = 3
    """Replicas that an idempotent call is given to, one after the other."""
    heartbeat: float = 0.25
    """Seconds between looks at the processes. A ping follows when one is stopped, and after a second without any."""
    silence: float = 5.0
    """Seconds without an answer to pings after which a replica is replaced; a stopped one is found at once."""
    start_failures: int = 5
    """Failures to start, one after the other, after which the service is given up."""
    drain: float = 60.0
    """Seconds that a replica may take to end its calls and sessions when the service is scaled down."""

    def __post_init__(self) -> None:
        for name in ("num_replicas", "procs", "concurrency", "queue", "tries", "start_failures"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: give 1 or more")
        for name in ("timeout", "heartbeat", "silence", "drain"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: give seconds, more than 0")
        if self.deadline is not None and not self.deadline > 0:
            raise ValueError(f"deadline={self.deadline!r}: give seconds, more than 0, or None")


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A replica: the place `slot` of its service, and the processes in it now.

    `load` counts its calls in flight and open sessions, `restarts` how often the slot was filled again.
    """

    name: str
    slot: int
    host: str
    pids: tuple[int, ...]
    health: Health
    load: int
    restarts: int
    version: int | None = None


class ReplicaEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a replica, at `time` (monotonic seconds).

    "took_over": it answered a call that the replica `detail` had before it was lost; the call took `seconds` in all.
    """

    time: float
    service: str
    replica: str
    slot: int
    kind: Literal["ready", "lost", "start_failed", "stopped", "took_over"]
    detail: str = ""
    seconds: float = 0.0


class ServiceReplica:
    """The processes that one slot of a service has now, on the host that is `moves` after the slot's own.

    `on_lost(replica, served)` is called at most once, with whether it was in service.
    """

    def __init__(
        self,
        name: str,
        slot: int,
        options: ServiceOptions,
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
        self._on_lost = on_lost
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
        """Start all processes, and prepare it. Raises `ActorStartFailed`, or what `prepare` does."""
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
        self._beating = asyncio.create_task(self._beat())
        if self.options.prepare is not None:
            async with asyncio.timeout(self.options.timeout):
                await self.options.prepare(self)
        if self.health == "lost":
            raise HoldfastError(f"replica {self.name} was lost: {self.why}")

    async def call(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call all processes; the result is that of the first. One that hangs costs the replica.

        Raises what `ActorProcess.call` does.
        """
        calls = [each.call(method, *args, timeout=timeout, **kwargs) for each in self._members]
        try:
            return await calls[0] if len(calls) == 1 else (await asyncio.gather(*calls))[0]
        except EndpointTimeout:
            self.lose(f"{method} hangs: it was not answered within {timeout:.3g} s")
            raise

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteChoice:
    """How to choose: by `policy`, or with a `key` always the same replica while that is ready."""

    policy: Policy = "least_loaded"
    key: Hashable = None
    avoid: frozenset[str] = frozenset()
    """Replicas that are chosen only if there is no other."""


class Router:
    """Chooses the replica for a call: the next in turn, the least loaded, or that of a key."""

    def __init__(self) -> None:
        self._last = -1
        self._chosen = 0

    def choose(self, replicas: Sequence[ServiceReplica], choice: RouteChoice) -> ServiceReplica | None:
        """The replica for a call, with one more call in flight; None if the call has to wait."""
        ready = [each for each in replicas if each.health == "ready"]
        ready = [each for each in ready if each.name not in choice.avoid] or ready
        free = [each for each in ready if each.routable]
        if choice.key is not None:
            home = max(ready, key=lambda each: affinity(choice.key, each.slot), default=None)
            found = home if home in free else None
        elif choice.policy == "round_robin":
            later = [each for each in free if each.slot > self._last]
            found = min(later or free, key=lambda each: each.slot, default=None)
            self._last = found.slot if found is not None else self._last
        else:
            found = min(free, key=lambda each: (each.load, each.used), default=None)
        if found is not None:
            self._chosen += 1
            found.used = self._chosen
            found.outstanding += 1
        return found


def affinity(key: Hashable, slot: int) -> int:
    """Rendezvous hashing: without a slot, only its own keys move."""
    return xxhash.xxh3_64_intdigest(repr((key, slot)).encode())


@dataclass(slots=True, eq=False)
class Slot:
    """A place for a replica, filled again whenever that is lost."""

    number: int
    replica: ServiceReplica
    fillings: int = 0
    moves: int = 0
    """How often its host was away when a replica was to start there."""
    leaving: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is ready for the first time, and when the service has failed."""
    task: asyncio.Task[None] | None = None


class ReplicaSet:
    """The replicas of one service: keeps them alive, and gives them calls. Used in one event loop."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        actor: type[Any],
        options: ServiceOptions,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.name, self.options = name, options
        self.calls = self.retried = self.lost = self.overloaded = 0
        self.slots: dict[int, Slot] = {}
        self._engine, self._actor, self._args, self._kwargs = engine, actor, args, kwargs
        self._router = Router()
        self._waiting: dict[asyncio.Future[ServiceReplica], RouteChoice] = {}
        self._over: HoldfastError | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._scaling = asyncio.Lock()

    @property
    def replicas(self) -> list[ServiceReplica]:
        """The replicas of all slots, in their order."""
        return [self.slots[number].replica for number in sorted(self.slots)]

    @property
    def queued(self) -> int:
        """How many calls wait for a replica."""
        return len(self._waiting)

    def check(self) -> None:
        """Raise `ServiceFailed` or `ServiceClosed` if the service is over."""
        if self._over is not None:
            raise again(self._over)

    async def scale(self, count: int) -> None:
        """Start replicas, or let the last ones end their calls and leave. Raises `ServiceFailed`."""
        async with self._scaling:
            self.check()
            leaving = [self.slots[number] for number in sorted(self.slots)[count:]]
            missing = [number for number in range(count) if number not in self.slots]
            for number in missing:
                slot = self.slots[number] = Slot(number, self._new(number, 0, 0))
                slot.task = asyncio.create_task(self._keep(slot))
            await asyncio.gather(*[self._drain(slot) for slot in leaving])
            for number in missing:
                await self.slots[number].ready.wait()
            self.check()

    async def acquire(self, choice: RouteChoice) -> ServiceReplica:
        """Wait for a replica; the caller must `release` it. Raises `Overloaded`."""
        self.check()
        found = self._router.choose(self.replicas, choice)
        if found is not None:
            return found
        if len(self._waiting) >= self.options.queue:
            self.overloaded += 1
            raise Overloaded(self.name, len(self._waiting))
        waiting: asyncio.Future[ServiceReplica] = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = choice
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self.release(waiting.result())
            raise
        finally:
            self._waiting.pop(waiting, None)

    def release(self, replica: ServiceReplica) -> None:
        """Take back a replica after a call."""
        replica.outstanding -= 1
        self.settle()

    def settle(self) -> None:
        """Give replicas to waiting calls, as far as there are free ones; wake what waits for idle ones."""
        self._idle.set()
        for waiting, choice in tuple(self._waiting.items()):
            if not any(each.routable for each in self.replicas):
                return
            if not waiting.done() and (found := self._router.choose(self.replicas, choice)) is not None:
                waiting.set_result(found)
                del self._waiting[waiting]

    def took_over(self, replica: ServiceReplica, lost: str, seconds: float) -> None:
        """Tell that a replica answered a call, which a lost one had before."""
        self._tell(replica, "took_over", lost, seconds)

    async def close(self) -> None:
        """End all replicas; waiting calls raise `ServiceClosed`. Idempotent."""
        self._end(ServiceClosed(self.name))
        tasks = [slot.task for slot in self.slots.values() if slot.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        slots, self.slots = tuple(self.slots.values()), {}
        await asyncio.gather(*[slot.replica.stop() for slot in slots])
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _keep(self, slot: Slot) -> None:
        failures, since = 0, time.monotonic()
        while not slot.leaving:
            replica = slot.replica = self._new(slot.number, slot.fillings, slot.moves)
            slot.fillings += 1
            try:
                await replica.start(self._engine, self._actor, self._args, self._kwargs)
            except Exception as error:
                self._tell(replica, "start_failed", describe(error))
                await replica.stop()
                if isinstance(error, ActorHostAway):
                    slot.moves += 1
                    if slot.moves % len(self.options.hosts):
                        continue
                failures += 1
                retryable = (
                    isinstance(error, HoldfastError) and error.retryable and not isinstance(error, ActorProcessLost)
                )
                passing = retryable and time.monotonic() - since < AWAY_SECONDS
                if failures >= self.options.start_failures and not passing:
                    self._end(ServiceFailed(self.name, failures, describe(error)))
                    return
                await asyncio.sleep(min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2 ** min(failures - 1, 10)))
                continue
            failures = 0
            replica.health = "ready"
            self._tell(replica, "ready")
            slot.ready.set()
            self.settle()
            await replica.gone.wait()
            since = time.monotonic()
            self._start(replica.stop())

    async def _drain(self, slot: Slot) -> None:
        """Let a replica end its calls, then stop it."""
        slot.leaving = True
        if slot.replica.health == "ready":
            slot.replica.health = "draining"
            deadline = time.monotonic() + self.options.drain
            while slot.replica.load and slot.replica.health == "draining" and time.monotonic() < deadline:
                self._idle.clear()
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await self._idle.wait()
                except TimeoutError:
                    break
        if slot.task is not None:
            slot.task.cancel()
            await asyncio.gather(slot.task, return_exceptions=True)
        await slot.replica.stop()
        self._tell(slot.replica, "stopped")
        self.slots.pop(slot.number, None)

    def _new(self, number: int, filling: int, moves: int) -> ServiceReplica:
        name = f"{self.name}-{number}" + (f".{filling}" if filling else "")
        return ServiceReplica(name, number, self.options, self._was_lost, moves)

    def _was_lost(self, replica: ServiceReplica, served: bool) -> None:
        if served:
            self.lost += 1
            self._tell(replica, "lost", replica.why)
        self._idle.set()

    def _end(self, error: HoldfastError) -> None:
        self._over = self._over or error
        for waiting in tuple(self._waiting):
            if not waiting.done():
                waiting.set_exception(again(self._over))
        for slot in self.slots.values():
            slot.ready.set()

    def _tell(
        self,
        replica: ServiceReplica,
        kind: Literal["ready", "lost", "start_failed", "stopped", "took_over"],
        detail: str = "",
        seconds: float = 0.0,
    ) -> None:
        if self.options.observer is not None:
            self.options.observer(
                ReplicaEvent(
                    time=time.monotonic(),
                    service=self.name,
                    replica=replica.name,
                    slot=replica.slot,
                    kind=kind,
                    detail=detail,
                    seconds=seconds,
                )
            )

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
