"""A process that another process started, by its id: it can be signalled and watched, and not waited for."""

from __future__ import annotations

import contextlib
import os
import select
import signal


class ForeignProcess:
    """The process `pid`, under a name. Close it after use.

    Holds a pidfd, so no signal ever hits another process with the same id.
    """

    def __init__(self, name: str, pid: int) -> None:
        self.name, self.pid = name, pid
        self._pidfd = -1
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)

    def alive(self) -> bool:
        """False once the process has ended."""
        if self._pidfd == -1:
            return False
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return not poller.poll(0)

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._pidfd != -1:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        if self._pidfd != -1:
            os.close(self._pidfd)
            self._pidfd = -1
