"""A folder of a running program: its owner holds it, and one whose owner was killed is removed by the next.

The hold is a lock on the folder (flock), which the kernel lets go of with its holder, however that ends. So nobody has
to ask which process made a folder, nor whether its number is another process's by now. A marker file says that
holdfast made the folder: one that only has a name of this kind is the user's, and stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO, Literal

SHARED_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
"""Where folders for the shared memory of ranks lie: in one of ours, for mpirun may forget files of the killed."""

MARKER = ".made-by-holdfast"


class HeldDirectory:
    """A new folder `path`, for its owner alone, in `where` (None: where temporary files go).

    Removes those of the same user with the same `prefix` that have the marker and are not held any more.
    """

    def __init__(self, prefix: str, where: Path | None = None) -> None:
        where = where or Path(tempfile.gettempdir())
        for other in where.glob(f"{prefix}*"):
            _remove_if_left(other)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
            with contextlib.suppress(FileNotFoundError):
                self._hold = _lock(self.path, fcntl.LOCK_EX)
                if self.path.exists():
                    (self.path / MARKER).touch(mode=0o600)
                    return
                os.close(self._hold)

    def close(self) -> None:
        """Remove it and all that is in it. Idempotent."""
        if self._hold >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._hold)
            self._hold = -1

    def __enter__(self) -> HeldDirectory:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def private_file(path: Path, mode: Literal["wb", "ab"]) -> BinaryIO:
    """Open a file for writing that, if it is new, its owner alone may read, whatever the umask."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def _remove_if_left(folder: Path) -> None:
    """Remove a folder that a holder of this user left behind. Not one that is held, of another user, or not ours."""
    with contextlib.suppress(OSError):
        hold = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            marker = os.stat(MARKER, dir_fd=hold, follow_symlinks=False)
            owners = {marker.st_uid, os.fstat(hold).st_uid}
            if stat.S_ISREG(marker.st_mode) and owners == {os.geteuid()}:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(hold)


def _lock(folder: Path, how: int) -> int:
    """A descriptor that holds the lock. Raises OSError if there is no such folder, or the lock is another's."""
    hold = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(hold, how)
    except OSError:
        os.close(hold)
        raise
    return hold
