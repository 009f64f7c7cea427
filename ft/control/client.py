"""A blocking client for remote calls: the calling threads use a plain socket, without a thread of its own.

Several threads may call at once. One of the waiting threads reads the socket for all of them, and passes this role on
when it has its own answer, so that a single caller pays for no switch between threads.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.comms.system import forks
from holdfast.comms.system.local_causes import local_cause
from holdfast.comms.system.signal_safety import held_by
from holdfast.ft.control.channel import HANDSHAKE_SECONDS, join_address, pause_before_retry, split_address
from holdfast.ft.control.connection import CLOSED_HERE, CLOSED_THERE
from holdfast.ft.control.errors import (
    Busy,
    CallTimeout,
    ConnectionClosed,
    ConnectionLost,
    ControlError,
    Dropped,
    RemoteError,
    cannot_connect,
)
from holdfast.ft.control.frames import DEFAULT_LIMIT, AuthenticatedSession, DiallerHandshake
from holdfast.ft.control.messages import Cancel, Failure, Reply, RpcRequest, decode, encode

_CHUNK = 1 << 16


@dataclass(slots=True)
class _Call:
    """One call in flight; the thread that reads its answer sets `answer`."""

    id: int
    method: str
    deadline: float
    answer: Reply | Failure | None = None


class RpcClient:
    """A connection to an `AsyncRpcServer`, made by the constructor. Thread-safe.

    The constructor raises what `holdfast.ft.control.channel.dial` raises. `peer` is the server's identity.
    """

    def __init__(
        self,
        address: str,
        *,
        key: bytes,
        job: str,
        identity: str,
        limit: int = DEFAULT_LIMIT,
        timeout: float = HANDSHAKE_SECONDS,
    ) -> None:
        self.address = address
        self._socket, self._session = _connect(address, timeout, (key, job, identity, limit))
        forks.release_socket_in_children(self)
        self.peer = self._session.peer
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._sending = threading.RLock()
        self._state = threading.Condition()  # guards what follows
        self._calls: dict[int, _Call] = {}
        self._made = 0
        self._reading = False
        self._users = 0
        self._lost: ControlError | None = None
        forks.refuse_in_children(self, f"the connection to {self.peer}", ("address", "peer"))

    def call(self, method: str, body: bytes = b"", timeout: float = 30.0) -> bytes:
        """The answer of the server's handler.

        Raises `RemoteError` if the handler failed; `ConnectionLost` (a `PeerFailed`) at once when the server
        dies or this client is closed; `CallTimeout` (an `OpTimeout`) after `timeout` seconds; `FrameTooLarge`
        if nothing was sent.
        """
        started = time.monotonic()
        with self._state:
            self._check()
            self._made += 1
            call = self._calls[self._made] = _Call(self._made, method, started + timeout)
        try:
            self._send(encode(RpcRequest(call.id, method, body)), call.deadline)
            answer = self._wait(call)
        except TimeoutError as error:  # it was not sent: other calls of this client were until the deadline
            raise CallTimeout(method, self.peer, time.monotonic() - started) from error
        finally:
            with self._state:
                self._calls.pop(call.id, None)
        if answer is None:
            with contextlib.suppress(ControlError, TimeoutError):
                self._send(encode(Cancel(call.id)), time.monotonic() + 1.0)
            raise CallTimeout(method, self.peer, time.monotonic() - started)
        if isinstance(answer, Failure):
            raise RemoteError(self.peer, method, answer.kind, answer.message)
        return answer.body

    def close(self) -> None:
        """End the connection; calls in other threads end with `ConnectionLost`. Idempotent."""
        self._end(ConnectionClosed(self.peer, CLOSED_HERE))

    def fileno(self) -> int:
        """The socket's number; -1 once it is closed."""
        return self._socket.fileno()

    def __enter__(self) -> RpcClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost.again()

    def _end(self, reason: ControlError) -> None:
        with self._state:
            if self._lost is None:
                self._lost = reason
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # wakes threads inside `_using`; the last of them closes it
            if not self._users:
                self._socket.close()
            self._state.notify_all()

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """A context for system calls on the socket.

        It keeps the socket open, so that its number is not given to another file meanwhile.
        """
        with self._state:
            self._check()
            self._users += 1
        try:
            yield
        finally:
            with self._state:
                self._users -= 1
                if self._lost is not None and not self._users:
                    self._socket.close()

    def _send(self, payload: bytes, deadline: float) -> None:
        """Send a frame. TimeoutError if the frames of other threads take until the deadline."""
        with held_by(self._sending, deadline), self._using():
            data = self._session.seal(payload)
            try:
                _send_all(self._socket, data, deadline)
            except OSError as error:  # part of the frame may be sent: the connection cannot go on
                self._end(ConnectionLost(self.peer, f"cannot send: {error}"))
            except BaseException:
                self._end(ConnectionLost(self.peer, "interrupted while sending"))
                raise
        with self._state:
            self._check()

    def _wait(self, call: _Call) -> Reply | Failure | None:
        """The answer to `call`; None when its time is up."""
        while True:
            with self._state:
                while call.answer is None and self._reading and self._lost is None:
                    remaining = call.deadline - time.monotonic()
                    if remaining <= 0:
                        return None
                    self._state.wait(remaining)
                if call.answer is not None:
                    return call.answer
                self._check()
                self._reading = True
            try:
                with self._using():
                    self._read_for_all(call)
            except ControlError as error:
                self._end(error)
            except BaseException:
                self._end(ConnectionLost(self.peer, "interrupted while reading"))
                raise
            finally:
                with self._state:
                    self._reading = False
                    self._state.notify_all()
            if call.answer is None and time.monotonic() >= call.deadline:
                return None

    def _read_for_all(self, call: _Call) -> None:
        """Distribute answers until `call` has its own or no more time."""
        while call.answer is None:
            remaining = call.deadline - time.monotonic()
            if remaining <= 0 or not self._readable.poll(1000 * remaining):
                return
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                continue
            except OSError as error:
                raise ConnectionLost(self.peer, f"{CLOSED_THERE} ({error})") from error
            if not data:
                self._session.end()
                raise ConnectionClosed(self.peer, CLOSED_THERE)
            self._hand_out(self._session.receive(data), call)

    def _hand_out(self, payloads: list[bytes], mine: _Call) -> None:
        with self._state:
            for payload in payloads:
                message = decode(payload)
                if isinstance(message, Reply | Failure):  # a server's own requests and notices have no handler here
                    call = self._calls.get(message.id)
                    if call is not None:
                        call.answer = message
                        if call is not mine:
                            self._state.notify_all()


