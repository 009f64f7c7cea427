"""Make a connected ProcessGroupGloo by the deadline, and find the sockets that it made.

gloo cannot be ended while it connects, so one attempt lasts `ATTEMPT_SECONDS` at most. If a rank is slow, as one that
was stopped, the attempt is over on all ranks, and they begin the next one together, until the deadline.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import itertools
import os
import re
import select
import socket
import stat
import struct
import termios
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch.distributed as dist

from holdfast.backends.common.torch_group import options, wait_for_ranks
from holdfast.comms.errors import CorruptData, HoldfastError, OpTimeout, PeerFailed, again
from holdfast.comms.system import forks
from holdfast.comms.system.files import OwnedDescriptor
from holdfast.comms.system.local_causes import local_cause, out_of_descriptors
from holdfast.comms.system.waiting import Wait, run_interruptible
from holdfast.comms.transport.base import Context
from holdfast.comms.transport.liveness import Liveness

Meaning = Literal["timeout", "connection", "local"]

_LATE = re.compile(r"\btimed out\b|wait timeout|Application timeout caused pair closure", re.IGNORECASE)
_KERNEL_LATE = "Connection timed out"
_OF_CONNECTIONS = re.compile(
    r"gloo/(transport|rendezvous)/|Connection (closed|reset|refused|timed out)|Broken pipe|Socket closed"
    r"|endpoint is not connected|connectFullMesh|(No route to|unreachable|is down)"
)


def meaning_of(error: RuntimeError) -> Meaning:
    """Whether an op took too long, lost a connection, or failed in this process by no peer's fault."""
    text = str(error)
    if _LATE.search(text) and _KERNEL_LATE not in text:
        return "timeout"
    return "connection" if _OF_CONNECTIONS.search(text) else "local"


_BPF_RETURN = 0x06  # BPF_RET | BPF_K
_SO_ATTACH_FILTER = 26
_INTERNET = (socket.AF_INET, socket.AF_INET6)


def sockets() -> set[tuple[int, int]]:
    """The sockets of this process, as (descriptor, inode)."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208  # a tenth of the time that pathlib takes
        try:
            status = os.fstat(int(entry))
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            found.add((int(entry), status.st_ino))
    return found


def find_sockets(
    published: Sequence[bytes], fetched: Sequence[bytes]
) -> tuple[list[OwnedDescriptor], list[OwnedDescriptor]]:
    """Duplicates of a group's listeners, and of its connections, by the addresses that gloo itself published.

    A group listens at ports of its own, and other threads may open sockets at the same time: a listener is the group's
    if its address is in `published`, a connection if it was accepted there, or goes to an address in `fetched`.
    """
    listeners, connections = [], []
    for number, inode in sockets():
        try:
            each = socket.socket(fileno=os.dup(number))
        except OSError:
            continue  # closed since
        try:
            if os.fstat(each.fileno()).st_ino != inode or each.family not in _INTERNET:
                continue
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                if _is_named(each, each.getsockname(), published):
                    listeners.append(OwnedDescriptor(os.dup(each.fileno())))
            elif _is_named(each, each.getsockname(), published) or _is_named(each, each.getpeername(), fetched):
                connections.append(OwnedDescriptor(os.dup(each.fileno())))
        except OSError:
            pass  # not connected
        finally:
            each.close()
    return listeners, connections


def _is_named(each: socket.socket, address: tuple[Any, ...], texts: Sequence[bytes]) -> bool:
    """Whether one of `texts`, which hold a `struct sockaddr` among other bytes, names an address."""
    start = struct.pack("=H", each.family) + struct.pack(">H", address[1])
    host = socket.inet_pton(each.family, address[0].partition("%")[0])
    host_at = 4 if each.family == socket.AF_INET else 8
    return any(
        text[found.start() + host_at :].startswith(host)
        for text in texts
        for found in re.finditer(re.escape(start), text, re.DOTALL)
    )


def refuse_connections(listener: OwnedDescriptor) -> None:
    """Make a listening socket refuse further connections; accepted ones stay.

    A socket filter makes the kernel drop all that arrives. The socket cannot be closed: gloo's own loop still uses it.
    """
    accept_nothing = struct.pack("HBBI", _BPF_RETURN, 0, 0, 0)
    program = ctypes.create_string_buffer(accept_nothing)
    with contextlib.closing(socket.socket(fileno=os.dup(listener))) as each:
        filters = struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
        each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filters)


def are_lost(connections: Sequence[OwnedDescriptor]) -> bool:
    """Whether the peers of all connections have closed them, and nothing that they have sent is left to read."""
    poll, unread = select.poll(), array.array("i", [0])
    for connection in connections:
        poll.register(connection, select.POLLRDHUP)
    if not connections or len(poll.poll(0)) < len(connections):
        return False
    for connection in connections:
        with contextlib.suppress(OSError):
            fcntl.ioctl(connection, termios.FIONREAD, unread)
            if unread[0]:
                return False
    return True


def shut_down(connection: OwnedDescriptor) -> None:
    """End a connection, which ends the ops that use it, unless the number names another socket by now."""
    with contextlib.suppress(OSError):
        if connection.ours:
            with contextlib.closing(socket.socket(fileno=os.dup(connection))) as each:
                each.shutdown(socket.SHUT_RDWR)


THREADS = 2
"""gloo's threads for one communicator, unless a hint says otherwise."""

