"""The newest batches that a trainer was sent, for its steps to take by number."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.rl.data.encoded_batch import EncodedBatch
from holdfast.rl.trainers.errors import NoBatch

KEPT = 2
"""The number of newest batches that are kept: members of a session are at most one step apart."""

LOOK_SECONDS = 0.05
"""Seconds of one wait for a batch, after which `over` is called."""


class BatchInbox:
    """Filled by one thread, read by another."""

    def __init__(self) -> None:
        self._batches: dict[int, EncodedBatch] = {}
        self._changed = threading.Condition()

    @property
    def newest(self) -> int | None:
        """The first update of the newest batch; None if none has come."""
        with self._changed:
            return max(self._batches, default=None)

    def put(self, batch: EncodedBatch) -> None:
        """Add a batch. The oldest one goes if there are too many."""
        with self._changed:
            self._batches[batch.step] = batch
            while len(self._batches) > KEPT:
                del self._batches[min(self._batches)]
            self._changed.notify_all()

    def take(self, step: int, over: Callable[[], None], timeout: float) -> EncodedBatch:
        """Wait for the batch that begins with update `step`; it stays. `over` is called meanwhile, and may raise.

        Raises `NoBatch`.
        """
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                if step in self._batches:
                    return self._batches[step]
                left = deadline - time.monotonic()
                if left <= 0:
                    raise NoBatch(step, timeout, max(self._batches, default=None))
                self._changed.wait(min(left, LOOK_SECONDS))
            over()
