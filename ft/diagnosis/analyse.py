"""Runs all analyses of `holdfast blame` over a job's evidence; those of mismatches and of slow ranks are here.

In each communicator the first fault explains the rest: ranks that call different ops end up waiting for each other, and
a rank that waits is not slow. So mismatches are searched first; without one, ranks that stopped the others, then slow
ranks.

**Mismatches**: the first op with different calls, and its minority. The majority is right. In a tie the past decides: a
job repeats its calls in each step, so the expected call is the one that earlier followed the same last three, two or
one calls.

**Slow ranks**: between two ops that all recordings have, each rank's time is either inside or outside of ops. The sum
is equal on all ranks, so a rank with more time outside keeps the others waiting. That needs no common clock, and holds
for ops in which only some ranks wait. A rank is slow if its excess is clearly above that of all others, and a fair part
of the time. If no rank has an excess, one may still arrive late at collectives, because of time inside of other ops.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from holdfast.ft.console.units import format_seconds
from holdfast.ft.diagnosis.evidence import MEETINGS, Finding, JobEvidence, RankGroup, Track, in_words, of_track
from holdfast.ft.diagnosis.stops import find_stops
from holdfast.ft.telemetry.flight import OpRecord, OpStatus, Signature


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


def find_mismatch(group: RankGroup) -> Iterator[Finding]:
    """The ranks that differ in the first op with different calls; later differences are only consequences."""
    for ordinal in sorted({o for track in group.tracks.values() for o in track.collectives}):
        calls = {r: t.collectives[ordinal] for r, t in group.tracks.items() if ordinal in t.collectives}
        bare = any(op.signature == Signature(op.signature.op) for op in calls.values())  # no room for its arguments
        if len({op.signature.op if bare else op.signature for op in calls.values()}) > 1:
            yield from _findings(group, ordinal, calls)
            return
    yield from _messages(group)


def _findings(group: RankGroup, ordinal: int, calls: Mapping[int, OpRecord]) -> Iterator[Finding]:
    votes = Counter(op.signature for op in calls.values())
    usual = max(votes, key=lambda signature: (votes[signature], _expected(group, ordinal, signature)))
    sure = votes[usual] * 2 > len(calls) or _expected(group, ordinal, usual) > max(
        (_expected(group, ordinal, other) for other in votes if other != usual), default=0
    )
    others = [rank for rank, op in calls.items() if op.signature == usual]
    for rank, op in calls.items():
        if op.signature != usual:
            words = f"as collective {ordinal} of {group.where} rank {rank} called {op.signature}, "
            words += f"{in_words(others)} {usual}"
            if votes[usual] * 2 <= len(calls) and sure:
                words += ", as came after the same calls before"
            yield of_track("mismatch", group, group.tracks[rank], 0.98 if sure else 0.6, words)


def _expected(group: RankGroup, ordinal: int, signature: Signature) -> int:
    """How often `signature` followed the calls that precede `ordinal`; a longer match counts ten times more."""
    merged: dict[int, Signature] = {}
    for track in group.tracks.values():
        merged.update({o: op.signature for o, op in track.collectives.items() if o < ordinal})
    score = 0
    for length in (1, 2, 3):
        before = [merged.get(ordinal - length + i) for i in range(length)]
        if None in before:
            break
        score += 10**length * sum(
            merged.get(o) == signature and [merged.get(o - length + i) for i in range(length)] == before for o in merged
        )
    return score


def _messages(group: RankGroup) -> Iterator[Finding]:
    """The first send and its receive that differ in size, dtype or tag, if any."""
    for rank, track in group.tracks.items():
        for send in _of(track.ops, "send"):
            other = group.tracks.get(send.signature.peer)
            if other is None:
                continue
            for recv in _of(other.ops, "recv"):
                if recv.signature.peer != rank or recv.ordinal != send.ordinal:
                    continue
                if recv.status is not OpStatus.DONE and not _fits(send, recv):
                    yield from _odd_message(group, rank, send, other.rank, recv)
                    return


def _fits(send: OpRecord, recv: OpRecord) -> bool:
    return (send.nbytes, send.signature.detail, send.signature.dtype) == (
        recv.nbytes,
        recv.signature.detail,
        recv.signature.dtype,
    )


def _odd_message(group: RankGroup, sender: int, send: OpRecord, receiver: int, recv: OpRecord) -> Iterator[Finding]:
    """The end of a message that differs more from its earlier messages."""

    def change(rank: int, op: OpRecord) -> int:
        earlier = [
            each
            for each in group.tracks[rank].ops
            if each.signature.op == op.signature.op
            and each.signature.peer == op.signature.peer
            and each.number < op.number
        ]
        return sum(not _fits(each, op) for each in earlier) - sum(_fits(each, op) for each in earlier)

    ends = sorted([(change(sender, send), sender, send), (change(receiver, recv), receiver, recv)], key=_by_change)
    (_, _, expected), (_, odd, op) = ends
    words = (
        f"message {send.ordinal} from rank {sender} to rank {receiver} of {group.where}: "
        f"rank {odd} called {op.signature}, the other {expected.signature}"
    )
    yield of_track("mismatch", group, group.tracks[odd], 0.9 if ends[0][0] != ends[1][0] else 0.6, words)


def _by_change(end: tuple[int, int, OpRecord]) -> tuple[int, int]:
    return end[0], end[1]


def _of(ops: Sequence[OpRecord], name: str) -> Iterator[OpRecord]:
    return (op for op in ops if op.signature.op == name)


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
    times, meetings, worst, where = _arrivals(group, rank, met)
    words = (
        f"rank {rank} spent {format_seconds(outside[rank])} of {format_seconds(span)} "
        f"outside of the ops of {group.where}, the others {format_seconds(usual)}; "
        f"it was the last in {times} of {meetings} meetings"
    )
    if worst > 0.5 * excess:
        words += f", once by {format_seconds(worst)} ({where})"
    score = round(0.3 + 0.5 * min(1.0, excess / span / 0.2), 3)
    yield of_track("slow", group, group.tracks[rank], score, words, seconds=excess)


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
