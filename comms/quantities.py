"""Converts users' integers and timeouts, and refuses values that are neither."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable
from datetime import timedelta
from numbers import Real
from typing import Any

LONGEST = 1e9
"""The limit of timeouts, in seconds: longer ones would overflow when systems count them in nanoseconds."""


def integer(value: Any, what: str) -> int:
    """`value` as an int, from any integer type, numpy's included. Raises TypeError for others, and for a bool."""
    if type(value) is int:
        return value
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except (TypeError, RuntimeError):  # RuntimeError: a tensor without a value
            pass
    raise TypeError(f"{what} must be a whole number, not {value!r}")


def integer_in(value: Any, what: str, least: int, most: int | None = None) -> int:
    """As `integer`; raises ValueError unless it is from `least` to `most`."""
    number = integer(value, what)
    if number < least or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{what}={number} is out of range: {bounds}")
    return number


def seconds(value: Any, what: str = "timeout") -> float:
    """A number or a timedelta in seconds; 0 if it is negative.

    Raises TypeError for other types, ValueError for infinity and NaN.
    """
    if type(value) is float and 0.0 <= value < LONGEST:  # the usual timeout of an op
        return value
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{what}={value!r} is not a number of seconds, nor a timedelta")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not -LONGEST < number < LONGEST:
        raise ValueError(f"{what}={value!r}: a timeout must be less than {LONGEST:.0e} seconds")
    return max(number, 0.0)


def seconds_or(value: Any, default: float, what: str = "timeout") -> float:
    """As `seconds`; `default` for None."""
    return default if value is None else seconds(value, what)


def time_left(timeout: Any) -> Callable[[], float | None]:
    """For a call of several waits: a function that returns what is left of `timeout` seconds, at least 0.

    It returns None if `timeout` is None.
    """
    if timeout is None:
        return lambda: None
    end = time.monotonic() + seconds(timeout)
    return lambda: max(end - time.monotonic(), 0.0)
