"""The invariants of a job, one checker a file, over the merged event stream of all its processes.

events = read_directory(log_directory)
for violation in check(events): ...
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.ft.event_lines import event_of
from holdfast.ft.events import Event
from holdfast.ft.telemetry.event_reader import merge, read_directory, read_log
from holdfast.harness.invariants.checker import Bounds, Checker, CheckResult, Violation
from holdfast.harness.invariants.commits import Commits
from holdfast.harness.invariants.completion import CompletionChecker
from holdfast.harness.invariants.deadlines import Deadlines
from holdfast.harness.invariants.epochs_forward import EpochsForward
from holdfast.harness.invariants.equal_bits import EqualBits
from holdfast.harness.invariants.evicted import NoEvictedCommits
from holdfast.harness.invariants.evictions import EvictionsJustified
from holdfast.harness.invariants.one_membership import OneMembership
from holdfast.harness.invariants.progress import ProgressResumes
from holdfast.harness.invariants.rank_order import RankOrder
from holdfast.harness.invariants.revoked_effects import RevokedEffects
from holdfast.harness.invariants.store_versions import StoreVersions
from holdfast.harness.invariants.unbroken import Unbroken

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
    "event_of",
    "examine",
    "merge",
    "read_directory",
    "read_log",
]


def examine(events: Iterable[Event], bounds: Bounds | None = None) -> list[CheckResult]:
    """Run every checker over `events`, which are in the order of time.

    For the logs of real processes the checkers that need a simulation are left out.
    """
    checkers = [checker(bounds or Bounds()) for checker in CHECKERS]
    for event in events:
        for checker in checkers:
            checker.observe(event)
    for checker in checkers:
        checker.finish()
    return [checker.finding() for checker in checkers if checker.looked or not checker.needs_simulation]


def check(events: Iterable[Event], bounds: Bounds | None = None) -> list[Violation]:
    """Every violation in `events`, in the order of time."""
    found = [violation for finding in examine(events, bounds) for violation in finding.violations]
    return sorted(found, key=lambda violation: violation.time)
