"""The engine without Monarch: actors in forks of the zygote of this host, calls over a socket pair each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import struct
import sys
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from holdfast.ft.processes.channel import ChannelClosed, FramedSocket, ProcessChannel
from holdfast.ft.processes.child_process import ChildProcess, ExecutedProcess, spawned
from holdfast.ft.processes.zygote_client import zygote_with
from holdfast.rl.actors.engine import ActorHost, ActorOrder, ActorProcess, Child, Engine, OwnProcess
from holdfast.rl.actors.errors import ActorStartFailed

_NUMBER = struct.Struct("<Q")
"""The length of a frame, and the number of a call, which its request and its answer begin with."""

_SEND_SECONDS = 600.0


class LocalProcess(OwnProcess):
    """A child of this process, on a socket pair."""

    def __init__(
        self,
        order: ActorOrder,
        child: Child,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        forget: Callable[[ActorProcess], None],
    ) -> None:
        super().__init__(order, child, forget)
        reader, self._writer = streams
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count()
        self._reading = asyncio.create_task(self._read(reader))

    def _send(self, request: bytes, answer: asyncio.Future[bytes]) -> None:
        number = next(self._numbers)
        self._answers[number] = answer
        answer.add_done_callback(lambda _: self._answers.pop(number))
        self._writer.writelines((_NUMBER.pack(_NUMBER.size + len(request)), _NUMBER.pack(number), request))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):  # it is ending: the watch will say how
            while True:
                (length,) = _NUMBER.unpack(await reader.readexactly(_NUMBER.size))
                (number,) = _NUMBER.unpack(await reader.readexactly(_NUMBER.size))
                found = await reader.readexactly(length - _NUMBER.size)
                answer = self._answers.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(found)

    def _leave(self) -> None:
        self._writer.close()  # it ends once it has run its exit functions

    async def _release(self) -> None:
        self._writer.transport.abort()
        self._reading.cancel()
        await super()._release()


class LocalEngine(Engine):
    """Starts actors in processes of this host; see `Engine`."""

    async def _process(self, order: ActorOrder) -> LocalProcess:
        if order.host:
            raise ActorStartFailed(
                order.name, f"the local engine reaches no host {order.host!r}: use the Monarch engine"
            )
        process = await spawned(partial(self._spawn, order))
        child = Child(process)
        try:
            streams = await asyncio.open_unix_connection(sock=process.channel.detach())
        except BaseException:
            child.kill()
            await asyncio.shield(child.reaped.wait())
            raise
        return LocalProcess(order, child, streams, self._processes.discard)

    def _spawn(self, order: ActorOrder) -> ChildProcess:
        output = self._log_of(order.name)
        if order.python is None:
            source = zygote_with(__name__, *self._preload)
            return source.spawn(serve_actor, name=order.name, output=output, environ=order.environ)
        command = [order.python, "-P", "-m", __name__]
        return ExecutedProcess(command, name=order.name, output=output, environ=order.environ)


def serve_actor(channel: ProcessChannel) -> None:
    """Answer the numbered requests of the parent until it closes its end: the body of a child of `LocalEngine`."""
    frames, host = FramedSocket(channel.detach()), ActorHost()
    with contextlib.suppress(ChannelClosed):
        while True:
            frame = memoryview(frames.receive())
            number, request = bytes(frame[: _NUMBER.size]), frame[_NUMBER.size :]
            host.answer(request).add_done_callback(partial(_answer, frames, number))


def _answer(frames: FramedSocket, number: bytes, answer: Future[bytes]) -> None:
    try:
        frames.send(number + answer.result(), _SEND_SECONDS)
    except ChannelClosed:
        pass
    except TimeoutError:  # part of it may be sent: no later answer could be read
        os._exit(1)


if __name__ == "__main__":
    serve_actor(ProcessChannel(socket.socket(fileno=int(sys.argv[1]))))
    os._exit(0)
