"""Summarises a simulation as readable text: the faults, the decisions, the violation."""

from __future__ import annotations

from holdfast.ft.console.units import counted
from holdfast.harness.invariants import Event, Violation
from holdfast.harness.simulate.core.schedule import Schedule

LONGEST = 160
TOLD = (
    "fault",
    "died",
    "stopped",
    "proposed",
    "evicted",
    "fenced",
    "register_away",
    "cut_off",
    "resigned",
    "condemned",
)


class RunSummary:
    """Collects the important events of a run."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._epochs: dict[int, tuple[float, str, list[str], str]] = {}
        self._steps: dict[int, int] = {}
        self._doubts: set[tuple[str, str]] = set()

    def hear(self, event: Event) -> None:
        """Handle the next event."""
        kind, who = event.kind, event.process
        match kind:
            case "installed":
                self._installed(event)
            case "committed":
                self._steps[event.integer("step")] = self._steps.get(event.integer("step"), 0) + 1
            case "suspected" if (event.text("member"), who) not in self._doubts:
                self._doubts.add((event.text("member"), who))
                self._say(event.time, f"{who} does not hear {event.text('member')} any more")
            case "cleared":
                self._doubts.discard((event.text("member"), who))
                self._say(event.time, f"{who} hears {event.text('member')} again")
            case "aborted_step":
                self._say(event.time, f"{who} undoes its attempt at step {event.integer('step')}")
            case "error" | "broken":
                self._say(event.time, f"{who} ends: {event.text('error')}")
            case "finished":
                self._say(event.time, f"{who} has finished after step {event.integer('step')}")
            case _ if kind in TOLD:
                words = ", ".join(
                    f"{name} {value}" for name, value in event.fields.items() if name not in ("what", "phase")
                )
                self._say(event.time, f"{event.text('what') or who + ' ' + kind}: {words}".strip())

    def _installed(self, event: Event) -> None:
        epoch = event.integer("epoch")
        if epoch not in self._epochs:
            self._epochs[epoch] = (event.time, ", ".join(event.names("members")), [], event.text("reason"))
            self._say(event.time, f"epoch {epoch} begins with {self._epochs[epoch][1]}: {event.text('reason')}")
        self._epochs[epoch][2].append(event.process)

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
