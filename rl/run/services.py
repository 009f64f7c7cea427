"""The services of a run by role: started alike, recorded, asked for what they did, and shown to Prometheus."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec

from holdfast.comms.errors import HoldfastError
from holdfast.ft.telemetry.metrics import PORT, ports, serve_page
from holdfast.rl.actors.engine import Engine
from holdfast.rl.actors.service import ReplicaEvent, Service, ServiceEndpoint, ServiceOptions, ServiceStatus, served
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.run.run_events import CallTakenOver, ProcessLost, ProcessReady, ProcessStarted
from holdfast.rl.run.telemetry import Ask, RunTelemetry

SHOWN = ("holder", "generator", "environment")
"""The roles whose services are in the status and in the metrics; trainers have rows of their own."""

ANSWER_SECONDS = 5.0
"""Seconds that one process of a service has to answer in a collection."""

UCX_TLS = "UCX_TLS"
MANY_HOSTS = "tcp,self"
"""The transports of UCX that every network has."""


def new_register(url: str) -> str | None:
    """The register of one driver of a run. Each driver has a job of its own, under a name that no other one has.

    None without a URL: a file.
    """
    if not url:
        return None
    place, mark, options = url.partition("?")
    return f"{place}-{secrets.token_hex(6)}{mark}{options}"


def between_hosts(config: RunConfig) -> dict[str, str]:
    """The variables by which the run's processes reach other hosts. UCX has them in this process too."""
    planes = {} if config.store.plane == "auto" else {"HOLDFAST_PLANE": config.store.plane}
    if not config.engine.hosts:
        return planes
    return {**planes, UCX_TLS: os.environ.setdefault(UCX_TLS, MANY_HOSTS)}


async def answers(endpoint: ServiceEndpoint) -> dict[str, Any]:
    """What each replica says that answers in time; the others are left out, and stay."""
    results = await endpoint.options(patience=ANSWER_SECONDS).fanout()
    return {each.replica: each.value for each in results if each.error is None}


class RunServices:
    """Starts the services of a run on its hosts, and keeps them by role. A replica may be as silent as its host.

    Replicas have `environ` on top of the driver's environment. What happens to them is emitted to `telemetry`.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        environ: Mapping[str, str] | None = None,
        telemetry: RunTelemetry | None = None,
    ) -> None:
        silence = max(config.engine.silence, ServiceOptions().silence)
        self._common = {"engine": engine, "environ": environ or {}, "hosts": config.engine.hosts, "silence": silence}
        self.engine, self._telemetry = engine, telemetry
        self._services: dict[str, Service] = {}
        self.version: int | None = None
        """The version that the generators serve."""

    async def start(
        self,
        role: str,
        actor: type[Any],
        *arguments: Any,
        observer: Callable[[ReplicaEvent], None] = lambda event: None,
        **options: Any,
    ) -> Service:
        """Start the service of a role; `observer` gets each event once it is emitted. Raises `ServiceFailed`."""
        recorder = None if self._telemetry is None else ProcessRecorder(role, self._telemetry)

        def hear(event: ReplicaEvent) -> None:
            if recorder is not None:
                recorder.hear(event)
            observer(event)

        chosen = self._common | options
        service = await served(actor, name=role, observer=hear, **chosen).as_service(*arguments)
        self._services[role] = service
        return service

    def asks(self) -> dict[str, Ask]:
        """By role, what asks the processes what they did since the last time."""
        return {role: partial(answers, service.endpoint("work")) for role, service in self._services.items()}

    def status(self) -> tuple[ServiceStatus, ...]:
        """The services that are shown. May be called from any thread."""
        services = dict(self._services)
        return tuple(self._status(services[role]) for role in SHOWN if role in services)

    def _status(self, service: Service) -> ServiceStatus:
        status, version = service.status(), self.version
        if status.name != "generator" or version is None:
            return status
        replicas = [
            msgspec.structs.replace(each, version=version) if each.health == "ready" else each
            for each in status.replicas
        ]
        return msgspec.structs.replace(status, version=version, replicas=tuple(replicas))

    async def close(self) -> None:
        """End all processes, the services that were started last first. Idempotent."""
        for service in reversed(self._services.values()):
            await service.close()


class ProcessRecorder:
    """Emits what happens to the processes of a service."""

    def __init__(self, role: str, telemetry: RunTelemetry) -> None:
        self._role, self._telemetry = role, telemetry
        self._alive = set[str]()
        self._in_slot: dict[int, str] = {}

    def hear(self, event: ReplicaEvent) -> None:
        """Handle an event."""
        at, emit = self._telemetry.at(event.time), self._telemetry.emit
        name, role, host, pid = event.replica, self._role, event.host, event.pid
        if event.kind == "ready":
            replaces, self._in_slot[event.slot] = self._in_slot.get(event.slot, ""), name
            self._alive.add(name)
            emit(ProcessStarted(time=at, name=name, role=role, host=host, pid=pid, replaces=replaces))
            emit(ProcessReady(time=at, name=name, role=role, seconds=event.seconds))
        elif event.kind == "lost" and name in self._alive:
            self._alive.remove(name)
            how = event.detail.splitlines()[0] if event.detail else "ended"
            emit(ProcessLost(time=at, name=name, role=role, host=host, pid=pid, how=how))
        elif event.kind == "took_over":
            emit(CallTakenOver(time=at, process=name, lost=event.detail, seconds=event.seconds))


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
