"""Summarises a simulation as readable text: the faults, the decisions, the violation."""

from __future__ import annotations

from holdfast.ft import events
from holdfast.ft.console.units import counted
from holdfast.harness.invariants import Event, Violation
from holdfast.harness.simulate.core.schedule import Schedule

LONGEST = 160
TOLD = (
    events.ProcessDied
    | events.ProcessStopped
    | events.ViewProposed
    | events.WasEvicted
    | events.MemberFenced
    | events.RegisterUnreachable
    | events.LostMajority
    | events.ResignedItself
    | events.MemberUnreachable
    | events.StepAborted
    | events.SessionFailed
    | events.CoreBroken
    | events.StepsFinished
)


class RunSummary:
    """Collects the important events of a run."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._epochs: set[int] = set()
        self._steps: dict[int, int] = {}
        self._doubts: set[tuple[str, str]] = set()

    def hear(self, event: Event) -> None:
        """Handle the next event."""
        who = event.process
        match event:
            case events.ViewInstalled():
                self._installed(event)
            case events.StepCommitted(step=step):
                self._steps[step] = self._steps.get(step, 0) + 1
            case events.MemberSuspected(member=member):
                if (member, who) not in self._doubts:
                    self._doubts.add((member, who))
                    self._say(event.time, f"{who} does not hear {member} any more")
            case events.SuspicionCleared(member=member):
                self._doubts.discard((member, who))
                self._say(event.time, f"{who} hears {member} again")
            case events.FaultInjected():
                self._say(event.time, str(event))
            case _ if isinstance(event, TOLD):
                self._say(event.time, f"{who}: {event}")

    def _installed(self, event: events.ViewInstalled) -> None:
        if event.epoch not in self._epochs:
            self._epochs.add(event.epoch)
            self._say(event.time, f"epoch {event.epoch} begins with {', '.join(event.members)}: {event.reason}")

    def _say(self, time: float, words: str) -> None:
        self._lines.append(f"{time:9.4f} s  {words[:LONGEST]}")

    def text(self, schedule: Schedule, violation: Violation | None) -> str:
        """The whole text."""
        layout = schedule.layout
        head = (
            f"{counted(layout.ranks, 'rank')} on {layout.hosts} hosts, {counted(layout.spares, 'spare')}, "
            f"at least {layout.min_size} needed; "
            f"{counted(layout.steps, 'step')} of {layout.compute:g} s; seed {schedule.seed}."
        )
        committed = f"Steps 0 to {max(self._steps)} were committed." if self._steps else "No step was committed."
        if violation is None:
            end = "Every invariant held."
        else:
            end = f"BROKEN at {violation.time:.4f} s: {violation.invariant}: {violation.process} {violation.message}"
        return "\n".join((head, "", *self._lines, "", committed, end)) + "\n"
