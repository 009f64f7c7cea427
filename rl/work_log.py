"""What a process of a run did lately, and its processor time, for the driver to collect."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

MOST = 4096
"""The number of spans that are kept until they are collected; older ones are forgotten."""


class WorkSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Something that began `ago` seconds before the report, and took `seconds`, `cpu` of them on a processor.

    `number` is the step or the version.
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
    """Records spans of work, from any thread: two clocks are read at each end."""

    def __init__(self) -> None:
        self._done: deque[tuple[str, int, float, float, float]] = deque(maxlen=MOST)

    @contextmanager
    def doing(self, what: str, number: int) -> Iterator[None]:
        """Record what the block does in this thread, also if it raises."""
        began, cpu = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            self._done.append((what, number, began, time.monotonic() - began, time.thread_time() - cpu))

    def report(self) -> WorkReport:
        """The spans since the last call."""
        now, found = time.monotonic(), []
        while self._done:
            what, number, began, seconds, cpu = self._done.popleft()
            found.append(WorkSpan(what=what, number=number, ago=now - began, seconds=seconds, cpu=cpu))
        return WorkReport(spans=tuple(found), cpu=time.process_time())
