"""`WorkLog`: a process of a run records spans of work, which the driver collects with `work`."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
    """The state of a trainer: its rank in `epoch` (None: a spare), and the updates that it knows to be committed."""

    pid: int
    rank: int | None
    epoch: int | None
    committed: int
    newest_batch: int | None


@dataclass(slots=True)
class _Calls:
    """The calls of a kind that run: how many, since when there is one, and what the ended ones cost."""

    running: int = 0
    count: int = 0
    began: float = 0.0
    cpu: float = 0.0


class WorkLog:
    """Records spans of work from any thread, for one reader.

    `processor` gives the processor seconds of the process, with those of its children if they do its work.
    """

    def __init__(self, processor: Callable[[], float] = time.process_time) -> None:
        self.processor = processor
        self._lock = threading.Lock()
        self._spans: deque[WorkSpan] = deque(maxlen=MOST)
        self._calls: dict[str, _Calls] = {}
        self._unread: dict[str, WorkSpan] = {}
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
        """Record a call in this thread, also if it raises. Calls of a kind at the same time are one span."""
        cpu, began = time.thread_time(), time.monotonic()
        with self._lock:
            calls = self._calls.setdefault(what, _Calls())
            calls.began = calls.began if calls.running else began
            calls.running += 1
            calls.count += 1
        try:
            yield
        finally:
            cpu, ended = time.thread_time() - cpu, time.monotonic()
            with self._lock:
                calls.running -= 1
                calls.cpu += cpu
                if not calls.running:
                    self._end(what, calls, ended)

    def report(self) -> WorkReport:
        """The spans since the last call. Calls that still run are given up to now."""
        now = time.monotonic()
        with self._lock:
            for what, calls in self._calls.items():
                if calls.running:
                    self._end(what, calls, now)
                    calls.began, calls.count = now, calls.running
            self._unread.clear()
            spans = tuple(self._spans)
            self._spans.clear()
        return WorkReport(spans=spans, cpu=self.processor(), now=now)

    def _end(self, what: str, calls: _Calls, now: float) -> None:
        """Record that calls ran until now. A later span of the same time is shorter by the pauses within."""
        span = self._unread.get(what)
        if span is not None and calls.began - span.began < FOLD_SECONDS:
            span.seconds += now - calls.began
            span.cpu += calls.cpu
            span.number += calls.count
        else:
            span = self._unread[what] = WorkSpan(what, calls.count, calls.began, now - calls.began, calls.cpu)
            self._spans.append(span)
        calls.cpu, calls.count = 0.0, 0


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
