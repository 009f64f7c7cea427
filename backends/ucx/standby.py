"""A worker for messages that is made before it is needed: that takes 5 ms, which a rebuild that cannot go on with the
worker that it has need not wait for.

There is one while the process has communicators over UCX. It is made when the first of them stands, and anew whenever
one of several is closed, as those of earlier epochs are once nobody waits for the next.
"""

from __future__ import annotations

import contextlib
import os
import threading

from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.libucp import UcxError
from holdfast.backends.ucx.worker import Failed, Transports, Worker
from holdfast.comms.errors import BackendUnavailable

_lock = threading.Lock()
_users: dict[int, int] = {}
"""Process id -> communicators: a forked child has none of its parent's."""
_waiting: dict[int, Worker] = {}


def take(over: Transports, failed: Failed) -> Worker:
    """A worker for one more communicator, which reports broken connections to `failed`."""
    with _lock:
        waiting = _waiting.pop(os.getpid(), None)
    if waiting is not None and waiting.over != over:
        waiting.close()
        waiting = None
    worker = waiting if waiting is not None else Worker(libucp.FEATURE_TAG, over, failed)
    worker.failed = failed
    with _lock:
        _users[os.getpid()] = _users.get(os.getpid(), 0) + 1
    return worker


def make(over: Transports) -> None:
    """Have one ready. Whoever needs one and finds none makes it, and says then what is wrong."""
    with _lock:
        if _users.get(os.getpid(), 0) and os.getpid() not in _waiting:
            try:
                _waiting[os.getpid()] = Worker(libucp.FEATURE_TAG, over, lambda rank, why: None)
            except (UcxError, BackendUnavailable):
                return


def rehearse() -> None:
    """Make a worker and let it go: UCX loads its transports for the first one, which takes four times as long."""
    with contextlib.suppress(UcxError, BackendUnavailable):  # connecting says what is wrong, if it is wrong then
        Worker(libucp.FEATURE_TAG, Transports.choose(one_host=True)).close()


def left(over: Transports) -> None:
    """A communicator has closed its worker."""
    with _lock:
        if os.getpid() not in _users:  # it was the parent's
            return
        _users[os.getpid()] -= 1
        others = _users[os.getpid()]
        idle = None if others else _waiting.pop(os.getpid(), None)
    if idle is not None:
        idle.close()
    elif others:
        make(over)


def _begin_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_child)
