"""`Work`, the handle of an op that may still be running; `Lane`, the thread that runs them in order."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from holdfast.comms.errors import StillRunning, UsedAfterFork, again
from holdfast.comms.quantities import seconds
from holdfast.comms.system import forks
from holdfast.comms.system.signal_safety import HandlerEvent, run_shielded

T = TypeVar("T")

log = logging.getLogger("holdfast.comms")


def call_back(functions: list[Callable[[T], object]], argument: T) -> None:
    """Remove and call all `functions`, in order; log what they raise.

    Several threads may call this with one list: each function is called once, by one of them.
    """
    while functions:
        try:
            function = functions.pop(0)
        except IndexError:  # another thread took the last one
            return
        try:
            function(argument)
        except KeyboardInterrupt:
            raise
        except BaseException:  # the caller completes an op, which the error does not concern
            log.exception("the callback %r failed for %r", function, argument)


class Work:
    """The handle that every op returns, with `wait`, `done` and `exception`.

    A synchronous op returns a work that is done. Any thread may call `wait`, also repeatedly.
    """

    __slots__ = ("_callbacks", "_done", "_error", "_failure", "_name", "seconds")

    def __init__(self, name: str) -> None:
        self._name = name
        self._callbacks: list[Callable[[Work], object]] = []
        self._done = HandlerEvent()
        self._error: BaseException | None = None
        self.seconds: float | None = None
        """How long the op ran, without its time in the queue. None until it is complete, and for a synchronous op."""
        self._failure: Failure | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Return when the op is complete; raise its error, or `StillRunning` after `timeout` seconds of waiting.

        After `StillRunning` the op goes on, until the timeout that it was issued with.
        """
        limit = None if timeout is None else seconds(timeout)
        if not self.ends_within(limit):
            raise StillRunning(self._name, limit or 0.0)
        if self._error is not None:
            if self._failure is not None:
                self._failure.told = True
            raise again(self._error)

    def ends_within(self, limit: float | None) -> bool:
        """Wait for at most `limit` seconds; whether the op is complete or has failed."""
        return self._done.wait(limit)

    def done(self) -> bool:
        """True once the op is complete or has failed."""
        return self._done.is_set()

    def exception(self) -> BaseException | None:
        """The error that ended the op; None while it runs, and if it succeeded."""
        return self._error

    def add_done_callback(self, function: Callable[[Work], object]) -> None:
        """Call `function(work)` once the op is complete or has failed; at once if it has.

        It is called in the thread that completes the op, or in the caller's, and must not wait for later ops. What it
        raises is logged. In a forked child, which cannot complete the op, it is never called.
        """
        if self.done():
            call_back([function], self)
            return
        self._callbacks.append(function)
        if self.done():  # meanwhile: the second of the two threads finds the callback, or the end
            self._call_back()

    def run(self, body: Callable[[], None], failed: Callable[[Failure], None] | None = None) -> None:
        """Run `body` in the calling thread, and complete with its outcome; before that, report its failure."""
        began = time.perf_counter()
        try:
            body()
        except BaseException as error:
            self._error = error
            if failed is not None:
                self._failure = Failure(again(error))
                failed(self._failure)
        finally:
            self.seconds = time.perf_counter() - began
            self._done.set()
            self._call_back()

    def _call_back(self) -> None:
        call_back(self._callbacks, self)

    def abandon(self, error: BaseException) -> None:
        """Fail with `error` unless it is done: for a forked child, which lacks the thread that ran the op."""
        if not self._done.is_set():
            self._callbacks = []
            self._error, self._done = error, HandlerEvent()
            self._done.set()

    def __reduce__(self) -> tuple[Callable[[str], Work], tuple[str]]:
        """Pickle a work that is done; the copy is done, too. Functions run on ranks often return an op's work."""
        if not self.done() or self._error is not None:
            raise TypeError(f"this {self._name} is not complete; wait for it first")
        return Work.completed, (self._name,)

    @staticmethod
    def completed(name: str) -> Work:
        """A work that is done."""
        work = Work(name)
        work._done.set()
        return work


DONE = Work.completed("op")


class Failure:
    """The error of a work, without what it refers to, and whether a `wait` has told anybody of it."""

    __slots__ = ("error", "told")

    def __init__(self, error: BaseException) -> None:
        self.error, self.told = error, False
        error.__cause__ = None


REPORT_SECONDS = 1.0
"""How long a wait for all works goes on, after the deadline of the last one, for that one's own report of it."""


class UntoldFailure:
    """The first failure, of some works, that nobody has been told of."""

    def __init__(self) -> None:
        self._first: Failure | None = None

    def note(self, failure: Failure) -> None:
        """Note that a work has failed. From the thread that runs it."""
        if self._first is None or self._first.told:
            self._first = failure

    def tell(self) -> None:
        """Raise the error that nobody was told of, if there is one; once."""
        failure, self._first = self._first, None
        if failure is not None and not failure.told:
            raise again(failure.error)


class Lane:
    """Works that run one after the other, in the order of issue, on a thread that begins with the first.

    A forked child, which lacks that thread, fails them: the error calls each `what`.
    """

    def __init__(self, name: str, what: str) -> None:
        self.last: Work = DONE
        self.thread: threading.Thread | None = None
        self._name, self._what, self._pid = name, what, os.getpid()
        self._running = [DONE]
        self._issued: queue.SimpleQueue[tuple[Work, Callable[[], None]] | None] = queue.SimpleQueue()
        weakref.finalize(self, self._issued.put, None).atexit = False
        forks.reset_in_children(self)

    def issue(self, work: Work, task: Callable[[], None]) -> None:
        """Queue `task`, which completes the work."""
        if self.thread is None:
            run_shielded(self._start)  # Ctrl-C between its two lines would leave a thread that never starts
        self.last = work
        self._issued.put((work, task))

    def end(self, seconds: float) -> bool:
        """Let the thread end after the works that were issued; whether it has, within so many seconds."""
        if self.thread is None:
            return True
        self._issued.put(None)
        if self.thread is threading.current_thread():
            return True
        self.thread.join(max(seconds, 0.0))
        return not self.thread.is_alive()

    def reset_in_child(self) -> None:
        error = UsedAfterFork(self._what, self._pid)
        self._running[0].abandon(error)
        with contextlib.suppress(queue.Empty):
            while (item := self._issued.get_nowait()) is not None:
                item[0].abandon(error)

    def _start(self) -> None:
        self.thread = threading.Thread(
            target=_run_all, args=(self._issued, self._running), name=self._name, daemon=True
        )
        self.thread.start()


def _run_all(issued: queue.SimpleQueue[tuple[Work, Callable[[], None]] | None], running: list[Work]) -> None:
    while (item := issued.get()) is not None:
        running[0], task = item
        task()
        del item, task  # they refer to what was called, which this thread must not keep alive
