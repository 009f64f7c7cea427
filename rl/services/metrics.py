"""Services and their replicas as metrics for Prometheus, by HTTP on loopback."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from holdfast.comms.errors import HoldfastError
from holdfast.ft.telemetry.metrics import PORT, ports
from holdfast.ft.telemetry.metrics_server import MetricsServer
from holdfast.rl.services.status import ServiceStatus

_HOST = "127.0.0.1"
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


class ServiceCollector:
    """A collector for a registry of prometheus_client; `look` gives the services at each request."""

    def __init__(self, look: Callable[[], Iterable[ServiceStatus]]) -> None:
        self._look = look

    def collect(self) -> Iterable[Any]:
        """Yield all metrics; prometheus_client calls it for each request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        services = tuple(self._look())
        for name, text in _SERVICE_GAUGES.items():
            yield _filled(GaugeMetricFamily(f"holdfast_service_{name}", text, labels=["service"]), name, services)
        for name, text in _SERVICE_COUNTERS.items():
            yield _filled(CounterMetricFamily(f"holdfast_service_{name}", text, labels=["service"]), name, services)
        for name, text in _REPLICA_GAUGES.items():
            family = GaugeMetricFamily(f"holdfast_replica_{name}", text, labels=["service", "replica"])
            for service in services:
                for each in service.replicas:
                    value = each.health == "ready" if name == "ready" else getattr(each, name)
                    family.add_metric([service.name, str(each.slot)], _number(value))
            yield family


class ServiceMetrics:
    """Serves the metrics of services at `url` until `close`; `asked` is as in HOLDFAST_METRICS_PORT.

    Raises ValueError if `asked` names no ports, `HoldfastError` if prometheus_client is not installed or no port is
    free.
    """

    def __init__(self, asked: str, look: Callable[[], Iterable[ServiceStatus]]) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise HoldfastError("metrics need prometheus_client: pip install 'holdfast[metrics]'") from error
        registry = prometheus.CollectorRegistry()
        registry.register(ServiceCollector(look))
        self._server = _serve(
            ports(asked), lambda: (prometheus.CONTENT_TYPE_LATEST, prometheus.generate_latest(registry))
        )
        self.url = f"http://{_HOST}:{self._server.port}/metrics"

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.close()


@contextlib.contextmanager
def metrics_if_asked(look: Callable[[], Iterable[ServiceStatus]]) -> Iterator[None]:
    """Serve the metrics inside of the block if HOLDFAST_METRICS_PORT is set. Raises as `ServiceMetrics`."""
    asked = os.environ.get(PORT, "")
    with contextlib.closing(ServiceMetrics(asked, look)) if asked else contextlib.nullcontext():
        yield


def _filled(family: Any, name: str, services: Iterable[ServiceStatus]) -> Any:
    for service in services:
        family.add_metric([service.name], _number(getattr(service, name)))
    return family


def _number(value: int | None) -> int:
    return -1 if value is None else int(value)


def _serve(among: range, page: Callable[[], tuple[str, bytes]]) -> MetricsServer:
    for port in among:
        try:
            return MetricsServer(_HOST, port, page)
        except OSError as error:
            last = error
    raise HoldfastError(f"metrics cannot be served on {_HOST}, ports {among[0]} to {among[-1]}: {last}")
