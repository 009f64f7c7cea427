"""Packs exceptions of any type for another process: their type and recipe, their summary and their traceback."""

from __future__ import annotations

import traceback
import types
from dataclasses import dataclass
from typing import Any

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
