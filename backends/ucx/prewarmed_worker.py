"""A worker for messages that is made before it is needed.

Making one takes 5 ms; a rebuild that cannot keep its worker then need not wait for it. One is kept while the process
has communicators over UCX. It is made when the first of them is connected, and again whenever one of several is closed,
as those of earlier epochs are.
"""

from __future__ import annotations

import contextlib

from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.worker import Failed, Transports, UcxWorker
from holdfast.comms.errors import HoldfastError
from holdfast.comms.system import forks
from holdfast.comms.system.signal_safety import shared_lock

_lock = shared_lock()
_users = 0
"""The number of communicators of this process."""
_waiting: UcxWorker | None = None


def take(over: Transports, failed: Failed) -> UcxWorker:
    """Take a worker for one more communicator. It reports broken connections to `failed`."""
    global _users
    waiting = _take_waiting()
    if waiting is not None and waiting.over != over:
        waiting.close()
        waiting = None
    worker = waiting if waiting is not None else UcxWorker(libucp.FEATURE_TAG, over, failed)
    worker.failed = failed
    with _lock:
        _users += 1
    return worker


def _take_waiting() -> UcxWorker | None:
    global _waiting
    with _lock:
        waiting, _waiting = _waiting, None
    return waiting


def make(over: Transports) -> None:
    """Make a worker in advance. If that fails, the communicator that needs one makes it, and reports the error."""
    global _waiting
    with _lock:
        if _users and _waiting is None:
            try:
                _waiting = UcxWorker(libucp.FEATURE_TAG, over, lambda rank, why: None)
            except HoldfastError:
                return


def warm_up() -> None:
    """Make a worker and drop it: UCX loads its transports for the first one, which takes four times as long."""
    with contextlib.suppress(HoldfastError):  # connecting reports an error that still holds
        UcxWorker(libucp.FEATURE_TAG, Transports.choose(one_host=True)).close()


def worker_closed(over: Transports) -> None:
    """Note that a communicator has closed its worker."""
    global _users
    with _lock:
        _users -= 1
    if _users:
        make(over)
    elif (idle := _take_waiting()) is not None:
        idle.close()


@forks.run_in_children
def _begin_child() -> None:
    global _lock, _users, _waiting
    forks.never_destroy(_waiting)
    _lock, _users, _waiting = shared_lock(), 0, None
