"""Environments by name: `guess?high=9`, `python:FILE.py:NAME`."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qsl

import msgspec

from holdfast.comms.errors import HoldfastError, describe
from holdfast.rl.config.named_code import NoSuchCode, load_code
from holdfast.rl.environments.builtin import ArithmeticEnvironment, GuessNumberEnvironment
from holdfast.rl.environments.environment import Environment, checked
from holdfast.rl.environments.local import LocalSession
from holdfast.rl.environments.session import EnvironmentSession
from holdfast.rl.errors import UnknownEnvironment

T = TypeVar("T")

_factories: dict[str, Callable[..., Environment]] = {
    "arithmetic": ArithmeticEnvironment,
    "guess": GuessNumberEnvironment,
}

PYTHON = "python"
"""The name before that of a user's own class."""


def register(name: str, factory: Callable[..., Environment]) -> None:
    """Let `name` mean a factory. Its arguments are options: `name?option=value`."""
    if not name or set(name) & set(":?,/"):
        raise UnknownEnvironment(name, "a name has no colon, question mark, comma or slash")
    _factories[name] = factory


def names() -> list[str]:
    """All names that can be given, without what may follow them."""
    return sorted({*_factories, PYTHON})


def environment_factory(name: str) -> Callable[[], Environment]:
    """A function that makes environments of this name. Raises UnknownEnvironment before any is made."""
    whole, _, query = name.partition("?")
    kind, _, code = whole.partition(":")
    factory = _own(code, name) if kind == PYTHON else _factories.get(whole)
    if factory is None:
        raise UnknownEnvironment(name, f"there are {', '.join(names())}")
    signature = _tried(name, "its parameters cannot be read", partial(inspect.signature, factory, eval_str=True))
    try:
        arguments = {
            key: _convert(value, signature.parameters[key].annotation)
            for key, value in parse_qsl(query, keep_blank_values=True)
        }
        signature.bind(**arguments)
    except KeyError as error:
        options = ", ".join(signature.parameters)
        raise UnknownEnvironment(name, f"there is no option {error}; there are: {options or 'none'}") from error
    except (TypeError, msgspec.ValidationError) as error:
        raise UnknownEnvironment(name, f"{error}; it takes {signature}") from error
    return partial(factory, **arguments)


def check_environment(name: str) -> None:
    """Make an environment of this name, begin an episode and close it. Raises UnknownEnvironment if it cannot.

    Raises EnvironmentLied for an observation that is none.
    """
    environment = _tried(name, "it cannot be made", environment_factory(name))
    try:
        checked(_tried(name, "it cannot begin an episode", partial(environment.reset, 0)), name, "reset")
    except BaseException:
        with contextlib.suppress(Exception):  # what came first says more
            environment.close()
        raise
    _tried(name, "it cannot be closed", environment.close)


def open_session(name: str, *, timeout: float = 30.0) -> EnvironmentSession:
    """A session of an environment by name, in this process. Use it within an event loop. Raises UnknownEnvironment."""
    return LocalSession(environment_factory(name), name, timeout=timeout)


def _tried(name: str, what: str, call: Callable[[], T]) -> T:
    """The result of code that may be the user's. Raises UnknownEnvironment, with where it raised, for its errors."""
    try:
        return call()
    except HoldfastError:
        raise
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        raise UnknownEnvironment(name, f"{what}: {describe(error)} ({where})") from error


def _own(code: str, name: str) -> Callable[..., Environment]:
    """What makes the environment of `FILE.py:NAME`, or of `MODULE:NAME`."""
    try:
        factory: Callable[..., Environment] = load_code(code)
    except NoSuchCode as error:
        raise UnknownEnvironment(name, str(error)) from error
    if not callable(factory):
        raise UnknownEnvironment(name, "it is not called: name the class, or a function that makes one")
    return factory


def _convert(value: str, annotation: object) -> object:
    return value if annotation in (inspect.Parameter.empty, str) else msgspec.convert(value, annotation, strict=False)
