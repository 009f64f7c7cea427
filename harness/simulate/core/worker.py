"""The session of a simulated process: commits steps with the production `CommitState`, `decide` and `EpochGuard`.

This is the counterpart of `ft.session`: the same order of the same calls, with waits in virtual time. An op of the
communicator needs all members of the epoch; the others wait for a missing one until the epoch is revoked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from holdfast.comms.errors import HoldfastError
from holdfast.ft import events
from holdfast.ft.commit.commit_state import CommitState
from holdfast.ft.commit.decision import Decision, Vote, decide
from holdfast.ft.membership.events import LocalFinished
from holdfast.ft.membership.view import View

if TYPE_CHECKING:
    from holdfast.harness.simulate.core.process import SimulatedProcess

Stage = Literal["waiting", "busy", "op", "over"]
THREAD_SECONDS = 0.00005
"""The average time that the session's thread takes from one line of the protocol to the next."""
FNV, PRIME, MASK = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1


class SimulatedSession:
    """The session of one process.

    `digest` stands for the state: it names the attempts at the steps that made it. Ops of the epoch `interrupted`, and
    of those before it, have been aborted.
    """

    def __init__(self, process: SimulatedProcess, steps: int, compute: float) -> None:
        self._process, self._compute = process, compute
        self.commits = CommitState()
        self.commits.total = steps
        self.stage: Stage = "waiting"
        self.digest = FNV
        self.interrupted = 0
        self._view: View | None = None
        self._newer_than = 0
        self._op = ""
        self.entered = 0
        self._trying = False
        self._failed_step = -1
        self._attempt = (0, 0)

    @property
    def epoch(self) -> int:
        return 0 if self._view is None else self._view.epoch

    def look(self) -> None:
        """Check, after a change, whether the wait of this session is over."""
        guard = self._process.guard
        if self._process.ended:
            self._end_with_error()
        elif self.stage == "waiting":
            view = guard.view
            if view is not None and view.epoch > self._newer_than and not guard.is_over(view.epoch):
                self._enter(view)
        elif self.stage == "op" and (
            self.interrupted >= self.epoch or (self._op.endswith("connect") and guard.is_over(self.epoch))
        ):
            self._fail()

    def _end_with_error(self) -> None:
        if self.stage == "over":
            return
        self.stage = "over"
        why = self._process.guard.why_over(self.epoch)
        self._process.world.emit(self._process, events.SessionFailed(error=str(why)))

    # Building an epoch ----------------------------------------------------------------------------------------

    def _enter(self, view: View) -> None:
        first = self._newer_than == 0
        self._newer_than, self._view, self.entered = view.epoch, view, 0
        if view.phase != "running":
            self._conclude(first)
            return
        if first and not self._process.was_spare:
            self.commits.found()
        self.stage = "busy"
        self._reach("rebuild.before_connect", lambda: self._meet("connect", None, self._connected))

    def _connected(self, _: Sequence[Any]) -> None:
        assert self._view is not None
        self._process.connected(self._view)
        self._reach("rebuild.before_votes", lambda: self._meet("votes", self.commits.vote(), self._voted))

    def _voted(self, votes: Sequence[Vote]) -> None:
        view, me = self._view, self._process
        assert view is not None
        rank = view.rank_of(me.member.id)
        assert rank is not None
        try:
            decision = decide(votes, rank)
        except HoldfastError as error:
            me.end(error)
            self.look()
            me.world.leave(me, str(error))
            return
        self._reach("rebuild.after_votes", lambda: self._settle(decision))

    def _settle(self, decision: Decision) -> None:
        me = self._process
        if decision.committed:
            self._note_commit("recovered")
        self.commits.settle(decision)
        me.world.emit(me, events.CommunicatorBuilt(epoch=self.epoch))
        if self._failed_step == self.commits.done:
            me.world.emit(me, events.StepAborted(step=self._failed_step, epoch=self.epoch))
        self._failed_step = -1
        self._ready()

    def _conclude(self, first: bool) -> None:
        me = self._process
        self.stage = "over"
        if not first:
            try:
                if self.commits.finishes():
                    self._note_commit("finished")
            except HoldfastError as error:
                me.world.emit(me, events.SessionFailed(error=str(error)))
                return
        me.world.emit(me, events.StepsFinished(step=self.commits.done - 1))

    # Steps ----------------------------------------------------------------------------------------------------

    def _ready(self) -> None:
        me, commits = self._process, self.commits
        decision, view = commits.pending, self._view
        if decision is not None and view is not None:
            rank = view.rank_of(me.member.id)
            if rank == decision.source:
                self._reach("sync.before_header", lambda: self._synchronise(decision, (commits.done, self.digest)))
            elif rank in decision.receivers:
                self._synchronise(decision, None)
            else:
                self._state_transferred()
        elif commits.done >= commits.total:
            me.reach("finish.before_propose", self._finish)
        else:
            self._begin_step()

    def _finish(self) -> None:
        self.stage = "waiting"
        self._process.feed(LocalFinished(self.epoch))
        self.look()

    def _synchronise(self, decision: Decision, state: tuple[int, int] | None) -> None:
        assert self._view is not None
        ranks = (decision.source, *decision.receivers)
        self._meet("sync", state, self._synchronised, [self._view.members[rank].id for rank in ranks])

    def _synchronised(self, states: Sequence[tuple[int, int] | None]) -> None:
        me, state, view, decision = self._process, states[0], self._view, self.commits.pending
        assert state is not None and view is not None and decision is not None
        if view.rank_of(me.member.id) == decision.source:  # of this epoch: its core may not have heard of that yet
            self._state_transferred()
            return

        def load() -> None:
            done, self.digest = state
            self.commits.take_over(done)
            me.world.emit(me, events.StateReceived(step=done - 1, epoch=self.epoch, digest=f"{self.digest:x}"))
            self._reach("sync.after_load", self._state_transferred)

        self._reach("sync.before_load", load)

    def _state_transferred(self) -> None:
        """Continue once all newcomers have the state."""

        def go_on(_: Sequence[Any]) -> None:
            self.commits.synchronised()
            self._ready()

        self._meet("arrived", None, go_on)

    def _begin_step(self) -> None:
        def begin() -> None:
            me = self._process
            try:
                with me.guard.held(self.epoch):
                    me.world.emit(me, events.StepBegun(step=self.commits.done, epoch=self.epoch))
            except HoldfastError:
                self._fail()
                return
            self.stage, self._trying = "busy", True
            me.after(self._compute * (0.8 + 0.4 * me.world.rng.random()), self._computed, self.epoch)

        self._reach("step.begin", begin)

    def _computed(self, epoch: int) -> None:
        if epoch == self.epoch and self.stage == "busy":
            self._meet("reduce", None, self._reduced)

    def _reduced(self, _: Sequence[Any]) -> None:
        self._reach("commit.before_prepare", self._prepare)

    def _prepare(self) -> None:
        me = self._process
        try:
            with me.guard.held(self.epoch):
                self.commits.prepare()
                self._attempt = (self.commits.done, self.epoch)
                me.world.emit(me, events.StepPrepared(step=self.commits.done, epoch=self.epoch))
        except HoldfastError:
            self._fail()
            return
        self._reach("commit.before_barrier", lambda: self._meet("barrier", None, self._prepared_by_all))

    def _prepared_by_all(self, _: Sequence[Any]) -> None:
        self._reach("commit.after_barrier", self._commit)

    def _commit(self) -> None:
        try:
            with self._process.guard.held(self.epoch):
                self._note_commit("normal")
        except HoldfastError:
            self._fail()
            return
        self._reach("commit.after_commit", self._ready)

    def _note_commit(self, how: str) -> None:
        me, step = self._process, self.commits.done
        of = self._attempt[1] if self._attempt[0] == step else 0
        self.digest = ((self.digest ^ (step << 20 | of)) * PRIME) & MASK
        digest = f"{self.digest:x}"
        me.world.emit(me, events.StepCommitted(step=step, epoch=self.epoch, how=how, digest=digest))
        self.commits.commit()
        self._trying = False

    # Waiting, failing, dying ----------------------------------------------------------------------------------

    def _fail(self) -> None:
        """Leave the epoch, which is over, for the next."""
        if self._process.ended:
            self._end_with_error()
            return
        self.stage, self._op = "waiting", ""
        if self._trying:
            self._failed_step = self.commits.done
        self._trying = False
        self.look()

    def _meet(
        self, op: str, value: Any, then: Callable[[Sequence[Any]], None], who: Sequence[str] | None = None
    ) -> None:
        """Enter an op of the epoch's communicator; `then` gets the values of all ranks, in rank order."""
        me, view = self._process, self._view
        assert view is not None
        if me.guard.is_over(view.epoch):
            self._fail()
            return
        self.stage = "op"
        if who is None:
            self.entered += 1
            self._op = f"{view.epoch}:{self.entered}:{op}"
        else:
            self._op = f"{view.epoch}:{op}"
        name = self._op
        me.world.meetings.enter(me, view, name, value, who, lambda values: self._met(name, then, values))
        if op != "connect":
            me.adopt_announced_view()

    def _met(self, op: str, then: Callable[[Sequence[Any]], None], values: Sequence[Any]) -> None:
        if self.stage == "op" and self._op == op:
            self.stage, self._op = "busy", ""
            then(values)

    def _reach(self, point: str, then: Callable[[], None]) -> None:
        """Continue with `then` a moment later, unless a fault is injected. Membership events may come in between."""
        me = self._process
        pause = THREAD_SECONDS * me.world.rng.expovariate(1.0)
        me.world.reach(me, point, self.epoch, lambda: me.after(pause, self._go_on, self.epoch, then))

    def _go_on(self, epoch: int, then: Callable[[], None]) -> None:
        if epoch == self.epoch and self.stage == "busy":
            then()
