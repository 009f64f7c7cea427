"""Runs all analyses of `holdfast blame` over a job's evidence: mismatches, ranks that stopped the others, slow ranks.

In each communicator the first fault explains the rest: ranks that call different ops end up waiting for each other, and
a rank that waits is not slow. So mismatches are searched first; without one, ranks that stopped the others, then slow
ranks.

**Mismatches**: the first op with different calls, and its minority. The majority is right. In a tie the past decides: a
job repeats its calls in each step, so the expected call is the one that earlier followed the same last three, two or
one calls.

**Stops**: ranks that died, hang or were cut off. In the waits-for graph an edge leads from a rank to a rank that it
waits for: as its transport told the recorder, else every rank that has not arrived. A chain ends at a rank that waits
for no other: it died, was stopped, or computes. Or it ends at a lost message: the awaited rank has sent it, since it
has left the op or is further in it, and it did not arrive.

**Slow ranks**: between two ops that all recordings have, each rank's time is either inside or outside of ops. The sum
is equal on all ranks, so a rank with more time outside keeps the others waiting. That needs no common clock, and holds
for ops in which only some ranks wait. A rank is slow if its excess is clearly above that of all others, and a fair part
of the time. If no rank has an excess, one may still arrive late at collectives, because of time inside of other ops.
"""

from __future__ import annotations

import enum
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.comms.errors import Mismatch
from holdfast.ft.console.units import format_seconds
from holdfast.ft.diagnosis.evidence import (
    MEETINGS,
    Finding,
    JobEvidence,
    ProcessState,
    RankGroup,
    Track,
    in_words,
    of_track,
)
from holdfast.ft.events import DeathsDetected, Event, MemberFenced, MemberStalled, MemberUnreachable
from holdfast.ft.telemetry.flight import OpRecord, OpStatus, Signature

PATIENCE = 1.0
"""Seconds after which an op that has not ended counts as blocked, in a running job."""


def find_stops(evidence: JobEvidence, group: RankGroup) -> Iterator[Finding]:
    """The suspects for a communicator in which an op failed or has not ended for `PATIENCE` seconds."""
    found = list(_dead(evidence, group))
    stopped = _stopped(evidence, group)
    if stopped:
        found += [*_by_waiting(evidence, group), *_left_inside(group)]
    named: dict[int, Finding] = {}
    for finding in found:
        if finding.rank not in named or finding.score > named[finding.rank].score:
            named[finding.rank] = finding
    yield from named.values()
    if stopped and not named:
        yield from _unknown_cause(group)


def _stopped(evidence: JobEvidence, group: RankGroup) -> bool:
    blocked = group.blocked.items()
    failed = any(op.status is not OpStatus.INSIDE for _, op in blocked)
    return failed or any(
        group.tracks[r].life in (ProcessState.GONE, ProcessState.UNKNOWN)
        or evidence.left(group.tracks[r], op) - group.tracks[r].entered(op) > PATIENCE
        for r, op in blocked
    )


# By the kernel and by the members' events -----------------------------------------------------------------------------


def _dead(evidence: JobEvidence, group: RankGroup) -> Iterator[Finding]:
    killed = [track for track in group.tracks.values() if track.was_killed]
    outlived = any(r.ops and r.ops[-1].communicator.epoch > group.epoch for r in evidence.recordings)
    mostly_killed = len(killed) * 2 > group.size and not outlived  # most were killed at the end of the job: no evidence
    for track in group.tracks.values():
        report = _report(evidence.events, group, track)
        if report.fenced:
            yield of_track("hang", group, track, 0.98, f"{_last(track)}; the others ended it: {report.evidence}")
        elif track in killed and not mostly_killed:
            words = report.evidence or f"then its process (pid {track.recording.process.pid}) was gone"
            yield of_track("crash", group, track, 0.98, f"{_last(track)}; {words}")
        elif report.error == Mismatch.__name__:  # of ops no longer recorded: either rank that it names may be wrong
            yield of_track("mismatch", group, track, 0.7, f"{_last(track)}; {report.evidence}")
        elif report.evidence:
            stopped = report.stalled or track.life is ProcessState.STOPPED
            yield of_track("hang" if stopped else "crash", group, track, 0.96, f"{_last(track)}; {report.evidence}")
        elif track.life is ProcessState.STOPPED:
            words = f"its process (pid {track.recording.process.pid}) is stopped; {_last(track)}"
            yield of_track("hang", group, track, 0.97, words)


