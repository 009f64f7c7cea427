"""`CallTimes`: how long the calls of a server's sessions took, for several readers."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import msgspec

from holdfast.rl.work_log import MOST, WorkReport, WorkSpan, processor_with_descendants

Call = Literal["reset", "step", "state"]

FOLD_SECONDS = 0.05
"""A call that begins within this time of a span's begin is added to that span: a server may take thousands a second."""


@dataclass(slots=True)
class _Span:
    what: Call
    began: float
    seconds: float
    cpu: float
    calls: int


@dataclass(slots=True)
class _AtWork:
    """The calls of a kind that run: how many, and since when there is one."""

    running: int = 0
    calls: int = 0
    began: float = 0.0
    cpu: float = 0.0


class CallWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader gets: the spans since its last reading, and the number with which it reads on.

    `server` is another word after each start of the server, `host` and `pid` are its process.
    """

    server: str
    host: str
    pid: int
    next: int
    report: WorkReport


class CallTimes:
    """Records calls from any thread. A span is a time in which calls of a kind ran, its number that of the calls.

    Any number of readers may read: what one has read, another one still gets.
    """

    def __init__(self, host: str, pid: int, processor: Callable[[], float] = processor_with_descendants) -> None:
        self._host, self._pid, self._processor = host, pid, processor
        self._server = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._spans: deque[_Span] = deque(maxlen=MOST)
        self._count = 0
        self._at_work: dict[Call, _AtWork] = {}
        self._unread: dict[Call, _Span] = {}

    @contextmanager
    def calling(self, what: Call) -> Iterator[None]:
        """Record what the block does in this thread, also if it raises."""
        cpu = time.thread_time()
        self._begin(what)
        try:
            yield
        finally:
            self._end(what, time.thread_time() - cpu)

    def read(self, since: int | None) -> CallWork:
        """What happened since the reading that gave `since` as its `next`; None reads nothing, and begins.

        Calls that still run are given up to now.
        """
        now = time.monotonic()
        with self._lock:
            for what, each in self._at_work.items():
                if each.running:
                    self._add(what, each, now)
                    each.began, each.calls = now, each.running
            self._unread.clear()
            first = self._count - len(self._spans)
            found = [] if since is None else list(self._spans)[max(0, since - first) :]
            following = self._count
        spans = tuple(
            WorkSpan(what=each.what, number=each.calls, ago=now - each.began, seconds=each.seconds, cpu=each.cpu)
            for each in found
        )
        report = WorkReport(spans=spans, cpu=self._processor())
        return CallWork(server=self._server, host=self._host, pid=self._pid, next=following, report=report)

    def _begin(self, what: Call) -> None:
        now = time.monotonic()
        with self._lock:
            each = self._at_work.setdefault(what, _AtWork())
            if not each.running:
                each.began = now
            each.running += 1
            each.calls += 1

    def _end(self, what: Call, cpu: float) -> None:
        now = time.monotonic()
        with self._lock:
            each = self._at_work[what]
            each.running -= 1
            each.cpu += cpu
            if not each.running:
                self._add(what, each, now)
                each.calls = 0

    def _add(self, what: Call, each: _AtWork, now: float) -> None:
        """Record that calls ran until now. A later span of the same time is shorter by the pauses within."""
        last = self._unread.get(what)
        if last is not None and each.began - last.began < FOLD_SECONDS:
            last.seconds += now - each.began
            last.cpu += each.cpu
            last.calls += each.calls
        else:
            span = self._unread[what] = _Span(what, each.began, now - each.began, each.cpu, each.calls)
            self._spans.append(span)
            self._count += 1
        each.cpu = 0.0
