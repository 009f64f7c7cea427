"""A folder of a running program: its owner holds it, and one whose owner was killed is removed by the next.

The hold is a lock on the folder (flock), which the kernel lets go of with its holder, however that ends. So nobody has
to ask which process made a folder, nor whether its number is another process's by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
"""Where folders for the shared memory of ranks lie: in one of ours, for mpirun may forget files of the killed."""


class HeldFolder:
    """A new folder `path`, for its owner alone, in `where` (None: where temporary files go).

    Removes those with the same `prefix` that nobody holds any more.
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
                    return
                os.close(self._hold)

    def close(self) -> None:
        """Remove it and all that is in it. Idempotent."""
        if self._hold >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._hold)
            self._hold = -1

    def __enter__(self) -> HeldFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _remove_if_left(folder: Path) -> None:
    """Leave those of others alone, held or not ours to open."""
    with contextlib.suppress(OSError):
        hold = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(hold)


def _lock(folder: Path, how: int) -> int:
    """A descriptor that holds the lock. Raises OSError if there is no such folder, or the lock is another's."""
    hold = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(hold, how)
    except OSError:
        os.close(hold)
        raise
    return hold