@dataclass(frozen=True, slots=True)
class _Report:
    """What the members' events say of a rank: their evidence against it ("": they have none), and how it ended.

    `error` is the name of the type of the exception with which it left the job.
    """

    evidence: str = ""
    fenced: bool = False
    stalled: bool = False
    error: str = ""
    detected: bool = False


def _report(events: Sequence[Event], group: RankGroup, track: Track) -> _Report:
    """The members' report of a rank; an empty one unless the rank's last op was on this communicator."""
    me = track.recording.identity
    if track.recording.ops[-1].number != track.last.number:
        return _Report()
    stalled = any(isinstance(event, MemberStalled) and event.member == me for event in events)
    found = _Report()
    for event in events:
        match event:
            case MemberFenced(member=member, reason=reason) if member == me:
                return _Report(reason, fenced=True)
            case DeathsDetected(members=members, errors=errors) if me in members and not found.detected:
                error = errors[members.index(me)] if len(errors) == len(members) else ""
                found = _Report(event.evidence, stalled=stalled, error=error, detected=True)
            case MemberUnreachable(member=member, evidence=evidence) if member == me and not (
                found.detected or found.evidence
            ):
                found = _Report(evidence, stalled=stalled)
    return found


# By the waits between ranks -------------------------------------------------------------------------------------------


def _by_waiting(evidence: JobEvidence, group: RankGroup) -> Iterator[Finding]:
    for place, end in enumerate(ends(list(edges(group)))):
        track = group.tracks.get(end.rank)
        score = 0.9 - 0.1 * min(place, 5)
        if end.lost:
            certain = end.edge.why is Why.LOST and place == 0
            yield _link(group, end, 0.99 if certain else score)
        elif track is None:
            words = f"{in_words(end.waiters)} {_wait(end)} for it in {_op(end.edge.op)}, and it left no recording"
            yield Finding("hang", end.rank, score - 0.2, words, group.name, group.epoch)
        else:
            waited = max(_waited(evidence, group, waiter) for waiter in end.waiters)
            words = f"{in_words(end.waiters)} waited for it in {_op(end.edge.op)} for {waited:.3g} s; {_last(track)}"
            named = any(op.status is OpStatus.PEER_FAILED for op in group.blocked.values())
            yield of_track("crash" if named else "hang", group, track, score, words, seconds=waited)


def _link(group: RankGroup, end: End, score: float) -> Finding:
    edge = end.edge
    theirs = group.tracks[edge.awaited].collectives.get(edge.op.ordinal) if edge.op.signature.collective else None
    if theirs is None:
        done = "has sent it"
    elif theirs.status is OpStatus.DONE:
        done = "has left that op"
    else:
        done = f"is as far ({theirs.waiting.rounds if theirs.waiting else 0} rounds)"
    words = (
        f"rank {edge.waiter} waits in {_op(edge.op)}, round {edge.rounds}, for a message of rank {edge.awaited}, "
        f"which {done}: the link from rank {edge.awaited} to rank {edge.waiter} loses what is sent"
    )
    track = group.tracks[edge.awaited]
    return of_track("cut", group, track, score, words, to=edge.waiter)


def _waited(evidence: JobEvidence, group: RankGroup, waiter: int) -> float:
    track, op = group.tracks[waiter], group.blocked[waiter]
    return evidence.left(track, op) - track.entered(op)


# By the ranks that are left inside an op ------------------------------------------------------------------------------


