"""Detects which peer processes of this host have ended (by pidfds) or are stopped (by /proc and cgroups)."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from holdfast.comms.errors import HoldfastError, RegionGone, again
from holdfast.comms.system.files import OwnedDescriptor, read_all
from holdfast.comms.system.local_causes import resource_exhausted
from holdfast.comms.transport.base import Peer

HOST = "HOLDFAST_SIMULATED_HOST"
"""The environment variable that simulates several hosts on one machine.

Processes with different values treat each other as remote: they use only what arrives over the network.
"""


_LOOK_SECONDS = 0.05
"""The polling interval where pidfds are not available, and that of the check that they are still ours."""

_EXIT_LOOK_SECONDS = 0.001
"""The polling interval at which a wait for one rank looks whether its process is exiting."""

_EXITING = 0x4  # PF_EXITING of the flags in /proc/pid/stat
_KILLED = 1 << (signal.SIGKILL - 1)  # in its mask of pending signals

_IDLE_SECONDS = 0.5
"""The longest that a wait goes on without that check."""


@functools.cache
def this_host() -> str:
    """Identify this boot of this machine and this pid namespace: there, (pid, start time) names one process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join(filter(None, (boot, str(Path("/proc/self/ns/pid").readlink()), os.environ.get(HOST))))


def start_time(pid: int) -> int:
    """A process's start time in clock ticks since boot. Raises ProcessLookupError if there is none."""
    fields = read_proc_stat(pid)
    if not fields:
        raise ProcessLookupError(pid)
    return int(fields[19])


def this_process() -> Peer:
    """This process, as its peers identify it."""
    return Peer(this_host(), os.getpid(), start_time(os.getpid()))


class PidfdsRefused(OSError):
    """This process may not open pidfds; it polls other processes with `is_gone` instead."""


def open_pidfd(peer: Peer) -> int | None:
    """Open a descriptor that becomes readable when the process ends; None if it has ended already.

    Only for peers of this host; the caller closes it. Raises `PidfdsRefused` where a container profile forbids pidfds.
    """
    try:
        fd = os.pidfd_open(peer.pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS):
            raise PidfdsRefused(error.errno, error.strerror) from error
        raise
    ours = False
    try:
        ours = start_time(peer.pid) == peer.started
    except ProcessLookupError:
        pass
    finally:  # it raises where this process has no descriptor for a look at the peer
        if not ours:
            os.close(fd)
    return fd if ours else None


def is_gone(peer: Peer) -> bool:
    """Whether a process of this host has ended. False for one of another host."""
    if peer.host != this_host():
        return False
    try:
        fields = read_proc_stat(peer.pid)
    except OSError:  # this process lacks a descriptor: no evidence about the peer
        return False
    if not fields:
        return not _exists(peer.pid)
    return fields[0] in (b"Z", b"X") or int(fields[19]) != peer.started


def is_exiting(pid: int) -> bool:
    """Whether a process has ended, is exiting, or has a pending SIGKILL: none of these can be stopped.

    A pidfd tells of the end only after the kernel has freed the memory: 5 to 50 ms later for a process with torch.
    """
    try:
        fields = read_proc_stat(pid)
    except OSError:  # an error of this process, and no proof
        return False
    if not fields:
        return not _exists(pid)
    if fields[0] in (b"Z", b"X"):
        return True
    return bool(int(fields[6]) & _EXITING or int(fields[28]) & _KILLED)


def _exists(pid: int) -> bool:
    """Whether there is a process of this number, which a mount of /proc may hide."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def read_proc_stat(pid: int) -> list[bytes]:
    """The fields of /proc/pid/stat from the state on; empty for a process that has ended.

    Raises OSError if this process has no free descriptor.
    """
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if resource_exhausted(error.errno, "a look at a process") is not None:
            raise
        return []
    try:
        text = read_all(fd)
    except OSError:  # the process ended between open and read
        return []
    finally:
        os.close(fd)
    return text[text.rindex(b")") + 2 :].split()


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped now: by SIGSTOP, Ctrl-Z, a debugger or a frozen cgroup.

    False for a process that has ended or cannot be inspected.
    """
    try:
        state = read_proc_stat(pid)[:1]
    except OSError:
        return False
    return bool(state) and (state[0] in (b"T", b"t") or _is_frozen(pid))


