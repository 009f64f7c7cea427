"""Frames of bytes between processes of this machine, with deadlines; and pickled objects between parent and child.

The socket of a `ProcessChannel` is one half of a socketpair that only those two processes hold: this is the one place
where pickles travel. Nothing that came over a network may ever be read with it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import cloudpickle

_LENGTH = struct.Struct("<Q")


class ChannelClosed(EOFError):
    """The other end is closed, most often because its process is gone."""


class FramedSocket:
    """One end of the socket. Any thread may `send`; one thread at a time may `receive`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._sending = threading.RLock()

    def fileno(self) -> int:
        """The descriptor, readable when there is something to `receive`; -1 once closed."""
        return self._socket.fileno()

    def send(self, body: bytes, timeout: float) -> None:
        """Send one frame. Raises `ChannelClosed`, or `TimeoutError` after `timeout` seconds without room."""
        deadline = time.monotonic() + timeout
        with _held_by(self._sending, deadline):
            for part in (_LENGTH.pack(len(body)), body):
                view = memoryview(part)
                while view:
                    try:
                        view = view[self._socket.send(view) :]
                    except BlockingIOError:
                        self._await(select.POLLOUT, deadline)
                    except OSError as error:
                        raise ChannelClosed(f"cannot send: {error}") from error

    def receive(self, timeout: float | None = None) -> bytearray:
        """The next frame. Raises `ChannelClosed`, or `TimeoutError` after `timeout` seconds without a whole one."""
        deadline = None if timeout is None else time.monotonic() + timeout
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        return self._read(length, deadline)

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._socket.close()

    def _read(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view)
            except BlockingIOError:
                self._await(select.POLLIN, deadline)
                continue
            except OSError as error:
                raise ChannelClosed(f"cannot receive: {error}") from error
            if count == 0:
                raise ChannelClosed("the other process closed its end")
            view = view[count:]
        return data

    def _await(self, event: int, deadline: float | None) -> None:
        poller = select.poll()
        try:
            poller.register(self._socket, event)
        except ValueError as error:
            raise ChannelClosed("this end is closed") from error
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if not poller.poll(left):
            raise TimeoutError("the other process did not answer in time")


class ProcessChannel(FramedSocket):
    """One end of the socket. Any thread may `send`; one thread at a time may `recv`."""

    @staticmethod
    def pair() -> tuple[ProcessChannel, socket.socket]:
        """A channel for this process, and the plain socket to hand to the child."""
        ours, theirs = socket.socketpair()
        return ProcessChannel(ours), theirs

    def send(self, message: Any, timeout: float = 30.0) -> None:
        """Send one object. Raises `ChannelClosed`, or `TimeoutError` after `timeout` seconds without room."""
        super().send(cloudpickle.dumps(message), timeout)

    def recv(self, timeout: float | None = None) -> Any:
        """The next object. Raises `ChannelClosed`, or `TimeoutError` after `timeout` seconds without one."""
        return cloudpickle.loads(self.receive(timeout))

    def detach(self) -> socket.socket:
        """Give the socket, not blocking, to the caller; this channel is closed."""
        return socket.socket(fileno=self._socket.detach())


@contextlib.contextmanager
def _held_by(lock: threading.RLock, deadline: float) -> Iterator[None]:
    """Hold a lock; TimeoutError if another thread keeps it until the deadline, or a handler finds it held below it."""
    if lock._is_owned():  # type: ignore[attr-defined]
        raise TimeoutError("a signal's handler has interrupted the call that it waits for")
    try:
        if not lock.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise TimeoutError("another thread holds it")
        yield
    finally:
        if lock._is_owned():  # type: ignore[attr-defined]
            lock.release()
