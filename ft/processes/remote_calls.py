"""Packs calls of methods for a child process, and what comes of them. Only a parent and its children exchange these."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from holdfast.ft.processes.packed_errors import PackedError, pack_error


@dataclass(frozen=True, slots=True)
class MethodCall:
    """A call of `method` of an object in another process."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CallResult:
    """What came of a call: a `value`, or an `error`."""

    value: Any = None
    error: PackedError | None = None


@dataclass(frozen=True, slots=True)
class ObjectRecipe:
    """The object that a process serves: a type and the arguments to make it with."""

    kind: type[Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None

    def make(self) -> Any:
        """Make the object."""
        return self.kind(*self.args, **(self.kwargs or {}))


def pack(message: MethodCall | CallResult | ObjectRecipe) -> bytes:
    """Pack a message. A result that cannot be packed becomes the error that says so."""
    try:
        return _pickled(message)
    except Exception as error:
        if not isinstance(message, CallResult):
            raise
        return _pickled(CallResult(error=pack_error(error)))


def _pickled(message: object) -> bytes:
    """Pickle by name, which is fast; by value what has no name that is the same in the other process.

    `__main__` is another module there.
    """
    if not cloudpickle.list_registry_pickle_by_value():
        try:
            packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        except Exception:  # a lambda, a local class
            pass
        else:
            if b"__main__" not in packed:
                return packed
    whole: bytes = cloudpickle.dumps(message)
    return whole


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """The message that `pack` packed."""
    return cloudpickle.loads(data)
