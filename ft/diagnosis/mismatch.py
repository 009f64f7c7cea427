"""Finds ranks with calls that differ from those of the others: the first op with different calls, and its minority.

The majority is right. In a tie the past decides: a job repeats its calls in each step, so the expected call is the one
that earlier followed the same last three, two or one calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from holdfast.ft.diagnosis.evidence import RankGroup
from holdfast.ft.diagnosis.finding import Finding
from holdfast.ft.telemetry.flight import OpRecord, OpStatus, Signature


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
            track = group.tracks[rank]
            yield Finding(
                "mismatch",
                rank,
                0.98 if sure else 0.6,
                f"as collective {ordinal} of {group.where} rank {rank} called {op.signature}, "
                f"{_ranks(others)} {usual}"
                + ("" if votes[usual] * 2 > len(calls) else ", as came after the same calls before" * sure),
                group.name,
                group.epoch,
                track.recording.identity,
                track.recording.process.pid,
            )


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
    track = group.tracks[odd]
    yield Finding(
        "mismatch",
        odd,
        0.9 if ends[0][0] != ends[1][0] else 0.6,
        f"message {send.ordinal} from rank {sender} to rank {receiver} of {group.where}: "
        f"rank {odd} called {op.signature}, the other {expected.signature}",
        group.name,
        group.epoch,
        track.recording.identity,
        track.recording.process.pid,
    )


def _by_change(end: tuple[int, int, OpRecord]) -> tuple[int, int]:
    return end[0], end[1]


def _of(ops: Sequence[OpRecord], name: str) -> Iterator[OpRecord]:
    return (op for op in ops if op.signature.op == name)


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
