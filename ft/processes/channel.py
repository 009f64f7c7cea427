"""Pickled objects between a process and the children that it forked itself, with deadlines.

The socket is one half of a socketpair that only those two processes hold: this is the one place where pickles travel.
Nothing that came over a network may ever be read with it.
"""

from __future__ import annotations

import socket
from typing import Any

import cloudpickle

from holdfast.ft.processes.framed_socket import FramedSocket


class ProcessChannel:
    """One end of the socket. Any thread may `send`; one thread at a time may `recv`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = FramedSocket(sock)

    @staticmethod
    def pair() -> tuple[ProcessChannel, socket.socket]:
        """A channel for this process, and the plain socket to hand to the child."""
        ours, theirs = socket.socketpair()
        return ProcessChannel(ours), theirs

    def fileno(self) -> int:
        """The descriptor, readable when there is something to `recv`; -1 once closed."""
        return self._frames.fileno()

    def send(self, message: Any, timeout: float = 30.0) -> None:
        """Send one object. Raises `ChannelClosed`, or `TimeoutError` after `timeout` seconds without room."""
        self._frames.send(cloudpickle.dumps(message), timeout)

    def recv(self, timeout: float | None = None) -> Any:
        """The next object. Raises `ChannelClosed`, or `TimeoutError` after `timeout` seconds without one."""
        return cloudpickle.loads(self._frames.receive(timeout))

    def detach(self) -> socket.socket:
        """Give the socket, not blocking, to the caller; this channel is closed."""
        return socket.socket(fileno=self._socket.detach())

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._frames.close()
