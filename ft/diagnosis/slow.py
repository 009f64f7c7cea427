"""Finds the straggler: the rank that spends more time outside of ops than the others, which wait inside.

Between two ops that all recordings have, each rank's time is either inside or outside of ops. The sum is equal on all
ranks, so a rank with more time outside keeps the others waiting. That needs no common clock, and holds for ops in which
only some ranks wait. A rank is slow if its excess is clearly above that of all others, and a fair part of the time. If
no rank has an excess, one may still arrive late at collectives, because of time inside of other ops.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from holdfast.ft.console.units import format_seconds
from holdfast.ft.diagnosis.clocks import MEETINGS
from holdfast.ft.diagnosis.evidence import RankGroup, Track
from holdfast.ft.diagnosis.finding import Finding

FRACTION = 0.05
"""The least share of the time that the straggler must have cost."""
CLEARLY = 2.0
"""The least ratio of the straggler's excess to that of the next rank."""
FEWEST = 4
"""The least number of ops that all recordings must have in common."""


def find_slow(group: RankGroup) -> Iterator[Finding]:
    """The straggler, if there is one; only for communicators with recordings of all ranks."""
    if len(group.tracks) < 2 or len(group.tracks) < group.size:
        return
    met = sorted(set.intersection(*(set(track.collectives) for track in group.tracks.values())))
    if len(met) < FEWEST or group.tracks[min(group.tracks)].collectives[met[0]].left is None:
        return
    outside = {rank: _outside(track, met[0], met[-1]) for rank, track in group.tracks.items()}
    span = max(_span(track, met[0], met[-1]) for track in group.tracks.values())
    rank = max(outside, key=lambda r: outside[r])
    usual = statistics.median(seconds for r, seconds in outside.items() if r != rank)
    excess = outside[rank] - usual
    others = max((seconds - usual for r, seconds in outside.items() if r != rank), default=0.0)
    if span <= 0 or excess < FRACTION * span or excess < CLEARLY * others:
        return
    track = group.tracks[rank]
    times, meetings, worst, where = _arrivals(group, rank, met)
    words = (
        f"rank {rank} spent {format_seconds(outside[rank])} of {format_seconds(span)} "
        f"outside of the ops of {group.where}, the others {format_seconds(usual)}; "
        f"it was the last in {times} of {meetings} meetings"
    )
    if worst > 0.5 * excess:
        words += f", once by {format_seconds(worst)} ({where})"
    yield Finding(
        "slow",
        rank,
        round(0.3 + 0.5 * min(1.0, excess / span / 0.2), 3),
        words,
        group.name,
        group.epoch,
        track.recording.identity,
        track.recording.process.pid,
        seconds=excess,
    )


def _span(track: Track, first: int, last: int) -> float:
    """Seconds from the end of collective `first` to the beginning of `last`."""
    left = track.collectives[first].left
    return 0.0 if left is None else track.collectives[last].entered - left


def _outside(track: Track, first: int, last: int) -> float:
    """Seconds of `_span` in which the rank was in no op of any communicator."""
    began, ended = track.collectives[first].left or 0.0, track.collectives[last].entered
    outside, at = 0.0, began
    for op in track.recording.ops:
        if op.entered >= began and op.left is not None and op.left <= ended:
            outside += max(0.0, op.entered - at)
            at = max(at, op.left)
    return outside + max(0.0, ended - at)


def _arrivals(group: RankGroup, rank: int, met: list[int]) -> tuple[int, int, float, str]:
    """How often `rank` arrived last at a collective, of how many, by how many seconds at most, and in which."""
    times = meetings = 0
    worst, where = 0.0, ""
    for ordinal in met[1:]:
        calls = {r: track.collectives[ordinal] for r, track in group.tracks.items()}
        if calls[rank].signature.op not in MEETINGS:
            continue
        meetings += 1
        next_to_last = max(track.entered(calls[r]) for r, track in group.tracks.items() if r != rank)
        cost = group.tracks[rank].entered(calls[rank]) - next_to_last
        if cost > 0:
            times += 1
        if cost > worst:
            worst, where = cost, f"{calls[rank].signature.op}, collective {ordinal}"
    return times, meetings, worst, where
