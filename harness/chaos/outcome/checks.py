"""Checkers of a workload over the events of a job, and how a run differs from what is expected."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from msgspec import UNSET

from holdfast.ft import events
from holdfast.ft.console.units import counted
from holdfast.ft.event_lines import to_record
from holdfast.ft.events import FaultInjected, SessionFailed
from holdfast.harness.chaos.outcome.record import Speed
from holdfast.harness.chaos.outcome.training import held_out
from holdfast.harness.chaos.run.process_set import ENDED_WITH_DRIVER, EXITED_WELL
from holdfast.harness.chaos.run.scenario_run import RawRun
from holdfast.harness.chaos.scenario import Scenario
from holdfast.harness.invariants import Bounds, Checker, CheckResult, Event, Violation
from holdfast.harness.report.model import FaultRecord

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
    """In the attempt of each step that was committed the ranks worked on every shard, and on each exactly once."""

    optional: ClassVar[bool] = True
    name: ClassVar[str] = "every sample once"

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._taken: dict[int, dict[int, list[tuple[str, tuple[int, ...]]]]] = defaultdict(lambda: defaultdict(list))
        self._committed: dict[int, Event] = {}
        self._members: dict[int, int] = {}
        self._total = 0
        self._torn = False

    def observe(self, event: Event) -> None:
        if isinstance(event, events.ViewInstalled):
            self._members[event.epoch] = len(event.members)
        elif isinstance(event, events.SamplesTaken):
            self._taken[event.step][event.epoch].append((event.process, event.shards))
            self._total = self._total if event.of is UNSET else max(self._total, event.of)
        elif isinstance(event, events.StepCommitted):
            self._committed.setdefault(event.step, event)
        elif isinstance(event, events.FaultInjected) and event.what == "disk-full":
            self._torn = True  # logs may lack the last lines of dead processes

    def finish(self) -> None:
        taken = (shard for epochs in self._taken.values() for each in epochs.values() for _, s in each for shard in s)
        everything = set(range(self._total)).union(taken)  # no rank may ever have worked on some of them
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
    """A process that is in one view and not in a later one was struck by a fault before.

    Slowness, a bad network or an absent register is no death.
    """

    optional: ClassVar[bool] = True
    name: ClassVar[str] = "only the struck leave"

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
    """While the register is away, and nothing else has been broken, no epoch ends."""

    optional: ClassVar[bool] = True
    name: ClassVar[str] = "a register away breaks no epoch"

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
    """Every byte that a reader fetched is that of the version that it was told it has."""

    optional: ClassVar[bool] = True
    name: ClassVar[str] = "readers get the right bytes"

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


# The expected outcome -------------------------------------------------------------------------------------------------


LEFT = OnlyFaultyMembersLeave.name
SHOWN = 3
"""The most violations of one invariant that are listed."""


def violated(findings: Sequence[CheckResult]) -> tuple[str, ...]:
    """The names of the invariants that were broken."""
    return tuple(finding.invariant for finding in findings if finding.violations)


def failures(
    scenario: Scenario,
    raw: RawRun,
    findings: Sequence[CheckResult],
    faults: Sequence[FaultRecord],
    speed: Speed,
    reference: Speed | None,
    rebuilds: int,
) -> list[str]:
    """All differences between the run and its scenario's expectation, in words."""
    expect = scenario.expect
    found = list(_of_invariants(scenario, findings))
    found += [f"fault {each.number} ({each.words}) could not strike: {each.refused}" for each in faults if each.refused]
    outlived = _outlived(raw)
    found += [
        f"fault {each.number} ({each.words}) never struck: its moment ({each.when}) did not come"
        for each in faults
        if each.time is None and not each.refused and each.number not in outlived
    ]
    found += [
        f"fault {each.planned.number} ({each.planned.what.words()}) could not be undone: {each.unhealed}"
        for each in raw.faults
        if each.unhealed
    ]
    found += _without_effect(raw)
    if raw.too_long:
        found.append(f"the run was not over after {scenario.limit:.0f} s: {counted(speed.steps, 'step')} committed")
    elif expect.finishes:
        found += [f"a process failed: {error.splitlines()[0]}" for error in raw.results.errors]
        found += _lost(raw)
        if raw.results.errors or LEFT in violated(findings):
            failed = [event for event in raw.events if isinstance(event, SessionFailed)]
            told = ((event.process, event.error.splitlines()) for event in failed)
            found += [f"{process} ended with {lines[0]}" for process, lines in told if lines]
    elif not raw.results.errors:
        found.append("the job finished, and it was expected that it does not")
    if raw.too_long or raw.results.errors:
        found += _stalled(scenario, raw)
    if expect.ranks is not None and raw.results.ranks != expect.ranks:
        found.append(f"the job ended with {counted(raw.results.ranks, 'rank')}, expected are {expect.ranks}")
    if expect.rebuilds is not None and not expect.rebuilds[0] <= rebuilds <= expect.rebuilds[1]:
        least, most = expect.rebuilds
        wanted = f"{least}" if least == most else f"{least} to {most}"
        found.append(f"the communicator was rebuilt {counted(rebuilds, 'time')}, expected is {wanted}")
    if expect.goodput and reference is not None and reference.rate > 0:
        share = speed.rate / reference.rate
        if share < expect.goodput:
            found.append(
                f"{share:.1%} of the steps a second of a run without faults, expected are {expect.goodput:.0%}"
            )
    if raw.training is not None and expect.held_out:
        rate = held_out(raw.training)
        if rate < expect.held_out:
            found.append(f"held-out reward is {rate:.1%} at the end, expected is {expect.held_out:.0%}")
    if expect.caught:
        logged = [event for event in raw.events if not isinstance(event, FaultInjected)]
        text = raw.output + " ".join(str(to_record(event)) for event in logged)
        if not any(words in text for words in expect.caught):
            found.append(f"nobody noticed: none of {list(expect.caught)} is in the logs")
    return found


