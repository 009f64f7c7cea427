"""The session of a simulated process: carries out in virtual time what the production `StepProtocol` asks for.

An op of the communicator needs all members of the epoch; the others wait for a missing one until the epoch is revoked.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import msgspec
from msgspec.structs import replace

from holdfast.comms.errors import HoldfastError, OpTimeout, Revoked, StaleEpoch
from holdfast.ft import events
from holdfast.ft import step_protocol as protocol
from holdfast.ft.membership.events import EpochBroken, LocalFinished
from holdfast.ft.membership.view import View
from holdfast.ft.step_protocol import CommitState, Decision, Vote

if TYPE_CHECKING:
    from holdfast.comms.communicator import Communicator
    from holdfast.harness.simulate.core.process import SimulatedProcess
    from holdfast.harness.simulate.core.schedule import JobLayout

Stage = Literal["waiting", "busy", "op", "exchange", "votes", "over"]
SILENT_SECONDS = 2.0
"""How long an exchange waits for a rank that is silent, which is no proof that it has ended."""
PENDING: Final = object()
"""In place of a result: it comes later."""
FNV, PRIME, MASK = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1


class SimulatedSession:
    """The session of one process.

    `digest` stands for the state: it names the attempts at the steps that made it. Ops of the epoch `interrupted`, and
    of those before it, have been aborted. `entered` counts the ops of the epoch.
    """

    def __init__(self, process: SimulatedProcess, layout: JobLayout) -> None:
        self._process, self._layout = process, layout
        self.commits = CommitState()
        self.commits.total = layout.steps
        self.stage: Stage = "waiting"
        self.digest = FNV
        self.interrupted = 0
        self.entered = 0
        self._view: View | None = None
        self._op = ""
        self._attempt = (0, 0)
        self._results = 0
        """A number for the results of the last exchange: of whom they are, in which epoch."""
        self._participants: tuple[str, ...] = ()
        """The ranks of this epoch's switch that nobody has masked."""
        self._switch: SimulatedSwitch | None = None
        self._degraded_steps = 0
        self._protocol = protocol.StepProtocol(self.commits, process.member.id, process.core.timeouts)
        self._steps = self._protocol.run()
        self._request: protocol.ProtocolRequest = next(self._steps)
        self._turn = 0

    @property
    def epoch(self) -> int:
        return 0 if self._view is None else self._view.epoch

    def look(self) -> None:
        """Check, after a change, whether the wait of this session is over."""
        guard, request = self._process.guard, self._request
        if self.stage == "waiting":
            if isinstance(request, protocol.AwaitEnd):
                if guard.is_over(request.epoch):
                    self._go_on(True)
            elif guard.ended:
                self._fail(0)
            elif (view := guard.view) is not None:
                newer_than = request.newer_than if isinstance(request, protocol.AwaitView) else 0
                if view.epoch > newer_than and not guard.is_over(view.epoch):
                    first = isinstance(request, protocol.JoinJob)
                    self._go_on((view, self._process.was_spare) if first else view)
        elif self.stage == "exchange":
            if self._switch is not None and self._switch.over is not None:
                self._go_on(error=self._switch.over)
        elif self.stage == "votes":
            assert isinstance(request, protocol.CollectVotes)
            if guard.ended or guard.is_over(request.view.epoch):
                self._fail(request.view.epoch)
        elif self.stage == "op":
            connects = isinstance(request, protocol.Connect)  # which asks at once whether its epoch is over
            if guard.ended or self.interrupted >= self.epoch or (connects and guard.is_over(self.epoch)):
                self._fail(self.epoch)

    # The driver of the step protocol --------------------------------------------------------------------------

    def _go_on(self, outcome: object = None, error: HoldfastError | None = None) -> None:
        """Give the protocol what its request has led to, and carry out the next ones until one takes time."""
        while outcome is not PENDING:
            try:
                request = self._steps.send(outcome) if error is None else self._steps.throw(error)
            except StopIteration:
                self.stage = "over"
                self._process.world.emit(self._process, events.StepsFinished(step=self.commits.done - 1))
                return
            except HoldfastError as end:
                self._end(end)
                return
            self.stage, self._request, error = "busy", request, None
            self._turn += 1
            try:
                outcome = CARRY_OUT[type(request)](self, request)
            except HoldfastError as raised:
                error = raised

    def _commit(self, request: protocol.CommitStep) -> float:
        step = request.event.step
        attempt = self._attempt[1] if self._attempt[0] == step else 0
        digest = ((self.digest ^ (step << 20 | attempt)) * PRIME) & MASK
        self._emit(replace(request.event, digest=f"{digest:x}"), request.in_epoch)
        self.digest = digest
        return self._now()

    def _now(self) -> float:
        return self._process.world.now

    def _record(self, request: protocol.RecordStep) -> None:
        self._emit(request.event, request.in_epoch)
        if isinstance(request.event, events.StepPrepared):
            masks = self._layout.on_death != "rebuild"
            self._attempt = (request.event.step, self._results if masks else request.event.epoch)

    def _report_failure(self, request: protocol.ReportFailure) -> None:
        self._process.node.failed(request.failure)

    def _emit(self, event: events.Event, in_epoch: int | None) -> None:
        if in_epoch is None:
            self._process.world.emit(self._process, event)
            return
        with self._process.guard.held(in_epoch):
            self._process.world.emit(self._process, event)

    def _fail(self, epoch: int) -> None:
        """Throw the error that ended `epoch` into the protocol."""
        why = self._process.guard.why_over(epoch)
        assert why is not None
        self._go_on(error=why)

    def _end(self, error: HoldfastError) -> None:
        """End this process, which cannot go on."""
        me = self._process
        self.stage = "over"
        if me.guard.ended:
            me.world.emit(me, events.SessionFailed(error=str(error)))
        else:
            me.end(error)
            me.world.leave(me, str(error))

    # Requests that take time ----------------------------------------------------------------------------------

    def _run_body(self) -> object:
        """Compute, and reduce the results; or dispatch, compute and combine."""
        seconds = self._layout.compute * (0.8 + 0.4 * self._process.world.rng.random())
        if self._layout.on_death == "rebuild":
            self._after(seconds, self._meet, "reduce", None, self._met)
            return PENDING

        def combined() -> None:
            self._results = zlib.crc32(f"{self.epoch} {self._participants}".encode()) & 0xFFFFF
            self._go_on()

        self._exchange("dispatch", lambda: self._after(seconds, self._exchange, "combine", combined))
        return PENDING

    def _exchange(self, name: str, then: Callable[[], object]) -> None:
        """Exchange rows with the ranks of the switch: see `Meetings.exchange`."""
        me, switch = self._process, self._switch
        assert switch is not None
        if switch.over is not None:
            self._go_on(error=switch.over)
            return
        turn = self._turn

        def left(ranks: Sequence[str]) -> None:
            if self._turn != turn or self.stage != "exchange":
                return
            self.stage = "busy"
            if ranks:
                self._participants = tuple(ranks)
                then()
            else:
                self._go_on(error=StaleEpoch("this rank is masked: the others go on without it"))

        self.stage = "exchange"
        op = f"{self.epoch}:{self.commits.done}:{name}"
        masked = self._layout.masked if self._layout.hosts == 1 else 0.0
        late = OpTimeout("combine", self.epoch, SILENT_SECONDS)
        self._after(SILENT_SECONDS, lambda: self._go_on(error=late) if self.stage == "exchange" else None)
        me.world.meetings.exchange(me, op, self._participants, masked, left)
        self.look()

    def _collect_votes(self, request: protocol.CollectVotes) -> object:
        """Exchange votes over the table of a degraded view, as a session does."""
        table, epoch = self._process.node.sharing.table, request.view.epoch
        keys = [f"{request.name}/{member.id}" for member in request.view.members]
        turn = self._turn

        def here(error: Revoked | None) -> None:
            if error is None:
                self._process.world.work(self._process.world.now, self._process, 0.0, voted)

        def voted() -> None:
            if self._turn == turn and self.stage == "votes":
                found = table.values(epoch, keys)
                self._go_on([Vote.of(msgspec.json.decode(found[key], type=list[int])) for key in keys])

        self.stage = "votes"
        try:
            table.put(epoch, {f"{request.name}/{self._process.member.id}": msgspec.json.encode(request.vote.numbers())})
        except Revoked:
            self.look()
            return PENDING
        table.when(epoch, keys, here)
        self.look()
        return PENDING

    def _settled(self, request: protocol.Settled) -> None:
        view = self._process.guard.view
        if request.committed and view is not None and view.degraded_from:
            self._degraded_steps += 1
            self._protocol.wants_rebuild |= self._degraded_steps >= self._layout.degraded_steps

    def _connect(self, request: protocol.Connect) -> object:
        self._view, self.entered, self._degraded_steps = request.view, 0, 0
        self._participants = tuple(member.id for member in request.view.members)

        def connected(_: Sequence[Any]) -> None:
            self._process.connected(request.view)
            self._switch = SimulatedSwitch(request.view.epoch)
            if not self._process.guard.is_over(request.view.epoch):
                self._process.guard.bind(cast("Communicator", self._switch), lasting=True)
            self._reach("rebuild.before_votes", lambda: self._meet("votes", request.vote, self._go_on))

        return self._meet("connect", None, connected)

    def _transfer(self, decision: Decision, done: int) -> object:
        """Bring the state from the source to the receivers, while all other ranks wait."""
        assert self._view is not None
        rank = self._view.rank_of(self._process.member.id)
        ranks = [self._view.members[rank].id for rank in (decision.source, *decision.receivers)]

        def arrived(_: Sequence[Any]) -> None:
            self._meet("arrived", None, self._met)

        def load(done: int, digest: int) -> None:
            self.digest = digest
            received = events.StateReceived(step=done - 1, epoch=self.epoch, digest=f"{digest:x}")
            self._process.world.emit(self._process, received)
            self._go_on(done)

        if rank == decision.source:
            state = (done, self.digest)
            self._reach("sync.before_header", lambda: self._meet("sync", state, arrived, ranks))
        elif rank in decision.receivers:
            self._meet("sync", None, lambda states: self._reach("sync.before_load", lambda: load(*states[0])), ranks)
        else:
            arrived(())
        return PENDING

    def _wait(self, seconds: float | None = None, late: Callable[[], None] = lambda: None) -> object:
        """Wait until `look` finds what the request waits for; after `seconds`, call `late`."""
        if seconds is not None:
            self._after(seconds, late)
        self.stage = "waiting"
        self.look()
        return PENDING

    def _await_view(self, newer_than: int) -> object:
        seconds = self._process.core.timeouts.rebuild + self._process.core.timeouts.join
        return self._wait(seconds, lambda: self._go_on(error=OpTimeout("rebuild", newer_than, seconds)))

    def _meet(
        self, op: str, value: Any, then: Callable[[Sequence[Any]], object], who: Sequence[str] | None = None
    ) -> object:
        """Enter an op of the epoch's communicator; `then` gets the values of all ranks, in rank order."""
        me, view = self._process, self._view
        assert view is not None
        if me.guard.is_over(view.epoch):
            self._fail(view.epoch)
            return PENDING
        self.stage = "op"
        if who is None:
            self.entered += 1
            self._op = f"{view.epoch}:{self.entered}:{op}"
        else:
            self._op = f"{view.epoch}:{op}"
        name = self._op
        if op == "connect":
            me.exchange(view, lambda: self._left_op(name, then, ()))
            return PENDING
        me.world.meetings.enter(me, view, name, value, who, lambda values: self._left_op(name, then, values))
        me.adopt_announced_view()
        return PENDING

    def _left_op(self, op: str, then: Callable[[Sequence[Any]], object], values: Sequence[Any]) -> None:
        if self.stage == "op" and self._op == op:
            self.stage, self._op = "busy", ""
            then(values)

    def _met(self, _: Sequence[Any]) -> None:
        self._go_on()

    def _reach(self, point: str, then: Callable[[], object]) -> object:
        """Continue with `then` a moment later, unless a fault is injected. Membership events may come in between."""
        me = self._process
        pause = me.world.schedule.machine.thread * me.world.rng.expovariate(1.0)
        me.world.reach(me, point, self.epoch, lambda: self._after(pause, then))
        return PENDING

    def _after(self, seconds: float, act: Callable[..., object], *args: Any) -> None:
        """Call `act` after `seconds`, if the protocol then still waits for the same request."""
        turn = self._turn

        def still() -> None:
            if self._turn == turn:
                act(*args)

        self._process.after(seconds, still)


