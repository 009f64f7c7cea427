"""Metrics of a process of a job for Prometheus: opt-in, by HTTP on loopback.

`EventFigures` says what events are in numbers, once for Prometheus and OpenTelemetry. Latencies and bytes of ops come
from a journal. Both are plain numbers of this process. prometheus_client gets them only at a request, so that its own
sharing between processes (PROMETHEUS_MULTIPROC_DIR, which another library may have set) does not apply. Without
metrics it is not loaded.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

from holdfast.comms.errors import HoldfastError
from holdfast.comms.ops import Journal, OpTensors, Recorder
from holdfast.ft import events
from holdfast.ft.control.event_loop import BoundedListener, Departure, LoopThread
from holdfast.ft.events import Event
from holdfast.ft.telemetry.event_log import EventLog

MOST = 16
"""The most connections at a time; one more ends the oldest."""
SECONDS = 5.0
"""Seconds that a connection may take to send its request and to read the answer."""
_REQUEST_BYTES = 16 << 10
_START_SECONDS = 30.0


class MetricsServer:
    """Serves `page()` (its content type and bytes) at /metrics of one interface, from construction to `close`.

    Raises OSError if it cannot listen there.
    """

    def __init__(self, host: str, port: int, page: Callable[[], tuple[str, bytes]]) -> None:
        self._page = page
        self._thread = LoopThread("holdfast-metrics")
        try:
            self.port = self._thread.run(self._start(host, port), _START_SECONDS)
        except BaseException:
            self._thread.close()
            raise

    async def _start(self, host: str, port: int) -> int:
        self._listener = BoundedListener(self._make, most=MOST, seconds=SECONDS)
        return (await self._listener.start(host, port))[1]

    def _make(self) -> _Request:
        return _Request(self._page, self._listener)

    async def _stop(self) -> None:
        self._listener.close()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._thread.alive:
            self._thread.run(self._stop(), _START_SECONDS)
            self._thread.close()


class _Request(asyncio.Protocol):
    """One connection: one request, one answer."""

    def __init__(self, page: Callable[[], tuple[str, bytes]], listener: BoundedListener) -> None:
        self._page, self._listener = page, listener
        self._asked = bytearray()
        self._transport: asyncio.Transport | None = None
        self._gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._gone:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._asked += data
        if b"\r\n\r\n" in self._asked or len(self._asked) > _REQUEST_BYTES:
            self._answer()

    def _answer(self) -> None:
        assert self._transport is not None
        words = bytes(self._asked.partition(b"\r\n")[0]).split()
        kind, body = "text/plain; charset=utf-8", b"only GET /metrics is served here\n"
        status = "404 Not Found"
        if len(words) == 3 and words[0] in (b"GET", b"HEAD") and words[1].partition(b"?")[0] in (b"/", b"/metrics"):
            status, (kind, body) = "200 OK", self._page()
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self._transport.write(head.encode() + (b"" if words[:1] == [b"HEAD"] else body))
        self._transport.close()

    def turn_away(self, why: Departure) -> None:
        self._gone = True
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.admit(self)


PORT = "HOLDFAST_METRICS_PORT"
"""The environment variable that turns metrics on: a port, "0" for any free one, or a range such as "9400-9463".
Of a range, each process of the host takes the first free port."""

OP_BUCKETS = tuple(1e-6 * 4**power for power in range(14))
"""Upper bounds, in seconds, of the histogram of op latencies: 1 us to 67 s."""
EVENT_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_HOST = "127.0.0.1"
FLUSH_SECONDS = 0.1
"""How long a request waits for the events that have not been counted yet."""

# What events say in numbers -----------------------------------------------------------------------------------------

Kind = Literal["gauge", "counter", "time"]


class EventFigure(NamedTuple):
    """A number that the events of a process say. `otel` is its name in OpenTelemetry, "" if it has none there."""

    kind: Kind
    about: str
    otel: str = ""
    scraped: bool = True
    """Whether Prometheus has it too, under its key in `FIGURES`."""


FIGURES = {
    "epoch": EventFigure("gauge", "The epoch that the process works in.", "epoch"),
    "rank": EventFigure("gauge", "The rank of the process in its epoch; -1 without one."),
    "members": EventFigure("gauge", "How many members the epoch has.", "members"),
    "step": EventFigure("gauge", "The last step that was committed here."),
    "epochs": EventFigure("counter", "Epochs that the process was a member of."),
    "steps_aborted": EventFigure(
        "counter", "Attempts at steps that were not committed and came again.", "steps.aborted"
    ),
    "failures_detected": EventFigure("counter", "Members found dead, stopped or unreachable.", "failures"),
    "suspicions": EventFigure("counter", "Times that a member was suspected.", "suspicions"),
    "register_away": EventFigure("counter", "Times that the register could not be reached.", "register.away"),
    "steps_committed": EventFigure("counter", "Steps committed here, by how.", "steps"),
    "detection": EventFigure(
        "time", "From the last sign of life of a member to the moment its failure was known: no less than it took."
    ),
    "rebuild": EventFigure("time", "Time to build a communicator and settle the open step.", "rebuild"),
    "recovery": EventFigure("time", "From the revocation of an epoch to the next communicator."),
    "resume": EventFigure("time", "From the revocation of an epoch to the next committed step."),
    "gap": EventFigure("time", "Time between two commits around a change of members.", "recovery", scraped=False),
}
_LABELLED = "steps_committed"
"""The figure with a value for each way in which a step is committed."""


class EventFigures:
    """Says in order, for each event of a process, which figures it changes: by how much, or to what."""

    def __init__(self) -> None:
        self._revoked_at: float | None = None
        self._recovering_since = 0.0

    def of(self, event: Event) -> Iterator[tuple[str, float, str]]:
        """Yield the key of a figure, its value, and how a step was committed ("" for all other figures)."""
        if event.counter:
            yield event.counter, len(getattr(event, "members", (None,))), ""
        match event:
            case events.ViewInstalled(rank=rank):
                yield "rank", -1 if rank is None else rank, ""
                yield "epochs", 1, ""
                yield "epoch", event.epoch, ""
                yield "members", len(event.members), ""
            case events.DeathsDetected():
                for silent in event.silent:
                    if silent is not None:
                        yield "detection", silent, ""
            case events.EpochRevoked():
                self._revoked_at = self._revoked_at or event.time
                self._recovering_since = event.time
            case events.CommunicatorBuilt():
                yield "rebuild", event.seconds, ""
                if self._revoked_at is not None:
                    yield "recovery", event.time - self._recovering_since, ""
            case events.StepCommitted():
                yield "steps_committed", 1, event.how
                yield "step", event.step, ""
                if self._revoked_at is not None:
                    yield "resume", event.time - self._revoked_at, ""
                    self._revoked_at = None
            case events.RecoveryEnded():
                yield "gap", event.seconds, ""


# How Prometheus reads them ------------------------------------------------------------------------------------------


def serve_page(among: range, page: Callable[[], tuple[str, bytes]]) -> MetricsServer:
    """Serve a page on loopback, at the first free port. Raises `HoldfastError` if none is."""
    for port in among:
        try:
            return MetricsServer(_HOST, port, page)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise HoldfastError(f"metrics cannot be served on {_HOST}:{port}: {error}") from error
    words = str(among[0]) if len(among) == 1 else f"{among[0]}-{among[-1]}"
    raise HoldfastError(
        f"metrics cannot be served: no port of {words} is free on {_HOST}; give a range with a port for each "
        f"process of the host ({PORT}=9400-9463), or 0 for any free port"
    )


def ports(asked: str) -> range:
    """The ports that a value of HOLDFAST_METRICS_PORT names. Raises ValueError for any other text."""
    first, _, last = asked.partition("-")
    try:
        low, high = int(first), int(last or first)
    except ValueError:
        raise ValueError(f"{PORT}={asked!r} is neither a port nor a range of ports such as 9400-9463") from None
    if not 0 <= low <= high <= 65535 or (low == 0 and high > 0):
        raise ValueError(f"{PORT}={asked!r}: ports go from 1 to 65535, or 0 for any free one")
    return range(low, high + 1)


class _Histogram:
    """A histogram of durations in seconds, with these upper bounds of its buckets."""

    __slots__ = ("bounds", "buckets", "seconds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.buckets, self.seconds = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(self.bounds, seconds)] += 1
        self.seconds += seconds

    def cumulative(self) -> list[tuple[str, int]]:
        """Cumulative counts as Prometheus has them: (upper bound, how many values are not above it)."""
        names = [*(f"{bound:.9g}" for bound in self.bounds), "+Inf"]
        return list(zip(names, itertools.accumulate(self.buckets), strict=True))


class _Sums(_Histogram):
    """Sums over one communicator's ops of one name."""

    __slots__ = ("failures", "nbytes")

    def __init__(self) -> None:
        super().__init__(OP_BUCKETS)
        self.nbytes = self.failures = 0

    def add(self, other: _Sums) -> None:
        self.buckets = [mine + theirs for mine, theirs in zip(self.buckets, other.buckets, strict=True)]
        self.seconds += other.seconds
        self.nbytes += other.nbytes
        self.failures += other.failures


