"""The ops of simulated communicators: ranks enter with a value, and continue with all values once all have entered.

The host of the first rank keeps the values; a rank that is cut off from it tries again.

An exchange of a `Switch` outlives its ranks: it is over when all others have entered, and they get the same set of
ranks, as its agreement guarantees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.ft.membership.view import View

if TYPE_CHECKING:
    from holdfast.harness.simulate.core.process import SimulatedProcess
    from holdfast.harness.simulate.core.world import World

RETRY_CUT = 0.05

Then = Callable[[Sequence[Any]], None]


@dataclass(slots=True)
class SimulatedOp:
    """An op of a communicator: the expected ranks, the values so far, and the waiting ranks."""

    expected: tuple[str, ...]
    host: int
    values: dict[str, Any] = field(default_factory=dict)
    waiting: list[tuple[SimulatedProcess, Then]] = field(default_factory=list)
    complete: bool = False
    masks: bool = False
    """Whether it is an exchange, which goes on without ranks that are `gone`; `values` then are the ranks."""
    gone: set[str] = field(default_factory=set)


class Meetings:
    """All ops of a world, by name."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._meetings: dict[str, SimulatedOp] = {}

    def enter(
        self, process: SimulatedProcess, view: View, op: str, value: Any, members: Sequence[str] | None, then: Then
    ) -> None:
        """Let `process` enter an op of the communicator of `view`, between `members` (None: all members)."""
        meeting = self._meetings.get(op)
        if meeting is None:
            expected = tuple(members) if members is not None else tuple(member.id for member in view.members)
            meeting = self._meetings[op] = SimulatedOp(expected, self._world.process_of(expected[0]).host)
        meeting.waiting.append((process, then))
        self._arrive(process, meeting, value)

    def exchange(self, process: SimulatedProcess, op: str, ranks: Sequence[str], masked: float, then: Then) -> None:
        """Let `process` enter an exchange between `ranks`; `then` gets those with rows that are used, () if it is out.

        After `masked` seconds (0: never) it is over without those that are silent.
        """
        world, meeting = self._world, self._meetings.get(op)
        if meeting is None:
            host = world.process_of(ranks[0]).host
            dead = {rank for rank in ranks if not world.process_of(rank).alive and not world.is_gone(host)}
            meeting = self._meetings[op] = SimulatedOp(tuple(ranks), host, masks=True, gone=dead)
            if masked:
                world.after(masked, self._mask_silent, meeting)
        if meeting.complete and process.member.id not in meeting.values:
            then(())
            return
        meeting.waiting.append((process, then))
        self._arrive(process, meeting, process.member.id)

    def gone(self, member_id: str) -> None:
        """The end of a process is seen by those that exchange with it."""
        for meeting in list(self._meetings.values()):
            if meeting.masks and not meeting.complete and member_id in meeting.expected:
                meeting.gone.add(member_id)
                self._complete(meeting)

    def _mask_silent(self, meeting: SimulatedOp) -> None:
        if not meeting.complete:
            meeting.gone.update(rank for rank in meeting.expected if rank not in meeting.values)
            self._complete(meeting)

    def _arrive(self, process: SimulatedProcess, meeting: SimulatedOp, value: Any) -> None:
        world = self._world
        if world.paths.is_cut(process.host, meeting.host):
            world.after(RETRY_CUT, self._arrive, process, meeting, value)
            return
        delay = world.paths.latency(process.host, meeting.host, ordered=True) + process.slow
        world.after(delay, self._arrived, process.member.id, meeting, value)

    def _arrived(self, member_id: str, meeting: SimulatedOp, value: Any) -> None:
        if meeting.masks and meeting.complete:  # it is out: it was silent for too long
            self._release_all(meeting, ())
            return
        meeting.values[member_id] = value
        self._complete(meeting)

    def _complete(self, meeting: SimulatedOp) -> None:
        if not meeting.complete and all(rank in meeting.values or rank in meeting.gone for rank in meeting.expected):
            meeting.complete = True
            self._release_all(meeting, [meeting.values[rank] for rank in meeting.expected if rank in meeting.values])

    def _release_all(self, meeting: SimulatedOp, values: Sequence[Any]) -> None:
        for process, then in meeting.waiting:
            self._release(process, meeting, values if process.member.id in meeting.values else (), then)
        meeting.waiting.clear()

    def _release(self, process: SimulatedProcess, meeting: SimulatedOp, values: Sequence[Any], then: Then) -> None:
        world = self._world
        if world.paths.is_cut(meeting.host, process.host):
            world.after(RETRY_CUT, self._release, process, meeting, values, then)
            return
        delay = world.paths.latency(meeting.host, process.host, ordered=True) + process.slow
        world.work(world.now + delay, process, world.schedule.machine.op, then, values)
