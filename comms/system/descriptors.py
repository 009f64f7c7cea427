"""Descriptors that this process holds: each is a number, and the file that it names.

A program may close numbers that are not its own, as a daemon does that closes all, and then open files of its own under
the same numbers. So what is held for longer than one function remembers its file, and closes or wakes no other one.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

_TELLS_APART = "eventfd-id:"
"""What the kernel says of descriptors that share one inode, and that stays so: the Pid of a pidfd does not."""


class OwnedDescriptor(int):
    """The number of a descriptor that was just opened. msgspec takes `int(it)`."""

    _file: tuple[object, ...]
    _open: bool

    def __new__(cls, number: int) -> OwnedDescriptor:
        owned = super().__new__(cls, number)
        owned._file, owned._open = _file_of(number), True
        return owned

    @property
    def ours(self) -> bool:
        """Whether the descriptor is open, and still names the file that it named first."""
        if not self._open:
            return False
        try:
            return _file_of(self) == self._file
        except OSError:
            return False

    def wake(self) -> None:
        """Let an eventfd be readable, if it is still ours."""
        if self.ours:
            os.eventfd_write(self, 1)

    def close(self) -> None:
        """Close the descriptor, unless the number names another file by now. Idempotent."""
        ours, self._open = self.ours, False
        if ours:
            os.close(self)


def _file_of(number: int) -> tuple[object, ...]:
    """What tells the file of a descriptor from all others."""
    status = os.fstat(number)
    file = status.st_dev, status.st_ino
    if stat.S_IFMT(status.st_mode):
        return file
    details: list[str] = []  # an eventfd, an epoll or, before Linux 6.9, a pidfd: they share an inode
    with contextlib.suppress(OSError):
        details.append(os.readlink(f"/proc/self/fd/{number}"))  # noqa: PTH115  # no descriptor needed
        lines = Path(f"/proc/self/fdinfo/{number}").read_text().splitlines()
        details += [line for line in lines if line.startswith(_TELLS_APART)]
    return (*file, *details)
