"""Holds this process at named points until a harness has injected a fault there, or lets it go on.

`HOLDFAST_FAULT_GATE` is a `GateAddress` in JSON: the Unix socket of the harness, and the points at which to ask it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.comms.system.paths import connect_unix

VARIABLE = "HOLDFAST_FAULT_GATE"

HELD_SECONDS = 10.0
"""The longest that a process waits at a point."""


class Arrival(msgspec.Struct, frozen=True):
    """A process is at a point. `rank` is -1 where it has none."""

    pid: int
    point: str
    step: int
    rank: int
    epoch: int


class PointFilter(msgspec.Struct, frozen=True):
    """The arrivals to ask the harness about: at `point`, in the given step, rank and epoch, -1 for any.

    `since` leaves out those in earlier steps.
    """

    point: str
    step: int = -1
    rank: int = -1
    epoch: int = -1
    since: int = -1

    def fits(self, arrival: Arrival) -> bool:
        """Whether this is one of them."""
        wanted = ((self.step, arrival.step), (self.rank, arrival.rank), (self.epoch, arrival.epoch))
        fits = self.point == arrival.point and arrival.step >= self.since
        return fits and all(want in (-1, have) for want, have in wanted)


class GateAddress(msgspec.Struct, frozen=True):
    """Where the harness listens, and for which arrivals."""

    path: str
    filters: tuple[PointFilter, ...]

    def environ(self) -> dict[str, str]:
        """The variable that makes a process ask at these points."""
        return {VARIABLE: msgspec.json.encode(self).decode()}


class GateAgent:
    """The process's side. `reach` is safe to call from any thread."""

    def __init__(self, address: GateAddress, before: Callable[[], None] = lambda: None) -> None:
        """`before` is called before the harness hears of an arrival, since it may kill this process then."""
        self._before = before
        self._filters = address.filters
        self._points = {each.point for each in address.filters}
        self._turn = threading.Lock()
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connect_unix(self._line, Path(address.path))
        self._line.settimeout(HELD_SECONDS)

    def reach(self, point: str, step: int, rank: int, epoch: int) -> None:
        """Wait at a point if a fault may be injected there."""
        if point not in self._points:
            return
        here = Arrival(os.getpid(), point, step, rank, epoch)
        if not any(each.fits(here) for each in self._filters):
            return
        self._before()
        with self._turn:
            try:
                self._line.send(msgspec.json.encode(here))
                self._line.recv(1)
            except OSError:
                return
