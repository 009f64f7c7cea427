"""The supervisor of a job's links: a process that takes orders, answers trapped system calls and runs the proxy.

Every process of the job gives it the descriptor of its seccomp filter over a Unix socket. From then on it records each
`listen`, leads a `connect` to another process's listener to the proxy by connecting a duplicate of the very socket, and
answers `getpeername` with the address that the process wanted to connect to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.comms.system.files import bind_unix
from holdfast.ft.processes.channel import ChannelClosed, ProcessChannel
from holdfast.harness.links import seccomp
from holdfast.harness.links.policy import LinkPolicy, LinkRule, LinkTraffic, Plane, combined
from holdfast.harness.links.proxy import Direction, Relay


@dataclass(frozen=True, slots=True)
class SetRules:
    """Replace all rules and all control endpoints."""

    rules: tuple[LinkRule, ...]
    control: frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class TrafficQuery:
    """Ask for the traffic so far."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The traffic so far. Also the answer to `SetRules`, once the rules hold."""

    traffic: tuple[LinkTraffic, ...]


@dataclass(frozen=True, slots=True)
class SupervisorFailed:
    """The supervisor cannot go on."""

    reason: str


Address = tuple[str, int]

_BACKLOG = 1024
_KINDS = (socket.AF_INET, socket.AF_INET6)


class Supervised:
    """A process under the supervisor."""

    def __init__(self, pid: int, line: socket.socket, listener: int) -> None:
        self.pid, self.line, self.listener = pid, line, listener
        self.pidfd = os.pidfd_open(pid)

    def close(self) -> None:
        for fd in (self.listener, self.pidfd):
            os.close(fd)
        self.line.close()


