"""Temporary directories that a running program holds; the next program removes those of killed owners.

The hold is a lock on the directory (flock), which the kernel releases when its holder ends, however it ends. So there
is no need to find the process that made a directory, or to guard against reused pids. A marker file shows that holdfast
made the directory: one that only has such a name is the user's, and stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Literal

from holdfast.comms.system.files import OwnedDescriptor

SHARED_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
"""The parent of directories for the shared memory of ranks, which is removed with them: mpirun may leave files."""

MARKER = ".made-by-holdfast"

Removing = Callable[[Path], None]


class HeldDirectory:
    """A new owner-only directory `path` in `where` (None: the directory for temporary files).

    Also removes directories of the same user with the same `prefix` that have the marker and are no longer held.
    `removing` is called with each directory before it is removed: it removes what else goes with it.
    """

    def __init__(self, prefix: str, where: Path | None = None, removing: Removing | None = None) -> None:
        where, self._closed, self._removing = where or Path(tempfile.gettempdir()), False, removing
        remove_left(prefix, where, removing)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
            try:
                self._hold = OwnedDescriptor(_lock(self.path, fcntl.LOCK_EX | fcntl.LOCK_NB))
            except FileNotFoundError:
                continue
            except BlockingIOError:  # another process looks at it; a fork of that one may hold the lock for long
                with contextlib.suppress(OSError):
                    self.path.rmdir()
                continue
            if self.path.exists():
                (self.path / MARKER).touch(mode=0o600)
                return
            self._hold.close()

    def close(self) -> None:
        """Remove the directory and its content. Idempotent."""
        if not self._closed:
            self._closed = True
            _remove(self.path, self._removing)
            self._hold.close()

    def __enter__(self) -> HeldDirectory:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def private_file(path: Path, mode: Literal["wb", "ab"]) -> BinaryIO:
    """Open a file for writing; a new file is readable by its owner alone, whatever the umask."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def remove_left(prefix: str, where: Path | None = None, removing: Removing | None = None) -> None:
    """Remove the directories that ended holders left; see `HeldDirectory`."""
    for folder in (where or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        _remove_if_left(folder, removing)


def _remove(folder: Path, removing: Removing | None) -> None:
    if removing is not None:
        removing(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_if_left(folder: Path, removing: Removing | None) -> None:
    """Remove a directory that an ended holder of this user left.

    One that is held, foreign, or without the marker stays.
    """
    with contextlib.suppress(OSError):
        hold = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            marker = os.stat(MARKER, dir_fd=hold, follow_symlinks=False)
            owners = {marker.st_uid, os.fstat(hold).st_uid}
            if stat.S_ISREG(marker.st_mode) and owners == {os.geteuid()}:
                _remove(folder, removing)
        finally:
            os.close(hold)


def _lock(folder: Path, how: int) -> int:
    """A descriptor that holds the lock. Raises OSError if the directory is missing or locked by another process."""
    hold = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(hold, how)
    except OSError:
        os.close(hold)
        raise
    return hold
