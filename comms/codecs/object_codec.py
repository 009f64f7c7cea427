"""Encodes users' objects as msgpack, and refuses types that msgpack would silently change.

Lists, dicts, strings, bytes, 64-bit integers, floats, bools and None arrive unchanged; tuples arrive as lists,
dataclasses and msgspec structs as dicts. msgspec alone would turn a set into a list, an Enum into its value, and
a Decimal or a datetime into a string: here `encode_object` refuses these, naming the path within the object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec

_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
_DEEPEST = 200
_KEYS = (str, int, float, bool, bytes, type(None))


def encode_object(obj: object) -> bytes:
    """Encode `obj`. Raises TypeError, naming the path, for a value that would arrive changed."""
    _check(obj, "the object", 0)
    try:
        return msgspec.msgpack.encode(obj)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{error}: {_HINT}") from error


def decode_object(data: bytes) -> Any:
    """Decode the output of `encode_object`."""
    return msgspec.msgpack.decode(data, strict=True)


_HINT = (
    "objects travel as msgpack (dicts, lists, strings, numbers, bytes, None), never as pickle; send tensors with "
    "broadcast or all_gather, and your own types as msgspec structs or dataclasses"
)


def _check(obj: object, path: str, depth: int) -> None:
    kind = type(obj)
    if kind in (str, float, bool, bytes, type(None)):
        return
    if kind is int:
        if not _LEAST <= obj <= _MOST:  # type: ignore[operator]
            raise TypeError(f"{path} is {_short(obj)}, which has more than 64 bits: {_HINT}")
        return
    if depth == _DEEPEST:
        raise TypeError(f"{path} is nested more than {_DEEPEST} levels deep: {_HINT}")
    for key, value in _members(obj, path):
        _check(value, f"{path}[{_short(key)}]", depth + 1)


def _members(obj: object, path: str) -> Iterator[tuple[object, object]]:
    """The keys and values of a container; TypeError for any other object."""
    if isinstance(obj, dict):
        for key in obj:
            if type(key) not in _KEYS:
                raise TypeError(f"a key of {path} is a {type(key).__name__}, not a string or number: {_HINT}")
            _check(key, f"a key of {path}", _DEEPEST)
        yield from obj.items()
    elif type(obj) is tuple or isinstance(obj, list):
        yield from enumerate(obj)
    elif isinstance(obj, msgspec.Struct):
        yield from ((name, getattr(obj, name)) for name in obj.__struct_fields__)
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        yield from ((field.name, getattr(obj, field.name)) for field in dataclasses.fields(obj))
    else:
        raise TypeError(f"{path} is a {type(obj).__name__}, which would arrive as another type: {_HINT}")


def _short(value: object) -> str:
    try:
        words = repr(value)
    except ValueError:  # Python refuses to print an int of that many digits
        words = "a number of thousands of digits"
    return words if len(words) <= 80 else f"{words[:77]}..."
