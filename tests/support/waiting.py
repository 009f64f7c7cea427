"""Wait in tests for a condition instead of sleeping for a fixed time."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any

PROGRAM_SECONDS = 240.0
"""What must happen, happens by then, a program that ends too: less than the test, which pytest ends after 300 s."""

PATIENCE = 30.0
"""Seconds that no call of a test takes by itself, however busy its machine: that many are one that hangs.

What must not happen instead, a timeout, is set to twice as many.
"""


def becomes_true(condition: Callable[[], bool], seconds: float = PROGRAM_SECONDS, interval: float = 0.002) -> bool:
    """Whether `condition()` holds within `seconds`; checks it every `interval` seconds, less often if it takes long."""
    began = time.monotonic()
    while not condition():
        if (waited := time.monotonic() - began) >= seconds:
            return False
        time.sleep(max(interval, min(0.05, waited / 50)))
    return True


def eventually(condition: Callable[[], bool]) -> None:
    """Return once `condition()`; fails the test if that takes longer than `PROGRAM_SECONDS`."""
    assert becomes_true(condition), f"it did not happen in {PROGRAM_SECONDS:g} s"


@contextmanager
def once_it_waits(action: Callable[[], object]) -> Iterator[None]:
    """Run `action()` in another thread once this one waits for a lock; at the end, if it waits for none."""
    waits, lock, before = threading.Event(), type(threading.Lock()), sys.getprofile()

    def look(_: FrameType, kind: str, called: Any) -> None:
        of_lock = kind == "c_call" and called.__name__ == "acquire" and isinstance(called.__self__, lock)
        if of_lock and called.__self__.locked():
            waits.set()

    def act() -> None:
        waits.wait()
        action()

    other = threading.Thread(target=act)
    other.start()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
        waits.set()
        other.join()


def next_line(output: IO[Any] | None) -> str:
    """The next line that a process writes, "" at the end; fails the test if that takes longer than `PROGRAM_SECONDS`.

    Takes no byte that follows the line, so that `communicate` may read the rest.
    """
    assert output is not None
    line, deadline = b"", time.monotonic() + PROGRAM_SECONDS
    while not line.endswith(b"\n"):
        ready = select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]
        assert ready, f"no line in {PROGRAM_SECONDS:g} s, only {line!r}"
        if not (byte := os.read(output.fileno(), 1)):
            break
        line += byte
    return line.decode()
