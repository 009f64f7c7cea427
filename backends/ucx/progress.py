"""The thread that progresses a worker while no thread is in an op: over TCP nothing else does."""

from __future__ import annotations

import os
import select
import threading
import time

from holdfast.backends.common.cpu_wait import yield_cpu
from holdfast.backends.ucx.worker import UcxWorker

_PAUSE_MILLISECONDS = 2
_EAGER_SECONDS = 0.0003


class ProgressThread:
    """Progresses `worker` under `lock` whenever there is work and the lock is free. Asleep otherwise.

    An `eager` one stays awake for a third of a millisecond after work: a rank that answers a request then gets the next
    one without a wake-up.
    """

    def __init__(self, worker: UcxWorker, lock: threading.RLock, eager: bool = False) -> None:
        self._worker, self._lock, self._eager = worker, lock, eager
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._events = select.poll()
        self._events.register(self._stop, select.POLLIN)
        self._events.register(worker.event_fd, select.POLLIN)
        self._pause = select.poll()
        self._pause.register(self._stop, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="holdfast-ucx-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            if self._work():
                if any(fd == self._stop for fd, _ in self._events.poll()):
                    return
            elif self._pause.poll(_PAUSE_MILLISECONDS):
                return

    def _work(self) -> bool:
        """True if no work is left; False if the worker is in use."""
        progress, lock = self._worker.progress, self._lock
        until = 0.0
        while True:
            if not lock.acquire(blocking=False):
                return False
            try:
                moved = progress()
                while progress():
                    pass
                if moved and self._eager:
                    until = time.monotonic() + _EAGER_SECONDS
                elif (not until or time.monotonic() > until) and self._worker.arm():
                    return True
            finally:
                lock.release()
            if until:
                yield_cpu()

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
