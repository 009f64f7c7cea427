"""Checks of a reinforcement learning run, and what a host's loss cost it, by its drivers' events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from holdfast.ft.console.units import counted
from holdfast.harness.chaos.outcome.record import HostLoss
from holdfast.harness.chaos.run.scenario_run import RunFault
from holdfast.harness.chaos.run.training_processes import TrainingRecord
from holdfast.harness.invariants import CheckResult, Violation
from holdfast.harness.training.report import GroupRows, RunFacts, episode_rows
from holdfast.rl.run.policy import task_of
from holdfast.rl.run.run_events import (
    Activity,
    CallTakenOver,
    CopiesRestored,
    EpisodeFailed,
    ProcessLost,
    RunResumed,
    StepTrained,
    WeightsServed,
)

STEPS = "every step once"
PROMPTS = "every prompt once"
STALENESS = "staleness is bounded"
VERSIONS = "no version is lost"
COPIES = "versions get their copies again"
RECOVERY = "steps go on after each fault"
NOTHING_LEFT = "no process is left"

SHOWN_GROUPS = 100
"""The most groups whose episodes a report has."""

AVERAGED = 3
"""How many of the last evaluations the held-out reward averages."""


def examine(record: TrainingRecord, faults: Sequence[float], progress: float) -> list[CheckResult]:
    """The results of all checks. `faults` are the moments of faults, `progress` the limit of a recovery, in seconds."""
    return [
        _steps(record),
        _prompts(record),
        _staleness(record),
        _versions(record),
        _copies(record, progress),
        _recovery(record, faults, progress),
        _nothing_left(record),
    ]


def facts_of(record: TrainingRecord, began: float = 0.0) -> RunFacts:
    """The facts of the whole run, over all of its drivers, with times since `began`."""
    events = (event for driver in record.drivers for event in driver)
    return RunFacts.of(msgspec.structs.replace(event, time=event.time - began) for event in events)


def episodes_of(record: TrainingRecord) -> tuple[GroupRows, ...]:
    """The episodes of the newest groups, in words."""
    groups = {group.number: group for group in record.groups}
    newest = [groups[number] for number in sorted(groups)[-SHOWN_GROUPS:]]
    return tuple(episode_rows(newest, task_of(record.config).tokenizer.decode))


def held_out(record: TrainingRecord) -> float:
    """The mean of the last evaluations on the held-out prompts: single ones are jagged. 0 without any."""
    last = facts_of(record).held_out()[-AVERAGED:]
    return sum(each.value for each in last) / len(last) if last else 0.0


def _steps(record: TrainingRecord) -> CheckResult:
    found = _Finding(STEPS, "A driver commits the steps one after the other, from the first or from those it resumes.")
    size, position = record.config.algorithm.updates, 0
    for driver in record.drivers:
        position = next((event.step for event in driver if isinstance(event, RunResumed)), position)
        for event in driver:
            if isinstance(event, StepTrained):
                found.looked += 1
                if event.step != position:
                    found.violated(event.time, f"step {event.step} was trained, and step {position} was due")
                position = event.step + size
    if position != record.config.steps:
        found.violated(0.0, f"the run ended after {position} of {counted(record.config.steps, 'step')}")
    return found.result()


def _prompts(record: TrainingRecord) -> CheckResult:
    """Prompts that were begun last may be untrained at the end: as many as the staleness admits."""
    found = _Finding(
        PROMPTS, "The steps that count trained on every prompt once, in the order of the data, none skipped."
    )
    facts, loop = facts_of(record), record.config.algorithm
    counts = Counter(prompt for step in facts.steps.values() for prompt in step.prompts)
    found.looked = len(counts)
    for prompt, times in counts.items():
        if times > 1:
            found.violated(0.0, f"prompt {prompt} was trained {counted(times, 'time')}")
    failed = {
        event.prompt
        for driver in record.drivers
        for event in driver
        if isinstance(event, EpisodeFailed) and not event.again
    }
    skipped = [each for each in range(max(counts, default=-1) + 1) if each not in counts and each not in failed]
    admitted = loop.staleness // loop.updates * loop.groups
    if len(skipped) > admitted:
        found.violated(0.0, f"{counted(len(skipped), 'prompt')} skipped, the first of them {skipped[:5]}")
    return found.result()


def _staleness(record: TrainingRecord) -> CheckResult:
    bound = record.config.algorithm.staleness
    found = _Finding(STALENESS, f"A step trains on tokens whose weights are at most {counted(bound, 'version')} old.")
    for event in _trained(record):
        found.looked += len(event.staleness)
        if max(event.staleness, default=0) > bound:
            found.violated(event.time, f"step {event.step} trained on tokens {max(event.staleness)} versions old")
    return found.result()


def _versions(record: TrainingRecord) -> CheckResult:
    found = _Finding(VERSIONS, "A generator serves the weights of the last step.")
    served = {event.version for driver in record.drivers for event in driver if isinstance(event, WeightsServed)}
    found.looked = len(served)
    if (last := record.config.steps) not in served:
        found.violated(0.0, f"no generator served version {last}, the last one")
    return found.result()


def _copies(record: TrainingRecord, progress: float) -> CheckResult:
    found = _Finding(
        COPIES, f"{progress:.3g} s after the loss of a holder, each version has all copies again, or the run ends."
    )
    for driver in record.drivers:
        ends = max((event.time for event in driver), default=0.0)
        restored = [event.time for event in driver if isinstance(event, CopiesRestored)]
        for event in driver:
            if isinstance(event, ProcessLost) and event.role == "holder":
                found.looked += 1
                after = min((time for time in restored if time > event.time), default=ends)
                if after - event.time > progress:
                    found.violated(event.time, f"the copies that {event.name} held were not made again")
    return found.result()


def _recovery(record: TrainingRecord, faults: Sequence[float], progress: float) -> CheckResult:
    found = _Finding(RECOVERY, f"After each fault a step is committed within {progress:.3g} s, or the run ends.")
    steps = [event.time for event in _trained(record)]
    ends = max((event.time for driver in record.drivers for event in driver), default=0.0)
    for fault in faults:
        found.looked += 1
        after = min((time for time in steps if time > fault), default=ends)
        if after - fault > progress:
            found.violated(fault, f"the next step was committed after {after - fault:.1f} s")
    return found.result()


def _nothing_left(record: TrainingRecord) -> CheckResult:
    found = _Finding(NOTHING_LEFT, "After a driver no process is there that it started, or that one of these did.")
    found.looked = 1
    for process in record.left:
        found.violated(0.0, f"{process} is left")
    return found.result()


def _trained(record: TrainingRecord) -> Iterable[StepTrained]:
    return (event for driver in record.drivers for event in driver if isinstance(event, StepTrained))


class _Finding:
    """A check that is being made."""

    def __init__(self, name: str, meaning: str) -> None:
        self._name, self._meaning = name, meaning
        self.looked = 0
        self._violations: list[Violation] = []

    def violated(self, time: float, message: str) -> None:
        self._violations.append(Violation(self._name, "run", time, message))

    def result(self) -> CheckResult:
        return CheckResult(self._name, self._meaning, self.looked, tuple(self._violations))


NOTE = "host-lost"


def host_losses(record: TrainingRecord, faults: Sequence[RunFault]) -> tuple[HostLoss, ...]:
    """What followed the loss of each host."""
    return tuple(
        _after(record, fault.time, frozenset(fault.victims))
        for fault in faults
        if fault.time is not None and any(event.what == NOTE for event in fault.injected)
    )


def _after(record: TrainingRecord, lost: float, processes: frozenset[str]) -> HostLoss:
    events = [event for driver in record.drivers for event in driver]
    steps = [event for event in events if isinstance(event, StepTrained)]
    epoch = max((event.epoch for event in steps if event.time <= lost), default=0)
    moved = [event for event in events if isinstance(event, CallTakenOver) and event.lost in processes]
    return HostLoss(
        processes=tuple(sorted(processes)),
        step=_first((event.time for event in steps if event.epoch > epoch), lost),
        answer=_first(
            (
                event.time + event.seconds
                for event in events
                if isinstance(event, Activity) and event.what == "generate" and event.time > lost
            ),
            lost,
        ),
        calls=len(moved),
        calls_answered=max((event.time - lost for event in moved), default=None),
        copies=_first((event.time for event in events if isinstance(event, CopiesRestored)), lost),
    )


def _first(times: Iterator[float], since: float) -> float | None:
    """The seconds from `since` to the first of the times that are later."""
    return min((time - since for time in times if time > since), default=None)
