"""The seam to whatever starts processes: the harness's zygote today, an actor runtime tomorrow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class WorkerProcess(Protocol):
    """A process that was started."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int: ...

    def kill(self) -> None:
        """SIGKILL; nothing happens if it is gone."""

    def close(self) -> None:
        """End the process if it still runs, and let go of it. Idempotent. `on_exit` is not called for it."""


class Engine(Protocol):
    """Starts processes and says when they end. Used from the thread of one running asyncio event loop."""

    def start(self, name: str, body: Callable[..., None], *args: Any, on_exit: Callable[[str], None]) -> WorkerProcess:
        """Run `body(*args)` in a process of its own.

        `on_exit(how)` is called in the event loop once it has ended, with how it ended in words; "" if it returned.
        """