def _left_inside(group: RankGroup) -> Iterator[Finding]:
    """The minority of ranks still inside an op that all others have left."""
    inside = {r: op for r, op in group.blocked.items() if op.status is OpStatus.INSIDE}
    others = [track for r, track in group.tracks.items() if r not in inside]
    if not inside or len(inside) * 2 > len(group.tracks):
        return
    for rank, op in inside.items():
        if not op.signature.collective:
            continue
        out = [t for t in others if (same := t.collectives.get(op.ordinal)) is not None and same.left is not None]
        if out and len(out) == len(others):
            failed = any(t.collectives[op.ordinal].status is not OpStatus.DONE for t in out)
            words = f"it never left {_op(op)}, which all others have left" + " by an error" * failed
            yield of_track("hang", group, group.tracks[rank], 0.8, words)


def _unknown_cause(group: RankGroup) -> Iterator[Finding]:
    first = min(group.blocked.items(), key=lambda item: item[1].entered)
    words = (
        f"all ranks have arrived at {_op(first[1])} and it does not end; the backend "
        f"({first[1].communicator.backend}) does not say who waits for whom"
    )
    yield of_track("stuck", group, group.tracks[first[0]], 0.1, words)


# Words ----------------------------------------------------------------------------------------------------------------


def _last(track: Track) -> str:
    op = track.last
    step = f" in step {op.step}" if op.step >= 0 else ""
    if op.status is OpStatus.DONE:
        return f"the last that rank {track.rank} did was to leave {_op(op)}{step}"
    verb = "is inside of" if op.status is OpStatus.INSIDE else "failed in"
    return f"rank {track.rank} {verb} {_op(op)}{step}"


def _op(op: OpRecord) -> str:
    number = f"collective {op.ordinal}" if op.signature.collective else f"message {op.ordinal}"
    return f"{op.signature} ({number}, op {op.seq})"


def _wait(end: End) -> str:
    return "waits" if len(end.waiters) == 1 else "wait"


class Why(enum.Enum):
    """The position of an awaited rank, relative to the op that waits for it."""

    ABSENT = "has not arrived"
    LOST = "has sent, and it did not arrive"
    BEHIND = "is inside, and less far"
    LEVEL = "is inside, and as far"
    SILENT = "is inside, and waits for nobody"


@dataclass(frozen=True, slots=True)
class Edge:
    """Rank `waiter` waits for rank `awaited` in `op`, of which it has done `rounds` message rounds."""

    waiter: int
    awaited: int
    op: OpRecord
    why: Why
    rounds: int


def edges(group: RankGroup) -> Iterator[Edge]:
    """The waits of all blocked ranks."""
    for rank, op in group.blocked.items():
        rounds = op.waiting.rounds if op.waiting is not None else 0
        for awaited, gives in _awaited(group, rank, op):
            if awaited != rank:
                yield Edge(rank, awaited, op, _why(group, rank, awaited, op, gives), rounds)


def _awaited(group: RankGroup, rank: int, op: OpRecord) -> list[tuple[int, bool]]:
    """The ranks that `rank` waits for in an op; True for one that has yet to receive from it."""
    if not op.signature.collective and op.signature.peer >= 0:
        return [(op.signature.peer, op.signature.op == "send")]
    if op.waiting is not None and (op.waiting.takes or op.waiting.gives):
        takes, gives = op.waiting.takes, op.waiting.gives
        return [*((r, False) for r in takes), *((r, True) for r in gives if r not in takes)]
    if op.failed_ranks:
        return [(r, False) for r in op.failed_ranks]
    if not op.signature.collective:
        return []
    return [(r, False) for r in range(group.size) if r != rank and not _arrived(group, r, op)]


def _arrived(group: RankGroup, rank: int, op: OpRecord) -> bool:
    """Whether `rank` has entered a collective."""
    track = group.tracks.get(rank)
    return track is not None and max(track.collectives, default=0) >= op.ordinal


def _why(group: RankGroup, waiter: int, awaited: int, op: OpRecord, gives: bool) -> Why:
    track = group.tracks.get(awaited)
    if track is None:
        return Why.ABSENT
    if not op.signature.collective:
        return _why_message(group, waiter, awaited, op)
    theirs = track.collectives.get(op.ordinal)
    if theirs is None:
        return Why.LOST if _arrived(group, awaited, op) else Why.ABSENT
    if theirs.status is OpStatus.DONE:
        return Why.LOST
    if theirs.waiting is None:
        return Why.SILENT
    mine, rounds = op.waiting.rounds if op.waiting is not None else 0, theirs.waiting.rounds
    if gives or rounds < mine:
        return Why.BEHIND
    return Why.LOST if rounds > mine else Why.LEVEL


