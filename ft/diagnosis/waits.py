"""The waits-for graph of a communicator that stopped, and where each chain of waits ends.

An edge leads from a rank to a rank that it waits for: as its transport told the recorder, else every rank that has not
arrived. A chain ends at a rank that waits for no other: it died, was stopped, or computes. Or it ends at a lost
message: the awaited rank has sent it, since it has left the op or is further in it, and it did not arrive.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.ft.diagnosis.evidence import RankGroup
from holdfast.ft.telemetry.flight import OpRecord, OpStatus


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
