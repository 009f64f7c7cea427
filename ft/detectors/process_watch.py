"""The processes of this host: `pidfd` detects their ends by the kernel, and heartbeats are pages in shared memory.

The kernel reports the end of a process only after it has freed its memory: 5 to 50 ms for one that uses torch. The end
of a single thread is reported at once. So a few threads of each process are watched too; when one of them ends while
the process is exiting, that is sufficient proof, because an exit that has begun cannot be stopped. Freeing that memory
keeps a processor busy just when the survivors need it, so an exiting process is scheduled after all others for a
moment.

A heartbeat page is a memfd that the others open through /proc, so it has no name and ends with its process. It holds
the time at which its process last ran, and its position in its ops; both can be read while the process is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import select
import signal
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast.comms.system.files import OwnedDescriptor, map_file
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import (
    is_exiting,
    is_gone,
    is_stopped,
    open_pidfd,
    read_proc_stat,
    start_time,
    this_host,
)
from holdfast.ft.detectors.detector import Detector, DetectorContext
from holdfast.ft.membership.events import Death, ProvenDeaths
from holdfast.ft.membership.view import Member, View
from holdfast.ft.ports import OnDeaths, OpPosition

_BYTES = mmap.PAGESIZE
_PAGE = struct.Struct("<8sQdQQ?")  # magic, version, time of the beat, epoch, ops entered, inside
_MAGIC = b"HFPULSE1"
_VERSION = struct.Struct("<Q")
_AT = 8
_TRIES = 8
_NAME = "holdfast-pulse"


class HeartbeatPage:
    """The page of this process. Others need `number` to open it."""

    def __init__(self) -> None:
        self.fd = OwnedDescriptor(os.memfd_create(_NAME, os.MFD_CLOEXEC))
        os.ftruncate(self.fd, _BYTES)
        self._page = map_file(self.fd, _BYTES)
        self._version = 0
        self.number = int(self.fd)

    def beat(self, now: float, place: OpPosition) -> None:
        """Record that this process runs. The version is odd while the rest is being written."""
        self._version += 2
        _VERSION.pack_into(self._page, _AT, self._version - 1)
        _PAGE.pack_into(self._page, 0, _MAGIC, self._version - 1, now, place.epoch, place.entered, place.inside)
        _VERSION.pack_into(self._page, _AT, self._version)

    def close(self) -> None:
        self._page.release()
        self.fd.close()


class HeartbeatPageReader:
    """The page of another process."""

    def __init__(self, peer: Peer, fd: int) -> None:
        """Raises OSError if there is no such page, or this process may not read it."""
        path = f"/proc/{peer.pid}/fd/{fd}"
        _check_name(path)  # first: opening another file, such as a FIFO without a writer, could block for ever
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            _check_name(f"/proc/self/fd/{opened}")
            if start_time(peer.pid) != peer.started:
                raise FileNotFoundError(path)
            self._page = map_file(opened, _BYTES, writable=False)
        except (ValueError, ProcessLookupError) as error:
            raise FileNotFoundError(path) from error
        finally:
            os.close(opened)

    def read(self) -> tuple[float, OpPosition] | None:
        """The time at which the process last beat, and its position; None if it never has."""
        for _ in range(_TRIES):
            magic, version, time, epoch, entered, inside = _PAGE.unpack_from(self._page, 0)
            if magic == _MAGIC and version % 2 == 0 and _VERSION.unpack_from(self._page, _AT)[0] == version:
                return time, OpPosition(epoch, entered, inside)
        return None

    def close(self) -> None:
        with contextlib.suppress(BufferError):
            self._page.release()


def _check_name(path: str) -> None:
    """Raise OSError if `path` is not a heartbeat page."""
    if str(Path(path).readlink()) != f"/memfd:{_NAME} (deleted)":
        raise FileNotFoundError(path)


PIDFD_THREAD = os.O_EXCL
"""The flag of pidfd_open for the number of a thread; since Linux 6.9."""
_GIVES_WAY_SECONDS = 0.05
_LOOK_SECONDS = 0.05  # between looks at a process without a pidfd
_SECOND_LOOKS = (0.0005, 0.001, 0.002, 0.005)  # seconds after a thread has ended in a process that lives on


@dataclass(frozen=True, slots=True)
class _Followed:
    """A process, and its descriptors: `process` for all of it, `threads` for some of its threads."""

    member: Member
    process: OwnedDescriptor
    threads: tuple[OwnedDescriptor, ...]


class ProcessWatch:
    """Watches the processes of members, by pidfds; the start time of each is checked. Belongs to one event loop.

    `on_deaths` is called in the loop, once for all processes that are found to have ended at a time. Members of other
    hosts, and those that are threads of this process, are not watched.
    """

    def __init__(self, on_deaths: OnDeaths) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_deaths = on_deaths
        self._poll = select.poll()
        self._followed: dict[str, _Followed] = {}
        self._owners: dict[int, str] = {}
        self._gone: set[str] = set()

    def follow(self, members: Iterable[Member]) -> None:
        """Watch exactly these from now on."""
        wanted = {m.id: m for m in members if m.peer.host == this_host() and m.peer.pid != os.getpid()}
        for member_id in self._followed.keys() - wanted.keys():
            self._let_go(member_id)
        self._gone &= wanted.keys()
        gone = []
        for member_id in wanted.keys() - self._followed.keys() - self._gone:
            member = wanted[member_id]
            fd = open_pidfd(member.peer)
            if fd is None:
                self._gone.add(member_id)
                gone.append(death_of(member))
                continue
            threads = _open_threads(member.peer.pid, member.threads)
            self._followed[member_id] = followed = _Followed(member, OwnedDescriptor(fd), threads)
            for each in (followed.process, *followed.threads):
                self._listen(each, member_id)
        if gone:
            self._loop.call_soon(self._on_deaths, tuple(gone))

    def close(self) -> None:
        """Stop watching."""
        for member_id in list(self._followed):
            self._let_go(member_id)

    def _look(self) -> None:
        """Handle all descriptors that are ready, so that simultaneous deaths are reported together."""
        ended: dict[str, Member] = {}
        for fd, mask in self._poll.poll(0):
            member_id = self._owners.get(fd)
            if member_id is None or member_id in ended:
                continue
            followed = self._followed[member_id]
            owned = next(each for each in (followed.process, *followed.threads) if each == fd)
            if not mask & select.POLLIN or not owned.ours:
                self._ignore(fd)
                self._look_from_time_to_time(followed)
            elif fd == followed.process:
                ended[member_id] = followed.member
            elif is_exiting(followed.member.peer.pid):
                self._hold_back(followed.member.peer.pid)
                ended[member_id] = followed.member
            else:
                self._ignore(fd)
                self._look_again(followed, _SECOND_LOOKS)
        self._tell(ended)

    def _look_from_time_to_time(self, followed: _Followed) -> None:
        """Look at a process of which another part of the program closed a descriptor."""
        if self._followed.get(followed.member.id) is not followed:
            return
        if is_gone(followed.member.peer):
            self._tell({followed.member.id: followed.member})
        else:
            self._loop.call_later(_LOOK_SECONDS, self._look_from_time_to_time, followed)

    def _look_again(self, followed: _Followed, delays: tuple[float, ...]) -> None:
        """Check again whether the process of a thread that has ended is exiting: it may also close in good order."""
        if not delays:
            return

        def look() -> None:
            if self._followed.get(followed.member.id) is not followed:
                return
            if is_exiting(followed.member.peer.pid):
                self._tell({followed.member.id: followed.member})
            else:
                self._look_again(followed, delays[1:])

        self._loop.call_later(delays[0], look)

    def _hold_back(self, pid: int) -> None:
        """Let an exiting process run only on idle processors for a while, unless another survivor has done so."""
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(pid) == os.SCHED_IDLE:
                return
        threads = _threads(pid)
        _reschedule(threads, os.SCHED_IDLE, 19)

        def let_go() -> None:
            if is_exiting(pid):
                _reschedule(threads, os.SCHED_OTHER, 0)

        self._loop.call_later(_GIVES_WAY_SECONDS, let_go)

    def _tell(self, ended: dict[str, Member]) -> None:
        self._gone |= ended.keys()
        if ended:
            self._on_deaths(tuple(death_of(member) for member in ended.values()))
        for member_id in ended.keys() & self._followed.keys():
            self._let_go(member_id)

    def _listen(self, fd: int, member_id: str) -> None:
        self._owners[fd] = member_id
        self._poll.register(fd, select.POLLIN)
        self._loop.add_reader(fd, self._look)

    def _ignore(self, fd: int) -> None:
        if self._owners.pop(fd, None) is not None:
            self._loop.remove_reader(fd)
            self._poll.unregister(fd)

    def _let_go(self, member_id: str) -> None:
        followed = self._followed.pop(member_id)
        for fd in (followed.process, *followed.threads):
            self._ignore(fd)
            fd.close()


def _open_threads(pid: int, numbers: Iterable[int]) -> tuple[OwnedDescriptor, ...]:
    """Descriptors for those threads of a process that still exist; none where the kernel does not support them."""
    fds = []
    for number in numbers:
        try:
            fd = os.pidfd_open(number, PIDFD_THREAD)
        except OSError:
            continue
        if Path(f"/proc/{pid}/task/{number}").exists():
            fds.append(OwnedDescriptor(fd))
        else:
            os.close(fd)
    return tuple(fds)


def cpu_ticks(pid: int) -> int:
    """The processor time that a process has used, in clock ticks; 0 for one that has ended."""
    try:
        fields = read_proc_stat(pid)
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12]) if fields else 0


def oldest_threads(pid: int, most: int = 4) -> tuple[int, ...]:
    """Some threads of a process that has several; the end of each is reported when it ends.

    None of a process with one thread: its memory is freed before that thread is reported.
    """
    numbers = _threads(pid)
    return tuple(numbers[:most]) if len(numbers) > 1 else ()


def _threads(pid: int) -> list[int]:
    """The kernel's numbers of a process's threads; none of one that has ended."""
    try:
        return sorted(int(entry.name) for entry in os.scandir(f"/proc/{pid}/task"))
    except OSError:
        return []


def _reschedule(threads: Iterable[int], policy: int, niceness: int) -> None:
    """Change the scheduling of threads, as far as they still exist and this process may.

    The kernel looks at niceness, not at the policy, when it decides whether a thread must yield its processor at once,
    and not only at the next clock tick, after up to 4 ms.
    """
    for thread in threads:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, policy, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread, niceness)


def fatal_signal(pid: int) -> int:
    """The signal that is ending a process; 0 if there is none, or the process cannot be examined."""
    try:
        fields = read_proc_stat(pid)
    except OSError:
        return 0
    return int(fields[49]) & 0x7F if len(fields) > 49 and is_exiting(pid) else 0


def death_of(member: Member) -> Death:
    """The proven end of a process of this host."""
    return Death(member.id, f"its process (pid {member.peer.pid}) ended")


class HostProcesses:
    """The `Processes` of the kernel. `watch` is called in an event loop."""

    watch = ProcessWatch
    is_gone = staticmethod(is_gone)
    is_stopped = staticmethod(is_stopped)
    cpu_ticks = staticmethod(cpu_ticks)
    page = HeartbeatPage
    open_page = HeartbeatPageReader

    def kill(self, peer: Peer) -> None:
        with contextlib.suppress(ProcessLookupError):
            try:
                if (fd := open_pidfd(peer)) is not None:
                    with contextlib.closing(OwnedDescriptor(fd)):
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
            except ProcessLookupError:
                raise
            except OSError:  # pidfds are refused, or no descriptor is left: by its number, if that is still its own
                if not is_gone(peer):
                    os.kill(peer.pid, signal.SIGKILL)


class PidfdDetector(Detector):
    """Proves deaths within milliseconds."""

    def __init__(self, context: DetectorContext) -> None:
        super().__init__(context)
        self._watch = context.processes.watch(lambda deaths: context.tell(ProvenDeaths(deaths)))

    def follow(self, view: View | None, watched: tuple[Member, ...]) -> None:
        self._watch.follow(watched)

    def close(self) -> None:
        self._watch.close()


class LookingDetector(Detector):
    """Proves deaths within a heartbeat, with nothing of the kernel's that can be forbidden."""

    def __init__(self, context: DetectorContext) -> None:
        super().__init__(context)
        self._mates: dict[str, Member] = {}
        self._gone: set[str] = set()

    def follow(self, view: View | None, watched: tuple[Member, ...]) -> None:
        self._mates = self.context.mates(watched)
        self._gone &= self._mates.keys()

    def look(self, now: float) -> None:
        ended = [m for m in self._mates.values() if m.id not in self._gone and self.context.processes.is_gone(m.peer)]
        self._gone |= {member.id for member in ended}
        if ended:
            self.context.tell(ProvenDeaths(tuple(map(death_of, ended))))
