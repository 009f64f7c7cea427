"""`run_interruptible` waits for an uninterruptible call, until a check raises; `run_within` for some seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

Result = TypeVar("Result")

_LOOK_SECONDS = 0.002


def run_interruptible(
    call: Callable[[], Result],
    check_abort: Callable[[], None],
    *,
    every: float = _LOOK_SECONDS,
    delays_exit: bool = True,
) -> Result:
    """Run `call()` in a thread of its own; abandon it when `check_abort()`, called every few ms, raises, or on Ctrl-C.

    An abandoned call goes on until it ends by itself, and its result is dropped. The process does not exit before
    that, unless `delays_exit` is false.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="holdfast-interruptible", daemon=not delays_exit).start()
    while not wait([future], every).done:
        check_abort()
    return future.result()


def run_within(seconds: float, call: Callable[[], Result], *, delays_exit: bool = True) -> Result:
    """As `run_interruptible`; raises TimeoutError, and abandons the call, after so many seconds."""
    until = time.monotonic() + seconds

    def look() -> None:
        if time.monotonic() > until:
            raise TimeoutError

    return run_interruptible(call, look, delays_exit=delays_exit)
