"""Wait in tests for a condition instead of sleeping for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 30.0
"""Seconds that no call of a test takes by itself, however busy its machine: that many are one that hangs.

What must not happen instead, a timeout, is set to twice as many.
"""


def becomes_true(condition: Callable[[], bool], seconds: float = PATIENCE, interval: float = 0.002) -> bool:
    """Whether `condition()` holds within `seconds`; checks it every `interval` seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval)
    return True


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Return once `condition()`; fails the test if that takes longer than `seconds`."""
    assert becomes_true(condition, seconds), "it did not happen"
