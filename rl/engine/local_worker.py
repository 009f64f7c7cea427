"""The child of a `LocalEngine`: answers numbered calls over the socket to its parent, and ends with that."""

from __future__ import annotations

import os
import socket
import struct
import sys
from functools import partial

from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.framed_socket import ChannelClosed, FramedSocket
from holdfast.rl.engine.actor_host import ActorHost

NUMBER = struct.Struct("<Q")
"""The number of a call, which its request and its answer begin with. The answer 0 says that the actor is made."""

PONG = b"pong"
_SEND_SECONDS = 600.0


def serve_actor(recipe: bytes, channel: ProcessChannel) -> None:
    """Make an actor from its packed `ObjectRecipe`, and serve it until the parent closes its end."""
    frames = FramedSocket(channel.detach())
    host = ActorHost()
    host.make(recipe, partial(_answer, frames, NUMBER.pack(0)))
    try:
        while True:
            frame = memoryview(frames.receive())
            number, request = bytes(frame[: NUMBER.size]), frame[NUMBER.size :]
            if request:
                host.call(request, partial(_answer, frames, number))
            else:
                _answer(frames, number, PONG)
    except ChannelClosed:
        pass


def _answer(frames: FramedSocket, number: bytes, answer: bytes) -> None:
    try:
        frames.send(number + answer, _SEND_SECONDS)
    except ChannelClosed:
        pass
    except TimeoutError:  # part of it may be sent: no later answer could be read
        os._exit(1)


if __name__ == "__main__":
    inherited = ProcessChannel(socket.socket(fileno=int(sys.argv[1])))
    serve_actor(inherited.recv(60.0), inherited)
    os._exit(0)
