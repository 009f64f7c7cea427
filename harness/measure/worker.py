"""The worker's side of a measurement: serves calls of an object's methods until the caller hangs up.

This file imports nothing of holdfast: a process of the gate loads it by its path, and runs the code of any commit.
Messages are lines of JSON. A worker sleeps in a read between calls, so it uses no CPU while others have their turn.
"""

from __future__ import annotations

import inspect
import os
import socket
import traceback
import typing
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """A worker is ready. `cpus` are those it may run on; `detail` names its library and version."""

    role: str
    rank: int
    pid: int
    cpus: tuple[int, ...]
    detail: str


class WorkerCall(msgspec.Struct, frozen=True, tag=True):
    """Call a method of the worker's object; answered by `MethodReturned` or `MethodRaised`."""

    method: str
    arguments: tuple[msgspec.Raw, ...]


class MethodReturned(msgspec.Struct, frozen=True, tag=True):
    """What the method returned."""

    value: msgspec.Raw


class MethodRaised(msgspec.Struct, frozen=True, tag=True):
    """The method raised. `unmeasured`: the library has no such op, and nothing was tried."""

    text: str
    unmeasured: bool


Message = WorkerReady | MethodReturned | MethodRaised
CALLS = msgspec.json.Decoder(WorkerCall)
MESSAGES: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def stream_of(connection: socket.socket) -> BinaryIO:
    """The connection as a stream of lines."""
    return cast(BinaryIO, connection.makefile("rwb"))


def say(stream: BinaryIO, message: Message | WorkerCall) -> None:
    """Send one message."""
    stream.write(msgspec.json.encode(message) + b"\n")
    stream.flush()


def serve(address: Path, service: object, role: str, rank: int, detail: str, run: Run | None = None) -> None:
    """Dial the Unix socket `address`, and serve as worker `rank` of a role; see `serve_on`."""
    from holdfast.comms.system.paths import connect_unix

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connect_unix(connection, address)
        serve_on(connection, service, role, rank, detail, run)


Run = Callable[[Awaitable[Any]], Any]
"""Waits for a coroutine."""


def serve_on(
    connection: socket.socket, service: object, role: str, rank: int, detail: str, run: Run | None = None
) -> None:
    """Serve the public methods of `service` until the other end hangs up. `run` waits for those that are coroutines."""
    with stream_of(connection) as stream:
        try:
            say(stream, WorkerReady(role, rank, os.getpid(), tuple(sorted(os.sched_getaffinity(0))), detail))
            for line in stream:
                say(stream, _answer(service, CALLS.decode(line), run))
        except ConnectionError:
            return


def _answer(service: object, call: WorkerCall, run: Run | None) -> MethodReturned | MethodRaised:
    try:
        if call.method.startswith("_"):
            raise ValueError(f"{call.method} is no public method")
        value = _call(getattr(service, call.method), call.arguments)
        if inspect.isawaitable(value):
            assert run is not None, f"{call.method} is a coroutine, and this worker has no loop"
            value = run(value)
        return MethodReturned(msgspec.Raw(msgspec.json.encode(value)))
    except NotImplementedError as error:
        return MethodRaised(str(error), unmeasured=True)
    except Exception as error:
        return MethodRaised("".join(traceback.format_exception_only(error)).strip(), unmeasured=False)


def _call(method: Callable[..., Any], arguments: tuple[msgspec.Raw, ...]) -> Any:
    """Decode the arguments as the method's annotations say, and call it."""
    hints = typing.get_type_hints(method)
    names = list(inspect.signature(method).parameters)
    if len(arguments) > len(names):
        raise TypeError(f"{method.__name__} takes {len(names)} arguments, not {len(arguments)}")
    given = zip(names, arguments, strict=False)
    return method(*(msgspec.json.decode(raw, type=hints[name]) for name, raw in given))
