"""Requests that MPI works on, each with the memory that it accesses until the request has ended."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import starmap

from mpi4py import MPI


class UnderWay:
    """Requests under way. Their memory is kept here, whatever becomes of the code that began them."""

    def __init__(self) -> None:
        self.requests: list[tuple[MPI.Request, object]] = []

    def begin(self, start: Callable[..., MPI.Request], given: tuple[object, ...], memory: object) -> MPI.Request:
        """The request that `start(*given)` begins; it accesses `memory`. `start` is a method of mpi4py.

        Ctrl-C cannot lose the request: the line that begins and notes it runs no bytecode in between.
        """
        self.requests.extend(zip(starmap(start, (given,)), ((given, memory),), strict=False))
        return self.requests[-1][0]

    def keep(self, request: MPI.Request, memory: object) -> None:
        """Take over a request that was begun elsewhere."""
        self.requests.append((request, memory))

    def forget_completed(self) -> None:
        """Release what its owner has found complete. Asks MPI nothing: the owner must learn of an error by itself."""
        self.requests[:] = [each for each in self.requests if each[0] != MPI.REQUEST_NULL]

    def settle(self) -> None:
        """Release what has ended, with success or not: of requests that have no owner."""
        self.requests[:] = [each for each in self.requests if not _released(each[0])]

    def abandon(self) -> None:
        """Give all requests up; this process keeps their memory until they have ended."""
        abandoned.requests.extend(self.requests)
        self.requests.clear()
        abandoned.settle()


abandoned = UnderWay()
"""What its communicator has given up. It is settled when a communicator begins or ends."""


def _released(request: MPI.Request) -> bool:
    """Whether a request has ended, with success or not. A persistent one, which outlives its ops, is freed."""
    with suppress(MPI.Exception):
        if not request.Test():
            return False
    if request != MPI.REQUEST_NULL:
        request.Free()
    return True
