"""Waits: `Wait` for a condition, `run_interruptible` for a call that nothing else can end; atomics of this process."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from holdfast.comms.errors import HoldfastError
from holdfast.comms.system import forks
from holdfast.comms.system.signal_safety import HandlerEvent

yield_cpu = ctypes.CDLL(None).sched_yield
"""Yield the processor. Releases the GIL, which os.sched_yield does not."""


@dataclass(frozen=True, slots=True)
class Wait:
    """How to wait: `spins` checks before each look, a yield after each of the first `yields` looks, then sleeps."""

    spins: int = 1
    yields: int = 200
    sleep_seconds: float = 0.0002

    def until(
        self,
        done: Callable[[], bool],
        look: Callable[[], object],
        deadline: float,
        late: Callable[[float], HoldfastError],
    ) -> None:
        """Return once `done()`. Raises what `look()` raises, unless it is done then; `late(seconds)` at the deadline.

        `done` may have effects, such as taking a lock: after it has returned true it is not called again.
        """
        began = time.monotonic()
        if not self.reaches(done, deadline, look):
            raise late(time.monotonic() - began)

    def reaches(self, done: Callable[[], bool], deadline: float, look: Callable[[], object] = lambda: None) -> bool:
        """Whether `done()` by the deadline. Raises as `until`."""
        looks = 0
        while True:
            for _ in range(self.spins):
                if done():
                    return True
            try:
                look()
            except HoldfastError:
                if done():  # it came between the two looks, before the peer ended
                    return True
                raise
            if time.monotonic() >= deadline:
                return False
            looks += 1
            if looks <= self.yields:
                yield_cpu()
            else:
                time.sleep(self.sleep_seconds)


POLL = Wait(yields=0, sleep_seconds=0.001)
"""For what takes milliseconds, such as the news of a peer's death."""


def change(address: int, itemsize: int, add: bool, first: int, second: int) -> int:
    """Add `first` to an integer of `itemsize` bytes, or swap `first` for `second`; returns the old value.

    `itemsize` is 4 or 8; an addition wraps around. Atomic only among callers that hold the same lock.
    """
    place = (ctypes.c_int32 if itemsize == 4 else ctypes.c_int64).from_address(address)
    old = int(place.value)
    if add:
        place.value = old + first
    elif old == first:
        place.value = second
    return old


Result = TypeVar("Result")

_CHECK_SECONDS = 0.002
_END_SECONDS = 1.0
"""How long a fork waits for threads that end. They wait for nobody."""

_ending: deque[int] = deque(maxlen=64)
"""The last threads whose calls have returned, as the system numbers them."""


def run_interruptible(
    call: Callable[[], Result],
    check_abort: Callable[[], None],
    *,
    every: float = _CHECK_SECONDS,
    delays_exit: bool = True,
) -> Result:
    """Run `call()` in a thread of its own; abandon it when `check_abort()`, called every few ms, raises, or on Ctrl-C.

    An abandoned call goes on until it ends by itself, and its result is dropped. The process does not exit before
    that, unless `delays_exit` is false.
    """
    ended, results, raised = HandlerEvent(), list[Result](), list[BaseException]()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            raised.append(error)
        finally:
            _ending.append(threading.get_native_id())
            ended.set()

    threading.Thread(target=run, name="holdfast-interruptible", daemon=not delays_exit).start()
    while not ended.wait(every):
        check_abort()
    if raised:
        raise raised.pop()
    return results.pop()


def _await_ends() -> None:
    """Let the threads end whose calls have returned: microseconds.

    A thread that ends takes locks of libc, the resolver's among them. In a child forked meanwhile they would stay
    locked: it would wait forever where it resolves a name. `Thread.join` returns too early.
    """
    deadline = time.monotonic() + _END_SECONDS
    while _ending:
        thread = Path(f"/proc/self/task/{_ending.pop()}")
        Wait().reaches(lambda: not thread.exists(), deadline)  # noqa: B023 (it is called here)


forks.run_around_fork(_await_ends, lambda: None)


def run_within(seconds: float, call: Callable[[], Result], *, delays_exit: bool = True) -> Result:
    """As `run_interruptible`; raises TimeoutError, and abandons the call, after so many seconds."""
    until = time.monotonic() + seconds

    def look() -> None:
        if time.monotonic() > until:
            raise TimeoutError

    return run_interruptible(call, look, delays_exit=delays_exit)