class OpTally:
    """A recorder that sums up ops, and passes them on to the recorder `inner`, if any."""

    def __init__(self, inner: Recorder | None) -> None:
        self._inner = inner
        self._journals: list[_TallyJournal] = []

    def journal(self, name: str, epoch: int, rank: int, size: int, backend: str) -> Journal:
        """See `holdfast.comms.ops.Recorder`."""
        inner = None if self._inner is None else self._inner.journal(name, epoch, rank, size, backend)
        journal = _TallyJournal(inner)
        self._journals.append(journal)
        return journal

    def sums(self) -> dict[str, _Sums]:
        """The sums by op, over all communicators so far."""
        total: dict[str, _Sums] = {}
        for journal in list(self._journals):
            for op, sums in list(journal.sums.items()):
                total.setdefault(op, _Sums()).add(sums)
        return total


class _TallyJournal:
    __slots__ = ("_began", "_inner", "_nbytes", "_op", "sums")

    def __init__(self, inner: Journal | None) -> None:
        self._inner = inner
        self.sums: dict[str, _Sums] = {}
        self._op, self._nbytes, self._began = "", 0, 0.0

    def enter(self, op: str, seq: int, nbytes: int, about: OpTensors, detail: Hashable, peer: int) -> None:
        if self._inner is not None:
            self._inner.enter(op, seq, nbytes, about, detail, peer)
        self._op, self._nbytes, self._began = op, nbytes, time.perf_counter()

    def leave(self, error: BaseException | None) -> None:
        seconds = time.perf_counter() - self._began
        sums = self.sums.get(self._op)
        if sums is None:
            sums = self.sums[self._op] = _Sums()
        sums.observe(seconds)
        sums.nbytes += self._nbytes
        if error is not None:
            sums.failures += 1
        if self._inner is not None:
            self._inner.leave(error)

    def waits(self, ranks: Sequence[int], gives: Sequence[int] = (), rounds: int = 0) -> None:
        if self._inner is not None:
            self._inner.waits(ranks, gives, rounds)


