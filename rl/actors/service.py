"""A service: replicas of an actor behind `service.method.route(...)`, `.fanout(...)` and `service.session()`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import msgspec

from holdfast.comms.errors import HoldfastError, again, describe
from holdfast.comms.transport.liveness import is_stopped, read_proc_stat
from holdfast.rl.actors.engine import ActorProcess, Engine, current_engine, is_idempotent
from holdfast.rl.actors.errors import (
    ActorDied,
    ActorHostAway,
    ActorProcessLost,
    EndpointTimeout,
    NoReplica,
    Overloaded,
    ReplicaLost,
    ServiceClosed,
    ServiceFailed,
)

Health = Literal["starting", "ready", "lost"]

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.05, 5.0
_STOP_SECONDS = 10.0
_STOPPED = ([b"T"], [b"t"])
_AWAY_SECONDS = 30.0
"""Seconds for which processes are started again that fail by an error that passes, such as a register that is away."""
SILENCE = 5.0
_PING_SECONDS = 1.0
"""Seconds after an answered ping until the next one, if no process is stopped; less if `silence` is short."""


CALL_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """An actor's class, and how a service runs it. Raises ValueError for what cannot be."""

    actor: type[Any] = field(kw_only=False)
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
    timeout: float = CALL_SECONDS
    """Seconds in which a call must find a replica and be answered, with all its tries."""
    deadline: float | None = None
    """Seconds after which a call hangs, so that its replica is replaced."""
    tries: int = 3
    """Replicas that an idempotent call is given to, one after the other."""
    heartbeat: float = 0.25
    """Seconds between looks at the processes. A ping follows when one is stopped, and after a second without any."""
    silence: float = SILENCE
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

    async def as_service(self, *args: Any, **kwargs: Any) -> Service:
        """Start the service; each replica makes `actor(*args, **kwargs)`.

        Raises `ServiceFailed`, `NoEngine`, and leaves no process.
        """
        name = self.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", self.actor.__name__).lower()
        service = Service(self.engine or current_engine(), name, self, args, kwargs)
        try:
            await service._start()
        except BaseException:
            await asyncio.shield(service.close())
            raise
        return service


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the replica in a `slot` of its service; `pid` is 0 until it is started.

    `load` counts its calls in flight and open sessions, `restarts` how often the slot was filled again.
    """

    name: str
    slot: int
    host: str
    pid: int
    health: Health
    load: int
    restarts: int

    @property
    def ready(self) -> bool:
        """Whether it serves."""
        return self.health == "ready"


ReplicaEventKind = Literal["ready", "lost", "start_failed", "took_over"]


class ReplicaEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a replica at `time` (monotonic seconds).

    "ready": it serves, `seconds` after its start was begun. "took_over": it answered a call that the replica `detail`
    had before it was lost; the call took `seconds` in all. "start_failed" with `passing`: the reason passes, so it is
    not counted.
    """

    time: float
    replica: ReplicaStatus
    kind: ReplicaEventKind
    detail: str = ""
    seconds: float = 0.0
    passing: bool = False


