"""The ops of simulated communicators: ranks enter with a value, and continue with all values once all have entered.

The host of the first rank keeps the values; a rank that is cut off from it tries again.
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

    def _arrive(self, process: SimulatedProcess, meeting: SimulatedOp, value: Any) -> None:
        world = self._world
        if world.paths.is_cut(process.host, meeting.host):
            world.after(RETRY_CUT, self._arrive, process, meeting, value)
            return
        delay = world.paths.latency(process.host, meeting.host, ordered=True) + process.slow
        world.after(delay, self._arrived, process.member.id, meeting, value)

    def _arrived(self, member_id: str, meeting: SimulatedOp, value: Any) -> None:
        meeting.values[member_id] = value
        if not meeting.complete and all(member in meeting.values for member in meeting.expected):
            meeting.complete = True
            values = [meeting.values[member] for member in meeting.expected]
            for process, then in meeting.waiting:
                self._release(process, meeting, values, then)
            meeting.waiting.clear()

    def _release(self, process: SimulatedProcess, meeting: SimulatedOp, values: Sequence[Any], then: Then) -> None:
        world = self._world
        if world.paths.is_cut(meeting.host, process.host):
            world.after(RETRY_CUT, self._release, process, meeting, values, then)
            return
        delay = world.paths.latency(meeting.host, process.host, ordered=True) + process.slow
        world.work(world.now + delay, process, world.schedule.machine.op, then, values)
