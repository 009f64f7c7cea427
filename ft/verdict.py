"""What becomes of the step that was open when an epoch failed: a pure function of what all ranks know of it.

A step is PREPARED on a rank once that rank holds all its results and enters the commit barrier, COMMITTED once it
has left the barrier. So if any rank committed, all had prepared; and if all who hold the state had prepared, nobody
needs anything of the dead to commit. Otherwise nobody has committed, and the step is done again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.comms.errors import HoldfastError, Mismatch

NEWCOMER, FOUNDER, HOLDER = 0, 1, 2
"""What a rank has of the job's state: nothing; what it was constructed with, at the very start; all of it."""


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank knows: `done` steps are committed, and step number `done` is `prepared` or not."""

    standing: int
    done: int
    prepared: bool
    total: int

    def numbers(self) -> list[int]:
        return [self.standing, self.done, int(self.prepared), self.total]

    @staticmethod
    def of(numbers: Sequence[int]) -> Vote:
        standing, done, prepared, total = numbers
        return Vote(standing, done, bool(prepared), total)


FIELDS = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """`committed`: the step that this rank had open is committed. `done` steps are committed on all who hold the
    state. `source` gives the state to `receivers`, if there are any."""

    committed: bool
    done: int
    source: int
    receivers: tuple[int, ...]


def judge(votes: Sequence[Vote], rank: int) -> Verdict:
    """The verdict for `rank`; every rank comes to the same about the step.

    Raises `Mismatch` if this rank, or those who hold the state, are not doing the same job as the first who holds it;
    `HoldfastError` if nobody holds the state any more.
    """
    best = max(vote.standing for vote in votes)
    if best == NEWCOMER:
        raise HoldfastError(
            "no process that is left holds the state of the job: everybody who had it died; "
            "start the job again from its last checkpoint"
        )
    holders = [r for r, vote in enumerate(votes) if vote.standing == best]
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
    receivers = tuple(r for r, vote in enumerate(votes) if r != source and vote.standing != HOLDER)
    return Verdict(committed, newest + int(commit_newest), source, receivers)