class SimulatedSwitch:
    """What an `EpochGuard` needs of the communicator that a member's death leaves as it is."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.over: HoldfastError | None = None

    def abort(self, error: HoldfastError) -> None:
        self.over = self.over or error


CARRY_OUT: Mapping[type[protocol.ProtocolRequest], Callable[[SimulatedSession, Any], object]] = MappingProxyType(
    {
        protocol.Reach: lambda session, request: session._reach(request.point, session._go_on),
        protocol.RecordStep: SimulatedSession._record,
        protocol.Now: lambda session, request: session._now(),
        protocol.JoinJob: lambda session, request: session._wait(),
        protocol.AwaitView: lambda session, request: session._await_view(request.newer_than),
        protocol.LeaveEpoch: lambda session, request: request.failure,
        protocol.AwaitEnd: lambda session, request: session._wait(request.seconds, lambda: session._go_on(False)),
        protocol.ReportFailure: SimulatedSession._report_failure,
        protocol.BreakEpoch: lambda session, request: session._process.feed(
            EpochBroken(request.epoch, str(request.failure))
        ),
        protocol.Connect: SimulatedSession._connect,
        protocol.CollectVotes: SimulatedSession._collect_votes,
        protocol.ProposeFinish: lambda session, request: session._process.feed(LocalFinished(request.epoch)),
        protocol.TransferState: lambda session, request: session._transfer(request.decision, request.done),
        protocol.ConfirmTransfer: lambda session, request: session._meet("arrived", None, session._met),
        protocol.RestoreState: lambda session, request: request.done,
        protocol.StageState: lambda session, request: None,
        protocol.StepBoundary: lambda session, request: None,
        protocol.RunBody: lambda session, request: session._run_body(),
        protocol.AwaitBarrier: lambda session, request: session._meet("barrier", None, session._met),
        protocol.CommitStep: SimulatedSession._commit,
        protocol.CloseRetired: lambda session, request: None,
        protocol.Settled: SimulatedSession._settled,
    }
)
"""For each request, what carries it out: it returns the result, or PENDING if that comes later."""
