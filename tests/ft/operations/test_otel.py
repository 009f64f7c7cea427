"""The events of a session as OpenTelemetry's spans and metrics, read from exporters in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("opentelemetry.sdk", reason="pip install 'holdfast[otel]'")

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from holdfast import ft
from holdfast.comms.system.keys import create_key
from holdfast.ft import events
from holdfast.ft.events import Event, stamped
from holdfast.ft.processes.zygote_client import call_in_fork
from holdfast.ft.telemetry.event_log import EventLog
from holdfast.ft.telemetry.metrics import FIGURES, EventFigure, Metrics, OpTally
from holdfast.ft.telemetry.otel import export
from support.waiting import PROGRAM_SECONDS


@dataclass
class Exported:
    """What a program's exporters got."""

    exporter: InMemorySpanExporter
    reader: InMemoryMetricReader

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def metrics(self) -> dict[str, list[Any]]:
        data = self.reader.get_metrics_data()
        found = [each for part in data.resource_metrics for scope in part.scope_metrics for each in scope.metrics]
        return {metric.name: list(metric.data.data_points) for metric in found}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exported]:
    """A program that has set up OpenTelemetry."""
    found = Exported(InMemorySpanExporter(), InMemoryMetricReader())
    tracers, meters = TracerProvider(), MeterProvider([found.reader])
    tracers.add_span_processor(SimpleSpanProcessor(found.exporter))
    monkeypatch.setattr(trace, "get_tracer", tracers.get_tracer)
    monkeypatch.setattr(metrics, "get_meter", meters.get_meter)
    yield found
    tracers.shutdown()
    meters.shutdown()


RECOVERY: list[tuple[float, Event]] = [
    (1.0, events.ViewInstalled(epoch=1, members=("p1", "p2", "p3"), rank=0, reason="all are here")),
    (1.1, events.CommunicatorBuilt(epoch=1, seconds=0.05, rank=0, size=3)),
    (1.2, events.StepBegun(step=0, epoch=1)),
    (1.3, events.StepCommitted(step=0, epoch=1)),
    (1.4, events.StepBegun(step=1, epoch=1)),
    (1.5, events.DeathsDetected(members=("p3",), evidence="its process ended")),
    (1.6, events.EpochRevoked(epoch=1, reason="p3 is lost")),
    (1.7, events.ViewInstalled(epoch=2, members=("p1", "p2"), rank=0, reason="p3 is gone")),
    (1.8, events.CommunicatorBuilt(epoch=2, seconds=0.05, rank=0, size=2)),
    (1.9, events.StepAborted(step=1, epoch=1)),
    (2.0, events.StepBegun(step=1, epoch=2)),
    (2.1, events.StepCommitted(step=1, epoch=2)),
    (2.2, events.RecoveryEnded(step=1, epoch=2, seconds=0.8, usual=0.1, joined=0, left=1)),
]


def run(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emit the events of a recovery, each at its time."""
    end = export(log, "job")
    for at, event in RECOVERY:
        monkeypatch.setattr(
            "holdfast.ft.telemetry.event_log.stamped", lambda e, process, pid, at=at: stamped(e, process, pid, at)
        )
        log.emit(event)
    end()
    log.close()


def test_steps_and_recoveries_are_spans(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    run(EventLog("p1", ""), monkeypatch)
    steps = exported.spans("holdfast.step")
    assert [span.attributes and span.attributes["holdfast.step"] for span in steps] == [0, 1, 1]
    assert [span.status.is_ok for span in steps] == [True, False, True]
    (recovery,) = exported.spans("holdfast.recovery")
    assert recovery.start_time is not None and recovery.end_time is not None
    assert (recovery.end_time - recovery.start_time) / 1e9 == pytest.approx(0.7)
    assert [event.name for event in recovery.events] == ["detected", "revoked", "installed", "gap"]
    first, second = exported.spans("holdfast.rebuild")
    assert first.parent is None and second.parent is not None and second.parent.span_id == recovery.context.span_id
    assert recovery.attributes and recovery.attributes["holdfast.job"] == "job"


def test_what_is_counted_is_a_metric_of_both_libraries(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog("p1", "")
    served = Metrics("0", "job", log, OpTally(None), lambda: 0)
    run(log, monkeypatch)
    found, scraped = exported.metrics(), served.registry.get_sample_value
    counted = ("steps", "steps.aborted", "failures", "epoch", "members")
    assert [found[f"holdfast.{name}"][0].value for name in counted] == [2, 1, 1, 2, 2]
    assert (found["holdfast.rebuild"][0].count, found["holdfast.recovery"][0].sum) == (2, 0.8)
    for key, figure in FIGURES.items():
        points = found.get(f"holdfast.{figure.otel}", [])
        match figure:
            case EventFigure(otel="") | EventFigure(scraped=False):
                continue
            case EventFigure(kind="time"):
                assert scraped(f"holdfast_{key}_seconds_sum") == sum(point.sum for point in points) > 0
            case EventFigure(kind="gauge"):
                assert [scraped(f"holdfast_{key}")] == [point.value for point in points]
            case _:
                labels = {"how": "normal"} if key == "steps_committed" else {}
                assert scraped(f"holdfast_{key}_total", labels) == sum(point.value for point in points)
    served.close()


def exported_and_profiled(key: Path) -> tuple[int, list[str]]:
    """The number of steps that a session exports, and the names of its ranges in a profile."""
    create_key(key)
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(tracers)
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        ft.Session("shm", size=1, job="job", register="memory://otel", key_file=key) as session,
    ):
        for attempt in session.steps(3):
            with attempt:
                attempt.comm.barrier()
    steps = [span for span in exporter.get_finished_spans() if span.name == "holdfast.step"]
    return len(steps), sorted({event.name for event in profile.events() or () if "holdfast" in event.name})


def test_a_session_exports_its_steps_and_a_profile_has_their_ranges(tmp_path: Path) -> None:
    """The whole way, in a process of its own."""
    call = partial(exported_and_profiled, tmp_path / "key")
    steps, ranges = call_in_fork(call, name="otel", output=tmp_path / "output", timeout=PROGRAM_SECONDS)
    assert steps == 3
    assert ranges == ["holdfast rebuild of epoch 1", *(f"holdfast step {step}" for step in range(3))]


def test_a_program_without_the_sdk_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.sdk")
    log = EventLog("p1", "")
    export(log, "job")
    assert log._receivers == ()
