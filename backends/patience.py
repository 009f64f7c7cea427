"""A call that nothing can end, and a caller who need not wait for its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

Result = TypeVar("Result")

_LOOK_SECONDS = 0.002


def unless(look: Callable[[], None], call: Callable[[], Result]) -> Result:
    """What `call()` returns or raises, in a thread of its own; or what `look()`, called meanwhile, raises first.

    The call is then left behind: it ends when it ends, and what it returns is dropped. A process does not exit before.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="holdfast-patience").start()
    while not wait([future], _LOOK_SECONDS).done:
        look()
    return future.result()