class ServiceReplica:
    """The process that a slot of a service has now, after so many `restarts`.

    Its host is the one `moves` after the slot's own. `on_lost` is called at most once, if it was in service.
    """

    def __init__(
        self,
        name: str,
        slot: int,
        options: ServiceOptions,
        on_lost: Callable[[ServiceReplica], None],
        restarts: int = 0,
        moves: int = 0,
    ) -> None:
        self.name, self.slot, self.options, self.restarts = name, slot, options, restarts
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

    async def start(self, engine: Engine, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Start the process, and prepare it. Raises `ActorStartFailed`, or what `prepare` does."""
        self._process = await engine.start(
            self.name,
            self.options.actor,
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
        if served:
            self._on_lost(self)

    async def stop(self) -> None:
        """End its process, in good order unless it is lost. Idempotent."""
        if self._beating is not None:
            self._beating.cancel()
        patience = 0.0 if self.health == "lost" else _STOP_SECONDS
        self.health, self.why = "lost", self.why or "it was stopped"
        if self._process is not None:
            await self._process.stop(patience)

    def status(self) -> ReplicaStatus:
        """What is known of it now."""
        return msgspec.convert(self, ReplicaStatus, from_attributes=True)

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
        try:
            return not self.host and read_proc_stat(self.pid)[:1] in _STOPPED
        except OSError:  # this process has no free descriptor
            return False


def choose(replicas: Sequence[ServiceReplica], avoid: frozenset[str] = frozenset()) -> ServiceReplica | None:
    """The least loaded replica, with one more call in flight; None if the call has to wait.

    Those to `avoid` are chosen only if there is no other.
    """
    ready = [each for each in replicas if each.health == "ready"]
    ready = [each for each in ready if each.name not in avoid] or ready
    free = [each for each in ready if each.routable]
    chosen = min(free, key=lambda each: (each.load, each.used), default=None)
    if chosen is not None:
        chosen.used = 1 + max(each.used for each in replicas)
        chosen.outstanding += 1
    return chosen


def _passes(error: Exception) -> bool:
    """Whether a start may succeed later, as nothing ended the process."""
    return isinstance(error, HoldfastError) and error.retryable and not isinstance(error, ActorProcessLost)


class Service:
    """Replicas of an actor, called as one, and kept alive. Used in one event loop; a context manager that closes it."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        options: ServiceOptions,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._name, self._options = name, options
        self._calls = self._retried = self._lost = self._overloaded = 0
        self._replicas: list[ServiceReplica] = []
        """That of each slot. It is filled again whenever its replica is lost."""
        self._engine, self._args, self._kwargs = engine, args, kwargs
        self._waiting: dict[asyncio.Future[ServiceReplica], frozenset[str]] = {}
        """The calls that wait for a replica, and which ones they avoid."""
        self._over: HoldfastError | None = None
        self._unready = set(range(options.num_replicas))
        """The slots that were never ready."""
        self._started = asyncio.Event()
        self._keeping: list[asyncio.Task[None]] = []
        self._stopping: set[asyncio.Task[None]] = set()

    def __getattr__(self, method: str) -> ServiceEndpoint:
        return self.endpoint(method)

    def endpoint(self, method: str) -> ServiceEndpoint:
        """A method of the replicas, also where the service has one of that name. Raises `NoSuchEndpoint`."""
        return ServiceEndpoint(method, is_idempotent(self._options.actor, method), self._options.timeout, self)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[ReplicaSession]:
        """Work with one replica, the least loaded one."""
        async with asyncio.timeout(self._options.timeout):
            replica = await self._acquire()
        replica.sessions += 1
        self._release(replica)
        try:
            yield ReplicaSession(replica, self)
        finally:
            replica.sessions -= 1
            self._settle()

    def check(self) -> None:
        """Raise `ServiceFailed` or `ServiceClosed` if the service is over."""
        if self._over is not None:
            raise again(self._over)

    def replace(self, replica: str, why: str) -> None:
        """Kill a replica, by its name, and start another one in its place. Does nothing to one that is gone."""
        for each in self._replicas:
            if each.name == replica:
                each.lose(why)

    def status(self) -> ServiceStatus:
        """The service and its replicas now. May be called from any thread."""
        return ServiceStatus(
            name=self._name,
            replicas=tuple(each.status() for each in tuple(self._replicas)),
            queued=len(self._waiting),
            calls=self._calls,
            retried=self._retried,
            overloaded=self._overloaded,
            lost=self._lost,
        )

    async def close(self) -> None:
        """End all replicas; waiting calls raise `ServiceClosed`. Idempotent."""
        self._end(ServiceClosed(self._name))
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        replicas, self._replicas = self._replicas, []
        await asyncio.gather(*[each.stop() for each in replicas])
        await asyncio.gather(*self._stopping, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _start(self) -> None:
        """Start all replicas. Raises `ServiceFailed`."""
        self._replicas = [self._new(slot, 0, 0) for slot in range(self._options.num_replicas)]
        self._keeping = [asyncio.create_task(self._keep(slot)) for slot in range(self._options.num_replicas)]
        for task in self._keeping:
            task.add_done_callback(self._kept)
        await self._started.wait()
        self.check()

    async def _acquire(self, avoid: frozenset[str] = frozenset()) -> ServiceReplica:
        """Wait for a replica, as `choose` has it; the caller must `_release` it. Raises `Overloaded`."""
        self.check()
        chosen = choose(self._replicas, avoid)
        if chosen is not None:
            return chosen
        if len(self._waiting) >= self._options.queue:
            self._overloaded += 1
            raise Overloaded(self._name, len(self._waiting))
        waiting: asyncio.Future[ServiceReplica] = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = avoid
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._release(waiting.result())
            raise
        finally:
            self._waiting.pop(waiting, None)

    def _release(self, replica: ServiceReplica) -> None:
        """Take back a replica after a call."""
        replica.outstanding -= 1
        self._settle()

    def _settle(self) -> None:
        """Give replicas to waiting calls, as far as there are free ones."""
        for waiting, avoid in tuple(self._waiting.items()):
            if not any(each.routable for each in self._replicas):
                return
            if not waiting.done() and (chosen := choose(self._replicas, avoid)) is not None:
                waiting.set_result(chosen)
                del self._waiting[waiting]

    async def _keep(self, slot: int) -> None:
        """Start the replica of a slot, and another one whenever that is lost or cannot be started."""
        failures, moves, since = 0, 0, time.monotonic()
        while True:
            replica = self._replicas[slot]
            try:
                await replica.start(self._engine, self._args, self._kwargs)
            except Exception as error:
                await replica.stop()
                away = isinstance(error, ActorHostAway)
                moves += away
                elsewhere = away and moves % len(self._options.hosts) != 0
                passing = elsewhere or (_passes(error) and time.monotonic() - since < _AWAY_SECONDS)
                failures += not elsewhere
                over = failures >= self._options.start_failures and not passing
                if over:
                    self._end(ServiceFailed(self._name, failures, describe(error)))
                self._tell(replica, "start_failed", describe(error), passing=passing)
                if over:
                    return
                if not elsewhere:
                    await asyncio.sleep(min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2 ** min(failures - 1, 10)))
            else:
                failures = 0
                replica.health = "ready"
                self._tell(replica, "ready", seconds=time.monotonic() - replica.began)
                self._unready.discard(slot)
                if not self._unready:
                    self._started.set()
                self._settle()
                await replica.gone.wait()
                since = time.monotonic()
                stopping = asyncio.create_task(replica.stop())
                self._stopping.add(stopping)
                stopping.add_done_callback(self._stopping.discard)
            self._replicas[slot] = self._new(slot, replica.restarts + 1, moves)

    def _kept(self, task: asyncio.Task[None]) -> None:
        """End the service with an error that nothing else has dealt with: a slot that is kept no longer stays empty."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._end(error if isinstance(error, HoldfastError) else ServiceFailed(self._name, 0, describe(error)))

    def _new(self, slot: int, restarts: int, moves: int) -> ServiceReplica:
        name = f"{self._name}-{slot}" + (f".{restarts}" if restarts else "")
        return ServiceReplica(name, slot, self._options, self._was_lost, restarts, moves)

    def _was_lost(self, replica: ServiceReplica) -> None:
        self._lost += 1
        self._tell(replica, "lost", replica.why)

    def _end(self, error: HoldfastError) -> None:
        self._over = self._over or error
        for waiting in tuple(self._waiting):
            if not waiting.done():
                waiting.set_exception(again(self._over))
        self._started.set()

    def _tell(
        self,
        replica: ServiceReplica,
        kind: ReplicaEventKind,
        detail: str = "",
        seconds: float = 0.0,
        passing: bool = False,
    ) -> None:
        """Give the observer an event. An error of its own ends the service."""
        if self._options.observer is not None:
            now, status = time.monotonic(), replica.status()
            event = ReplicaEvent(time=now, replica=status, kind=kind, detail=detail, seconds=seconds, passing=passing)
            try:
                self._options.observer(event)
            except Exception as error:
                self._fail(error)


_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two tries of a call that every replica has failed."""
_HALF_DONE = "it may be half done, and is not declared idempotent, so it is not tried elsewhere"


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A service; the counts are since its start. `version` is that of the weights, where there are any."""

    name: str
    replicas: tuple[ReplicaStatus, ...]
    queued: int
    calls: int
    retried: int
    overloaded: int
    lost: int
    version: int | None = None


class ReplicaResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica says to a fanned-out call: `value`, unless there is an `error`."""

    replica: str
    value: Any = None
    error: HoldfastError | None = None

    def get(self) -> Any:
        """The value. Raises the error."""
        if self.error is not None:
            raise again(self.error)
        return self.value


@dataclass(frozen=True, slots=True)
class ServiceEndpoint:
    """One method of all replicas; `options` gives a copy that is called otherwise."""

    name: str
    idempotent: bool
    timeout: float
    _service: Service
    patience: float | None = None

    def options(self, *, timeout: float | None = None, patience: float | None = None) -> ServiceEndpoint:
        """Bound the time.

        A fanout waits so much `patience` for a replica, in seconds: one that is late has an error, and stays.
        """
        return replace(self, timeout=timeout or self.timeout, patience=patience or self.patience)

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """Call one replica.

        If its replica is lost, an idempotent call goes to others, and so it does after an error that is `retryable`; a
        call that passed its `deadline` costs the replica. Raises `ReplicaLost`, `Overloaded`, `NoReplica`,
        `ServiceFailed`, and `EndpointFailed` if the method raised.
        """
        name, options = self.name, self._service._options
        self._service._calls += 1
        began, lost, tries, tried = time.monotonic(), "", 0, frozenset[str]()
        bound = asyncio.timeout(self.timeout)
        try:
            async with bound:
                while True:
                    replica = await self._service._acquire(tried)
                    try:
                        if replica.health == "lost":  # since it was chosen: it never had the call
                            continue
                        tries += 1
                        answer = await replica.call(name, *args, timeout=options.deadline, **kwargs)
                        if lost:
                            self._service._tell(replica, "took_over", lost, time.monotonic() - began)
                        return answer
                    except ActorProcessLost as error:
                        if not self.idempotent or tries >= options.tries:
                            hint = "the call itself may end them" if self.idempotent else _HALF_DONE
                            raise ReplicaLost(replica.name, name, replica.why, tries, hint) from error
                        lost = lost or replica.name
                        self._service._retried += 1
                    except HoldfastError as error:
                        if not error.retryable or not self.idempotent or tries >= options.tries:
                            raise
                        self._service._retried += 1
                    finally:
                        self._service._release(replica)
                    if replica.name in tried:  # there is no other one
                        await asyncio.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**tries))
                    tried |= {replica.name}
        except TimeoutError:
            if not bound.expired():
                raise
            states = ", ".join(f"{each.name}: {each.health}" for each in self._service._replicas)
            raise NoReplica(self._service._name, self.timeout, states) from None

    async def fanout(self, *args: Any, **kwargs: Any) -> tuple[ReplicaResult, ...]:
        """Call all replicas; a result or an error for each."""
        self._service.check()
        self._service._calls += 1
        return tuple(await asyncio.gather(*[self._result(each, args, kwargs) for each in self._service._replicas]))

    async def _result(self, replica: ServiceReplica, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ReplicaResult:
        name, method, deadline = replica.name, self.name, self._service._options.deadline
        if replica.health != "ready":
            why = f"it is {replica.health}" + (f": {replica.why}" if replica.why else "")
            return ReplicaResult(replica=name, error=ReplicaLost(name, method, why, 0, "it was not called"))
        replica.outstanding += 1
        late = asyncio.timeout(self.patience)
        try:
            async with late:
                value = await replica.call(method, *args, timeout=deadline, **kwargs)
            return ReplicaResult(replica=name, value=value)
        except ActorProcessLost:
            error: HoldfastError = ReplicaLost(name, method, replica.why, 1, "it is being replaced")
        except HoldfastError as failure:
            error = failure
        except Exception as failure:
            why = f"no answer in {self.patience:.3g} s" if late.expired() and self.patience else describe(failure)
            error = HoldfastError(f"{method}: {name}: {why}")
        finally:
            self._service._release(replica)
        return ReplicaResult(replica=name, error=error)


class ReplicaSession:
    """One replica for several calls: `await one.generate(x)`. Raises `ReplicaLost` once that replica is lost."""

    def __init__(self, replica: ServiceReplica, service: Service) -> None:
        self._replica, self._service = replica, service

    def __getattr__(self, method: str) -> Any:
        """A method of this replica's actor. Raises `NoSuchEndpoint`."""
        self._service.endpoint(method)  # it exists
        deadline = self._service._options.deadline

        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await self._replica.call(method, *args, timeout=deadline, **kwargs)
            except ActorProcessLost as error:
                hint = "what the session had there is gone: begin another session"
                raise ReplicaLost(self._replica.name, method, self._replica.why, 1, hint) from error

        return call


class Servable:
    """Base of actors: `await Policy.options(num_replicas=2).as_service(model)`."""

    @classmethod
    def options(cls, **chosen: Any) -> ServiceOptions:
        """The options of a service of this actor; of a class that is not `Servable`, make `ServiceOptions`."""
        return ServiceOptions(cls, **chosen)
