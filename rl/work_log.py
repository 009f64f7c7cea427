"""What a process of a run did lately, and its processor time, for the driver to collect."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

MOST = 4096
"""The number of spans that are kept until they are collected; older ones are forgotten."""


class WorkSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Something that began `ago` seconds before the report, and took `seconds`, `cpu` of them on a processor.

    `number` is the step or the version; of an environment, the number of its calls.
    """

    what: str
    number: int
    ago: float
    seconds: float
    cpu: float


class WorkReport(msgspec.Struct, frozen=True, kw_only=True):
    """The spans since the last report, and the processor seconds of the process since its start."""

    spans: tuple[WorkSpan, ...]
    cpu: float


class WorkLog:
    """Records spans of work, from any thread: two clocks are read at each end.

    `processor` gives the processor seconds of the process, with those of its children if they do its work.
    """

    def __init__(self, processor: Callable[[], float] = time.process_time) -> None:
        self.processor = processor
        self._done: deque[tuple[str, int, float, float, float]] = deque(maxlen=MOST)

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
        self._done.append((what, number, began, time.monotonic() - began, cpu))

    def report(self) -> WorkReport:
        """The spans since the last call."""
        now, found = time.monotonic(), []
        while self._done:
            what, number, began, seconds, cpu = self._done.popleft()
            found.append(WorkSpan(what=what, number=number, ago=now - began, seconds=seconds, cpu=cpu))
        return WorkReport(spans=tuple(found), cpu=self.processor())


class SharedSpan:
    """One span for what several tasks of an event loop do at the same time. It lasts from the first to the last.

    Its processor time is that of the process. While it is `paused`, another span has it.
    """

    def __init__(self, log: WorkLog, what: str) -> None:
        self._log, self._what = log, what
        self._tasks = 0
        self._open: tuple[int, float, float] | None = None

    @contextmanager
    def doing(self, number: int) -> Iterator[None]:
        """Be a part of the span; the first part gives it its number."""
        self._tasks += 1
        if self._tasks == 1:
            self._begin(number)
        try:
            yield
        finally:
            self._tasks -= 1
            if not self._tasks:
                self._end()

    @contextmanager
    def paused(self, what: str, number: int) -> Iterator[None]:
        """Do something else; after it, the span goes on as another one with the same number if that works."""
        self._end()
        began, cpu, before = time.monotonic(), self._log.processor(), self._tasks
        try:
            yield
        finally:
            self._log.add(what, number, began, self._log.processor() - cpu)
            if self._tasks and before:
                self._begin(number)

    def _begin(self, number: int) -> None:
        self._open = (number, time.monotonic(), self._log.processor())

    def _end(self) -> None:
        if self._open is not None:
            number, began, cpu = self._open
            self._open = None
            self._log.add(self._what, number, began, self._log.processor() - cpu)


def processor_with_descendants() -> float:
    """The processor seconds of this process, of its living descendants, and of the children that it has waited for."""
    ended = os.times()
    living = sum(map(_processor_of, _descendants(os.getpid())))
    return time.process_time() + ended.children_user + ended.children_system + living


def _descendants(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, file.read_text().split()):
                yield child
                yield from _descendants(child)


def _processor_of(pid: int) -> float:
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
