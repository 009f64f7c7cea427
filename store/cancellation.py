"""Cancels calls of the store that run in other threads.

A call looks for a cancellation where it waits and between the pieces that it copies; it then ends with `CallCancelled`,
as it would with any other error: what it had begun to publish is withdrawn.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.store.errors import CallCancelled

SLICE_SECONDS = 0.05
"""The longest time that a call which can be cancelled waits before it looks."""


class Cancellation:
    """Ends the calls that run in its `scope`, in whatever thread, once `cancel` was called."""

    def __init__(self, op: str) -> None:
        self.op = op
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """End the calls in the scope. Idempotent, from any thread."""
        self._cancelled.set()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Calls of this thread can be cancelled inside."""
        outer = getattr(_current, "cancellation", None)
        _current.cancellation = self
        try:
            yield
        finally:
            _current.cancellation = outer


_current = threading.local()


def check() -> None:
    """Raise `CallCancelled` if the call that runs in this thread was cancelled."""
    found: Cancellation | None = getattr(_current, "cancellation", None)
    if found is not None and found.cancelled:
        raise CallCancelled(found.op)


def longest_wait(seconds: float) -> float:
    """The time that a wait of `seconds` may take until the next `check`."""
    return seconds if getattr(_current, "cancellation", None) is None else min(seconds, SLICE_SECONDS)
