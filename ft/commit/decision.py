"""Decides what becomes of the step that was open when an epoch failed: a pure function of all ranks' votes.

A step is PREPARED on a rank once the rank holds all its results and enters the commit barrier, and COMMITTED once the
rank has left the barrier. So if one rank committed, all had prepared. If all ranks that hold the state had prepared,
they can commit without anything from the dead. Otherwise no rank has committed, and the step is done again.

A job that returns to a checkpoint repeats the steps after it. If an epoch fails just then, perhaps only some ranks
have returned; the state of a rank that returned less often than others is obsolete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.comms.errors import HoldfastError, Mismatch

NEWCOMER, FOUNDER, HOLDER = 0, 1, 2
"""A rank's standing: it has no state; the state that it was constructed with, at the start; the state of the job."""


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank knows: `done` of `total` steps are committed, and step number `done` is `prepared` or not.

    `standing` is NEWCOMER, FOUNDER or HOLDER; `rewinds` is the number of returns to a checkpoint that the rank saw.
    """

    standing: int
    done: int
    prepared: bool
    total: int
    rewinds: int = 0

    def numbers(self) -> list[int]:
        return [self.standing, self.done, 2 * self.rewinds + self.prepared, self.total]

    @staticmethod
    def of(numbers: Sequence[int]) -> Vote:
        standing, done, word, total = numbers
        return Vote(standing, done, bool(word % 2), total, word // 2)


FIELDS = 4


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome: whether the step that this rank had open is `committed`, and how the state gets to all ranks.

    `done` steps are committed on all ranks that hold the state, after `rewinds` returns to a checkpoint. Rank `source`
    has the state that the ranks `receivers` need; there may be none."""

    committed: bool
    done: int
    source: int
    receivers: tuple[int, ...]
    rewinds: int


def decide(votes: Sequence[Vote], rank: int) -> Decision:
    """The decision for `rank`; all ranks decide the same about the step.

    Raises `Mismatch` if this rank, or a rank that holds the state, is not doing the same job as the first rank that
    holds it; `HoldfastError` if no rank holds the state any more.
    """
    best, rewinds = max((vote.standing, vote.rewinds) for vote in votes)
    if best == NEWCOMER:
        raise HoldfastError(
            "no process that is left holds the state of the job: everybody who had it died; "
            "start the job again from its last checkpoint"
        )
    holders = [r for r, vote in enumerate(votes) if (vote.standing, vote.rewinds) == (best, rewinds)]
    for r in (*holders, rank):
        if votes[r].total != votes[holders[0]].total:
            raise Mismatch(
                f"rank {r} was asked for {votes[r].total} steps, rank {holders[0]} for {votes[holders[0]].total}; "
                "call steps() alike on all ranks"
            )
    newest = max(votes[r].done for r in holders)
    for r in holders:
        if not (votes[r].done == newest or (votes[r].done == newest - 1 and votes[r].prepared)):
            raise Mismatch(
                f"rank {r} has {votes[r].done} steps, others {newest}, and it was not about to commit the next: "
                "the state of the ranks has come apart; start the job again from its last checkpoint"
            )
    commit_newest = all(votes[r].done == newest and votes[r].prepared for r in holders)
    mine = votes[rank]
    committed = rank in holders and (commit_newest or mine.done < newest)
    source = holders[0]
    have = holders if best == HOLDER else [source]
    receivers = tuple(r for r in range(len(votes)) if r not in have)
    return Decision(committed, newest + int(commit_newest), source, receivers, rewinds)
