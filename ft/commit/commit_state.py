"""How far a process is in the steps of its job, and what becomes of that when an epoch fails. Sans-I/O.

The lines of the commit protocol in order: `prepare` (this rank holds all results of the step), a barrier of all ranks,
`commit`. After a failure all ranks of the next epoch compare their `vote`s, and `settle` by what `judge` makes of them.
Newcomers then get the state of those that have it, and `take_over`.
"""

from __future__ import annotations

from holdfast.comms.errors import HoldfastError
from holdfast.ft.commit.decision import FOUNDER, HOLDER, NEWCOMER, Verdict, Vote

BROKEN_EPOCHS = 3
"""How many epochs, from one commit to the next, may be ended by a failure that nobody is found to be to blame for."""


class CommitState:
    """`done` steps of `total` are committed here; step number `done` is `prepared` or not. `standing` is what this
    process has of the job's state, and `pending` the verdict by which newcomers are still to be given it.
    """

    def __init__(self) -> None:
        self.standing = NEWCOMER
        self.done = 0
        self.total = -1
        self.prepared = False
        self.rewinds = 0
        self.pending: Verdict | None = None
        self._broken = 0

    def found(self) -> None:
        """This process is there from the start: it has the state that it was constructed with."""
        self.standing = FOUNDER

    def prepare(self) -> None:
        """This rank holds all results of the open step."""
        self.prepared = True

    def commit(self) -> None:
        """The open step is committed."""
        self.done += 1
        self.prepared = False
        self._broken = 0

    def may_break(self) -> bool:
        """Whether one more epoch may be ended because of a failure that nobody is found to be to blame for."""
        self._broken += 1
        return self._broken <= BROKEN_EPOCHS

    def vote(self) -> Vote:
        """What the others of the next epoch have to know."""
        return Vote(self.standing, self.done, self.prepared, self.total, self.rewinds)

    def settle(self, verdict: Verdict) -> None:
        """Nothing is open any more: if the verdict commits the step, `commit` comes before this."""
        self.prepared = False
        self.pending = verdict if verdict.receivers else None
        if self.standing == FOUNDER and not verdict.receivers:
            self.standing = HOLDER

    def take_over(self, done: int) -> None:
        """This newcomer has the state after `done` steps now."""
        if self.pending is not None:
            self.rewinds = self.pending.rewinds
        self.done = done
        self.synchronised()

    def go_back(self, done: int) -> None:
        """The job goes on after `done` steps, from a checkpoint."""
        self.done, self.prepared = done, False
        self.rewinds += 1

    def synchronised(self) -> None:
        """Everybody whom this process was to give the state to, or get it from, has it."""
        self.standing = HOLDER
        self.pending = None

    def finishes(self) -> bool:
        """Whether the open step is committed because the job is finished. Raises `HoldfastError` if steps are missing
        here that others have done.
        """
        open_step = self.prepared and self.done == self.total - 1
        if self.standing == NEWCOMER:
            raise HoldfastError("the job was finished before this process, a newcomer to it, was given its state")
        if self.done + open_step < self.total:
            raise HoldfastError(
                f"the job was finished after {self.done} of {self.total} steps here; call steps() alike on all ranks"
            )
        return open_step
