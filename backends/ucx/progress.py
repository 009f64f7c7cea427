"""The thread that progresses a worker while no thread is in an op: over TCP nothing else does."""

from __future__ import annotations

import os
import select
import threading
import time

from holdfast.backends.ucx.worker import UcxWorker
from holdfast.comms.system.cpu_wait import yield_cpu
from holdfast.comms.system.descriptors import OwnedDescriptor

_PAUSE_MILLISECONDS = 2
_IDLE_MILLISECONDS = 500
"""The longest sleep: another part of the process may close `stop`, which then wakes nobody."""
_EAGER_SECONDS = 0.0003


class ProgressThread:
    """Progresses `worker` under `lock` whenever there is work and the lock is free. Asleep otherwise.

    An `eager` one stays awake for a third of a millisecond after work: a rank that answers a request then gets the next
    one without a wake-up.
    """

    def __init__(self, worker: UcxWorker, lock: threading.RLock, eager: bool = False) -> None:
        self._worker, self._lock, self._eager = worker, lock, eager
        self._stop, self._stopping = OwnedDescriptor(os.eventfd(0, os.EFD_CLOEXEC)), False
        self._events = select.poll()
        self._events.register(self._stop, select.POLLIN)
        assert worker.event_fd is not None
        self._events.register(worker.event_fd, select.POLLIN)
        self._pause = select.poll()
        self._pause.register(self._stop, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="holdfast-ucx-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping and not self._worker.lost_descriptors:
            if self._work():
                self._events.poll(_IDLE_MILLISECONDS)
            else:
                self._pause.poll(_PAUSE_MILLISECONDS)

    def _work(self) -> bool:
        """True if no work is left; False if the worker is in use, or this thread must end."""
        lock = self._lock
        until = 0.0
        while not self._stopping:
            if not lock.acquire(blocking=False):
                return False
            try:
                moved = self._worker.drain()
                if moved and self._eager:
                    until = time.monotonic() + _EAGER_SECONDS
                elif (not until or time.monotonic() > until) and self._worker.arm():
                    return True
            finally:
                lock.release()
            if until:
                yield_cpu()
        return False

    def close(self) -> None:
        self._stopping = True
        self._stop.wake()
        self._thread.join()
        self._stop.close()
