"""The invariants of a job, one checker a file, over the merged event stream of all its processes.

events = read_events(log_directory, refuse)          # of holdfast.ft.event_lines
for violation in check(events): ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.ft.events import Event
from holdfast.harness.invariants.checker import Bounds, Checker, CheckResult, Violation
from holdfast.harness.invariants.liveness import CompletionChecker, Deadlines, ProgressResumes, Unbroken
from holdfast.harness.invariants.memberships import EpochsForward, EvictionsJustified, OneMembership, RankOrder
from holdfast.harness.invariants.step_effects import Commits, EqualBits, NoEvictedCommits, RevokedEffects, StoreVersions

CHECKERS: tuple[type[Checker], ...] = (
    OneMembership,
    EpochsForward,
    RevokedEffects,
    Deadlines,
    EqualBits,
    NoEvictedCommits,
    Commits,
    ProgressResumes,
    StoreVersions,
    RankOrder,
    EvictionsJustified,
    CompletionChecker,
    Unbroken,
)

__all__ = [
    "CHECKERS",
    "Bounds",
    "CheckResult",
    "Checker",
    "Event",
    "Violation",
    "check",
    "examine",
]


def examine(
    events: Iterable[Event], bounds: Bounds | None = None, kinds: Sequence[type[Checker]] = CHECKERS
) -> list[CheckResult]:
    """Run checkers over `events`, which are in the order of time. Optional ones without a result are left out."""
    checkers = [kind(bounds or Bounds()) for kind in kinds]
    for event in events:
        for checker in checkers:
            checker.observe(event)
    for checker in checkers:
        checker.finish()
    return [each.finding() for each in checkers if each.looked or each.violations or not each.optional]


def check(events: Iterable[Event], bounds: Bounds | None = None) -> list[Violation]:
    """Every violation in `events`, in the order of time."""
    found = [violation for finding in examine(events, bounds) for violation in finding.violations]
    return sorted(found, key=lambda violation: violation.time)
