"""Runs all analyses of `holdfast blame` over a job's evidence.

In each communicator the first fault explains the rest: ranks that call different ops end up waiting for each other, and
a rank that waits is not slow. So mismatches are searched first; without one, ranks that stopped the others, then slow
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.ft.diagnosis.evidence import JobEvidence, RankGroup
from holdfast.ft.diagnosis.finding import Finding
from holdfast.ft.diagnosis.mismatch import find_mismatch
from holdfast.ft.diagnosis.slow import find_slow
from holdfast.ft.diagnosis.stops import find_stops


def analyse(evidence: JobEvidence) -> list[Finding]:
    """All findings, by score, then newest epoch first; at most one of each kind for a process."""
    found = [finding for group in evidence.groups for finding in _in_group(evidence, group)]
    once: dict[tuple[object, ...], Finding] = {}
    for finding in sorted(found, key=lambda finding: (-finding.score, -finding.epoch, finding.rank)):
        who = finding.process or (finding.communicator, finding.epoch, finding.rank)
        once.setdefault((finding.kind, who, finding.to), finding)
    return list(once.values())


def _in_group(evidence: JobEvidence, group: RankGroup) -> Iterator[Finding]:
    mismatches = list(find_mismatch(group))
    if mismatches:
        yield from mismatches
        return
    yield from find_stops(evidence, group)
    yield from find_slow(group)
