"""Makes inherited objects unusable in forked children: every call on them raises `UsedAfterFork`.

A child inherits communicators, windows, sessions and their sockets without the threads behind them. An op in the child
would count as one of its parent's rank, and destroying an object would take it away from the parent. So in a child each
object refuses every call, except that releasing it does nothing; it is kept alive until the child ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from holdfast.comms.errors import UsedAfterFork

RELEASE_METHODS = ("abort", "close", "release", "shutdown", "__exit__", "__aexit__", "__del__")
"""The methods that do nothing in a child. So does `aclose`, which is awaited."""

_REFUSED = ("__enter__", "__aenter__", "__iter__", "__next__", "__aiter__", "__anext__", "__call__", "__len__")
"""Methods that Python looks up without `__getattribute__`."""


Start = TypeVar("Start", bound=Callable[[], None])


class HasSocket(Protocol):
    """An owner of a socket. `fileno` returns its descriptor while it is open, and -1 otherwise."""

    def fileno(self) -> int: ...


Thing = TypeVar("Thing")


class _Noted(weakref.ref[Thing]):
    __slots__ = ("note",)
    note: Any


class Living(Generic[Thing]):
    """The objects, of those that were added, that are still alive, and a note on each.

    A `WeakSet` runs Python code when one goes, where what a signal's handler raises is lost. This runs none.
    """

    def __init__(self) -> None:
        self._refs: dict[int, _Noted[Thing]] = {}
        self._numbers = itertools.count()
        self._most = 64

    def add(self, thing: Thing, note: Any = None) -> None:
        """Add an object. Of several notes on one, the last counts."""
        if len(self._refs) >= self._most:
            for number, each in self._refs.copy().items():  # a list of items may start a collection, which runs others
                if each() is None:
                    self._refs.pop(number, None)
            self._most = 64 + 2 * len(self._refs)
        ref = _Noted(thing)
        ref.note = note
        self._refs[next(self._numbers)] = ref

    def __iter__(self) -> Iterator[Thing]:
        return (thing for thing, _ in self.noted())

    def noted(self) -> list[tuple[Thing, Any]]:
        """The living objects with their notes."""
        living = [(thing, ref.note) for ref in list(self._refs.values()) if (thing := ref()) is not None]
        return list({id(thing): (thing, note) for thing, note in living}.values())

    def clear(self) -> None:
        """Forget all."""
        self._refs.clear()


_owned: Living[Any] = Living()
_reset: Living[Any] = Living()
_starts: list[Callable[[], None]] = []
_sockets: Living[HasSocket] = Living()
_refusals: dict[int, tuple[UsedAfterFork, dict[str, object]]] = {}
"""In a child, by the id of an inherited object: its error, and the attributes that can still be read."""


def refuse_in_children(thing: Any, what: str, readable: Iterable[str] = ()) -> None:
    """Let `thing` refuse every call in forked children of this process. The error calls it `what`.

    `readable` are the attributes and properties that keep the values they had at the fork.
    """
    _owned.add(thing, (what, tuple(readable), os.getpid()))


def reset_in_children(thing: Any) -> None:
    """Call `thing.reset_in_child()` in forked children, before anything else runs there."""
    _reset.add(thing)


def run_in_children(start: Start) -> Start:
    """Call a module's function in forked children, before anything else runs there. A decorator."""
    _starts.append(start)
    return start


def run_around_fork(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` in this process right before it forks, and `after` in this process once it has."""
    os.register_at_fork(before=before, after_in_parent=after)


def release_socket_in_children(owner: HasSocket) -> None:
    """Release this owner's socket in forked children: a copy would keep the connection open after its owner dies."""
    _sockets.add(owner)


def never_destroy(thing: object) -> None:
    """Never destroy `thing`, not even at interpreter exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def error_of(thing: object) -> UsedAfterFork | None:
    """Why `thing` refuses calls; None in the process that owns it."""
    refusal = _refusals.get(id(thing))
    return None if refusal is None else refusal[0].again()


def _begin_child() -> None:
    replace_by_dev_null(number for owner in _sockets if (number := owner.fileno()) >= 0)
    _sockets.clear()
    for start in _starts:
        start()
    for thing in _reset:
        thing.reset_in_child()
    owned = _owned.noted()
    _owned.clear()
    for thing, (what, readable, pid) in owned:
        never_destroy(thing)
        values: dict[str, object] = {}
        for name in readable:
            with contextlib.suppress(Exception):  # a property may raise on a closed object: then it is refused, too
                values[name] = getattr(thing, name)
        _refusals[id(thing)] = UsedAfterFork(what, pid), values
    for thing, _ in owned:
        thing.__class__ = _refusing(type(thing))


def replace_by_dev_null(numbers: Iterable[int]) -> None:
    """Release sockets, but keep their descriptor numbers taken: inherited objects may still close them."""
    if numbers := list(numbers):
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in numbers:
            os.dup2(nothing, number, inheritable=False)
        os.close(nothing)


os.register_at_fork(after_in_child=_begin_child)


_classes: dict[type, type] = {}


def _refusing(kind: type) -> type:
    """The class that an inherited object of class `kind` gets in a child."""
    found = _classes.get(kind)
    if found is None:
        body: dict[str, Any] = {"__slots__": (), "__getattribute__": _read, "__setattr__": _set, "__repr__": _show}
        body.update((name, _refusal(name)) for name in _REFUSED if hasattr(kind, name))
        body.update((name, _release) for name in RELEASE_METHODS if hasattr(kind, name))
        for name in ("__aexit__", "aclose"):
            if hasattr(kind, name):
                body[name] = _release_async
        found = _classes[kind] = type(kind)(kind.__name__, (kind,), body)
    return found


def _read(self: object, name: str) -> object:
    error, values = _refusals[id(self)]
    if name in values:
        return values[name]
    if name in RELEASE_METHODS or name == "aclose" or (name.startswith("__") and name.endswith("__")):
        return object.__getattribute__(self, name)
    raise error.again()


def _set(self: object, name: str, value: object) -> None:
    raise _refusals[id(self)][0].again()


def _show(self: object) -> str:
    return f"<{type(self).__name__} of a parent process: {_refusals[id(self)][0]}>"


def _refusal(name: str) -> Callable[..., object]:
    def refuse(self: object, *_: object) -> object:
        raise _refusals[id(self)][0].again()

    refuse.__name__ = name
    return refuse


def _release(self: object, *_: object, **__: object) -> None:
    """Do nothing: the object belongs to the parent."""


async def _release_async(self: object, *_: object, **__: object) -> None:
    """Do nothing: the object belongs to the parent."""
