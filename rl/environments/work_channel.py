"""A server's work, asked for beside its sessions: a WebSocket to `/work`, of which OpenEnv's protocol knows nothing."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec import Meta
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import InvalidHandshake, InvalidURI, WebSocketException

from holdfast.comms.errors import HoldfastError, describe
from holdfast.rl.environments.client import websocket_url
from holdfast.rl.work_log import MOST, WorkReport, WorkSpan, processor_with_descendants

PATH = "/work"
MOST_BYTES = 4 << 20
_REQUEST_SECONDS = 5.0
_LOGGER = logging.getLogger("holdfast.rl.environments.work_channel")
_LOGGER.addHandler(logging.NullHandler())
_LOGGER.propagate = False  # errors are raised, or are no news

_Seconds = Annotated[float, Meta(ge=0, lt=1e9)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Call = Annotated[str, Meta(pattern="^(reset|step|state)$")]
_Word = Annotated[str, Meta(max_length=200)]


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


class _WorkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`since` is `next` of the last answer; None in the first request."""

    since: _Count | None


class _WireSpan(msgspec.Struct, frozen=True):
    what: _Call
    number: _Count
    ago: _Seconds
    seconds: _Seconds
    cpu: _Seconds


class _WorkAnswer(msgspec.Struct, frozen=True):
    server: _Word
    host: _Word
    pid: _Count
    next: _Count
    cpu: _Seconds
    spans: Annotated[tuple[_WireSpan, ...], Meta(max_length=MOST)]


class NoWorkChannel(HoldfastError):
    """A server does not tell what it did: it is another program's, or one of another release."""

    def __init__(self, url: str, why: str) -> None:
        self.url, self.why = url, why
        super().__init__(
            f"server {url} does not tell what it did: {why}; to see it in the report, start a server of this release"
        )


async def answer_work(connection: ServerConnection, times: CallTimes) -> None:
    """Answer the request of a connection to `/work`, and close it. One that is malformed has no answer."""
    try:
        async with asyncio.timeout(_REQUEST_SECONDS):
            request = msgspec.json.decode(await connection.recv(decode=False), type=_WorkRequest)
            found = times.read(request.since)
            report = found.report
            spans = (_WireSpan(each.what, each.number, each.ago, each.seconds, each.cpu) for each in report.spans)
            answer = _WorkAnswer(found.server, found.host, found.pid, found.next, report.cpu, tuple(spans))
            await connection.send(msgspec.json.encode(answer), text=True)
    except (TimeoutError, msgspec.DecodeError, WebSocketException):
        connection.transport.abort()


async def ask_work(url: str, since: int | None, timeout: float = 2.0) -> CallWork | None:
    """What the server at `url` did since the last answer; None if it does not answer now. Raises `NoWorkChannel`."""
    scheme, host, path, query, _ = urlsplit(websocket_url(url))
    address = urlunsplit((scheme, host, path.removesuffix("/ws") + PATH, query, ""))
    try:
        async with (
            asyncio.timeout(timeout),
            connect(address, compression=None, max_size=MOST_BYTES, ping_interval=None, close_timeout=0.5, proxy=None,
                    logger=_LOGGER) as connection,
        ):  # fmt: skip
            await connection.send(msgspec.json.encode(_WorkRequest(since)), text=True)
            answer = msgspec.json.decode(await connection.recv(decode=False), type=_WorkAnswer)
    except (InvalidHandshake, InvalidURI, msgspec.DecodeError) as error:
        raise NoWorkChannel(url, describe(error)) from error
    except (TimeoutError, WebSocketException, OSError):
        return None
    spans = tuple(
        WorkSpan(what=each.what, number=each.number, ago=each.ago, seconds=each.seconds, cpu=each.cpu)
        for each in answer.spans
    )
    return CallWork(
        server=answer.server,
        host=answer.host,
        pid=answer.pid,
        next=answer.next,
        report=WorkReport(spans=spans, cpu=answer.cpu),
    )
