"""Named points where a process can be killed, so that tests kill it at every step of a protocol.

`HOLDFAST_FAULT="point:step:rank"` (several separated by `;`) makes the process that is `rank` end itself with SIGKILL
when it reaches `point` in `step`. A fourth part restricts it to one epoch: a spare that takes the dead rank's place has
the same environment. Tests may `arm` any callable instead.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from holdfast.ft import fault_gate

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

_armed: Fault | None = None
_gate: tuple[int, str] | None = None
"""The process that is connected to a gate, and the gate's address."""


_before_kill: list[Callable[[], None]] = []


def run_before_kill(act: Callable[[], None]) -> None:
    """Call `act` before this process may be killed at a fault point. An event log writes its queue then."""
    _before_kill.append(act)


def _prepare_kill() -> None:
    for act in _before_kill:
        act()


@dataclass(frozen=True, slots=True)
class KillAtPoint:
    """SIGKILL this process at `point` of `step` if it is `rank` (-1 for both: any), in `epoch` (None: any)."""

    point: str
    step: int
    rank: int
    epoch: int | None = None

    def __call__(self, point: str, step: int, rank: int, epoch: int) -> None:
        if point != self.point or self.step not in (-1, step) or self.rank not in (-1, rank):
            return
        if self.epoch in (None, epoch):
            _prepare_kill()
            os.kill(os.getpid(), signal.SIGKILL)


def reach(point: str, step: int, rank: int, epoch: int) -> None:
    """Report that `point` is reached; an armed fault may end the process here."""
    if _armed is not None:
        _armed(point, step, rank, epoch)


def armed() -> bool:
    """Whether a fault is armed."""
    return _armed is not None


def arm(fault: Fault | None) -> None:
    """Call `fault(point, step, rank, epoch)` at every point from now on; None disarms."""
    global _armed
    _armed = fault


def parse(text: str) -> Fault | None:
    """The fault in the environment variable's text; None for none. Raises ValueError for invalid text."""
    kills = []
    for part in filter(None, text.split(";")):
        point, *numbers = part.split(":")
        if point not in POINTS and point not in WORKLOAD_POINTS:
            known = ", ".join((*POINTS, *WORKLOAD_POINTS))
            raise ValueError(f"{VARIABLE}: no fault point {point!r}; there are {known}")
        if len(numbers) not in (2, 3):
            raise ValueError(f"{VARIABLE}: {part!r} is not point:step:rank or point:step:rank:epoch")
        kills.append(KillAtPoint(point, *map(int, numbers)))
    if not kills:
        return None

    def fault(point: str, step: int, rank: int, epoch: int) -> None:
        for kill in kills:
            kill(point, step, rank, epoch)

    return fault


def arm_from_environment() -> None:
    """Arm the fault of `HOLDFAST_FAULT`, or the gate of `HOLDFAST_FAULT_GATE`. Raises ValueError for invalid text."""
    global _gate
    if text := os.environ.get(VARIABLE):
        arm(parse(text))
    elif (text := os.environ.get(fault_gate.VARIABLE)) and _gate != (os.getpid(), text):
        try:
            address = msgspec.json.decode(text, type=fault_gate.GateAddress)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{fault_gate.VARIABLE}: {error}") from None
        arm(fault_gate.GateAgent(address, _prepare_kill).reach)
        _gate = os.getpid(), text