ATTEMPT_SECONDS = 5.0
"""The longest attempt once all ranks are there. If a rank dies then, the blocked call is abandoned after that time."""

_GRACE_SECONDS = 1.0
"""After a connection broke: how long the kernel may take to report a death, or a rank that the attempt is over."""
_LOOK_SECONDS = 0.02
"""How often a rank that connects looks at the others: a look asks for each of them, while all need the processors."""
_WAIT = timedelta(seconds=0.02)

_abandoned: list[tuple[Any, Any]] = []
"""Groups with an op that has not ended: to destroy one would wait for it, at the end of the interpreter, too."""
forks.never_destroy(_abandoned)


def abandon(group: Any, op: Any) -> None:
    """Destroy a group once `op` has ended, which gloo may forget until the op's own timeout."""
    _abandoned.append((group, op))


def destroy_abandoned() -> None:
    """Destroy the abandoned groups whose op has ended by now."""
    for each in list(_abandoned):
        if each[1].is_completed():
            with contextlib.suppress(ValueError):  # another thread has
                _abandoned.remove(each)


@forks.run_in_children
def _keep_abandoned() -> None:
    """Destroy no group in a forked child: its threads are not there."""
    for group, _ in _abandoned:
        forks.never_destroy(group)
    _abandoned.clear()


