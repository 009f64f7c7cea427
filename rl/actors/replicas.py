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

Health = Literal["starting", "ready", "lost"]

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.05, 5.0
_STOP_SECONDS = 10.0
_STOPPED = ([b"T"], [b"t"])
_PING_SECONDS = 1.0
"""Seconds after an answered ping until the next one, if no process is stopped; less if `silence` is short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """How a service runs its actor. Raises ValueError for what cannot be."""

    num_replicas: int = 1
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

    def __post_init__(self) -> None:
        for name in ("num_replicas", "concurrency", "queue", "tries", "start_failures"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: give 1 or more")
        for name in ("timeout", "heartbeat", "silence"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: give seconds, more than 0")
        if self.deadline is not None and not self.deadline > 0:
            raise ValueError(f"deadline={self.deadline!r}: give seconds, more than 0, or None")


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A replica: the place `slot` of its service, and the process in it now; `pid` is 0 until it is started.

    `load` counts its calls in flight and open sessions, `restarts` how often the slot was filled again.
    """

    name: str
    slot: int
    host: str
    pid: int
    health: Health
    load: int
    restarts: int
    version: int | None = None


ReplicaEventKind = Literal["ready", "lost", "start_failed", "took_over"]


class ReplicaEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a replica, which is process `pid` of `host`, at `time` (monotonic seconds).

    "ready": it serves, `seconds` after its start was begun. "took_over": it answered a call that the replica `detail`
    had before it was lost; the call took `seconds` in all. "start_failed" with `passing`: the reason passes, so it is
    not counted.
    """

    time: float
    service: str
    replica: str
    slot: int
    kind: ReplicaEventKind
    host: str = ""
    pid: int = 0
    detail: str = ""
    seconds: float = 0.0
    passing: bool = False


class ServiceReplica:
    """The process that one slot of a service has now, on the host that is `moves` after the slot's own.

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
        self.began = time.monotonic()
        self.gone = asyncio.Event()
        """Set when it is lost."""
        self._on_lost = on_lost
        self._process: ActorProcess | None = None
        self._beating: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Its process; 0 until there is one."""
        return 0 if self._process is None else self._process.pid

    @property
    def load(self) -> int:
        """Calls in flight and open sessions."""
        return self.outstanding + self.sessions

    @property
    def routable(self) -> bool:
        """Whether it may be given another call."""
        return self.health == "ready" and self.outstanding < self.options.concurrency

    async def start(self, engine: Engine, actor: type[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Start the process, and prepare it. Raises `ActorStartFailed`, or what `prepare` does."""
        self._process = await engine.start(
            self.name,
            actor,
            *args,
            on_exit=self.lose,
            environ=self.options.environ,
            python=self.options.python,
            host=self.host or None,
            **kwargs,
        )
        self._beating = asyncio.create_task(self._beat())
        if self.options.prepare is not None:
            async with asyncio.timeout(self.options.timeout):
                await self.options.prepare(self)
        if self.health == "lost":
            raise HoldfastError(f"replica {self.name} was lost: {self.why}")

    async def call(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call the process. A call that hangs costs the replica. Raises what `ActorProcess.call` does."""
        assert self._process is not None, "it was started"
        try:
            return await self._process.call(method, *args, timeout=timeout, **kwargs)
        except EndpointTimeout:
            self.lose(f"{method} hangs: it was not answered within {timeout:.3g} s")
            raise

    def lose(self, why: str) -> None:
        """Kill what is left of it, and have it replaced. Does nothing to one that is stopped or lost."""
        if self.health == "lost":
            return
        served = self.health != "starting"
        self.health, self.why = "lost", why
        if self._process is not None:
            self._process.kill()
        self.gone.set()
        self._on_lost(self, served)

    async def stop(self) -> None:
        """End its process, in good order unless it is lost. Idempotent."""
        if self._beating is not None:
            self._beating.cancel()
        patience = 0.0 if self.health == "lost" else _STOP_SECONDS
        self.health, self.why = "lost", self.why or "it was stopped"
        if self._process is not None:
            await self._process.stop(patience)

    def status(self, restarts: int) -> ReplicaStatus:
        """What is known of it now."""
        return ReplicaStatus(
            name=self.name,
            slot=self.slot,
            host=self.host,
            pid=self.pid,
            health=self.health,
            load=self.load,
            restarts=restarts,
        )

    async def _beat(self) -> None:
        """Look at the process again and again; lose the replica when it is stopped, or silent for too long.

        A ping costs more than anything else that an idle run does. So every interval has a look at a process of this
        host, which finds one that is stopped, and a ping follows a stop, or `_PING_SECONDS` without any.
        """
        assert self._process is not None, "it was started"
        interval, silence = self.options.heartbeat, self.options.silence
        calm = min(_PING_SECONDS, silence / 5)
        missed, most = 0, max(1, math.ceil((silence - calm) / interval))
        answered = -math.inf
        while self.health != "lost":
            if not missed and time.monotonic() - answered < calm and not self._is_stopped():
                await asyncio.sleep(interval)
                continue
            try:
                await self._process.ping(interval)
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
        """Whether the kernel says that the process is stopped; one in a frozen cgroup is found by its silence."""
        assert self._process is not None, "it was started"
        try:
            return not self.host and read_proc_stat(self._process.pid)[:1] in _STOPPED
        except OSError:  # this process has no free descriptor
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteChoice:
    """How to choose: the least loaded, or with a `key` always the same replica while that is ready."""

    key: Hashable = None
    avoid: frozenset[str] = frozenset()
    """Replicas that are chosen only if there is no other."""


def choose(replicas: Sequence[ServiceReplica], choice: RouteChoice) -> ServiceReplica | None:
    """The replica for a call, with one more call in flight; None if the call has to wait."""
    ready = [each for each in replicas if each.health == "ready"]
    ready = [each for each in ready if each.name not in choice.avoid] or ready
    free = [each for each in ready if each.routable]
    if choice.key is not None:
        home = max(ready, key=lambda each: affinity(choice.key, each.slot), default=None)
        found = home if home in free else None
    else:
        found = min(free, key=lambda each: (each.load, each.used), default=None)
    if found is not None:
        found.used = 1 + max(each.used for each in replicas)
        found.outstanding += 1
    return found


def affinity(key: Hashable, slot: int) -> int:
    """Rendezvous hashing: without a slot, only its own keys move."""
    return xxhash.xxh3_64_intdigest(repr((key, slot)).encode())


def _passes(error: Exception) -> bool:
    """Whether a start may succeed later, as nothing ended the process."""
    return isinstance(error, HoldfastError) and error.retryable and not isinstance(error, ActorProcessLost)


@dataclass(slots=True, eq=False)
class Slot:
    """A place for a replica, filled again whenever that is lost."""

    number: int
    replica: ServiceReplica
    fillings: int = 0
    moves: int = 0
    """How often its host was away when a replica was to start there."""
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
        self._waiting: dict[asyncio.Future[ServiceReplica], RouteChoice] = {}
        self._over: HoldfastError | None = None
        self._background: set[asyncio.Task[None]] = set()

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

    async def start(self) -> None:
        """Start all replicas. Raises `ServiceFailed`."""
        for number in range(self.options.num_replicas):
            slot = self.slots[number] = Slot(number, self._new(number, 0, 0))
            slot.task = asyncio.create_task(self._keep(slot))
        for slot in tuple(self.slots.values()):
            await slot.ready.wait()
        self.check()

    async def acquire(self, choice: RouteChoice) -> ServiceReplica:
        """Wait for a replica; the caller must `release` it. Raises `Overloaded`."""
        self.check()
        found = choose(self.replicas, choice)
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
        """Give replicas to waiting calls, as far as there are free ones."""
        for waiting, choice in tuple(self._waiting.items()):
            if not any(each.routable for each in self.replicas):
                return
            if not waiting.done() and (found := choose(self.replicas, choice)) is not None:
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
        while True:
            replica = slot.replica = self._new(slot.number, slot.fillings, slot.moves)
            slot.fillings += 1
            try:
                await replica.start(self._engine, self._actor, self._args, self._kwargs)
            except Exception as error:
                await replica.stop()
                away = isinstance(error, ActorHostAway)
                slot.moves += away
                elsewhere = away and slot.moves % len(self.options.hosts) != 0
                passing = elsewhere or (_passes(error) and time.monotonic() - since < AWAY_SECONDS)
                failures += not elsewhere
                over = failures >= self.options.start_failures and not passing
                if over:
                    self._end(ServiceFailed(self.name, failures, describe(error)))
                self._tell(replica, "start_failed", describe(error), passing=passing)
                if over:
                    return
                if elsewhere:
                    continue
                await asyncio.sleep(min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2 ** min(failures - 1, 10)))
                continue
            failures = 0
            replica.health = "ready"
            self._tell(replica, "ready", seconds=time.monotonic() - replica.began)
            slot.ready.set()
            self.settle()
            await replica.gone.wait()
            since = time.monotonic()
            self._start(replica.stop())

    def _new(self, number: int, filling: int, moves: int) -> ServiceReplica:
        name = f"{self.name}-{number}" + (f".{filling}" if filling else "")
        return ServiceReplica(name, number, self.options, self._was_lost, moves)

    def _was_lost(self, replica: ServiceReplica, served: bool) -> None:
        if served:
            self.lost += 1
            self._tell(replica, "lost", replica.why)

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
        kind: ReplicaEventKind,
        detail: str = "",
        seconds: float = 0.0,
        passing: bool = False,
    ) -> None:
        if self.options.observer is not None:
            self.options.observer(
                ReplicaEvent(
                    time=time.monotonic(),
                    service=self.name,
                    replica=replica.name,
                    slot=replica.slot,
                    kind=kind,
                    host=replica.host,
                    pid=replica.pid,
                    detail=detail,
                    seconds=seconds,
                    passing=passing,
                )
            )

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
