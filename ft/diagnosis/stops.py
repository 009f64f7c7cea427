"""Finds the ranks that stopped a communicator: they died, hang or were cut off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.comms.errors import Mismatch
from holdfast.ft.diagnosis.evidence import JobEvidence, ProcessState, RankGroup, Track
from holdfast.ft.diagnosis.finding import Finding, Kind
from holdfast.ft.diagnosis.waits import End, Why, edges, ends
from holdfast.ft.events import DeathsDetected, Event, MemberFenced, MemberStalled, MemberUnreachable
from holdfast.ft.telemetry.flight import OpRecord, OpStatus

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
            yield _finding("hang", group, track, 0.98, f"{_last(track)}; the others ended it: {report.evidence}")
        elif track in killed and not mostly_killed:
            words = report.evidence or f"then its process (pid {track.recording.process.pid}) was gone"
            yield _finding("crash", group, track, 0.98, f"{_last(track)}; {words}")
        elif report.error == Mismatch.__name__:  # of ops no longer recorded: either rank that it names may be wrong
            yield _finding("mismatch", group, track, 0.7, f"{_last(track)}; {report.evidence}")
        elif report.evidence:
            stopped = report.stalled or track.life is ProcessState.STOPPED
            yield _finding("hang" if stopped else "crash", group, track, 0.96, f"{_last(track)}; {report.evidence}")
        elif track.life is ProcessState.STOPPED:
            words = f"its process (pid {track.recording.process.pid}) is stopped; {_last(track)}"
            yield _finding("hang", group, track, 0.97, words)


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
            words = f"{_ranks(end.waiters)} {_wait(end)} for it in {_op(end.edge.op)}, and it left no recording"
            yield Finding("hang", end.rank, score - 0.2, words, group.name, group.epoch)
        else:
            waited = max(_waited(evidence, group, waiter) for waiter in end.waiters)
            words = f"{_ranks(end.waiters)} waited for it in {_op(end.edge.op)} for {waited:.3g} s; {_last(track)}"
            named = any(op.status is OpStatus.PEER_FAILED for op in group.blocked.values())
            yield _finding("crash" if named else "hang", group, track, score, words, waited)


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
    return Finding(
        "cut",
        edge.awaited,
        score,
        words,
        group.name,
        group.epoch,
        track.recording.identity,
        track.recording.process.pid,
        to=edge.waiter,
    )


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
            yield _finding("hang", group, group.tracks[rank], 0.8, words)


def _unknown_cause(group: RankGroup) -> Iterator[Finding]:
    first = min(group.blocked.items(), key=lambda item: item[1].entered)
    words = (
        f"all ranks have arrived at {_op(first[1])} and it does not end; the backend "
        f"({first[1].communicator.backend}) does not say who waits for whom"
    )
    yield _finding("stuck", group, group.tracks[first[0]], 0.1, words)


# Words ----------------------------------------------------------------------------------------------------------------


def _finding(kind: Kind, group: RankGroup, track: Track, score: float, words: str, seconds: float = 0.0) -> Finding:
    who = track.recording
    return Finding(
        kind, track.rank, score, words, group.name, group.epoch, who.identity, who.process.pid, seconds=seconds
    )


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


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
