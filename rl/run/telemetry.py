"""Sends the events of a run to its directory, to TensorBoard, and to whatever else observes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import Activity, Evaluated, Event, StepTrained, WeightsServed

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

Observer = Callable[[Event], None]


class RunTelemetry:
    """The outlet of events. Every observer gets each event, after the directory has it."""

    def __init__(self, directory: RunDirectory, observers: tuple[Observer, ...] = (), began: float = 0.0) -> None:
        """`began` is how long the run had lasted, in seconds, when the driver before this one ended."""
        self._directory, self._observers = directory, [*observers]
        self._zero = time.monotonic() - began

    def observe(self, observer: Observer) -> None:
        """Give one more observer the events from now on."""
        self._observers.append(observer)

    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._zero

    def at(self, monotonic: float) -> float:
        """The time of an event at `monotonic`, a value of `time.monotonic()`."""
        return monotonic - self._zero

    def emit(self, event: Event) -> None:
        """Record an event."""
        self._directory.append(event)
        for observer in self._observers:
            observer(event)

    def emit_all(self, events: Sequence[Event]) -> None:
        """Record events, which may be older than those before."""
        self._directory.append_all(events)
        for event in events:
            for observer in self._observers:
                observer(event)

    @contextmanager
    def doing(self, process: str, role: str, what: str, number: int) -> Iterator[None]:
        """Emit an `Activity` at the end of the block, unless it raises."""
        began = self.now()
        yield
        self.emit(
            Activity(time=began, process=process, role=role, what=what, number=number, seconds=self.now() - began)
        )


class TensorBoard:
    """An observer that writes scalars as TensorBoard reads them, by step. Close it after use."""

    def __init__(self, path: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer: SummaryWriter = SummaryWriter(str(path), flush_secs=5)

    def __call__(self, event: Event) -> None:
        add = self._writer.add_scalar
        match event:
            case StepTrained():
                step = event.step + 1  # as versions are counted: the committed steps
                add("train/reward", event.reward, step)
                add("train/loss", event.loss, step)
                add("train/gradient_norm", event.gradient_norm, step)
                add("train/tokens", event.tokens, step)
                add("train/staleness", max(event.staleness, default=0), step)
                add("trainers/size", event.size, step)
                add("trainers/epoch", event.epoch, step)
            case Evaluated():
                if event.reward is not None:
                    add("evaluation/reward", event.reward, event.version)
                add("evaluation/failed", event.failed, event.version)
            case WeightsServed():
                add("weights/seconds_to_served", event.seconds, event.version)
            case _:
                return

    def close(self) -> None:
        """Write what is left. Idempotent."""
        self._writer.close()
