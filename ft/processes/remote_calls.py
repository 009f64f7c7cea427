"""Packs calls of methods for a child process, and what comes of them. Only a parent and its children exchange these."""

from __future__ import annotations

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
        packed: bytes = cloudpickle.dumps(message)
    except Exception as error:
        if not isinstance(message, CallResult):
            raise
        packed = cloudpickle.dumps(CallResult(error=pack_error(error)))
    return packed


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """The message that `pack` packed."""
    return cloudpickle.loads(data)
