"""What an known_bug is: a known bug, where it was seen, and how to put it into the running code for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KnownBug:
    """A bug. `origin`: who had it. `inject()` is a context manager: inside, the code has the bug."""

    name: str
    bug: str
    origin: str
    inject: Callable[[], AbstractContextManager[None]]


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Put `value` in the place of an attribute of a class or module, and take it away again."""
    original = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def known_bug(name: str, bug: str, origin: str, owner: Any, attribute: str, make: Callable[[Any], object]) -> KnownBug:
    """A bug in one attribute: `make(original)` gives the broken one."""
    return KnownBug(name, bug, origin, lambda: replaced(owner, attribute, make(owner.__dict__[attribute])))
