"""How a run differs from the outcome that its scenario expects, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.ft.console.units import counted
from holdfast.ft.event_lines import to_record
from holdfast.ft.events import FaultInjected, SessionFailed
from holdfast.harness.chaos.outcome.checks import OnlyFaultyMembersLeave
from holdfast.harness.chaos.outcome.record import Speed
from holdfast.harness.chaos.outcome.training import held_out
from holdfast.harness.chaos.run.process_set import ENDED_WITH_DRIVER, EXITED_WELL
from holdfast.harness.chaos.run.scenario_run import RawRun
from holdfast.harness.chaos.scenario.scenario import Scenario
from holdfast.harness.invariants import CheckResult
from holdfast.harness.report.model import FaultRecord

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
