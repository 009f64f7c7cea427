"""Sleeps until a file is written to or removed by any process of this host; costs nothing while nothing happens."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
from collections.abc import Sequence
from pathlib import Path

from holdfast.comms.system.descriptors import OwnedDescriptor

_IN_MODIFY, _IN_ATTRIB, _IN_DELETE_SELF, _IN_MOVE_SELF = 0x2, 0x4, 0x400, 0x800
_libc = ctypes.CDLL(None, use_errno=True)


class FileWatch:
    """Watches files from construction to `close`. Costs one inotify instance (Linux gives a user 128 or more).

    It reports that `written` was written to, and that a file of `kept` was removed, renamed or replaced. Keep it: the
    kernel may take tens of milliseconds to close one. Raises OSError if a file cannot be watched.
    """

    def __init__(self, written: Path, kept: Sequence[Path] = ()) -> None:
        self._wakeup = OwnedDescriptor(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._lock, self._closed = threading.Lock(), False
        self._fd: OwnedDescriptor | None = None
        try:
            self._fd = OwnedDescriptor(_checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)))
            _checked(_libc.inotify_add_watch(self._fd, os.fsencode(written), _IN_MODIFY))
            for path in kept:
                gone = _IN_ATTRIB | _IN_DELETE_SELF | _IN_MOVE_SELF
                _checked(_libc.inotify_add_watch(self._fd, os.fsencode(path), gone))
        except OSError:
            self.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._poll.register(self._wakeup, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Sleep until something is to be reported, for at most `seconds`; return whether it is, since the last wait.

        A write may be reported a moment before it is complete.
        """
        if not self._poll.poll(1000 * seconds):
            return False
        assert self._fd is not None
        for fd in (self._fd, self._wakeup):
            with contextlib.suppress(BlockingIOError):
                os.read(fd, 4096)
        return True

    def wake(self) -> None:
        """End the wait of another thread, or the next one. Does nothing to a watch that is closed."""
        with self._lock:
            if not self._closed:
                self._wakeup.wake()

    def close(self) -> None:
        """Close the watch, once no thread waits. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for fd in (self._fd, self._wakeup):
                if fd is not None:
                    fd.close()


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
