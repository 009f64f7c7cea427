"""Endpoints: the public methods of an actor's class, and what `endpoint` declares about them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from holdfast.rl.engine.errors import NoSuchEndpoint

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "__holdfast_endpoint__"


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an endpoint.

    A call of an `idempotent` one may be done twice, so it is tried elsewhere when its process ends. After `deadline`
    seconds a call is taken to hang.
    """

    name: str
    idempotent: bool = False
    deadline: float | None = None


def endpoint(*, idempotent: bool = False, deadline: float | None = None) -> Callable[[F], F]:
    """Declare a method: whether it may be tried elsewhere, and after how many seconds it hangs."""
    if deadline is not None and not deadline > 0:
        raise ValueError(f"deadline={deadline!r} is no number of seconds: give a positive one, or None")

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, (idempotent, deadline))
        return method

    return mark


_known: WeakKeyDictionary[type[Any], Mapping[str, Endpoint]] = WeakKeyDictionary()


def endpoints_of(kind: type[Any]) -> Mapping[str, Endpoint]:
    """The endpoints of an actor's class, by name: its public methods."""
    if kind not in _known:
        _known[kind] = MappingProxyType({each.name: each for each in _find(kind)})
    return _known[kind]


def _find(kind: type[Any]) -> Iterator[Endpoint]:
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        if not name.startswith("_") and inspect.isfunction(method):
            idempotent, deadline = getattr(method, _ATTRIBUTE, (False, None))
            yield Endpoint(name=name, idempotent=idempotent, deadline=deadline)


def endpoint_of(kind: type[Any], name: str) -> Endpoint:
    """The endpoint `name` of an actor's class. Raises `NoSuchEndpoint`."""
    known = endpoints_of(kind)
    if name not in known:
        raise NoSuchEndpoint(kind.__name__, name, tuple(known))
    return known[name]
