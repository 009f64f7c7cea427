"""Calls of functions and methods in child processes, and exceptions of any type packed for another process.

Only a parent and its children exchange these messages.
"""

from __future__ import annotations

import pickle
import traceback
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import cloudpickle

from holdfast.comms.errors import rebuild


@dataclass(frozen=True, slots=True)
class PackedError:
    """A packed exception. `pickled` is its type and recipe, or None if these cannot be pickled."""

    pickled: bytes | None
    summary: str
    trace: str


def pack_error(error: BaseException) -> PackedError:
    """Pack an exception of any type. Never raises."""
    trace = "".join(traceback.format_exception(error)).strip()
    for recipe in (recipe_of(error), ErrorRecipe(False, (str(error),), {})):
        try:
            return PackedError(cloudpickle.dumps((type(error), recipe)), one_line(error), trace)
        except Exception:
            continue
    return PackedError(None, one_line(error), trace)


def unpack_error(packed: PackedError) -> BaseException:
    """The original exception, or a `RuntimeError` with its text if its type does not exist here."""
    if packed.pickled is not None:
        try:
            kind, recipe = cloudpickle.loads(packed.pickled)
            return error_of(kind, recipe)
        except Exception:
            pass
    return RuntimeError(packed.summary)


@dataclass(frozen=True, slots=True)
class ErrorRecipe:
    """How to make an exception: call its type with `args`, or only set `args`; then set the `fields`."""

    call: bool
    args: tuple[Any, ...]
    fields: dict[str, Any]


def recipe_of(error: BaseException) -> ErrorRecipe:
    """The recipe of an exception.

    Types with a constructor in C (OSError ...) are called again, as they hide their arguments; a constructor in Python
    may take others than `args`, so it is not called.
    """
    if isinstance(type(error).__init__, types.WrapperDescriptorType):
        reduced = error.__reduce__()
        if isinstance(reduced, tuple) and reduced[0] is type(error):
            return ErrorRecipe(True, reduced[1], error.__dict__)
    return ErrorRecipe(False, error.args, error.__dict__)


def error_of(kind: type[BaseException], recipe: ErrorRecipe) -> BaseException:
    if not recipe.call:
        return rebuild(kind, recipe.args, recipe.fields)
    error = kind(*recipe.args)
    vars(error).update(recipe.fields)
    return error


def one_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


T = TypeVar("T")


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
