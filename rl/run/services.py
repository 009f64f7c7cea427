"""The services of a run by role: started alike, recorded, asked for what they did, and shown to Prometheus."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from holdfast.comms.errors import HoldfastError
from holdfast.ft.telemetry.metrics import ports, serve_page
from holdfast.rl.actors.engine import Engine
from holdfast.rl.actors.service import SILENCE, ReplicaEvent, Service, ServiceEndpoint, ServiceOptions, ServiceStatus
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.run.run_events import CallTakenOver, ProcessLost, ProcessStarted
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
        silence = max(config.engine.silence, SILENCE)
        self._common = dict[str, Any](engine=engine, environ=environ or {}, hosts=config.engine.hosts, silence=silence)
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
        in_slot: dict[int, str] = {}

        def hear(event: ReplicaEvent) -> None:
            self._record(role, in_slot, event)
            observer(event)

        chosen = self._common | options
        service = await ServiceOptions(actor, name=role, observer=hear, **chosen).as_service(*arguments)
        self._services[role] = service
        return service

    def asks(self) -> dict[str, Ask]:
        """By role, what asks the processes what they did since the last time."""
        return {role: partial(answers, service.endpoint("work")) for role, service in self._services.items()}

    def processes(self, role: str) -> dict[tuple[str, int], str]:
        """The replicas of a role that serve, by `this_host` of their hosts and pid. May be called from any thread."""
        service = self._services.get(role)
        replicas = () if service is None else service.status().replicas  # it is not all started yet
        return {(self.engine.host_identity(each.host), each.pid): each.name for each in replicas if each.ready}

    def status(self) -> tuple[ServiceStatus, ...]:
        """The services that are shown. May be called from any thread."""
        services = dict(self._services)
        return tuple(self._status(services[role]) for role in SHOWN if role in services)

    def _status(self, service: Service) -> ServiceStatus:
        status = service.status()
        return msgspec.structs.replace(status, version=self.version) if status.name == "generator" else status

    def _record(self, role: str, in_slot: dict[int, str], event: ReplicaEvent) -> None:
        """Emit what happened to a process; `in_slot` has the last one that served in each slot."""
        if self._telemetry is None:
            return
        at, emit, name = self._telemetry.at(event.time), self._telemetry.emit, event.replica.name
        if event.kind == "ready":
            replaces, in_slot[event.replica.slot] = in_slot.get(event.replica.slot, ""), name
            emit(
                ProcessStarted(
                    time=at,
                    name=name,
                    role=role,
                    host=event.replica.host,
                    pid=event.replica.pid,
                    replaces=replaces,
                    seconds=event.seconds,
                )
            )
        elif event.kind == "lost":
            how = event.detail.splitlines()[0] if event.detail else "ended"
            emit(ProcessLost(time=at, name=name, role=role, host=event.replica.host, pid=event.replica.pid, how=how))
        elif event.kind == "took_over":
            emit(CallTakenOver(time=at, process=name, lost=event.detail, seconds=event.seconds))

    async def close(self) -> None:
        """End all processes, the services that were started last first. Idempotent."""
        for service in reversed(self._services.values()):
            await service.close()


_OF_SERVICE = {
    "queued": "Calls that wait for a replica.",
    "version": "The committed version; -1 before the first.",
    "calls": "Calls of the service.",
    "retried": "Calls that were given to another replica.",
    "overloaded": "Calls that were refused, as the queue was full.",
    "lost": "Replicas that died, stopped or hung while they served.",
}
_OF_REPLICA = {
    "ready": "1 if the replica serves, else 0.",
    "load": "Calls in flight and open sessions of the replica.",
    "restarts": "How often the replica's slot was filled again.",
}
_COUNTERS = ("calls", "retried", "overloaded", "lost")


@contextlib.contextmanager
def service_metrics(asked: str, look: Callable[[], Iterable[ServiceStatus]]) -> Iterator[str]:
    """Serve the metrics of services to Prometheus inside of the block, which gets their URL.

    `asked` is as in HOLDFAST_METRICS_PORT, "" for none. `look` gives the services at each request. Raises ValueError if
    `asked` names no ports, `HoldfastError` if prometheus_client is not installed or no port is free.
    """
    if not asked:
        yield ""
        return
    try:
        import prometheus_client as prometheus
    except ImportError as error:
        raise HoldfastError("metrics need prometheus_client: pip install 'holdfast[metrics]'") from error
    registry: Any = prometheus.CollectorRegistry()
    registry.register(_ServiceCollector(look))
    page = partial(prometheus.generate_latest, registry)
    with contextlib.closing(serve_page(ports(asked), lambda: (prometheus.CONTENT_TYPE_LATEST, page()))) as server:
        yield f"http://127.0.0.1:{server.port}/metrics"


class _ServiceCollector:
    """What prometheus_client calls for each request."""

    def __init__(self, look: Callable[[], Iterable[ServiceStatus]]) -> None:
        self.collect = lambda: _families(tuple(look()))


def _families(services: Sequence[ServiceStatus]) -> Iterator[Any]:
    """All metrics of services and their replicas."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    replicas = [([service.name, str(each.slot)], each) for service in services for each in service.replicas]
    for labels, texts, rows in (
        (["service"], _OF_SERVICE, [([each.name], each) for each in services]),
        (["service", "replica"], _OF_REPLICA, replicas),
    ):
        for name, text in texts.items():
            kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
            family = kind(f"holdfast_{labels[-1]}_{name}", text, labels=labels)
            for values, row in rows:
                value = getattr(row, name)
                family.add_metric(values, -1 if value is None else int(value))
            yield family