def _send_all(sock: socket.socket, data: bytes, deadline: float) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            writable = select.poll()
            writable.register(sock, select.POLLOUT)
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not writable.poll(1000 * remaining):
                raise TimeoutError("it does not read what is sent to it") from None


def _connect(
    address: str, timeout: float, arguments: tuple[bytes, str, str, int]
) -> tuple[socket.socket, AuthenticatedSession]:
    """A connected non-blocking socket and its session; raises what `channel.dial` raises."""
    started = time.monotonic()
    deadline, drops = started + timeout, 0
    host, port = split_address(address)
    while True:
        try:
            return _connect_once(host, port, DiallerHandshake(*arguments), deadline)
        except TimeoutError as error:
            raise CallTimeout("the handshake", address, time.monotonic() - started) from error
        except OSError as error:
            if (cause := local_cause(error, f"a connection to {address}")) is not None:
                raise cause from error
            raise cannot_connect(address, error) from error
        except (Busy, Dropped) as error:
            drops += 1
            time.sleep(pause_before_retry(error, drops, deadline))


def _connect_once(
    host: str, port: int, handshake: DiallerHandshake, deadline: float
) -> tuple[socket.socket, AuthenticatedSession]:
    sock = socket.create_connection((host, port), max(0.001, deadline - time.monotonic()))
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answer = handshake.hello()
        while handshake.session is None:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.sendall(answer)
            data = sock.recv(_CHUNK)
            if not data:
                raise Dropped(join_address(host, port), f"{CLOSED_THERE} during the handshake")
            answer = handshake.receive(data)
        sock.setblocking(False)
    except ConnectionError as error:
        sock.close()
        raise Dropped(join_address(host, port), f"{CLOSED_THERE} during the handshake ({error})") from error
    except BaseException:
        sock.close()
        raise
    return sock, handshake.session