class _RecordingStore(dist.Store):
    """The keys of one attempt. It keeps what gloo published for this rank, and what gloo read of the others."""

    def __init__(self, store: dist.Store, prefix: str) -> None:
        super().__init__()
        self._store, self._prefix = store, prefix
        self.published: list[bytes] = []
        self.fetched: list[bytes] = []
        self.longest_wait = timedelta(seconds=ATTEMPT_SECONDS)

    def set(self, key: str, value: str | bytes) -> None:
        self.published.append(value.encode() if isinstance(value, str) else bytes(value))
        self._store.set(self._prefix + key, value)  # type: ignore[arg-type]  # it takes bytes

    def get(self, key: str) -> bytes:
        """Raises `CorruptData` for what no gloo of this version publishes: gloo itself would crash on it."""
        value = self._store.get(self._prefix + key)
        if self.published and _sizes(value) != _sizes(self.published[-1]):
            raise CorruptData(
                f"the store holds {bytes(value[:40])!r} under {self._prefix + key}, where an address of gloo's belongs"
            )
        self.fetched.append(value)
        return value

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._prefix + key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check([self._prefix + key for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """gloo waits here without a timeout of its own."""
        self._store.wait([self._prefix + key for key in keys], min(timeout or self.longest_wait, self.longest_wait))


def _sizes(value: bytes) -> tuple[int, int] | None:
    """The sizes of the address, and of what follows it, in what gloo publishes: a host's name comes first."""
    try:
        (name,) = struct.unpack_from("=Q", value)
        (address,) = struct.unpack_from("=Q", value, min(8 + name, len(value)))
    except struct.error:
        return None
    rest = len(value) - 16 - name - address
    return (address, rest) if rest >= 0 else None


def connect_group(context: Context, liveness: Liveness) -> tuple[Any, list[OwnedDescriptor]]:
    """Make the group, which accepts no further connections; returns it, and duplicates of its own. Collective.

    Raises `OpTimeout` at the deadline, `PeerFailed`, and what `context.over` returns.
    """
    destroy_abandoned()
    for number in itertools.count():
        made = _Attempt(context, liveness, number).run()
        if made is not None:
            return made
    raise AssertionError


class _AttemptOver(RuntimeError):
    """Another rank has begun the next attempt."""


class _Attempt:
    """One attempt of all ranks to connect."""

    def __init__(self, context: Context, liveness: Liveness, number: int) -> None:
        self._context, self._liveness = context, liveness
        self._prefix = f"gloo/{number}/"
        self._began = time.monotonic()

    def run(self) -> tuple[Any, list[OwnedDescriptor]] | None:
        """Connect; None if this attempt is over for all ranks, and the next one begins."""
        context = self._context
        store = _RecordingStore(context.store, self._prefix + "group/")
        device = _device(context)
        wait_for_ranks(context, self._liveness, self._prefix)
        limit = max(min(context.deadline - time.monotonic(), ATTEMPT_SECONDS), 0.001)
        store.longest_wait = timedelta(seconds=limit)
        began = time.monotonic()
        try:
            construct = partial(self._construct, store, device, limit)
            group = run_interruptible(construct, self._look, every=_LOOK_SECONDS)
            listeners, connections = find_sockets(store.published, store.fetched)
            try:
                self._wait_for_ranks(group)
                for listener in listeners:
                    refuse_connections(listener)
            except BaseException:
                for connection in connections:
                    shut_down(connection)
                    connection.close()
                raise
            finally:
                for listener in listeners:
                    listener.close()
            return group, connections
        except _AttemptOver:
            return None
        except HoldfastError:
            raise
        except (RuntimeError, TimeoutError) as error:  # the latter is of the store
            late = (
                time.monotonic() - began >= limit or isinstance(error, TimeoutError) or meaning_of(error) == "timeout"
            )
            self._give_up(error, late)
            return None

    def _construct(self, store: dist.Store, device: Any, limit: float) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        settings = gloo._Options()
        settings._devices = [device]
        settings._timeout = timedelta(seconds=limit)
        settings._threads = self._context.hints.get("threads", THREADS)
        return gloo(store, self._context.rank, self._context.size, settings)

    def _look(self) -> None:
        """Raise if the ranks can no longer connect."""
        if (error := self._context.over()) is not None:
            raise again(error)
        if dead := self._liveness.dead():
            raise PeerFailed(dead, "its process ended while the ranks connected")

    def _is_over(self) -> bool:
        """Whether a rank has begun the next attempt."""
        return bool(self._context.store.check([self._prefix + "over"]))

    def _wait_for_ranks(self, group: Any) -> None:
        """Wait until the others have connected, too: a rank that is done may close at once."""
        left = max(self._context.deadline - time.monotonic(), 0.001)
        barrier = group.barrier(options(dist.BarrierOptions, timedelta(seconds=left)))
        try:
            while True:
                try:
                    barrier.wait(_WAIT)
                    return
                except RuntimeError:
                    if barrier.is_completed():
                        barrier.wait()  # raises its failure, or returns if it ended after the last check
                        return
                    if time.monotonic() >= self._context.deadline:
                        raise
                    self._look()
                    if self._is_over():
                        raise _AttemptOver from None
        except BaseException:
            abandon(group, barrier)
            raise

    def _give_up(self, error: RuntimeError | TimeoutError, late: bool) -> None:
        """Return if all ranks begin another attempt; else raise why this rank cannot connect."""
        context, doing = self._context, "connecting over gloo"
        if (cause := local_cause(error, doing) or out_of_descriptors(doing)) is not None:
            raise cause from error
        now = time.monotonic()
        if now >= context.deadline:
            raise OpTimeout("connect", 0, now - self._began) from error
        if late:
            context.store.set(self._prefix + "over", "")
        until = min(context.deadline, now + _GRACE_SECONDS)
        if not Wait(yields=0, sleep_seconds=_LOOK_SECONDS).reaches(self._is_over, until, self._look):
            raise PeerFailed((), f"connecting lost a connection: {str(error).splitlines()[0]}") from error


def _device(context: Context) -> Any:
    """The gloo device, by the first of: a hint, one host's loopback, GLOO_SOCKET_IFNAME, `address`, gloo's own choice.

    Not lazy: after the group is connected, its sockets accept no further connections.
    """
    gloo: Any = dist.ProcessGroupGloo
    one_host, address = len({peer.host for peer in context.peers}) == 1, context.address
    interface = context.hints.get("interface") or ("lo" if one_host else os.environ.get("GLOO_SOCKET_IFNAME"))
    if interface:
        if interface not in (known := [name for _, name in socket.if_nameindex()]):
            raise HoldfastError(f"gloo: this host has no network interface {interface!r}; it has {', '.join(known)}")
        return gloo.create_device(interface=interface, lazy_init=False)
    return (
        gloo.create_device(hostname=address, lazy_init=False)
        if address
        else gloo.create_default_device(lazy_init=False)
    )