class Metrics:
    """The metrics of one process, served at `url` until `close`.

    Raises ValueError if `asked` names no ports, `HoldfastError` if prometheus_client is not installed or no port is
    free.
    """

    def __init__(
        self,
        asked: str,
        job: str,
        event_log: EventLog,
        tally: OpTally,
        missed_heartbeats: Callable[[], int],
    ) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise HoldfastError("metrics need prometheus_client: pip install 'holdfast[metrics]'") from error
        self._prometheus = prometheus
        self._tally, self._missed, self._events = tally, missed_heartbeats, event_log
        self._job = job
        self._lock = threading.Lock()
        self._figures = EventFigures()
        self._numbers: dict[str, float] = {**dict.fromkeys(FIGURES, 0), "rank": -1, "step": -1}
        self._committed: dict[str, float] = {}
        self._times = {key: _Histogram(EVENT_BUCKETS) for key, figure in FIGURES.items() if figure.kind == "time"}
        self.registry = prometheus.CollectorRegistry()
        self.registry.register(self)
        self._server = serve_page(ports(asked), self._page)
        self.url = f"http://{_HOST}:{self._server.port}/metrics"
        self._unsubscribe = event_log.subscribe(self._hear)
        event_log.emit(events.MetricsServed(url=self.url))

    def _hear(self, event: Event) -> None:
        """Count one event of this process."""
        with self._lock:
            for key, value, how in self._figures.of(event):
                kind = FIGURES[key].kind
                if kind == "time":
                    self._times[key].observe(value)
                elif key == _LABELLED:
                    self._committed[how] = self._committed.get(how, 0) + value
                else:
                    self._numbers[key] = value + (self._numbers[key] if kind == "counter" else 0)

    def collect(self) -> Iterable[Any]:
        """Yield all metrics; prometheus_client calls it for each request."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
            InfoMetricFamily,
        )

        process = {"job": self._job, "pid": str(os.getpid())}
        yield InfoMetricFamily("holdfast_process", "The process and its job.", value=process)
        with self._lock:
            numbers, committed = dict(self._numbers), dict(self._committed)
            times = {key: (each.cumulative(), each.seconds) for key, each in self._times.items()}
        for key, (kind, about, _, scraped) in FIGURES.items():
            name = f"holdfast_{key}"
            if not scraped:
                continue
            if kind == "time":
                buckets, total = times[key]
                yield HistogramMetricFamily(f"{name}_seconds", about, buckets=buckets, sum_value=total)
            elif key == _LABELLED:
                steps = CounterMetricFamily(name, about, labels=["how"])
                for how, count in sorted(committed.items()):
                    steps.add_metric([how], count)
                yield steps
            else:
                yield (GaugeMetricFamily if kind == "gauge" else CounterMetricFamily)(name, about, value=numbers[key])
        missed = CounterMetricFamily("holdfast_heartbeats_missed", "Heartbeats of members that did not come.")
        missed.add_metric([], self._missed())
        seconds = HistogramMetricFamily("holdfast_op_seconds", "Latencies of ops on this rank.", labels=["op"])
        nbytes = CounterMetricFamily("holdfast_op_bytes", "Bytes that this rank gave to ops.", labels=["op"])
        failed = CounterMetricFamily("holdfast_ops_failed", "Ops that ended in an error.", labels=["op"])
        for op, sums in sorted(self._tally.sums().items()):
            seconds.add_metric([op], sums.cumulative(), sums.seconds)
            nbytes.add_metric([op], sums.nbytes)
            failed.add_metric([op], sums.failures)
        yield from (missed, seconds, nbytes, failed)

    def _page(self) -> tuple[str, bytes]:
        self._events.flush(FLUSH_SECONDS)
        return self._prometheus.CONTENT_TYPE_LATEST, self._prometheus.generate_latest(self.registry)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._unsubscribe()
        self._server.close()
