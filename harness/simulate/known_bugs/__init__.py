"""Known bugs of failure handling, ours and other projects', which can be injected into the running code.

Checkers that find none of them prove nothing. `reproduce.reproduce` looks for the first seed that shows a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

MakeBroken = Callable[[Any], object]
Spoil = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class KnownBug:
    """A bug. `origin`: the project that had it. `inject()` is a context manager: inside, the code has the bug."""

    name: str
    bug: str
    origin: str
    inject: Callable[[], AbstractContextManager[None]]


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of a class or module by `value` within the block."""
    original = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def known_bug(name: str, bug: str, origin: str, owner: Any, attribute: str) -> Callable[[MakeBroken], KnownBug]:
    """A bug in one attribute of a class or module: the function below makes the broken one of the original."""

    def decorate(make: MakeBroken) -> KnownBug:
        return KnownBug(name, bug, origin, lambda: replaced(owner, attribute, make(owner.__dict__[attribute])))

    return decorate


def bad_result(name: str, bug: str, origin: str, owner: Any, attribute: str) -> Callable[[Spoil], KnownBug]:
    """A bug in what a function or method returns: the function below spoils that, and gets the arguments too."""

    def decorate(spoil: Spoil) -> KnownBug:
        def make(original: Callable[..., Any]) -> object:
            return lambda *arguments: spoil(original(*arguments), *arguments)

        return known_bug(name, bug, origin, owner, attribute)(make)

    return decorate
