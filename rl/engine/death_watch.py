"""Sees the end of a process of this host within milliseconds, by pidfds of its threads and of itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from holdfast.comms.system.descriptors import OwnedDescriptor
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import is_gone, start_time, this_host
from holdfast.ft.detectors.process_watch import fatal_signal, open_threads_of
from holdfast.ft.launch.exit_status import how_it_ended

_LOOK_SECONDS = 0.05


class DeathWatch:
    """Calls `on_death` once: with how a killed process is ending, or with "" once it has ended otherwise.

    The kernel reports the threads of a killed process at once, and the process itself only when its memory is freed,
    up to 190 ms later. `pidfd` stays the caller's.
    """

    def __init__(self, pid: int, pidfd: OwnedDescriptor, on_death: Callable[[str], None]) -> None:
        self._pid, self._pidfd, self._on_death = pid, pidfd, on_death
        self._loop = asyncio.get_running_loop()
        self._threads: tuple[OwnedDescriptor, ...] = ()
        self._watching = True
        self._peer = Peer(this_host(), pid, 0)
        with contextlib.suppress(OSError):
            self._peer = Peer(this_host(), pid, start_time(pid))
        self._loop.add_reader(pidfd, self._process_ended)

    def follow_threads(self) -> None:
        """Follow the oldest threads of the process too, once it has those that stay."""
        if self._watching and not self._threads:
            self._threads = open_threads_of(self._pid)
            for fd in self._threads:
                self._loop.add_reader(fd, self._thread_ended, fd)

    def _thread_ended(self, fd: OwnedDescriptor) -> None:
        self._loop.remove_reader(fd)
        if number := fatal_signal(self._pid):
            self._tell(f"process {self._pid} {how_it_ended(-number)}")

    def _process_ended(self) -> None:
        if self._pidfd.ours:
            self._tell("")
            return
        self._loop.remove_reader(self._pidfd)  # another part of the program closed it: look from time to time
        self._look()

    def _look(self) -> None:
        if self._watching and is_gone(self._peer):
            self._tell("")
        elif self._watching:
            self._loop.call_later(_LOOK_SECONDS, self._look)

    def _tell(self, how: str) -> None:
        if self._watching:
            self.close()
            self._on_death(how)

    def close(self) -> None:
        """Watch no more. Idempotent."""
        if self._watching:
            self._watching = False
            self._loop.remove_reader(self._pidfd)
            for fd in self._threads:
                self._loop.remove_reader(fd)
                fd.close()
            self._threads = ()
