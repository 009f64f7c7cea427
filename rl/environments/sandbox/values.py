"""Compares values by their encoded texts, so that no output of a run becomes an object of this process."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

from holdfast.rl.environments.sandbox.inside.execute import encode

_DEEPEST = 100
"""Of nested containers: a value that is deeper equals nothing."""

_LONGEST_NUMBER = 1 << 16


def equals(encoded: bytes, expected: object) -> bool:
    """True if a run's encoded value equals plain data: exactly, but for the rounding of floats.

    Containers must be of the same type; numbers compare as numbers, as `==` does. Any text may come as `encoded`.
    """
    with suppress(ValueError, RecursionError):
        return _same(json.loads(encoded), encode(expected), _DEEPEST)
    return False


def is_plain(value: object) -> bool:
    """True if a value survives the way into a run and out of it."""
    return _same(encode(value), encode(value), _DEEPEST)


def _same(got: Any, wanted: Any, depth: int) -> bool:
    if not depth:
        return False
    if (number := _number(wanted)) is not None:
        other = _number(got)
        return other is not None and _close(other, number)
    if not isinstance(wanted, list):
        return type(got) is type(wanted) and bool(got == wanted)
    if not (isinstance(got, list) and len(got) == 2 and got[0] == wanted[0]):
        return False
    (kind, theirs), (_, ours) = got, wanted
    if kind not in ("list", "tuple", "set", "dict"):
        return kind != "object" and isinstance(theirs, str) and bool(theirs == ours)
    if not isinstance(theirs, list) or len(theirs) != len(ours):
        return False
    if kind in ("set", "dict"):
        theirs, ours = sorted(theirs, key=json.dumps), sorted(ours, key=json.dumps)
    if kind == "dict":
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in theirs):
            return False
        theirs, ours = ([part for pair in pairs for part in pair] for pairs in (theirs, ours))
    return all(_same(mine, yours, depth - 1) for mine, yours in zip(theirs, ours, strict=True))


def _number(encoded: Any) -> int | float | None:
    """The number behind an encoded text; None if it is none."""
    if isinstance(encoded, bool):
        return int(encoded)
    if not (isinstance(encoded, list) and len(encoded) == 2 and isinstance(encoded[1], str)):
        return None
    kind, text = encoded
    if len(text) <= _LONGEST_NUMBER:
        with suppress(ValueError, OverflowError):
            if kind == "int":
                return int(text, 16)
            if kind == "float":
                return float.fromhex(text)
    return None


def _close(got: int | float, wanted: int | float) -> bool:
    if isinstance(got, int) and isinstance(wanted, int):
        return got == wanted
    if got != got and wanted != wanted:
        return True
    with suppress(OverflowError):
        return math.isclose(got, wanted, rel_tol=1e-9, abs_tol=1e-12)
    return False
