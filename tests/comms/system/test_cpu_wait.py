"""`Wait`: what ends a wait, and what it raises. No processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest

from holdfast.comms.errors import OpTimeout, PeerFailed
from holdfast.comms.system.waiting import Wait

BRIEF = Wait(yields=1, sleep_seconds=0.0001)


def after(checks: int) -> Callable[[], bool]:
    """A condition that holds after that many checks."""
    made = iter(range(checks))
    return lambda: next(made, None) is None


def peer_fails() -> None:
    raise PeerFailed((1,), "a test")


def test_a_wait_reaches_what_comes_before_the_deadline() -> None:
    assert BRIEF.reaches(after(4), math.inf)
    assert not BRIEF.reaches(lambda: False, time.monotonic())


def test_a_look_ends_a_wait_unless_it_is_over_by_then() -> None:
    with pytest.raises(PeerFailed):
        BRIEF.reaches(lambda: False, math.inf, peer_fails)
    assert BRIEF.reaches(after(1), math.inf, peer_fails), "it was done before the peer failed"


def test_a_late_wait_raises_the_error_of_its_caller() -> None:
    with pytest.raises(OpTimeout, match="window"):
        BRIEF.until(lambda: False, lambda: None, time.monotonic(), lambda late: OpTimeout("window", 0, late, (1,)))