def _is_frozen(pid: int) -> bool:
    """Whether the cgroup (version 2) of a process is frozen; /proc/pid/stat then shows it as sleeping."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        group = next(line.removeprefix("0::") for line in lines if line.startswith("0::"))
        return "frozen 1" in Path(f"/sys/fs/cgroup{group}/cgroup.events").read_text()
    except (OSError, StopIteration):
        return False


def stopped_ranks(peers: Sequence[Peer]) -> tuple[int, ...]:
    """The ranks with a stopped process, among the other processes of this host. A collective waits for these."""
    others = [rank for rank, peer in enumerate(peers) if peer.host == this_host() and peer.pid != os.getpid()]
    return tuple(rank for rank in others if is_stopped(peers[rank].pid))


class Liveness:
    """Watches the processes of the other ranks on this host; it knows nothing of ranks on other hosts.

    `dead` raises the error that `over()` returns, if it returns one, to end a wait. Pidfds are opened on first use: a
    communicator that never waits needs none.
    """

    def __init__(
        self, peers: Sequence[Peer], rank: int, over: Callable[[], HoldfastError | None] = lambda: None
    ) -> None:
        self._over = over
        self._unopened = {peer_rank: peer for peer_rank, peer in enumerate(peers) if peer_rank != rank}
        self._lock = threading.RLock()  # a signal's handler that aborts or closes comes in at any step, too
        self._ranks: dict[OwnedDescriptor, int] = {}
        self._closed = False
        self._dead: set[int] = set()
        self._waited_for = 0
        self._looked_at: dict[int, Peer] = {}
        self._peers, self._next_check, self._next_exit_look = peers, 0.0, 0.0
        self._poll = select.poll()

    def _open(self) -> None:
        """Open a pidfd for each peer that has none yet. The caller holds the lock."""
        for peer_rank in list(self._unopened):
            peer = self._unopened.pop(peer_rank, None)
            if peer is None or peer.host != this_host() or peer.pid == os.getpid():
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
                self._ranks[OwnedDescriptor(fd)] = peer_rank
                self._poll.register(fd, select.POLLIN)
        if self._closed:  # by a handler, meanwhile
            self.close()

    def dead(self) -> tuple[int, ...]:
        """The ranks of processes that have ended, in order. From any thread."""
        if (error := self._over()) is not None:
            raise again(error)
        with self._lock:
            self._open()
            self._drop_lost()
            if self._ranks:
                self._note(self._poll.poll(0))
            self._look()
            return tuple(sorted(self._dead))

    def is_ending(self, rank: int) -> bool:
        """Whether the process of `rank` has ended or is exiting: what `dead` finds only some milliseconds later.

        For one that waits for this rank alone. It raises what `dead` raises.
        """
        if rank in self.dead():
            return True
        now, peer = time.monotonic(), self._peers[rank]
        if now < self._next_exit_look or peer.host != this_host() or peer.pid == os.getpid():
            return False
        self._next_exit_look = now + _EXIT_LOOK_SECONDS
        if not is_exiting(peer.pid):
            return False
        with self._lock:
            self._dead.add(rank)
        return True

    def wait(self, wake_fd: OwnedDescriptor, seconds: float | None = None) -> bool:
        """Block until a watched process ends, `seconds` are over, or `wake_fd` is readable; False in the last case.

        The first wait ends at once if a process had ended before. It may end without a cause, and does soon after
        `wake_fd` was closed by another part of the program. From one thread at a time.
        """
        watched = select.poll()  # not self._poll: another thread may call dead() during the wait
        watched.register(wake_fd, select.POLLIN)
        with self._lock:
            self._open()
            self._drop_lost()
            if len(self._dead) > self._waited_for:
                self._waited_for = len(self._dead)
                return True
            for fd, peer_rank in self._ranks.copy().items():
                if peer_rank not in self._dead:
                    watched.register(fd, select.POLLIN)
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if end is None else max(end - time.monotonic(), 0.0)
            interval = _LOOK_SECONDS if self._looked_at else _IDLE_SECONDS
            ready = watched.poll(1000 * (interval if left is None else min(left, interval)))
            woken = any(fd == wake_fd for fd, _ in ready) and wake_fd.ours
            with self._lock:
                self._note([event for event in ready if event[0] != wake_fd])
                lost = self._drop_lost() or not wake_fd.ours
                self._look()
                found, self._waited_for = len(self._dead) > self._waited_for, len(self._dead)
            if lost and not found:
                time.sleep(_LOOK_SECONDS)  # a caller that waits again does not spin
            if ready or found or lost or (end is not None and time.monotonic() >= end):
                return not woken

    def _look(self) -> None:
        """Poll the peers that have no pidfd. The caller holds the lock."""
        for peer_rank in [rank for rank, peer in self._looked_at.copy().items() if is_gone(peer)]:
            self._looked_at.pop(peer_rank, None)
            self._dead.add(peer_rank)

    def _drop_lost(self) -> bool:
        """Poll the peers whose pidfd another part of the program closed; whether there are new ones.

        The caller holds the lock.
        """
        if time.monotonic() < self._next_check:
            return False
        self._next_check = time.monotonic() + _LOOK_SECONDS
        lost = [fd for fd in list(self._ranks) if not fd.ours]
        for fd in lost:
            self._drop(fd)
        return bool(lost)

    def _drop(self, fd: OwnedDescriptor) -> None:
        rank = self._ranks.pop(fd, None)
        if rank is not None and rank not in self._dead:
            self._unwatch(fd)
            self._looked_at[rank] = self._peers[rank]

    def _note(self, ready: Sequence[tuple[int, int]]) -> None:
        """Record the ranks of readable pidfds as dead, if these are still ours. The caller holds the lock."""
        for number, mask in ready:
            fd, rank = next(((fd, rank) for fd, rank in self._ranks.copy().items() if fd == number), (None, None))
            if fd is None or rank is None or rank in self._dead:
                continue
            if mask & select.POLLIN and fd.ours:
                self._dead.add(rank)
                self._unwatch(fd)
            else:
                self._drop(fd)

    def _unwatch(self, fd: OwnedDescriptor) -> None:
        with contextlib.suppress(KeyError):  # a handler that came in meanwhile was first
            self._poll.unregister(fd)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._unopened.clear()
            self._looked_at.clear()
            for fd in list(self._ranks):
                fd.close()
            self._ranks.clear()


_WATCH_SECONDS = 0.001


class PeerWatch:
    """Whether a communicator and its ranks live, as of a millisecond ago at most; shared by its windows.

    `check_live` raises what ended the communicator; else it returns the ranks with a connection known to be broken.
    """

    def __init__(self, liveness: Liveness, check_live: Callable[[], Iterable[int]]) -> None:
        self._liveness, self._check_live = liveness, check_live
        self._looking, self._next_look = threading.Lock(), 0.0
        self._dead: frozenset[int] = frozenset()

    def dead(self) -> frozenset[int]:
        """The dead ranks, as of a millisecond ago at most. Raises what ended the communicator."""
        return self.look() if time.monotonic() >= self._next_look else self._dead

    def look(self) -> frozenset[int]:
        """The dead ranks, as of now. Raises what ended the communicator."""
        with self._looking:
            self._dead = self._dead.union(self._liveness.dead())
            self._dead = self._dead.union(self._check_live())
            self._next_look = time.monotonic() + _WATCH_SECONDS
        return self._dead

    def check(self, rank: int) -> None:
        """Raise if the process of `rank` has ended, or the communicator, perhaps since that process has."""
        try:
            dead = self.dead()
        except HoldfastError:
            if rank in self._dead:
                raise window_gone(rank) from None
            raise
        if rank in dead:
            raise window_gone(rank)


def window_gone(rank: int) -> RegionGone:
    """The error of a call that accesses memory of a dead rank."""
    return RegionGone(f"the process of rank {rank} is gone, and its window with it; rebuild without it")


_NO_RANK = -1
"""Of this process among the owner's one process: the owner may be this process itself."""


class RegionOwner:
    """Watches one process. `here` says whether it is on this host."""

    def __init__(self, process: Peer) -> None:
        self.pid, self.here = process.pid, process.host == this_host()
        self._liveness = Liveness([process], rank=_NO_RANK)
        self.check()

    def check(self) -> None:
        """Raise `RegionGone` once the process is known to be gone."""
        if self._liveness.dead():
            raise region_gone(self.pid)

    def close(self) -> None:
        self._liveness.close()


def region_gone(pid: int) -> RegionGone:
    """The error of a call on a region of a process that has ended."""
    return RegionGone(f"process {pid}, which exposed this region, is gone; ask for a region of a process that runs")


def region_closed(pid: int) -> RegionGone:
    """The error of a call on a region that its owner has closed."""
    return RegionGone(f"process {pid} closed the region; what was read of it must not be used")
