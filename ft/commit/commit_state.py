"""The commit protocol's state of one process: committed steps, the open step, and the failed epoch's outcome. No I/O.

The protocol in order: `prepare` (this rank holds all results of the step), a barrier of all ranks, `commit`. After a
failure, all ranks of the next epoch exchange their `vote`s and `settle` by the decision of `decide`. Newcomers then get
the state from ranks that have it, and `take_over`.
"""

from __future__ import annotations

from holdfast.comms.errors import HoldfastError
from holdfast.ft.commit.decision import FOUNDER, HOLDER, NEWCOMER, Decision, Vote

BROKEN_EPOCHS = 3
"""The number of epochs, between two commits, that failures without a known cause may end."""


class CommitState:
    """The steps of one process: `done` of `total` are committed, and step number `done` is `prepared` or not.

    `standing` is NEWCOMER, FOUNDER or HOLDER: what this process has of the job's state. `pending` is the decision by
    which newcomers still have to get the state; None if none has to. `rewinds` counts returns to a checkpoint.
    """

    def __init__(self) -> None:
        self.standing = NEWCOMER
        self.done = 0
        self.total = -1
        self.prepared = False
        self.rewinds = 0
        self.pending: Decision | None = None
        self._broken = 0

    def found(self) -> None:
        """Note that this process starts the job: it has the state that it was constructed with."""
        self.standing = FOUNDER

    def prepare(self) -> None:
        """Note that this rank holds all results of the open step."""
        self.prepared = True

    def commit(self) -> None:
        """Note that the open step is committed."""
        self.done += 1
        self.prepared = False
        self._broken = 0

    def may_break(self) -> bool:
        """Count one more epoch that a failure without a known cause ends; return whether it may."""
        self._broken += 1
        return self._broken <= BROKEN_EPOCHS

    def vote(self) -> Vote:
        """The vote of this process, for the ranks of the next epoch."""
        return Vote(self.standing, self.done, self.prepared, self.total, self.rewinds)

    def settle(self, decision: Decision) -> None:
        """Close the open step by `decision`. If the decision commits the step, call `commit` first."""
        self.prepared = False
        self.pending = decision if decision.receivers else None
        if self.standing == FOUNDER and not decision.receivers:
            self.standing = HOLDER

    def take_over(self, done: int) -> None:
        """Note that this newcomer has got the state after `done` steps."""
        if self.pending is not None:
            self.rewinds = self.pending.rewinds
        self.done = done
        self.synchronised()

    def go_back(self, done: int) -> None:
        """Return to the state after `done` steps, which a checkpoint had."""
        self.done, self.prepared = done, False
        self.rewinds += 1

    def synchronised(self) -> None:
        """Note that the transfer of the state is over: all ranks hold it."""
        self.standing = HOLDER
        self.pending = None

    def finishes(self) -> bool:
        """Whether the end of the job commits an open step. Raises `HoldfastError` if steps are missing here."""
        open_step = self.prepared and self.done == self.total - 1
        if self.standing == NEWCOMER:
            raise HoldfastError("the job was finished before this process, a newcomer to it, was given its state")
        if self.done + open_step < self.total:
            raise HoldfastError(
                f"the job was finished after {self.done} of {self.total} steps here; call steps() alike on all ranks"
            )
        return open_step
