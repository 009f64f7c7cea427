"""A server's work, asked for beside its sessions: a WebSocket to `/work`, of which OpenEnv's protocol knows nothing."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Annotated
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec import Meta
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import InvalidHandshake, InvalidURI, WebSocketException

from holdfast.comms.errors import HoldfastError, describe
from holdfast.comms.transport.liveness import this_host
from holdfast.rl.environments.client import websocket_url
from holdfast.rl.telemetry import Count, WorkLog, WorkReport

WORK_PATH = "/work"
MOST_BYTES = 4 << 20
_REQUEST_SECONDS = 5.0
_LOGGER = logging.getLogger("holdfast.rl.environments.work_channel")
_LOGGER.addHandler(logging.NullHandler())
_LOGGER.propagate = False  # errors are raised, or are no news

_Word = Annotated[str, Meta(max_length=200)]


class _WorkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`since` is `next` of the last answer; None in the first request."""

    since: Count | None


class ServerWork(WorkReport, frozen=True, kw_only=True):
    """The answer: a report of the process `pid` on `host`. `server` is another word after each start of the server."""

    server: _Word
    host: _Word
    pid: Count
    next: Count


class NoWorkChannel(HoldfastError):
    """A server does not tell what it did: it is another program's, or one of another release."""

    def __init__(self, url: str, why: str) -> None:
        self.url, self.why = url, why
        super().__init__(
            f"server {url} does not tell what it did: {why}; to see it in the report, start a server of this release"
        )


async def answer_work(connection: ServerConnection, work: WorkLog, server: str) -> None:
    """Answer the request of a connection to `/work`, and close it. One that is malformed has no answer."""
    try:
        async with asyncio.timeout(_REQUEST_SECONDS):
            request = msgspec.json.decode(await connection.recv(decode=False), type=_WorkRequest)
            report = msgspec.structs.asdict(work.read(request.since))
            answer = ServerWork(server=server, host=this_host(), pid=os.getpid(), **report)
            await connection.send(msgspec.json.encode(answer), text=True)
    except (TimeoutError, msgspec.DecodeError, WebSocketException):
        connection.transport.abort()


async def ask_work(url: str, since: int | None, timeout: float = 2.0) -> ServerWork | None:
    """What the server at `url` did since the last answer; None if it does not answer now. Raises `NoWorkChannel`."""
    scheme, host, path, query, _ = urlsplit(websocket_url(url))
    address = urlunsplit((scheme, host, path.removesuffix("/ws") + WORK_PATH, query, ""))
    try:
        async with (
            asyncio.timeout(timeout),
            connect(address, compression=None, max_size=MOST_BYTES, ping_interval=None, close_timeout=0.5, proxy=None,
                    logger=_LOGGER) as connection,
        ):  # fmt: skip
            await connection.send(msgspec.json.encode(_WorkRequest(since)), text=True)
            return msgspec.json.decode(await connection.recv(decode=False), type=ServerWork)
    except (InvalidHandshake, InvalidURI, msgspec.DecodeError) as error:
        raise NoWorkChannel(url, describe(error)) from error
    except (TimeoutError, WebSocketException, OSError):
        return None
