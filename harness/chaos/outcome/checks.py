"""Checkers of a workload, over the same events as the invariants of a job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import ClassVar

from msgspec import UNSET

from holdfast.ft import events
from holdfast.ft.console.units import counted
from holdfast.harness.invariants import Bounds, Checker, CheckResult, Event, Violation

WEIGHTS = "same weights as without faults"
RESULTS = "same result on all ranks"
OF_RESULTS = (WEIGHTS, RESULTS)
LEAKS = "nothing leaks"
_MEANING = {
    WEIGHTS: "All ranks end with the same bits, and those are the bits of a run without faults.",
    RESULTS: "All ranks that return something return the same bits.",
    LEAKS: "A process that lives through many rebuilds ends with as many descriptors and threads as it had early on.",
}


class EverySampleOnce(Checker):
    """In the committed attempt at each step the ranks worked on all shards, each once."""

    optional: ClassVar[bool] = True
    name: ClassVar[str] = "every sample once"
    meaning: ClassVar[str] = (
        "In the attempt of each step that was committed the ranks worked on every shard, and on each exactly once."
    )

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._taken: dict[int, dict[int, list[tuple[str, tuple[int, ...]]]]] = defaultdict(lambda: defaultdict(list))
        self._committed: dict[int, Event] = {}
        self._members: dict[int, int] = {}
        self._torn = False

    def observe(self, event: Event) -> None:
        if isinstance(event, events.ViewInstalled):
            self._members[event.epoch] = len(event.members)
        elif isinstance(event, events.SamplesTaken):
            self._taken[event.step][event.epoch].append((event.process, event.shards))
        elif isinstance(event, events.StepCommitted):
            self._committed.setdefault(event.step, event)
        elif isinstance(event, events.FaultInjected) and event.what == "disk-full":
            self._torn = True  # logs may lack the last lines of dead processes

    def finish(self) -> None:
        everything = {
            shard for epochs in self._taken.values() for each in epochs.values() for _, s in each for shard in s
        }
        for step, event in self._committed.items():
            epochs = self._taken.get(step)
            if not epochs or (self._torn and len(epochs[max(epochs)]) < self._members.get(max(epochs), 0)):
                continue
            self.looked += 1
            worked = [shard for _, shards in epochs[max(epochs)] for shard in shards]
            if missing := sorted(everything - set(worked)):
                self.violated(event, f"step {step} was committed without shards {missing}")
            if len(worked) != len(set(worked)):
                self.violated(event, f"step {step} was committed with shards worked on twice: {sorted(worked)}")


class OnlyFaultyMembersLeave(Checker):
    """No process is evicted without a fault of its own.

    Slowness, a bad network or an absent register is no death.
    """

    optional: ClassVar[bool] = True
    name: ClassVar[str] = "only the struck leave"
    meaning: ClassVar[str] = "A process that is in one view and not in a later one was struck by a fault before."

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._struck: set[str] = set()
        self._epoch = 0
        self._members: frozenset[str] = frozenset()

    def observe(self, event: Event) -> None:
        if isinstance(event, events.FaultInjected):
            if event.target is not UNSET:
                self._struck.add(event.target)
        elif isinstance(event, events.ViewInstalled) and event.epoch > self._epoch:
            members = frozenset(event.members)
            self.looked += 1
            for member in sorted(self._members - members - self._struck):
                self.violated(event, f"epoch {event.epoch} is without {member}, which no fault has struck")
            self._epoch, self._members = event.epoch, members


class RegisterAwayBreaksNothing(Checker):
    """No epoch ends while only the register is away: a running epoch does not need it."""

    optional: ClassVar[bool] = True
    name: ClassVar[str] = "a register away breaks no epoch"
    meaning: ClassVar[str] = "While the register is away, and nothing else has been broken, no epoch ends."

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._away: set[int] = set()
        self._struck = False

    def observe(self, event: Event) -> None:
        if isinstance(event, events.FaultInjected) and event.what == "register-away":
            self._away.add(event.number)
        elif isinstance(event, events.FaultInjected):
            self._struck = True
        elif isinstance(event, events.FaultHealed):
            self._away.discard(event.number)
        elif not self._away or self._struck:
            return
        elif isinstance(event, events.StepCommitted):
            self.looked += 1
        elif isinstance(event, events.EpochRevoked):
            self.violated(event, f"epoch {event.epoch} ended while the register was away")


class RightBytes(Checker):
    """Readers of a store get, for each version, the bytes that were published as that version."""

    optional: ClassVar[bool] = True
    name: ClassVar[str] = "readers get the right bytes"
    meaning: ClassVar[str] = "Every byte that a reader fetched is that of the version that it was told it has."

    def observe(self, event: Event) -> None:
        if isinstance(event, events.VersionFetched):
            self.looked += 1
        elif isinstance(event, events.VersionWrong):
            self.violated(event, f"fetched version {event.version} with other bytes than were published")


CHECKERS: tuple[type[Checker], ...] = (
    EverySampleOnce,
    OnlyFaultyMembersLeave,
    RegisterAwayBreaksNothing,
    RightBytes,
)


def same_weights(digests: Mapping[str, str], reference: str) -> CheckResult:
    """Check that all digests of results are equal to `reference`, that of the fault-free run.

    Without a `reference` ("") they are compared with each other: one alone is compared with nothing.
    """
    invariant = WEIGHTS if reference else RESULTS
    first, wanted = "a run without faults", reference
    if not reference and digests:
        first, wanted = next(iter(digests.items()))
    violations = [
        Violation(invariant, name, 0.0, f"ends with {digest[:16]}, {first} with {wanted[:16]}")
        for name, digest in digests.items()
        if digest != wanted
    ]
    compared = len(digests) if reference or len(digests) > 1 else 0
    return CheckResult(invariant, _MEANING[invariant], compared, tuple(violations))


SLACK = {"descriptors": 12, "threads": 4}
"""How much may come and go: connections of an unfinished rebuild, a thread that ends later."""


def growth(logged: list[Event], least_rebuilds: int = 3) -> CheckResult:
    """Find leaks in processes that lived through several rebuilds.

    Compares the most in the first third of their time after the second rebuild with the least in the last third.
    Connections to members and spares that come and go are in both.
    """
    rebuilt: dict[str, int] = defaultdict(int)
    used: dict[str, list[events.ResourcesUsed]] = defaultdict(list)
    for event in logged:
        if isinstance(event, events.CommunicatorBuilt):
            rebuilt[event.process] += 1
        elif isinstance(event, events.ResourcesUsed) and rebuilt[event.process] >= 2:
            used[event.process].append(event)
    looked, violations = 0, []
    for process, all_of_it in used.items():
        third = len(all_of_it) // 3
        if rebuilt[process] < least_rebuilds or not third:
            continue
        looked += 1
        for name, slack in SLACK.items():
            before = max(getattr(event, name) for event in all_of_it[:third])
            after = min(getattr(event, name) for event in all_of_it[-third:])
            if after > before + slack:
                text = f"{name} grew from {before} to {after} over {counted(rebuilt[process], 'rebuild')}"
                violations.append(Violation(LEAKS, process, all_of_it[-1].time, text))
    return CheckResult(LEAKS, _MEANING[LEAKS], looked, tuple(violations))
