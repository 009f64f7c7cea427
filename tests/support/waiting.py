"""Wait in tests for a condition instead of sleeping for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Return once `condition()`; fails the test if that takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)
