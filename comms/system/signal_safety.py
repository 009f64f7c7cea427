"""Parts of ends (`abort`, `close`) that a signal's handler may call at any point of the code that it interrupts.

A handler runs in the main thread, between two steps of what that thread was doing: it may need what the thread holds,
and it may raise (KeyboardInterrupt), which leaves the work half done.
"""

from __future__ import annotations

import threading
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress

from holdfast.comms.errors import again
from holdfast.comms.system import forks

_shared: forks.Living[threading.RLock] = forks.Living()


def shared_lock() -> threading.RLock:
    """A lock of several communicators, held for a few steps. Those steps may be interrupted by themselves.

    In a forked child it is free: the threads that may have held it do not exist there.
    """
    lock = threading.RLock()
    _shared.add(lock)
    return lock


@forks.run_in_children
def _free_shared_locks() -> None:
    for lock in _shared:
        if not lock._is_owned():  # type: ignore[attr-defined]  # else by the thread that has forked, which releases it
            lock._at_fork_reinit()  # type: ignore[attr-defined]


class HandlerLock:
    """A mutex. What a signal's handler asks for while its own thread is inside is done right after."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._inside = False
        self._later: list[Callable[[], None]] = []

    def run(self, action: Callable[[], None], again: Callable[[], None]) -> None:
        """Run `action` under the lock; if this thread is inside already, let the outer call run `again` at its end."""
        try:
            with self._lock:
                if self._inside:
                    self._later.append(again)
                    return
                self._inside = True  # no handler can come between this and the check: there is no call between them
                try:
                    action()
                finally:
                    self._inside = False
        finally:
            while self._later and not self._lock._is_owned():  # type: ignore[attr-defined]
                self._later.pop(0)()


class HandlerEvent:
    """A flag to wait for. A handler may set it, or raise, at any point of a wait in the thread that it interrupts.

    The handler that sets a `threading.Event` amid a wait for it waits for good, for a lock that its own thread holds;
    and one that raises there may leave that lock locked for the thread that would set it.
    """

    __slots__ = ("_set", "_waiters")

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[threading.Lock] = []

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it, for good, and end all waits. From any thread."""
        self._set = True
        for waiter in list(self._waiters):
            with suppress(RuntimeError):  # another thread has set it, too
                waiter.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for at most `timeout` seconds; whether it is."""
        if self._set:
            return True
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            if not self._set:  # else whoever set it before this line did not see the waiter
                waiter.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
        finally:
            self._waiters.remove(waiter)
        return self._set


def run_shielded(call: Callable[[], None]) -> None:
    """Run a call that must not be cut short. What a signal's handler raises meanwhile is raised after it.

    In the main thread, the only one that handlers interrupt, it runs on a thread of its own; except below a handler
    that came while a shared lock was held, which that thread might need.
    """
    if threading.current_thread() is not threading.main_thread() or any(lock._is_owned() for lock in _shared):  # type: ignore[attr-defined]
        call()
        return
    begun, ended, raised = threading.Lock(), HandlerEvent(), list[BaseException]()

    def run() -> None:
        nonlocal call
        if not begun.acquire(blocking=False):  # the caller was interrupted before this began, and has gone on
            return
        try:
            call()
        except BaseException as error:
            raised.append(error)
        finally:
            del call  # what it refers to must not outlast it in a thread that is about to end
            ended.set()

    def start() -> None:
        try:
            threading.Thread(target=run, name="holdfast-shielded", daemon=False).start()
        except RuntimeError:  # this was the last thread that there can be
            run()

    # This thread starts none by `threading` and waits for no Event: a handler that raises amid their Python code leaves
    # a lock of theirs locked, and the next wait, or the interpreter's exit, waits for good.
    interruption: BaseException | None = None
    try:
        start_new_thread(start, ())
    except RuntimeError:  # there can be no more threads: they are used up, or the interpreter ends
        call()
        return
    except BaseException as error:
        if begun.acquire(blocking=False):
            raise
        interruption = error
    while not ended.is_set():
        try:
            ended.wait()
        except BaseException as error:
            interruption = error
    if interruption is not None:
        raise again(interruption)
    if raised:
        raise again(raised[0])
