"""Sockets that a forked child must not keep alive.

A child, a data-loader worker for example, inherits every open socket. If its parent is then killed, the
copies would keep the connections up, and nobody would learn of the death from them. So the child lets go of
them first of all.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class HasSocket(Protocol):
    """What can be guarded: it says the number of its socket while that is open, and -1 otherwise."""

    def fileno(self) -> int: ...


_guarded: weakref.WeakSet[HasSocket] = weakref.WeakSet()


def guard(owner: HasSocket) -> None:
    """Let go of this owner's socket in every child that is forked from now on."""
    _guarded.add(owner)


def _let_go() -> None:
    numbers = [number for owner in list(_guarded) if (number := owner.fileno()) >= 0]
    if numbers:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in numbers:  # the number stays taken: objects that the child inherited may yet close it
            os.dup2(nothing, number, inheritable=False)
        os.close(nothing)
    _guarded.clear()


os.register_at_fork(after_in_child=_let_go)
