"""Sees the end of a process of this host within milliseconds, by pidfds of its threads and of itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from holdfast.ft.detectors.process_watch import fatal_signal, open_threads_of
from holdfast.ft.launch.exit_status import how_it_ended


class DeathWatch:
    """Calls `on_death` once: with how a killed process is ending, or with "" once it has ended otherwise.

    The kernel reports the threads of a killed process at once, and the process itself only when its memory is freed,
    up to 190 ms later. `pidfd` stays the caller's.
    """

    def __init__(self, pid: int, pidfd: int, on_death: Callable[[str], None]) -> None:
        self._pid, self._pidfd, self._on_death = pid, pidfd, on_death
        self._loop = asyncio.get_running_loop()
        self._threads: tuple[int, ...] = ()
        self._watching = True
        self._loop.add_reader(pidfd, self._tell, "")

    def follow_threads(self) -> None:
        """Follow the oldest threads of the process too, once it has those that stay."""
        if self._watching and not self._threads:
            self._threads = open_threads_of(self._pid)
            for fd in self._threads:
                self._loop.add_reader(fd, self._thread_ended, fd)

    def _thread_ended(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        if number := fatal_signal(self._pid):
            self._tell(f"process {self._pid} {how_it_ended(-number)}")

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
                os.close(fd)
            self._threads = ()
