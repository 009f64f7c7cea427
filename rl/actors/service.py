"""A service: replicas of an actor behind `service.method.route(...)`, `.fanout(...)` and `service.session()`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import msgspec

from holdfast.comms.errors import HoldfastError, again, describe
from holdfast.ft.telemetry.metrics import PORT, ports, serve_page
from holdfast.rl.actors.engine import Endpoint, current_engine, endpoint_of
from holdfast.rl.actors.errors import ActorProcessLost, NoReplica, QuorumMissed, ReplicaLost
from holdfast.rl.actors.replicas import ReplicaSet, ReplicaStatus, RouteChoice, ServiceOptions, ServiceReplica

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two tries of a call that every replica has failed."""


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

    endpoint: Endpoint
    choice: RouteChoice
    timeout: float
    deadline: float | None
    _replicas: ReplicaSet
    patience: float | None = None

    def options(
        self,
        *,
        key: Hashable = None,
        timeout: float | None = None,
        deadline: float | None = None,
        patience: float | None = None,
    ) -> ServiceEndpoint:
        """With a `key` choose always the same replica, else the least loaded one; bound the time.

        A fanout waits so much `patience` for a replica, in seconds: one that is late has an error, and stays.
        """
        return replace(
            self,
            choice=self.choice if key is None else RouteChoice(key=key),
            timeout=timeout or self.timeout,
            deadline=deadline or self.deadline,
            patience=patience or self.patience,
        )

    async def route(self, *args: Any, **kwargs: Any) -> Any:
        """Call one replica.

        If its replica is lost, an idempotent call goes to others, and so it does after an error that is `retryable`; a
        call that passed its `deadline` costs the replica. Raises `ReplicaLost`, `Overloaded`, `NoReplica`,
        `ServiceFailed`, and `EndpointFailed` if the method raised.
        """
        name, most = self.endpoint.name, self._replicas.options.tries
        self._replicas.calls += 1
        began, lost, tries, choice = time.monotonic(), "", 0, self.choice
        bound = asyncio.timeout(self.timeout)
        try:
            async with bound:
                while True:
                    replica = await self._replicas.acquire(choice)
                    try:
                        if replica.health == "lost":  # since it was chosen: it never had the call
                            continue
                        tries += 1
                        answer = await replica.call(name, *args, timeout=self.deadline, **kwargs)
                        if lost:
                            self._replicas.took_over(replica, lost, time.monotonic() - began)
                        return answer
                    except ActorProcessLost as error:
                        if not self.endpoint.idempotent:
                            hint = "it may be half done, and is not declared idempotent, so it is not tried elsewhere"
                            raise ReplicaLost(replica.name, name, replica.why, tries, hint) from error
                        if tries >= most:
                            hint = "the call itself may end them"
                            raise ReplicaLost(replica.name, name, replica.why, tries, hint) from error
                        lost = lost or replica.name
                        self._replicas.retried += 1
                    except HoldfastError as error:
                        if not error.retryable or not self.endpoint.idempotent or tries >= most:
                            raise
                        self._replicas.retried += 1
                    finally:
                        self._replicas.release(replica)
                    if replica.name in choice.avoid:  # there is no other one
                        await asyncio.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**tries))
                    choice = replace(choice, avoid=choice.avoid | {replica.name})
        except TimeoutError:
            if not bound.expired():
                raise
            states = ", ".join(f"{each.name}: {each.health}" for each in self._replicas.replicas)
            raise NoReplica(self._replicas.name, self.timeout, states) from None

    async def fanout(self, *args: Any, quorum: int | None = None, **kwargs: Any) -> tuple[ReplicaResult, ...]:
        """Call all replicas; a result or an error for each. Raises `QuorumMissed` if fewer than `quorum` did it."""
        self._replicas.check()
        self._replicas.calls += 1
        found = tuple(await asyncio.gather(*[self._result(each, args, kwargs) for each in self._replicas.replicas]))
        done = sum(each.error is None for each in found)
        if quorum is not None and done < quorum:
            errors = [(each.replica, str(each.error)) for each in found if each.error is not None]
            raise QuorumMissed(self.endpoint.name, quorum, done, errors)
        return found

    async def _result(self, replica: ServiceReplica, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ReplicaResult:
        name, method = replica.name, self.endpoint.name
        if replica.health != "ready":
            why = f"it is {replica.health}" + (f": {replica.why}" if replica.why else "")
            return ReplicaResult(replica=name, error=ReplicaLost(name, method, why, 0, "it was not called"))
        replica.outstanding += 1
        late = asyncio.timeout(self.patience)
        try:
            async with late:
                value = await replica.call(method, *args, timeout=self.deadline, **kwargs)
            return ReplicaResult(replica=name, value=value)
        except ActorProcessLost:
            error: HoldfastError = ReplicaLost(name, method, replica.why, 1, "it is being replaced")
        except HoldfastError as failure:
            error = failure
        except Exception as failure:
            why = f"no answer in {self.patience:.3g} s" if late.expired() and self.patience else describe(failure)
            error = HoldfastError(f"{method}: {name}: {why}")
        finally:
            self._replicas.release(replica)
        return ReplicaResult(replica=name, error=error)


class ReplicaSession:
    """One replica for several calls: `await one.generate(x)`. Raises `ReplicaLost` once that replica is lost."""

    def __init__(self, replica: ServiceReplica, service: Service) -> None:
        self._replica, self._service = replica, service

    @property
    def name(self) -> str:
        """The replica."""
        return self._replica.name

    async def call(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call a method of this replica's actor; after `timeout` seconds, or its deadline, it hangs."""
        endpoint: ServiceEndpoint = getattr(self._service, method)
        try:
            return await self._replica.call(method, *args, timeout=timeout or endpoint.deadline, **kwargs)
        except ActorProcessLost as error:
            hint = "what the session had there is gone: begin another session"
            raise ReplicaLost(self.name, method, self._replica.why, 1, hint) from error

    def __getattr__(self, method: str) -> Any:
        endpoint_of(self._service.actor, method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self.call(method, *args, **kwargs)

        return call


class Service:
    """Replicas of an actor, called as one. A context manager that closes it."""

    def __init__(self, actor: type[Any], replicas: ReplicaSet) -> None:
        self.actor = actor
        self._replicas = replicas

    def __getattr__(self, method: str) -> ServiceEndpoint:
        return self.endpoint(method)

    def endpoint(self, method: str) -> ServiceEndpoint:
        """A method of the replicas, also where the service has one of that name. Raises `NoSuchEndpoint`."""
        found = endpoint_of(self.actor, method)
        options = self._replicas.options
        deadline = found.deadline or options.deadline
        return ServiceEndpoint(found, RouteChoice(), options.timeout, deadline, self._replicas)

    @contextlib.asynccontextmanager
    async def session(self, key: Hashable = None) -> AsyncIterator[ReplicaSession]:
        """Work with one replica, the least loaded or that of `key`."""
        async with asyncio.timeout(self._replicas.options.timeout):
            replica = await self._replicas.acquire(RouteChoice(key=key))
        replica.sessions += 1
        self._replicas.release(replica)
        try:
            yield ReplicaSession(replica, self)
        finally:
            replica.sessions -= 1
            self._replicas.settle()

    def check(self) -> None:
        """Raise `ServiceFailed` or `ServiceClosed` if the service is over."""
        self._replicas.check()

    def replace(self, replica: str, why: str) -> None:
        """Kill a replica, by its name, and start another one in its place. Does nothing to one that is gone."""
        for each in self._replicas.replicas:
            if each.name == replica:
                each.lose(why)

    def status(self) -> ServiceStatus:
        """The service and its replicas now. May be called from any thread."""
        replicas = self._replicas
        slots = sorted(replicas.slots.copy().items())
        return ServiceStatus(
            name=replicas.name,
            replicas=tuple(slot.replica.status(max(0, slot.fillings - 1)) for _, slot in slots),
            queued=replicas.queued,
            calls=replicas.calls,
            retried=replicas.retried,
            overloaded=replicas.overloaded,
            lost=replicas.lost,
        )

    async def close(self) -> None:
        """End all replicas. Idempotent."""
        await self._replicas.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """An actor and the options of its service, to be started."""

    actor: type[Any]
    chosen: ServiceOptions

    def options(self, **changes: Any) -> ServiceSpec:
        """The same with other options."""
        return ServiceSpec(self.actor, replace(self.chosen, **changes))

    async def as_service(self, *args: Any, **kwargs: Any) -> Service:
        """Start the service; each replica makes `actor(*args, **kwargs)`.

        Raises `ServiceFailed`, `NoEngine`, and leaves no process.
        """
        options, actor = self.chosen, self.actor
        name = options.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", actor.__name__).lower()
        replicas = ReplicaSet(options.engine or current_engine(), name, actor, options, args, kwargs)
        try:
            await replicas.start()
        except BaseException:
            await asyncio.shield(replicas.close())
            raise
        return Service(actor, replicas)


class Servable:
    """Base of actors: `await Policy.options(num_replicas=2).as_service(model)`."""

    @classmethod
    def options(cls, **chosen: Any) -> ServiceSpec:
        """The options of a service of this actor; see `ServiceOptions`."""
        return ServiceSpec(cls, ServiceOptions(**chosen))


def served(actor: type[Any], **chosen: Any) -> ServiceSpec:
    """The options of a service of any actor's class, which need not be `Servable`."""
    return ServiceSpec(actor, ServiceOptions(**chosen))


_SERVICE_GAUGES = {"queued": "Calls that wait for a replica.", "version": "The committed version; -1 before the first."}
_SERVICE_COUNTERS = {
    "calls": "Calls of the service.",
    "retried": "Calls that were given to another replica.",
    "overloaded": "Calls that were refused, as the queue was full.",
    "lost": "Replicas that died, stopped or hung while they served.",
}
_REPLICA_GAUGES = {
    "ready": "1 if the replica serves, else 0.",
    "load": "Calls in flight and open sessions of the replica.",
    "version": "The version that the replica serves; -1 without one.",
    "restarts": "How often the replica's slot was filled again.",
}


class ServiceMetrics:
    """Serves the metrics of services to Prometheus at `url` until `close`; `asked` is as in HOLDFAST_METRICS_PORT.

    `look` gives the services at each request. Raises ValueError if `asked` names no ports, `HoldfastError` if
    prometheus_client is not installed or no port is free.
    """

    def __init__(self, asked: str, look: Callable[[], Iterable[ServiceStatus]]) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise HoldfastError("metrics need prometheus_client: pip install 'holdfast[metrics]'") from error
        registry, self._look = prometheus.CollectorRegistry(), look
        registry.register(self)
        self._server = serve_page(
            ports(asked), lambda: (prometheus.CONTENT_TYPE_LATEST, prometheus.generate_latest(registry))
        )
        self.url = f"http://127.0.0.1:{self._server.port}/metrics"

    def collect(self) -> Iterator[Any]:
        """Yield all metrics; prometheus_client calls it for each request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        services = tuple(self._look())
        for kind, names in ((GaugeMetricFamily, _SERVICE_GAUGES), (CounterMetricFamily, _SERVICE_COUNTERS)):
            for name, text in names.items():
                family = kind(f"holdfast_service_{name}", text, labels=["service"])
                for service in services:
                    family.add_metric([service.name], _number(getattr(service, name)))
                yield family
        for name, text in _REPLICA_GAUGES.items():
            family = GaugeMetricFamily(f"holdfast_replica_{name}", text, labels=["service", "replica"])
            for service in services:
                for each in service.replicas:
                    value = each.health == "ready" if name == "ready" else getattr(each, name)
                    family.add_metric([service.name, str(each.slot)], _number(value))
            yield family

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.close()


@contextlib.contextmanager
def metrics_if_asked(look: Callable[[], Iterable[ServiceStatus]]) -> Iterator[None]:
    """Serve the metrics inside of the block if HOLDFAST_METRICS_PORT is set. Raises as `ServiceMetrics`."""
    asked = os.environ.get(PORT, "")
    with contextlib.closing(ServiceMetrics(asked, look)) if asked else contextlib.nullcontext():
        yield


def _number(value: int | None) -> int:
    return -1 if value is None else int(value)