class Supervisor:
    """Answers the calls of all processes. Constructed and used in one event loop."""

    def __init__(self, channel: ProcessChannel, seed: int) -> None:
        self._channel, self._dice = channel, random.Random(seed)
        self._loop = asyncio.get_running_loop()
        self._processes: dict[int, Supervised] = {}
        self._listening: dict[Address, int] = {}
        self._wanted: dict[int, bytes] = {}
        self._coming: dict[Address, tuple[int, int, Address]] = {}
        self._rules: tuple[LinkRule, ...] = ()
        self._control: frozenset[Address] = frozenset()
        self._relays: dict[asyncio.Task[None], Relay] = {}
        self._finished: dict[tuple[int, int, bool], LinkTraffic] = {}
        self._over = asyncio.Event()

    async def serve(self, path: Path) -> None:
        """Serve until the channel is closed."""
        with contextlib.ExitStack() as undo:
            door = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            bind_unix(door, path)
            door.listen(_BACKLOG)
            self._loop.add_reader(door, self._enter, door)
            self._doors: dict[int, socket.socket] = {}
            for kind, host in zip(_KINDS, ("127.0.0.1", "::1"), strict=True):
                with contextlib.suppress(OSError):
                    each = undo.enter_context(socket.socket(kind, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
                    each.bind((host, 0))
                    each.listen(_BACKLOG)
                    self._doors[int(kind)] = each
                    self._loop.add_reader(each, self._accept, each)
            self._loop.add_reader(self._channel, self._hear)
            self._channel.send(Answer(()))
            await self._over.wait()
            for task in self._relays:
                task.cancel()
            await asyncio.gather(*self._relays, return_exceptions=True)
            for process in self._processes.values():
                self._loop.remove_reader(process.listener)
                process.close()

    # -- the harness

    def _hear(self) -> None:
        try:
            message = self._channel.recv(5.0)
        except (ChannelClosed, TimeoutError):
            self._loop.remove_reader(self._channel)
            self._over.set()
            return
        if isinstance(message, SetRules):
            self._rules, self._control = message.rules, message.control
            for relay in self._relays.values():  # a connection may be older than the list of control endpoints
                relay.there.control = relay.back.control = relay.address in self._control
                relay.look_again()
        elif not isinstance(message, TrafficQuery):
            raise TypeError(f"the harness sends {message!r}")
        self._channel.send(Answer(self._traffic()))

    def _traffic(self) -> tuple[LinkTraffic, ...]:
        found = dict(self._finished)
        for relay in self._relays.values():
            _add(found, relay)
        return tuple(found.values())

    # -- processes

    def _enter(self, door: socket.socket) -> None:
        line, _ = door.accept()
        line.settimeout(5.0)
        pid = struct.unpack("iII", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        _, fds, _, _ = socket.recv_fds(line, 1, 1)
        if not fds:
            line.close()
            return
        line.setblocking(False)
        process = Supervised(pid, line, fds[0])
        self._processes[pid] = process
        self._loop.add_reader(process.listener, self._answer, process)
        self._loop.add_reader(line, self._leave, process)

    def _leave(self, process: Supervised) -> None:
        """Forget a process that has ended, and its listeners."""
        self._loop.remove_reader(process.line)
        self._loop.remove_reader(process.listener)
        del self._processes[process.pid]
        process.close()
        self._listening = {address: pid for address, pid in self._listening.items() if pid != process.pid}

    def _answer(self, process: Supervised) -> None:
        call = seccomp.receive(process.listener)
        if call is None:
            return
        numbers, error = seccomp.machine(), None
        try:
            if call.number == numbers.connect:
                error = self._connect(process, call)
            elif call.number == numbers.listen:
                self._listen(process, call)
            else:
                error = self._getpeername(process, call)
        except OSError:
            error = None  # not a socket, no such memory: the kernel will report it
        if error is None:
            seccomp.let_pass(process.listener, call)
        else:
            seccomp.done(process.listener, call, error)

    def _listen(self, process: Supervised, call: seccomp.Syscall) -> None:
        with _borrowed(process, call) as sock:
            if sock.family in _KINDS:
                self._listening[_plain(sock.getsockname())] = process.pid

    def _connect(self, process: Supervised, call: seccomp.Syscall) -> int | None:
        """Connect to the proxy; returns the errno or 0, and None for a link that is not within the job."""
        raw = _read(call, call.arguments[1], min(call.arguments[2], 128))
        address = _address_of(raw)
        if address is None:
            return None
        owner = self._listening.get(address, self._listening.get(("0.0.0.0", address[1])))
        if owner is None or owner == process.pid:
            return None
        with _borrowed(process, call) as sock:
            door = self._doors.get(int(sock.family))
            if door is None or sock.type != socket.SOCK_STREAM:
                return None
            error = sock.connect_ex(door.getsockname())
            self._coming[_plain(sock.getsockname())] = (process.pid, owner, address)
            self._wanted[os.fstat(sock.fileno()).st_ino] = raw
            return error

    def _getpeername(self, process: Supervised, call: seccomp.Syscall) -> int | None:
        with _borrowed(process, call) as sock:
            wanted = self._wanted.get(os.fstat(sock.fileno()).st_ino)
            if wanted is None or not _is_led_here(sock, self._doors):
                return None
            sock.getpeername()
        _, into, length_at, *_ = call.arguments
        room = struct.unpack("I", _read(call, length_at, 4))[0]
        _write(call, into, wanted[:room])
        _write(call, length_at, struct.pack("I", len(wanted)))
        return 0

    # -- connections

    def _accept(self, door: socket.socket) -> None:
        near, address = door.accept()
        near.setblocking(False)
        coming = self._coming.pop(_plain(address), None)
        if coming is None:  # not from a process of the job: this is no open proxy
            near.close()
            return
        source, target, wanted = coming
        control = wanted in self._control
        relay = Relay(
            near,
            wanted,
            Direction(source, target, control),
            Direction(target, source, control),
            self._policy,
            self._dice,
        )
        task = self._loop.create_task(relay.run())
        self._relays[task] = relay
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        _add(self._finished, self._relays.pop(task))
        if not task.cancelled() and (error := task.exception()) is not None:
            self._channel.send(SupervisorFailed(f"{type(error).__name__}: {error}"))

    def _policy(self, direction: Direction) -> LinkPolicy:
        return combined(self._rules, direction.source, direction.target, direction.control)


def _add(found: dict[tuple[int, int, bool], LinkTraffic], relay: Relay) -> None:
    for direction in (relay.there, relay.back):
        key = (direction.source, direction.target, direction.control)
        source, target = str(direction.source), str(direction.target)
        plane: Plane = "control" if direction.control else "data"
        before = found.get(key) or LinkTraffic(source=source, target=target, plane=plane, connections=0, bytes=0)
        found[key] = msgspec.structs.replace(
            before,
            connections=before.connections + (direction is relay.there),
            bytes=before.bytes + direction.bytes,
            held=before.held + direction.held,
            lost=before.lost + direction.lost,
            corrupted=before.corrupted + direction.corrupted,
            reset=before.reset + relay.was_reset,
        )


@contextlib.contextmanager
def _borrowed(process: Supervised, call: seccomp.Syscall) -> Iterator[socket.socket]:
    """A duplicate of the socket in a call."""
    sock = socket.socket(fileno=seccomp.borrow(process.pidfd, int(call.arguments[0])))
    try:
        yield sock
    finally:
        sock.close()


def _read(call: seccomp.Syscall, at: int, size: int) -> bytes:
    with Path(f"/proc/{call.thread}/mem").open("rb", buffering=0) as memory:
        memory.seek(at)
        return memory.read(size)


def _write(call: seccomp.Syscall, at: int, data: bytes) -> None:
    with Path(f"/proc/{call.thread}/mem").open("r+b", buffering=0) as memory:
        memory.seek(at)
        memory.write(data)


def _plain(address: tuple[object, ...]) -> Address:
    """Host and port of a socket address; IPv4 in IPv6 is IPv4."""
    return str(address[0]).removeprefix("::ffff:"), int(str(address[1]))


def _address_of(raw: bytes) -> Address | None:
    """Host and port of a sockaddr; None if it is neither IPv4 nor IPv6."""
    family = struct.unpack_from("H", raw)[0] if len(raw) >= 2 else 0
    if family == socket.AF_INET and len(raw) >= 8:
        return socket.inet_ntop(socket.AF_INET, raw[4:8]), struct.unpack_from("!H", raw, 2)[0]
    if family == socket.AF_INET6 and len(raw) >= 24:
        return _plain((socket.inet_ntop(socket.AF_INET6, raw[8:24]), struct.unpack_from("!H", raw, 2)[0]))
    return None


def _is_led_here(sock: socket.socket, doors: dict[int, socket.socket]) -> bool:
    """Whether the socket is connected to the proxy: a later socket may have the same inode number."""
    try:
        return any(sock.getpeername()[:2] == door.getsockname()[:2] for door in doors.values())
    except OSError:
        return False


def supervise(path: Path, seed: int) -> Callable[[ProcessChannel], None]:
    """The target of the supervisor's process."""

    def target(channel: ProcessChannel) -> None:
        async def serve() -> None:
            await Supervisor(channel, seed).serve(path)

        asyncio.run(serve())

    return target
