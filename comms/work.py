"""The handle of an operation that may still be running."""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.comms.errors import StillRunning, again
from holdfast.comms.quantities import seconds


class Work:
    """What every op returns: `wait` for it, ask whether it is `done`, look at its `exception`.

    A synchronous op returns a work that is done. `wait` may be called again, from any thread.
    """

    __slots__ = ("_done", "_error", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._done = threading.Event()
        self._error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Return when the op is complete; raise its error, or `StillRunning` after `timeout` seconds of waiting.

        The op itself goes on then: its own timeout is the one given when it was issued.
        """
        limit = None if timeout is None else seconds(timeout)
        if not self._done.wait(limit):
            raise StillRunning(self._name, limit or 0.0)
        if self._error is not None:
            raise again(self._error)

    def done(self) -> bool:
        """True once the op is complete or has failed."""
        return self._done.is_set()

    def exception(self) -> BaseException | None:
        """The error that ended the op; None while it runs, and if it succeeded."""
        return self._error

    def run(self, body: Callable[[], None]) -> None:
        """Run `body` here and now, and complete with its outcome."""
        try:
            body()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def abandon(self, error: BaseException) -> None:
        """Fail with `error` unless it is done: in a forked child, without the thread that ran it."""
        if not self._done.is_set():
            self._error, self._done = error, threading.Event()
            self._done.set()

    def __reduce__(self) -> tuple[Callable[[str], Work], tuple[str]]:
        """A work that is done can be pickled, and is done there too: functions run on ranks often end with an op."""
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
