"""What becomes of the step that was open when an epoch failed: a pure function of what all ranks know of it.

A step is PREPARED on a rank once that rank holds all its results and enters the commit barrier, COMMITTED once it
has left the barrier. So if any rank committed, all had prepared; and if all who hold the state had prepared, nobody
needs anything of the dead to commit. Otherwise nobody has committed, and the step is done again.

A job that goes back to a checkpoint does the steps from there on anew. If an epoch fails just then, perhaps only some
ranks have gone back; whoever went back less often than others has nothing of the job's state any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.comms.errors import HoldfastError, Mismatch

NEWCOMER, FOUNDER, HOLDER = 0, 1, 2
"""What a rank has of the job's state: nothing; what it was constructed with, at the very start; all of it."""


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank knows: `done` steps are committed, and step number `done` is `prepared` or not. The job has gone
    back to a checkpoint so many times (`rewinds`).
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
class Verdict:
    """`committed`: the step that this rank had open is committed. `done` steps are committed on all who hold the
    state, after so many `rewinds`. `source` gives the state to `receivers`, if there are any."""

    committed: bool
    done: int
    source: int
    receivers: tuple[int, ...]
    rewinds: int


def judge(votes: Sequence[Vote], rank: int) -> Verdict:
    """The verdict for `rank`; every rank comes to the same about the step.

    Raises `Mismatch` if this rank, or those who hold the state, are not doing the same job as the first who holds it;
    `HoldfastError` if nobody holds the state any more.
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
    return Verdict(committed, newest + int(commit_newest), source, receivers, rewinds)
