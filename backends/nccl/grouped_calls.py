"""Calls of NCCL in groups, and the threads in which one was left open.

NCCL keeps an open group by thread: all that the thread calls until the end of the group only waits in it. An exception
on the way would leave one open, in which the ops of the next communicator would never start.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_this_thread = threading.local()


def run_as_group(group: Any, ops: Callable[[], None]) -> Any:
    """Run `ops()`, sends and receives of torch's `group`, as one group call. However it ends, the group is closed."""
    group._start_coalescing()
    try:
        ops()
        return group._end_coalescing()
    except BaseException:
        if not any(_closed(group, close) for close in ("_end_coalescing", "_group_end")):
            _this_thread.left_open = True
        raise


def _closed(group: Any, close: str) -> bool:
    try:
        getattr(group, close)()
    except Exception:
        return False
    return True


def marks_open_group(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that opens a group of its own inside torch, which nothing can close if it fails in between."""

    def marked(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RuntimeError:
            _this_thread.left_open = True
            raise

    return marked


class CallingThread:
    """Runs calls where no group is open: in the calling thread, or in one of its own if one was left open there."""

    def __init__(self, entering: Callable[[], Callable[[], contextlib.AbstractContextManager[Any]]]) -> None:
        """`entering()`, in the calling thread, says what to enter in the other one: the current device and stream."""
        self._entering = entering
        self._other: ThreadPoolExecutor | None = None

    def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if not getattr(_this_thread, "left_open", False):
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
