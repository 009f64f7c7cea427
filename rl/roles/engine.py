"""The interface to what starts processes, such as the harness's zygote."""

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
        """Send SIGKILL; no effect if the process is gone."""

    def close(self) -> None:
        """End the process if it still runs, and release it, without calling `on_exit`. Idempotent."""


class Engine(Protocol):
    """Starts processes and reports their ends. Used from the thread of one running asyncio event loop."""

    def start(self, name: str, body: Callable[..., None], *args: Any, on_exit: Callable[[str], None]) -> WorkerProcess:
        """Run `body(*args)` in a process of its own.

        At its end, `on_exit(how)` is called in the event loop, with how it ended in words; "" if it returned.
        """
