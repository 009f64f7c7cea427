"""Sleeps until a file is written to by any process of this host; costs nothing while nothing happens."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
from pathlib import Path

_IN_MODIFY = 0x2
_libc = ctypes.CDLL(None, use_errno=True)


class Watch:
    """Watches one file from construction to `close`. Costs one inotify instance (Linux gives a user 128 or more).

    Keep it: the kernel may take tens of milliseconds to close one. Raises OSError if the file cannot be watched.
    """

    def __init__(self, path: Path) -> None:
        self._fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            _checked(_libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_MODIFY))
        except OSError:
            os.close(self._fd)
            raise
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Sleep until the file is written to, for at most `seconds`; return whether it was written since the last wait.

        A write may be reported a moment before it is complete.
        """
        if not self._poll.poll(1000 * seconds):
            return False
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 4096)
        return True

    def close(self) -> None:
        os.close(self._fd)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
