"""Which processes of this host are gone, by pidfds, and which are stopped, as the kernel tells it."""

from __future__ import annotations

import errno
import functools
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.comms.errors import HoldfastError, again
from holdfast.comms.system.file_io import read_all
from holdfast.comms.system.local_causes import exhausted
from holdfast.comms.transport.base import Peer

HOST = "HOLDFAST_HOST"
"""The environment variable that sets processes of one machine apart: those with different values take themselves to be
on different hosts, and judge each other by what comes over the network alone.
"""


_LOOK_SECONDS = 0.05
"""How often to look at processes where pidfds cannot be had."""


@functools.cache
def this_host() -> str:
    """This boot of this machine and this pid namespace: within it, a (pid, start time) names one process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join(filter(None, (boot, str(Path("/proc/self/ns/pid").readlink()), os.environ.get(HOST))))


def started(pid: int) -> int:
    """A process's start time in clock ticks since boot. Raises ProcessLookupError if there is none."""
    fields = stat(pid)
    if not fields:
        raise ProcessLookupError(pid)
    return int(fields[19])


def this_process() -> Peer:
    """How this process names itself to its peers."""
    return Peer(this_host(), os.getpid(), started(os.getpid()))


class PidfdsRefused(OSError):
    """This process may not have pidfds: it looks at other processes from time to time instead (`is_gone`)."""


def open_pidfd(peer: Peer) -> int | None:
    """A descriptor that becomes readable when the process ends; None if it is gone already.

    Only for peers of this host; the caller closes it. Raises `PidfdsRefused` where a container profile forbids it.
    """
    try:
        fd = os.pidfd_open(peer.pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS):
            raise PidfdsRefused(error.errno, error.strerror) from error
        raise
    try:
        if started(peer.pid) == peer.started:
            return fd
    except ProcessLookupError:
        pass
    os.close(fd)
    return None


def is_gone(peer: Peer) -> bool:
    """Whether a process of this host has ended. False for one of another host."""
    if peer.host != this_host():
        return False
    try:
        fields = stat(peer.pid)
    except OSError:  # of this process, and no proof of anything
        return False
    return not fields or fields[0] in (b"Z", b"X") or int(fields[19]) != peer.started


def stat(pid: int) -> list[bytes]:
    """/proc/pid/stat from the state on; empty for a process that is gone. OSError if this one lacks a descriptor."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if exhausted(error.errno, "a look at a process") is not None:
            raise
        return []
    try:
        text = read_all(fd)
    except OSError:  # it went while we looked
        return []
    finally:
        os.close(fd)
    return text[text.rindex(b")") + 2 :].split()


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP, Ctrl-Z, a debugger, a frozen cgroup) now. False for one that is gone, or
    cannot be looked at.
    """
    try:
        state = stat(pid)[:1]
    except OSError:
        return False
    return bool(state) and (state[0] in (b"T", b"t") or _is_frozen(pid))


def _is_frozen(pid: int) -> bool:
    """Whether its cgroup (version 2) is frozen: such a process looks as if it slept."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        group = next(line.removeprefix("0::") for line in lines if line.startswith("0::"))
        return "frozen 1" in Path(f"/sys/fs/cgroup{group}/cgroup.events").read_text()
    except (OSError, StopIteration):
        return False


def stopped(peers: Sequence[Peer]) -> tuple[int, ...]:
    """The ranks whose process, another one of this host, is stopped now: an op of all ranks waits for these."""
    others = [rank for rank, peer in enumerate(peers) if peer.host == this_host() and peer.pid != os.getpid()]
    return tuple(rank for rank in others if is_stopped(peers[rank].pid))


class Liveness:
    """Watches the processes behind the ranks that are on this host; says nothing about those elsewhere.

    `dead` raises what `over()` gives, if that is not None: nobody need wait any longer then. The processes are opened
    when somebody first asks, for who never waits never does.
    """

    def __init__(
        self, peers: Sequence[Peer], rank: int, over: Callable[[], HoldfastError | None] = lambda: None
    ) -> None:
        self._over = over
        self._unopened = {peer_rank: peer for peer_rank, peer in enumerate(peers) if peer_rank != rank}
        self._lock = threading.Lock()
        self._ranks: dict[int, int] = {}
        self._dead: set[int] = set()
        self._waited_for = 0
        self._looked_at: dict[int, Peer] = {}
        self._poll = select.poll()

    def _open(self) -> None:
        """The lock is held."""
        while self._unopened:
            peer_rank, peer = self._unopened.popitem()
            if peer.host != this_host() or peer.pid == os.getpid():
                continue
            try:
                fd = open_pidfd(peer)
            except PidfdsRefused:
                self._looked_at[peer_rank] = peer
                continue
            except BaseException:
                self._unopened[peer_rank] = peer
                raise
            if fd is None:
                self._dead.add(peer_rank)
            else:
                self._ranks[fd] = peer_rank
                self._poll.register(fd, select.POLLIN)

    def dead(self) -> tuple[int, ...]:
        """The ranks whose process is gone, in order. From any thread."""
        if (error := self._over()) is not None:
            raise again(error)
        with self._lock:
            self._open()
            if self._ranks:
                self._note(self._poll.poll(0))
            self._look()
            return tuple(sorted(self._dead))

    def wait(self, wake_fd: int, seconds: float | None = None) -> bool:
        """Block until a watched process ends, `seconds` are over, or `wake_fd` is readable; False in the last case.

        A process that was gone before anybody looked ends the first wait. From one thread at a time.
        """
        watched = select.poll()  # of its own: others may ask for the dead meanwhile
        watched.register(wake_fd, select.POLLIN)
        with self._lock:
            self._open()
            if len(self._dead) > self._waited_for:
                self._waited_for = len(self._dead)
                return True
            for fd, peer_rank in self._ranks.items():
                if peer_rank not in self._dead:
                    watched.register(fd, select.POLLIN)
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if end is None else max(end - time.monotonic(), 0.0)
            pause = min(left if left is not None else _LOOK_SECONDS, _LOOK_SECONDS) if self._looked_at else left
            ready = watched.poll(None if pause is None else pause * 1000)
            with self._lock:
                self._note([event for event in ready if event[0] != wake_fd])
                self._look()
                found, self._waited_for = len(self._dead) > self._waited_for, len(self._dead)
            if ready or found or (end is not None and time.monotonic() >= end):
                return all(fd != wake_fd for fd, _ in ready)

    def _look(self) -> None:
        """Where there are no pidfds. The lock is held."""
        for peer_rank in [rank for rank, peer in self._looked_at.items() if is_gone(peer)]:
            del self._looked_at[peer_rank]
            self._dead.add(peer_rank)

    def _note(self, ready: Sequence[tuple[int, int]]) -> None:
        """The lock is held."""
        for fd, _ in ready:
            if self._ranks[fd] not in self._dead:
                self._dead.add(self._ranks[fd])
                self._poll.unregister(fd)

    def close(self) -> None:
        with self._lock:
            self._unopened.clear()
            self._looked_at.clear()
            for fd in self._ranks:
                os.close(fd)
            self._ranks.clear()
