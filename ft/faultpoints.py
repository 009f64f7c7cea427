"""Named points of the protocols, where a process can be killed, or held while a fault is injected.

`HOLDFAST_FAULT="point:step:rank"` (several separated by `;`) makes the process that is `rank` end itself with SIGKILL
when it reaches `point` in `step` (-1 for both: any). A fourth part restricts it to one epoch: a spare that takes the
dead rank's place has the same environment. Tests may `arm` any callable instead.

`HOLDFAST_FAULT_GATE` is a `GateAddress` in JSON: the Unix socket of a harness, and the points at which to ask it. The
process waits there until the harness has injected a fault, or lets it go on.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from holdfast.comms.errors import UNDECODABLE
from holdfast.comms.system.files import connect_unix

GATE_VARIABLE = "HOLDFAST_FAULT_GATE"

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
        return {GATE_VARIABLE: msgspec.json.encode(self).decode()}


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


VARIABLE = "HOLDFAST_FAULT"

POINTS: Mapping[str, str] = MappingProxyType(
    {
        "step.begin": "an attempt at a step is about to be given to the user",
        "commit.before_prepare": "the user's part of the step is done, nothing is said about it yet",
        "commit.before_barrier": "prepared: this rank holds all results of the step",
        "commit.after_barrier": "every rank has prepared; this one has not noted the commit yet",
        "commit.after_commit": "the commit is noted; the user has not acted on it yet",
        "rebuild.before_propose": "this process is about to ask the register for the next view",
        "rebuild.after_propose": "the register has the next view; nobody has been told",
        "rebuild.before_connect": "the next view is known; its communicator is not begun",
        "rebuild.before_votes": "the communicator stands; nobody knows yet who had prepared",
        "rebuild.after_votes": "what becomes of the open step is decided",
        "sync.before_header": "a newcomer is about to be given the state",
        "sync.before_chunk": "a part of the state is about to be moved",
        "sync.before_load": "a newcomer has all bytes of the state and has not loaded them",
        "sync.after_load": "a newcomer has loaded the state",
        "copies.before_copy": "a rank's part of the sharded state is about to be kept, here and on its neighbours",
        "copies.after_copy": "its neighbours have it; nothing is said about the commit yet",
        "restore.before_fetch": "every part of the sharded state is somewhere; nothing has been moved",
        "restore.before_chunk": "a piece of a part is about to be read from a rank that has it",
        "restore.before_copies": "the sharded state is loaded for the new epoch; its copies are those of the old one",
        "restore.after_load": "every rank has loaded the state for the new epoch; this one has not noted which it is",
        "checkpoint.before_save": "a durable checkpoint is about to be written",
        "finish.before_propose": "the last step is committed; the job is not yet declared finished",
    }
)
"""Every point of the protocol, and what is true there."""

WORKLOAD_POINTS: Mapping[str, str] = MappingProxyType(
    {
        "train.in_reduction": "the gradients are reduced; the other trainers wait for this one to reduce the loss",
        "generate.between_tokens": "a generator has drawn a token of each of its samples, and not the last one",
        "loop.before_step": "the batch of a step is complete; no trainer has it",
        "loop.after_step": "the step is committed; the driver has recorded nothing",
        "loop.after_update": "the step is recorded; generators may have its weights or not",
    }
)
"""The points of the reference workload; the simulator has none of them."""

Fault = Callable[[str, int, int, int], None]

armed: Fault | None = None
"""What is called at every point; None: no fault is armed."""

_gate: tuple[int, str] | None = None
"""The process that is connected to a gate, and the gate's address."""


_before_kill: list[Callable[[], None]] = []


def run_before_kill(act: Callable[[], None]) -> None:
    """Call `act` before this process may be killed at a fault point. An event log writes its queue then."""
    _before_kill.append(act)


def _prepare_kill() -> None:
    for act in _before_kill:
        act()


def reach(point: str, step: int, rank: int, epoch: int) -> None:
    """Report that `point` is reached; an armed fault may end the process here."""
    if armed is not None:
        armed(point, step, rank, epoch)


def arm(fault: Fault | None) -> None:
    """Call `fault(point, step, rank, epoch)` at every point from now on; None disarms."""
    global armed
    armed = fault


def parse(text: str) -> Fault | None:
    """The fault in the environment variable's text; None for none. Raises ValueError for invalid text."""
    filters = []
    for part in filter(None, text.split(";")):
        point, *numbers = part.split(":")
        if point not in POINTS and point not in WORKLOAD_POINTS:
            known = ", ".join((*POINTS, *WORKLOAD_POINTS))
            raise ValueError(f"{VARIABLE}: no fault point {point!r}; there are {known}")
        if len(numbers) not in (2, 3):
            raise ValueError(f"{VARIABLE}: {part!r} is not point:step:rank or point:step:rank:epoch")
        filters.append(PointFilter(point, *map(int, numbers)))

    def kill(point: str, step: int, rank: int, epoch: int) -> None:
        if any(each.fits(Arrival(os.getpid(), point, step, rank, epoch)) for each in filters):
            _prepare_kill()
            os.kill(os.getpid(), signal.SIGKILL)

    return kill if filters else None


def arm_from_environment() -> None:
    """Arm the fault of `HOLDFAST_FAULT`, or the gate of `HOLDFAST_FAULT_GATE`. Raises ValueError for invalid text."""
    global _gate
    if text := os.environ.get(VARIABLE):
        arm(parse(text))
    elif (text := os.environ.get(GATE_VARIABLE)) and _gate != (os.getpid(), text):
        try:
            address = msgspec.json.decode(text, type=GateAddress)
        except UNDECODABLE as error:
            raise ValueError(f"{GATE_VARIABLE}: {error}") from None
        arm(GateAgent(address, _prepare_kill).reach)
        _gate = os.getpid(), text
