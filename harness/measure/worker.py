"""The worker's side of a measurement: serves calls of an object's methods until the caller hangs up.

This file imports nothing of holdfast: a process of the gate loads it by its path, and runs the code of any commit.
Messages are lines of JSON. A worker sleeps in a read between calls, so it uses no CPU while others have their turn.
"""

from __future__ import annotations

import inspect
import mmap
import os
import socket
import time
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
    from holdfast.comms.system.files import connect_unix

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


# The barrier ----------------------------------------------------------------------------------------------------------


_SLOT = 8
"""Counters are eight words apart: one cache line each."""


class WorkerBarrier:
    """The barrier of `ranks` ranks over the file at `path`, for `rank`. A wait calls `give_way` in a loop."""

    def __init__(self, path: Path, rank: int, ranks: int, give_way: Callable[[], object] = os.sched_yield) -> None:
        with path.open("r+b") as file:
            self._pages = mmap.mmap(file.fileno(), ranks * _SLOT * 8)
        self._counters = memoryview(self._pages).cast("Q")
        self._mine = rank * _SLOT
        self._others = [other * _SLOT for other in range(ranks) if other != rank]
        self._turn = 0
        self._give_way = give_way

    @staticmethod
    def create(path: Path, ranks: int) -> None:
        """Write the file that all ranks then map."""
        path.write_bytes(bytes(ranks * _SLOT * 8))

    def wait(self, timeout: float = 30.0) -> None:
        """Return when all ranks are here. Raises TimeoutError after `timeout` seconds."""
        self._turn += 1
        counters, turn = self._counters, self._turn
        counters[self._mine] = turn
        deadline = time.monotonic() + timeout
        for other in self._others:
            while counters[other] < turn:
                self._give_way()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not all ranks came to the barrier within {timeout} s")

    def close(self) -> None:
        self._counters.release()
        self._pages.close()
