"""Which processes of this host have ended, as the kernel tells the event loop; and how to end one for certain."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

from holdfast.comms.liveness import open_pidfd, this_host
from holdfast.ft.view import Member
from holdfast.ft.vocabulary import Death

OnDeaths = Callable[[tuple[Death, ...]], None]


class ProcessWatch:
    """Follows the processes behind members, by pidfds whose start time was checked. Belongs to one event loop.

    `on_deaths` is called in the loop, once for all processes that are found to have ended at a time. Members of other
    hosts, and those that are threads of this process, are beyond it.
    """

    def __init__(self, on_deaths: OnDeaths) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_deaths = on_deaths
        self._poll = select.poll()
        self._fds: dict[str, int] = {}
        self._members: dict[int, Member] = {}
        self._gone: set[str] = set()

    def follow(self, members: Iterable[Member]) -> None:
        """Follow exactly these from now on."""
        wanted = {m.id: m for m in members if m.peer.host == this_host() and m.peer.pid != os.getpid()}
        for member_id in self._fds.keys() - wanted.keys():
            self._let_go(self._fds[member_id])
        self._gone &= wanted.keys()
        gone = []
        for member_id in wanted.keys() - self._fds.keys() - self._gone:
            member = wanted[member_id]
            fd = open_pidfd(member.peer)
            if fd is None:
                self._gone.add(member_id)
                gone.append(_death(member))
                continue
            self._fds[member_id], self._members[fd] = fd, member
            self._poll.register(fd, select.POLLIN)
            self._loop.add_reader(fd, self._look)
        if gone:
            self._loop.call_soon(self._on_deaths, tuple(gone))

    def follows(self, member_id: str) -> bool:
        """Whether this process would be told of the member's death."""
        return member_id in self._fds

    def fence(self, member: Member) -> bool:
        """SIGKILL a followed process; False if it is not followed. Its death is told of as any other."""
        fd = self._fds.get(member.id)
        if fd is None:
            return False
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        return True

    def close(self) -> None:
        """Follow nobody any more."""
        for fd in list(self._members):
            self._let_go(fd)

    def _look(self) -> None:
        ended = [self._members[fd] for fd, _ in self._poll.poll(0) if fd in self._members]
        for member in ended:
            self._let_go(self._fds[member.id])
            self._gone.add(member.id)
        if ended:
            self._on_deaths(tuple(_death(member) for member in ended))

    def _let_go(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self._poll.unregister(fd)
        del self._fds[self._members.pop(fd).id]
        os.close(fd)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP, Ctrl-Z) now. False for one that is gone, or cannot be looked at."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 :][:1] == b"T"


def _death(member: Member) -> Death:
    return Death(member.id, f"its process (pid {member.peer.pid}) ended")