def _stalled(scenario: Scenario, raw: RawRun) -> Iterator[str]:
    """Why the job got no further during faults that stall it."""
    for each in raw.faults:
        if each.time is not None and (why := each.planned.what.stalls(scenario)):
            yield f'fault {each.planned.number} ({each.planned.what.words()}): {why}; see job.hosts = "many"'


def _without_effect(raw: RawRun) -> Iterator[str]:
    """The faults of links that were injected and changed nothing: no byte came their way."""
    for each in raw.faults:
        counter = each.planned.what.counter
        if counter and each.time is not None and not sum(getattr(link, counter) for link in raw.traffic):
            number, words = each.planned.number, each.planned.what.words()
            yield f"fault {number} ({words}) changed nothing: the proxy counted nothing as {counter}"


def _outlived(raw: RawRun) -> set[int]:
    """Recurring faults that a run faster than planned ended before, if one of their type came at all."""
    recurring = [each for each in raw.faults if each.planned.again]
    came = {each.planned.type for each in recurring if each.time is not None}
    return {each.planned.number for each in recurring if each.waits and each.planned.type in came}


def _lost(raw: RawRun) -> list[str]:
    """Processes that failed without a fault. Where they are replaced the run may end well all the same."""
    faults = {event.target_pid for each in raw.faults for event in each.injected}
    return [
        f"{life.name} {life.how}, and nobody had struck it"
        for life in raw.lives
        if life.ended and life.how not in (EXITED_WELL, ENDED_WITH_DRIVER) and life.pid not in faults
    ]


def _of_invariants(scenario: Scenario, findings: Sequence[CheckResult]) -> list[str]:
    broken, expected = violated(findings), set(scenario.expect.broken)
    found = [
        f"{violation.invariant}: {violation.process}: {violation.message}"
        for finding in findings
        if finding.invariant not in expected
        for violation in finding.violations[:SHOWN]
    ]
    if expected and not expected & set(broken):
        found.append(
            f"one of {sorted(expected)} was expected to be violated, and all held: if a limit has been overcome, "
            "change the scenario"
        )
    return found
