"""Exports the events of a session to OpenTelemetry, if the program has loaded its SDK: spans and metrics.

A step is a span, from its attempt to its commit, and so is a recovery, from the first evidence to the next normal
commit. A recovery has spans for its rebuild and its transfer of state, and every other event of that time as an event.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from holdfast.ft import event_lines, events
from holdfast.ft.events import Event
from holdfast.ft.telemetry.event_log import EventLog
from holdfast.ft.telemetry.metrics import FIGURES, EventFigures, Kind

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Span

NAME = "holdfast"
_SDK = "opentelemetry.sdk"

Attributes = dict[str, str | int | float | bool]


def export(log: EventLog, job: str) -> Callable[[], None]:
    """Export events from now on, if the program has loaded the SDK; returns a function that ends it."""
    if _SDK not in sys.modules:
        return lambda: None
    exporter = Exporter(job)
    end = log.subscribe(exporter)

    def finish() -> None:
        end()
        exporter.close()

    return finish


class Exporter:
    """The spans and metrics of one process. Called in one thread."""

    def __init__(self, job: str) -> None:
        from opentelemetry import metrics, trace

        self._trace = trace
        self._tracer = trace.get_tracer(NAME)
        meter = metrics.get_meter(NAME)
        self._job, self._rank = job, -1
        self._to_wall = time.time_ns() - time.monotonic_ns()
        self._step: Span | None = None
        self._recovery: Span | None = None
        self._last = 0.0
        self._figures = EventFigures()
        self._record: dict[str, Callable[[float, Attributes], None]] = {}
        for key, (kind, about, name, _) in FIGURES.items():
            if name:
                self._record[key] = _instrument(meter, kind, f"{NAME}.{name}", about)

    def __call__(self, event: Event) -> None:
        """Export an event."""
        self._last = event.time
        self._count(event)
        match event:
            case events.StepBegun():
                self._end_step(event.time, "it was not finished")
                self._step = self._begin("holdfast.step", event.time, event)
            case events.StepCommitted(how=how):
                if self._step is not None:
                    self._step.set_attribute("holdfast.how", how)
                self._end_step(event.time)
            case events.StepAborted():
                self._end_step(event.time, str(event))
            case events.StepPrepared():
                if self._step is not None:
                    self._step.add_event("prepared", timestamp=self._wall(event.time))
            case events.DeathsDetected() | events.EpochRevoked():
                if self._recovery is None:
                    self._recovery = self._begin("holdfast.recovery", event.time, event)
                self._note(event)
            case events.CommunicatorBuilt(seconds=seconds):
                self._part("holdfast.rebuild", event, seconds)
            case events.StateReceived(seconds=seconds) | events.StateRestored(seconds=seconds):
                self._part("holdfast.state", event, seconds)
            case events.RecoveryEnded():
                self._note(event)
                self._end_recovery(event.time)
            case _ if event.level > logging.DEBUG:
                self._note(event)

    def _count(self, event: Event) -> None:
        for key, value, how in self._figures.of(event):
            if key == "rank":
                self._rank = int(value)
            about: Attributes = {"holdfast.job": self._job, "holdfast.rank": self._rank}
            if how:
                about["holdfast.how"] = how
            if record := self._record.get(key):
                record(value, about)

    def _wall(self, at: float) -> int:
        return int(at * 1e9) + self._to_wall

    def _attributes(self, event: Event) -> Attributes:
        found: Attributes = {"holdfast.job": self._job, "holdfast.rank": self._rank, "holdfast.process": event.process}
        for name, value in event_lines.to_record(event).items():
            if isinstance(value, str | int | float) and name not in ("time", "process", "pid", "kind", "rank"):
                found[f"holdfast.{name}"] = value
        return found

    def _begin(self, name: str, at: float, event: Event, parent: Span | None = None) -> Span:
        context = None if parent is None else self._trace.set_span_in_context(parent)
        return self._tracer.start_span(name, context, attributes=self._attributes(event), start_time=self._wall(at))

    def _part(self, name: str, event: Event, seconds: float) -> None:
        """A span that ends with an event; inside of the recovery, if there is one."""
        self._begin(name, event.time - seconds, event, self._recovery).end(self._wall(event.time))

    def _note(self, event: Event) -> None:
        """An event of the recovery; a span without length, if there is none."""
        if self._recovery is None:
            self._part(f"holdfast.{event.kind}", event, 0.0)
        else:
            what: Mapping[str, str | int | float | bool] = {**self._attributes(event), "holdfast.text": str(event)}
            self._recovery.add_event(event.kind, what, self._wall(event.time))

    def _end_step(self, at: float, error: str = "") -> None:
        span, self._step = self._step, None
        if span is not None:
            if error:
                span.set_status(self._trace.StatusCode.ERROR, error)
            span.end(self._wall(at))

    def _end_recovery(self, at: float) -> None:
        span, self._recovery = self._recovery, None
        if span is not None:
            span.end(self._wall(at))

    def close(self) -> None:
        """End what is open."""
        self._end_step(self._last, "the session ended")
        self._end_recovery(self._last)


def _instrument(meter: Meter, kind: Kind, name: str, about: str) -> Callable[[float, Attributes], None]:
    match kind:
        case "counter":
            return meter.create_counter(name, description=about).add
        case "gauge":
            return meter.create_gauge(name, description=about).set
        case "time":
            return meter.create_histogram(name, "s", about).record
