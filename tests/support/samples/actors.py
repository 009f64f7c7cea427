"""Actors for tests of engines and services."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from holdfast.comms.errors import HoldfastError
from holdfast.ft.launch.held_directory import HeldDirectory, remove_left
from holdfast.rl.actors.engine import endpoint


class Counter:
    """An actor with methods of every kind."""

    def __init__(self, start: int = 0, log: str = "") -> None:
        self.value, self._log = start, log

    def add(self, n: int = 1) -> int:
        """Add slowly: two at a time would lose one."""
        before = self.value
        time.sleep(0.001)
        self.value = before + n
        return self.value

    @endpoint(idempotent=True)
    async def echo(self, x: object, seconds: float = 0.0) -> object:
        """Give `x` back, after a while."""
        await asyncio.sleep(seconds)
        return x

    @endpoint(idempotent=True)
    async def who(self) -> int:
        return os.getpid()

    async def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def block(self, seconds: float) -> float:
        """Keep the thread of sync methods busy."""
        time.sleep(seconds)
        return seconds

    async def fail(self, error: BaseException) -> None:
        raise error

    async def hang(self) -> None:
        await asyncio.Event().wait()

    def lock(self) -> object:
        """Give what cannot be sent."""
        return (each for each in ())

    async def leave(self, status: int) -> None:
        os._exit(status)

    def close(self) -> None:
        """Leave a note that this was called."""
        if self._log:
            with Path(self._log).open("a") as log:
                log.write("closed")


class Stillborn:
    """An actor that cannot be made."""

    def __init__(self, how: str) -> None:
        if how == "raise":
            raise ValueError("no such model")
        print("no such device", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


class Late:
    """An actor that cannot be made while a file is missing, for a reason that passes."""

    def __init__(self, file: str) -> None:
        if not Path(file).exists():
            raise StoreBusy(f"there is no {file} yet")


class StoreBusy(HoldfastError):
    """It may be tried again."""

    retryable = True


class Hoarder:
    """An actor with a folder, in which it names a file outside of it."""

    def __init__(self, outside: str) -> None:
        Path(outside).touch()
        self._folder = HeldDirectory(HOARD, removing=_remove_named)
        (self._folder.path / "named").write_text(outside)

    @staticmethod
    def remove_left() -> None:
        """Remove the files of those that were killed."""
        remove_left(HOARD, removing=_remove_named)


HOARD = "holdfast-hoard-"


def _remove_named(folder: Path) -> None:
    Path((folder / "named").read_text()).unlink(missing_ok=True)
