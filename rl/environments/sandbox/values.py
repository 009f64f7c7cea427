"""Compares what a run returned with the expected value: as Python's `==` does, with a tolerance for floats.

Stops: objects that equal everything, and values that are built to keep the comparison busy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

from holdfast.rl.environments.sandbox.inside.execute import decode

RELATIVE, ABSOLUTE = 1e-9, 1e-12
"""Two floats that differ by no more than these are equal, and NaN equals NaN.

Compared exactly are an int and a float, elements of sets, and keys.
"""

_DEEPEST = 100
"""Of nested containers: a value that is deeper equals nothing."""

_MOST_IN_KEY = 1000
"""Elements of a container within a set or a key: the code may choose them so that their hashes collide."""

_SCALARS = (bool, int, float, str, bytes, type(None))


def equals(encoded: bytes, expected: object) -> bool:
    """True if a run's encoded value equals plain data. Any text may come as `encoded`."""
    with suppress(ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return _same(json.loads(encoded), expected, _DEEPEST)
    return False


def is_plain(value: object, depth: int = _DEEPEST) -> bool:
    """True if a value survives the way into a run and out of it."""
    if type(value) in _SCALARS:
        return True
    if not depth:
        return False
    if isinstance(value, dict) and type(value) is dict:
        return all(is_plain(each, depth - 1) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple | set | frozenset) and type(value) in (list, tuple, set, frozenset):
        return all(is_plain(each, depth - 1) for each in value)
    return False


def _same(got: Any, wanted: Any, depth: int) -> bool:
    """Whether an encoded value equals a plain one. Nothing larger than `wanted` is decoded."""
    if not depth:
        return False
    if isinstance(wanted, _SCALARS):
        return _is_scalar(got) and _equal(decode(got), wanted)
    kind, items = got
    if not isinstance(items, list) or len(items) != len(wanted):
        return False
    if isinstance(wanted, dict):
        found = {_key(key): item for key, item in items}
        same = kind == "dict" and found.keys() == wanted.keys()
        return same and all(_same(found[key], wanted[key], depth - 1) for key in wanted)
    if isinstance(wanted, set | frozenset):
        return kind in ("set", "frozenset") and frozenset(map(_key, items)) == wanted
    return bool(kind == type(wanted).__name__) and all(
        _same(mine, yours, depth - 1) for mine, yours in zip(items, wanted, strict=True)
    )


def _equal(one: Any, other: Any) -> bool:
    """Whether scalars are equal, but for the rounding of floats."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE) or (one != one and other != other)
    return bool(one == other)


def _is_scalar(encoded: Any) -> bool:
    return not isinstance(encoded, list | dict) or (
        isinstance(encoded, list) and encoded[0] in ("int", "float", "bytes")
    )


def _key(encoded: Any) -> Hashable:
    """The hashable value behind a text. Raises ValueError for one that is none, or too large."""
    if _is_scalar(encoded):
        scalar: Hashable = decode(encoded)
        return scalar
    kind, items = encoded
    if kind not in ("tuple", "frozenset") or len(items) > _MOST_IN_KEY:
        raise ValueError("not hashable")
    return tuple(map(_key, items)) if kind == "tuple" else frozenset(map(_key, items))
