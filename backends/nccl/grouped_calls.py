"""Group calls of NCCL, and threads in which a group was left open.

NCCL keeps an open group per thread: all later calls of that thread wait until the group ends. An exception in between
would leave a group open, and the ops of the next communicator would never start.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class ThisThread(threading.local):
    """What is known of the calling thread."""

    left_open = False
    """A group of NCCL was left open here."""


this_thread = ThisThread()


def run_as_group(group: Any, ops: Callable[[], None]) -> Any:
    """Run `ops()`, sends and receives of torch's `group`, as one group call. The group is closed even on an error."""
    group._start_coalescing()
    try:
        ops()
        return group._end_coalescing()
    except BaseException:
        if not any(_closed(group, close) for close in ("_end_coalescing", "_group_end")):
            this_thread.left_open = True
        raise


def _closed(group: Any, close: str) -> bool:
    try:
        getattr(group, close)()
    except Exception:
        return False
    return True


def marks_open_group(call: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a call that opens a group inside torch, which no caller can close if the call fails midway."""

    def marked(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RuntimeError:
            this_thread.left_open = True
            raise

    return marked


class CallingThread:
    """Runs calls in a thread without an open group.

    That is the calling thread, or a new one if a group was left open there.
    """

    def __init__(self, entering: Callable[[], Callable[[], contextlib.AbstractContextManager[Any]]]) -> None:
        """`entering()`, called in the calling thread, returns what to enter in the other: its device and stream."""
        self._entering = entering
        self._other: ThreadPoolExecutor | None = None

    def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if not this_thread.left_open:
            return call(*arguments)
        entered = self._entering()

        def there() -> Any:
            with entered():
                return call(*arguments)

        if self._other is None:
            self._other = ThreadPoolExecutor(1, "holdfast-nccl")
        return self._other.submit(there).result()

    def close(self) -> None:
        if self._other is not None:
            self._other.shutdown(wait=False)