def _why_message(group: RankGroup, waiter: int, awaited: int, op: OpRecord) -> Why:
    """The position of the other end of a message, or of a batch of messages."""
    track = group.tracks[awaited]
    if op.signature.peer < 0:
        theirs = track.last
        if theirs.signature.op != op.signature.op or theirs.ordinal < op.ordinal:
            return Why.ABSENT
        if theirs.ordinal > op.ordinal or theirs.status is OpStatus.DONE:
            return Why.LOST
        return Why.LEVEL if theirs.waiting is not None else Why.SILENT
    other = "send" if op.signature.op == "recv" else "recv"
    matching = [
        each
        for each in track.ops
        if each.signature.op == other and each.signature.peer == waiter and each.ordinal >= op.ordinal
    ]
    return Why.LOST if matching else Why.ABSENT


@dataclass(frozen=True, slots=True)
class End:
    """The end of chains of waits: a rank, or a message from it if `lost`. `waiters` wait directly for `rank`."""

    rank: int
    edge: Edge
    waiters: tuple[int, ...]
    lost: bool


def ends(found: list[Edge]) -> list[End]:
    """The ends of all chains, first those with the most waiting ranks."""
    lost = [edge for edge in found if edge.why is Why.LOST]
    waits = {edge.waiter for edge in found}
    sinks: dict[int, list[Edge]] = {}
    for edge in found:
        if edge.why in (Why.ABSENT, Why.SILENT) and edge.awaited not in waits:
            sinks.setdefault(edge.awaited, []).append(edge)
    at_ranks = [
        End(rank, edges_[0], tuple(sorted({edge.waiter for edge in edges_})), False) for rank, edges_ in sinks.items()
    ]
    if at_ranks:
        return sorted(at_ranks, key=lambda end: (-len(end.waiters), end.rank))
    links = [End(edge.awaited, edge, (edge.waiter,), True) for edge in sorted(lost, key=_least_far)]
    if links:
        return links
    level = [edge for edge in found if edge.why is Why.LEVEL]
    return [End(edge.awaited, edge, (edge.waiter,), True) for edge in sorted(level, key=_least_far)]


def _least_far(edge: Edge) -> tuple[int, int, int]:
    """A sort key that puts the cause first: the loss in the earliest op, and in its earliest round."""
    return edge.op.ordinal, edge.rounds, edge.awaited


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
        bare = {op.signature.op for op in calls.values() if op.signature == Signature(op.signature.op)}
        told = {  # a rank may have had no room for the arguments of an op
            rank: Signature(op.signature.op) if op.signature.op in bare else op.signature for rank, op in calls.items()
        }
        if len(set(told.values())) > 1:
            yield from _findings(group, ordinal, calls, told)
            return
    yield from _messages(group)


def _findings(
    group: RankGroup, ordinal: int, calls: Mapping[int, OpRecord], told: Mapping[int, Signature]
) -> Iterator[Finding]:
    """The calls that differ from the usual one, by what is `told` of each."""
    votes = Counter(told.values())
    usual = max(votes, key=lambda signature: (votes[signature], _expected(group, ordinal, signature)))
    sure = votes[usual] * 2 > len(calls) or _expected(group, ordinal, usual) > max(
        (_expected(group, ordinal, other) for other in votes if other != usual), default=0
    )
    others = [rank for rank in calls if told[rank] == usual]
    ((whole, _),) = Counter(calls[rank].signature for rank in others).most_common(1)
    for rank, op in calls.items():
        if told[rank] != usual:
            words = f"as collective {ordinal} of {group.where} rank {rank} called {op.signature}, "
            words += f"{in_words(others)} {whole}"
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
ENOUGH = 4 * FEWEST
"""With fewer ops in common a rank may have been the last by chance: the score is lower."""


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
    score = round(0.3 + 0.5 * min(1.0, excess / span / 0.2) * min(1.0, len(met) / ENOUGH), 3)
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
