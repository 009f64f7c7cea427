"""End groups of torch beside the program: NCCL's abort takes half a second.

While the old group ends, the next communicator connects and its ops run. Each end has a deadline, and at most `MOST`
run at once. What has not ended by its deadline is reported and left behind; `MOST` of those, and this process makes no
further group.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from holdfast.comms.errors import HoldfastError
from holdfast.comms.system.interruptible import run_within

MOST = 4
"""The number of groups that end at once, and of groups that may be left behind."""

_log = logging.getLogger("holdfast.nccl")


class BackgroundEnds:
    """Ends groups in threads. `begin` may be called from any thread, and from a signal's handler."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._turns: queue.SimpleQueue[None] = queue.SimpleQueue()  # has no lock that a signal's handler could need
        for _ in range(most):
            self._turns.put(None)
        self._left_behind: list[Any] = []
        """What must outlive the ends that did not come: the device may still use it."""

    @property
    def left_behind(self) -> int:
        """The number of groups that had not ended by their deadline."""
        return len(self._left_behind)

    def begin(self, end: Callable[[], object], seconds: float, kept: tuple[Any, ...]) -> None:
        """Call `end()` in a thread, and keep `kept` until it has returned.

        If `MOST` are under way, this waits until one of them has ended, or has been left behind: `seconds` at most.
        """
        try:
            self._turns.get(timeout=seconds)
        except queue.Empty:
            _log.error("no group of NCCL ended within %g s: another one is not aborted, but left behind", seconds)
            self._left_behind.append((end, kept))
            return

        def run() -> None:
            try:
                if isinstance(failure_of_end(seconds, "abort", end), TimeoutError):
                    self._left_behind.append((end, kept))
            finally:
                self._turns.put(None)

        threading.Thread(target=run, name="holdfast-nccl-end").start()

    def check(self) -> None:
        """Raise HoldfastError if so many groups were left behind that this process should make no further one."""
        if self.left_behind >= self._most:
            raise HoldfastError(
                f"{self.left_behind} groups of NCCL in this process did not end after their abort, and hold memory and "
                "threads of its GPU: end this process, and let a spare take its place"
            )


def failure_of_end(seconds: float, what: str, call: Callable[[], object]) -> Exception | None:
    """Run `call()`, of torch's group: None if it has ended within `seconds`, else its error.

    That is a TimeoutError if it has not ended; it is abandoned then.
    """
    try:
        run_within(seconds, call)
    except TimeoutError as error:
        _log.warning("%s of a NCCL group takes longer than %g s: left behind", what, seconds)
        return error
    except Exception as error:
        _log.warning("%s of a NCCL group failed: %s", what, str(error).splitlines()[:1])
        return error
    return None


ends = BackgroundEnds()
"""Those of this process."""
