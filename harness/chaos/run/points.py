"""Injects faults at points of the protocol: a process that reaches one waits there until the harness has acted.

The process has a `GateAgent` (`holdfast.ft.faultpoints`), which asks the `PointGate` over a Unix socket.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.comms.system.paths import bind_unix
from holdfast.ft.faultpoints import Arrival, GateAddress, PointFilter
from holdfast.harness.chaos.scenario.planning import Trigger

LATE_STEPS = 5
"""So many steps after the step that a fault waits for, processes stop until the fault is injected."""

_COMMIT, _FINISH = "commit.before_prepare", "finish.before_propose"


def fits(arrival: Arrival, when: Trigger) -> bool:
    """Whether a trigger waits for this arrival, or lets the job go no further before its moment."""
    return any(each.fits(arrival) for each in _filters(when))


def gate_address(path: Path, triggers: Sequence[Trigger]) -> GateAddress:
    """The address of a gate, for processes that may be at the points of `triggers`."""
    return GateAddress(str(path), tuple(dict.fromkeys(each for when in triggers for each in _filters(when))))


def _filters(when: Trigger) -> tuple[PointFilter, ...]:
    if when.step is not None:
        # a job that ends before the step reaches no moment of this fault: its end is no substitute
        return PointFilter(_COMMIT, step=when.step + LATE_STEPS), PointFilter(_FINISH, since=when.step + 1)
    if when.point is not None:
        return (PointFilter(when.point, when.in_step, when.rank, when.epoch, when.since),)
    return ()


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
