"""Injects faults at points of the protocol: a process that reaches one waits there until the harness has acted.

In the process a `PointAgent` is armed (`holdfast.ft.faultpoints`); it asks the `PointGate` over a Unix socket.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.comms.system.paths import bind_unix, connect_unix
from holdfast.harness.chaos.scenario.planning import Trigger

HELD_SECONDS = 10.0
"""The longest that a process waits at a point."""

LATE_STEPS = 5
"""So many steps after the step that a fault waits for, processes stop until the fault is injected."""

_COMMIT, _FINISH = "commit.before_prepare", "finish.before_propose"


class Arrival(msgspec.Struct, frozen=True):
    """A process is at a point."""

    pid: int
    point: str
    step: int
    rank: int
    epoch: int

    def fits(self, when: Trigger) -> bool:
        """Whether a trigger waits for this point, or lets the job go no further before its moment."""
        if when.step is not None:
            late = self.point == _COMMIT and self.step == when.step + LATE_STEPS
            return late or self.point == _FINISH
        wanted = ((when.in_step, self.step), (when.rank, self.rank), (when.epoch, self.epoch))
        return when.point == self.point and all(want in (-1, have) for want, have in wanted)


class PointAgent:
    """Runs in a process of the job, and stops it at the points of `triggers`. Safe to call from any thread."""

    def __init__(self, path: Path, triggers: Sequence[Trigger]) -> None:
        self._triggers = tuple(triggers)
        self._points = {each.point for each in triggers}
        if None in self._points:
            self._points |= {_COMMIT, _FINISH}
        self._turn = threading.Lock()
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connect_unix(self._line, path)
        self._line.settimeout(HELD_SECONDS)

    def reach(self, point: str, step: int, rank: int, epoch: int) -> None:
        """Wait at a point if a fault may be injected there."""
        if point not in self._points:
            return
        here = Arrival(os.getpid(), point, step, rank, epoch)
        if not any(here.fits(when) for when in self._triggers):
            return
        with self._turn:
            try:
                self._line.send(msgspec.json.encode(here))
                self._line.recv(1)
            except OSError:
                return


@dataclass(frozen=True, slots=True)
class WaitingProcess:
    """A process that waits at a point until `release`."""

    arrival: Arrival
    line: socket.socket

    def release(self) -> None:
        """Let the process go on. Does nothing if it is dead."""
        try:
            self.line.send(b"!")
        except OSError:
            return


class PointGate:
    """The harness's side: agents connect to its socket `path`. A context manager, for one thread."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "gate"
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        bind_unix(self._door, self.path)
        self._door.listen(64)
        self._lines: dict[int, socket.socket] = {}

    def filenos(self) -> list[int]:
        """Descriptors that become readable when there is something to `take`."""
        return [self._door.fileno(), *self._lines]

    def take(self) -> list[WaitingProcess]:
        """The processes that have come to a point since the last call."""
        self._admit()
        found = []
        for number, line in list(self._lines.items()):
            try:
                data = line.recv(4096)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                self._lines.pop(number).close()
                continue
            found.append(WaitingProcess(msgspec.json.decode(data, type=Arrival), line))
        return found

    def _admit(self) -> None:
        while True:
            try:
                line, _ = self._door.accept()
            except BlockingIOError:
                return
            line.setblocking(False)
            self._lines[line.fileno()] = line

    def close(self) -> None:
        """Let all processes go on. Idempotent."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()
        self._door.close()

    def __enter__(self) -> PointGate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
