"""`WorkLog`: a process of a run records spans of work, which the driver collects with `work`."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from holdfast.ft.detectors.process_watch import cpu_ticks

MOST = 4096
"""The number of spans that are kept until they are read; older ones are forgotten."""

FOLD_SECONDS = 0.05
"""A call that begins within this time of a span's begin is added to that span: a server may take thousands a second."""


class WorkSpan(msgspec.Struct):
    """Something that began at `began` on the process's clock, and took `seconds`, `cpu` of them on a processor.

    `number` is the step or the version; of `WorkLog.calling`, the number of calls.
    """

    what: str
    number: int
    began: float
    seconds: float
    cpu: float


class WorkReport(msgspec.Struct, frozen=True, kw_only=True):
    """The spans since the report before, the processor seconds of the process, and what its clock shows now."""

    spans: tuple[WorkSpan, ...]
    cpu: float
    now: float = msgspec.field(default_factory=time.monotonic)


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a trainer.

    `rank` is its rank in `epoch`, None for a spare. `committed` is the number of updates that it knows to be committed,
    `newest_batch` the first update of the newest batch that it has.
    """

    pid: int
    rank: int | None
    epoch: int | None
    committed: int
    newest_batch: int | None


class WorkLog:
    """Records spans of work from any thread, for one reader.

    `processor` gives the processor seconds of the process, with those of its children if they do its work.
    """

    def __init__(self, processor: Callable[[], float] = time.process_time) -> None:
        self.processor = processor
        self._lock = threading.Lock()
        self._spans: deque[WorkSpan] = deque(maxlen=MOST)
        self._calls: dict[str, WorkSpan] = {}
        self._lasting: dict[str, tuple[int, float, float]] = {}

    @contextmanager
    def doing(self, what: str, number: int) -> Iterator[None]:
        """Record what the block does in this thread, also if it raises."""
        began, cpu = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            self.add(what, number, began, time.thread_time() - cpu)

    def add(self, what: str, number: int, began: float, cpu: float) -> None:
        """Record what began at `began` on `time.monotonic()`, and ends now."""
        with self._lock:
            self._spans.append(WorkSpan(what, number, began, time.monotonic() - began, cpu))

    def lasting(self, what: str, number: int | None, cpu: float) -> None:
        """Record a span of `what` that lasts until this is called with another number; None ends it.

        `cpu` is what the clock of its processor seconds shows now.
        """
        now, before = time.monotonic(), self._lasting.get(what)
        if before is not None and before[0] != number:
            with self._lock:
                self._spans.append(WorkSpan(what, before[0], before[1], now - before[1], cpu - before[2]))
            del self._lasting[what]
        if number is not None and what not in self._lasting:
            self._lasting[what] = number, now, cpu

    @contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Record a call in this thread, also if it raises. Calls that begin soon after the first are one span."""
        began, cpu = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            ended, cpu = time.monotonic(), time.thread_time() - cpu
            with self._lock:
                span = self._calls.get(what)
                if span is None or began - span.began >= FOLD_SECONDS:
                    span = self._calls[what] = WorkSpan(what, 0, began, 0.0, 0.0)
                    self._spans.append(span)
                ended = max(ended, span.began + span.seconds)
                span.began = min(span.began, began)  # it may have begun long before one that ended sooner
                span.number += 1
                span.seconds = ended - span.began
                span.cpu += cpu

    def report(self) -> WorkReport:
        """The spans since the last call."""
        with self._lock:
            spans = tuple(self._spans)
            self._spans.clear()
            self._calls.clear()
        return WorkReport(spans=spans, cpu=self.processor())


def processor_with_descendants() -> float:
    """The processor seconds of this process, of its living descendants, and of the children that it has waited for."""
    ended = os.times()
    living = sum(map(cpu_ticks, _descendants(os.getpid()))) / os.sysconf("SC_CLK_TCK")
    return time.process_time() + ended.children_user + ended.children_system + living


def _descendants(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, file.read_text().split()):
                yield child
                yield from _descendants(child)
