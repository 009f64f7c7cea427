"""A process's part in a job. Its steps are transactions: committed on all ranks or on none.

with ft.Session(min_size=2) as session:
    session.attach("model", model)
    for attempt in session.steps(total):
        with attempt:
            attempt.comm.all_reduce(gradients(attempt.shards))
        if attempt.committed:
            optimizer.step()
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import msgspec
import torch

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import HoldfastError, StaleEpoch, valid_text
from holdfast.comms.ops import Recorder
from holdfast.comms.quantities import integer
from holdfast.comms.rendezvous.meeting_store import decode
from holdfast.comms.system import forks
from holdfast.comms.system.local_causes import reraise_local_cause
from holdfast.ft import departure, event_lines, events, faultpoints, settings
from holdfast.ft import step_protocol as protocol
from holdfast.ft.communicators import CommunicatorManager, DefaultGroup, collect_votes
from holdfast.ft.departure import OnError, TerminationRequest
from holdfast.ft.events import StepBegun
from holdfast.ft.membership.events import EpochBroken, LocalFinished
from holdfast.ft.membership.view import OnDeath, Timeouts, View
from holdfast.ft.node.epoch_guard import EpochGuard
from holdfast.ft.node.register import Register
from holdfast.ft.node.runtime import Runtime, new_identity
from holdfast.ft.state.replicator import Build, Shape, Sharded, StateReplicator
from holdfast.ft.state.transfer import Stateful
from holdfast.ft.step_protocol import FAILURES, NEWCOMER, CommitState, Vote
from holdfast.ft.telemetry import otel
from holdfast.ft.telemetry.event_log import EventLog, flush_all, log_events
from holdfast.ft.telemetry.flight.recorder import open_recorder
from holdfast.ft.telemetry.metrics import PORT, Metrics, OpTally, ports

if TYPE_CHECKING:
    from holdfast.comms.torchdist.registration import SessionProcessGroup

_READABLE = ("identity", "view", "epoch", "rank", "size", "step")
"""Attributes that a forked child can still read of its parent's session."""

faultpoints.run_before_kill(flush_all)

_log = logging.getLogger("holdfast.ft")
_CLOSED = "its session was closed"

P = ParamSpec("P")
T = TypeVar("T")


class OwnSteps(threading.local):
    """Marks steps of an object's own code, by thread. What a handler asks for amid them is done right after."""

    def __init__(self) -> None:
        self._depth = 0
        self._later: list[Callable[[], None]] = []

    @property
    def interrupted(self) -> bool:
        """Whether this thread is amid such steps: the caller is a handler, or called by one."""
        return self._depth > 0

    def do_after(self, action: Callable[[], None]) -> None:
        """Run `action` at the end of the steps that this call has interrupted."""
        self._later.append(action)

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        try:
            if self._depth == 1:
                self._do_later()
        finally:
            self._depth -= 1
            if self._depth == 0:  # a handler may have come before that line
                self._do_later()

    def _do_later(self) -> None:
        while self._later:
            self._later.pop(0)()


def _in_own_steps(method: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Session, P], T]:
    """Run a method of a session as its own steps."""

    @functools.wraps(method)
    def inside(session: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with session._own_steps:
            return method(session, *args, **kwargs)

    return inside


class Session:
    """A context manager: inside, this process belongs to the job, as a member or as a spare.

    `backend` is a name, a preference list or "auto". `size` is the number of members that the job wants, `min_size`
    the fewest that it can run with. `shards` is the number of parts that a step's work is divided into, whatever the
    size (default: `size`). `interface` chooses the address that other hosts reach: the name of an interface, a network
    or an address; `host` names the address itself. An argument that is not given comes from the variable of its name
    (HOLDFAST_BACKEND, HOLDFAST_KEY_FILE ...), and `size` and `job` from the scheduler's, if they have none.

    `on_error` says what an exception of the user's code does. "replace": it takes its rank out, as a death would; if
    the same exception (type, message, place) comes again in that step or the next, it ends the job. "raise": it ends
    the job at once. A job that an exception ended raises `StepFailed` on the other ranks. At SIGTERM, if the program
    does not handle it, this process finishes its step, leaves the job and ends with status 143.

    `on_death` says what the living do when a member dies. "rebuild": they build the next communicator, and do the step
    again. "finish_step": a step that is complete on all the living (`comms.experts` can do that) is committed by
    them, and then they rebuild. "go_on": they do not rebuild, and do further steps in that degraded epoch, until
    `rebuild()`; spares wait. All members of a job have the same.

    `metrics` (or HOLDFAST_METRICS_PORT) serves metrics for Prometheus on loopback: a port, 0 for any free one, or a
    range such as "9400-9463" of which each process takes one.

    Raises, before anything is changed: ValueError and TypeError for bad arguments, `KeyRefused`, `WrongKey`,
    `Mismatch` for a register of another job or one in use with another configuration, `BackendUnavailable`,
    `RegisterAway`, `AlreadyJoined` for a second session of one job in one process.
    """

    def __init__(
        self,
        backend: str | None = None,
        *,
        size: int | None = None,
        min_size: int | None = None,
        job: str | None = None,
        register: str | None = None,
        key_file: str | os.PathLike[str] | None = None,
        shards: int | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008  (frozen)
        device: str | torch.device | None = None,
        host: str | None = None,
        interface: str | None = None,
        metrics: str | int | None = None,
        on_error: OnError = "replace",
        on_death: OnDeath = "rebuild",
    ) -> None:
        if on_error not in ("raise", "replace"):
            raise ValueError(f"on_error={on_error!r} is neither 'raise' nor 'replace'")
        self._on_error = on_error
        self._metrics = asked_for(metrics)
        self._settings = settings.settle(
            backend=backend,
            size=size,
            min_size=min_size,
            job=job,
            register=register,
            key_file=key_file,
            shards=shards,
            timeouts=timeouts,
            device=device,
            host=host,
            interface=interface,
            on_death=on_death,
        )
        self._register = Register.open(self._settings.register)
        try:
            settings.candidate_job(self._settings, self._register.read())
            settings.check_single(self._settings)
            if self._register.cell.lasts:
                self._register.close()
        except BaseException:
            self._register.close()
            raise
        faultpoints.arm_from_environment()
        self._identity = new_identity()
        self._events = EventLog(self._identity)
        log_events(self._events)
        self._epoch_guard = EpochGuard(self._identity, self._events.emit)
        self._runtime: Runtime | None = None
        self._recorder: Recorder | None = None
        over = self._epoch_guard.why_over
        self._replicator = StateReplicator(self._settings.timeouts, self._events, over, self._reach)
        self._group = DefaultGroup()
        self._comms = CommunicatorManager(self._settings)
        self._view: View | None = None
        self._living: View | None = None
        """`_view`, or the degraded view that followed it."""
        self._hosts: list[str] = []
        self._commit_state = CommitState()
        self._protocol = protocol.StepProtocol(self._commit_state, self._identity, self._settings.timeouts)
        self._protocol_run = self._protocol.run()
        self._handlers: dict[type[protocol.ProtocolRequest], Callable[[Any], Any]] = {}
        self._over = False
        self._own_steps = OwnSteps()
        self._termination = TerminationRequest()
        self._closing = contextlib.ExitStack()
        for close in (self._termination.end, self._events.close, self._register.close):
            self._closing.callback(close)
        forks.refuse_in_children(self, f"the session of job {self._settings.name!r}", _READABLE)

    # The public part ------------------------------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """This process's name in the job: the id of its member in views, and the `process` of its events."""
        return self._identity

    @property
    def view(self) -> View | None:
        """The view of the members that this process is connected with; None before its first view."""
        return self._view

    @property
    def epoch(self) -> int | None:
        """The epoch that this process works in; None before its first view."""
        return None if self._view is None else self._view.epoch

    @property
    def rank(self) -> int | None:
        """This process's rank in `view`; None before it has one."""
        return None if self._view is None else self._view.rank_of(self._identity)

    @property
    def size(self) -> int | None:
        """The number of members of `view`; None before its first view."""
        return None if self._view is None else len(self._view.members)

    @property
    def alive(self) -> tuple[bool, ...]:
        """For each rank of `view`, whether it still is a member: in a degraded epoch some are not."""
        if self._view is None or self._living is None:
            return ()
        return tuple(member.id in self._living.ranks for member in self._view.members)

    @property
    def step(self) -> int:
        """The number of steps that are committed here, which is the number of the next step."""
        return self._commit_state.done

    @_in_own_steps
    def subscribe(self, listener: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        """Call `listener(event)` for each event of this process, in a thread of its own; see `EventLog.subscribe`.

        An event is a mapping, as its line in the event log is.
        """
        return self._events.subscribe(lambda event: listener(event_lines.to_record(event)))

    @_in_own_steps
    def attach(self, name: str, thing: Stateful) -> None:
        """Keep `thing` the same on all ranks: newcomers get its state from the ranks that have it.

        Raises TypeError at once if `thing` has no state_dict and load_state_dict, or its state cannot be sent.
        """
        self._replicator.attach(name, thing)

    @_in_own_steps
    def attach_sharded(self, build: Build, *, copies: int = 1, mesh: Shape | None = None) -> Sharded:
        """Keep the dict that `build(mesh)` returns (model, optimizer ...), sharded over a DeviceMesh of all ranks.

        The mesh has one dimension, or those that `mesh(size)` returns, such as {"replicate": size // 2, "shard": 2}.
        Each epoch builds the dict anew and loads its state: `copies` neighbours of each rank keep a copy of its part in
        memory, refreshed with every commit. A part that is lost with all its copies comes from the newest of the
        `checkpoints`. It belongs to the transaction: change it (`optimizer.step()`) inside the attempt.

        Raises TypeError and ValueError for arguments that cannot work, HoldfastError if something sharded is attached.
        """
        if self._settings.on_death != "rebuild":
            raise ValueError(
                f"on_death={self._settings.on_death!r} with attach_sharded(), whose copies are made by all ranks at "
                'each commit; use on_death="rebuild", or attach() what all ranks have'
            )
        return self._replicator.attach_sharded(build, copies, mesh, self._settings.size)

    @_in_own_steps
    def checkpoints(self, directory: str | os.PathLike[str], *, every: int, last: int | None = None) -> None:
        """Save all attached state with torch.distributed.checkpoint every `every` steps, to a `directory` of all ranks.

        With `last`, it is saved after so many steps too, and never later. A job that finds checkpoints there at its
        start continues from the newest. A degraded epoch ends where one is due: all ranks write it. Raises ValueError,
        TypeError, OSError for arguments that cannot work; the steps raise `Mismatch`, before the first one, if the
        ranks do not share the directory.
        """
        self._replicator.keep_checkpoints(directory, every, last)

    def rebuild(self) -> None:
        """End a degraded epoch at the next boundary between two steps: build a communicator, and let spares in.

        One member is enough. An attempt that others have open then is undone, so call it on all after the same step. It
        does nothing if no epoch is degraded then.
        """
        self._protocol.wants_rebuild = True

    @_in_own_steps
    def lasting(self) -> Communicator:
        """The communicator behind `Attempt.lasting`."""
        if self._settings.on_death == "rebuild":
            raise HoldfastError(
                'nothing outlives a member here: make the session with on_death="finish_step" or "go_on"'
            )
        if self._comms.lasting is None:
            self._epoch_guard.bind(self._comms.make_lasting(), lasting=True)
        assert self._comms.lasting is not None
        return self._comms.lasting

    @_in_own_steps
    def process_group(self) -> SessionProcessGroup:
        """torch.distributed's default group in the current epoch; see `Attempt.process_group`."""
        comm, view = self._comms.comm, self._view
        if comm is None or view is None or self._runtime is None:
            raise HoldfastError("there is no process group before the first attempt")
        return self._group.over(comm, self._runtime.store(view), self._settings.timeouts.operation)

    def steps(self, total: int) -> Iterator[Attempt]:
        """Yield attempts at steps 0 to `total` - 1, each step until it is committed; then the job ends.

        A spare waits in here until it is promoted or the job is finished. If this process cannot go on, an error says
        why: `StaleEpoch` if it was evicted, `RegisterAway` if no member runs the job and the register is away for
        longer than `rebuild`.
        """
        total = integer(total, "how many steps")
        if total < 0:
            raise ValueError(f"steps({total}): how many must be a whole number, 0 or more")
        if self._runtime is None:
            raise HoldfastError("the session is not open: write `with Session(...) as session:`")
        if self._replicator.closed:
            raise HoldfastError("steps() can be called once: a job is one run of steps")
        self._replicator.check()
        self._replicator.closed = True
        self._commit_state.total = total
        self._handlers = self._handlers_of(self._runtime)
        return self._steps()

    @reraise_local_cause("joining a job")
    @_in_own_steps
    def __enter__(self) -> Session:
        if self._runtime is not None:
            raise HoldfastError("a session can be entered once; make another one")
        with contextlib.ExitStack() as undo:  # each is closed whatever the others raise, the last one first
            recording = recorded(
                self._events,
                self._settings.name,
                self._metrics,
                lambda: 0 if self._runtime is None else self._runtime.node.missed_heartbeats,
            )
            self._recorder = undo.enter_context(recording)
            settings.open_single(self._settings)
            undo.callback(settings.close_single, self._settings)
            self._runtime = Runtime(
                self._settings, self._epoch_guard, self._events, self._identity, lambda: self._commit_state.done
            )
            undo.callback(self._runtime.close)
            for close in (self._comms.close, self._replicator.close, self._group.drop):
                undo.callback(close)
            self._termination.begin()
            self._closing.push(undo.pop_all())
        self._closing.push(self._leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the job and close all parts. A signal's handler may call it at any point.

        If it interrupts the session's own code, which may hold what a part needs to close, the process leaves at once,
        and the parts are closed when that code ends.
        """
        if self._own_steps.interrupted:
            self._leave_now(error)
            self._own_steps.do_after(lambda: self._close(kind, error, trace))
        else:
            self._close(kind, error, trace)

    @_in_own_steps
    def _close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.__exit__(kind, error, trace)

    def _leave(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Tell the others that this process leaves, unless the job is over or ends with this."""
        if error is not None:
            self._events.emit(events.SessionFailed(error=valid_text(f"{type(error).__name__}: {error}")))
        if self._runtime is not None and not self._over and not self._ends_job(self._runtime, error):
            self._leave_now(error)

    def _leave_now(self, error: BaseException | None) -> None:
        """Tell the others that this process leaves, without a wait."""
        if self._runtime is None or self._over:
            return
        if error is None:
            self._runtime.leave(_CLOSED)
        else:
            self._runtime.leave(f"{type(error).__name__}: {error}", type(error).__name__)

    def _ends_job(self, runtime: Runtime, error: BaseException | None) -> bool:
        """Whether this process's leave ends the job: all members leave their steps, or an exception ends it."""
        view, rank, done = self._living, self.rank, self._commit_state.done
        if not self._replicator.closed or view is None or rank is None or self._commit_state.standing == NEWCOMER:
            return False
        if error is None:
            why = f"all members stopped after {done} of {self._commit_state.total} steps"
            pending = self._commit_state.pending
            return departure.stop_with_all(runtime, view, () if pending is None else pending.receivers, why)
        if self._epoch_guard.ended:
            return False
        known = departure.step_error(error, done, rank)
        return departure.end_with(runtime, view, error, known, self._on_error)

    # The driver of the step protocol --------------------------------------------------------------------------

    def _steps(self) -> Iterator[Attempt]:
        while (attempt := self._next_attempt()) is not None:
            yield attempt
            if not attempt.entered:
                raise HoldfastError("an attempt that steps() yields must be entered: write `with attempt:`")
            if not attempt.settled:
                raise HoldfastError(
                    f"step {attempt.step} ended here in an error that was caught outside of `with attempt:`, while the "
                    "other ranks went on with it; let the error leave the session, or catch it inside of the block"
                )
            if self._termination.asked:
                self._termination.obey()
        self._termination.in_steps = False
        self._events.emit(events.StepsFinished(step=self._commit_state.done - 1))

    def _next_attempt(self) -> Attempt | None:
        """The next attempt; None if the job is over."""
        with self._own_steps:
            request = self._drive()
            if request is None:
                return None
            assert isinstance(request, protocol.RunBody) and self._view is not None
            return Attempt(self, self._open_comm(), request.step, self._view.job.shards)

    def end_attempt(self, failure: HoldfastError | None) -> bool:
        """Commit or recover the open attempt, after its body is done or ended in `failure`; whether it is committed.

        Raises the error that ends this process's part in the job.
        """
        with self._own_steps:
            settled = self._drive(failure)
            assert isinstance(settled, protocol.Settled)
            self._over = settled.over
            return settled.committed

    def _drive(self, failure: HoldfastError | None = None) -> protocol.ProtocolRequest | None:
        """Carry out the protocol's requests up to the next one to the user; None if the job is over.

        `failure` is the error of the last one to the user.
        """
        steps, handlers = self._protocol_run, self._handlers
        try:
            request = next(steps) if failure is None else steps.throw(failure)
            while (carry_out := handlers.get(type(request))) is not None:
                try:
                    outcome = carry_out(request)
                except BaseException as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(outcome)
        except StopIteration:
            self._over = True
            return None
        return request

    def _handlers_of(self, runtime: Runtime) -> dict[type[protocol.ProtocolRequest], Callable[[Any], Any]]:
        """For each request of the protocol, what carries it out; none for those to the user."""
        guard, replicator, timeouts = self._epoch_guard, self._replicator, self._settings.timeouts
        return {
            protocol.Reach: self._reach_point,
            protocol.RecordStep: self._record,
            protocol.Now: lambda request: time.monotonic(),
            protocol.JoinJob: lambda request: self._join(runtime),
            protocol.AwaitView: lambda request: guard.next_view(request.newer_than, timeouts, request.failure),
            protocol.LeaveEpoch: lambda request: self._leave_epoch(request.failure),
            protocol.AwaitEnd: lambda request: guard.wait_over(request.epoch, request.seconds),
            protocol.ReportFailure: lambda request: runtime.soon(runtime.node.failed, request.failure),
            protocol.BreakEpoch: lambda request: runtime.feed(EpochBroken(request.epoch, str(request.failure))),
            protocol.Connect: lambda request: self._connect(runtime, request),
            protocol.CollectVotes: lambda request: self._vote_among_living(runtime, request),
            protocol.ProposeFinish: lambda request: runtime.feed(LocalFinished(request.epoch)),
            protocol.TransferState: lambda request: replicator.transfer_state(
                self._open_comm(), self._hosts, request.decision, request.done, founding=request.founding
            ),
            protocol.ConfirmTransfer: lambda request: replicator.confirm_transfer(self._open_comm()),
            protocol.RestoreState: lambda request: self._restore(request.done),
            protocol.StageState: lambda request: replicator.stage(self._open_comm(), self._hosts, request.version),
            protocol.StepBoundary: lambda request: self._begin_step(request.done),
            protocol.AwaitBarrier: lambda request: self._open_comm().barrier(),
            protocol.CommitStep: self._commit,
            protocol.CloseRetired: lambda request: self._comms.close_retired(),
        }

    def _join(self, runtime: Runtime) -> tuple[View, bool]:
        runtime.soon(runtime.node.ready)
        return self._epoch_guard.next_view(0, self._settings.timeouts), runtime.node.was_spare

    def _record(self, request: protocol.RecordStep) -> None:
        epoch = request.in_epoch
        self._events.emit(request.event, None if epoch is None else self._epoch_guard.held(epoch))

    def _commit(self, request: protocol.CommitStep) -> float:
        self._record(request)
        self._replicator.committed(request.event.step + 1)
        return time.monotonic()

    def _restore(self, done: int) -> int:
        if self._replicator.needs_group:
            self.process_group()
        return self._replicator.enter(self._open_comm(), self._hosts, done)

    def _begin_step(self, done: int) -> bool:
        """Begin the step after `done`; True if a degraded epoch ends first, so that all ranks write a checkpoint."""
        if self._living is not None and self._living.degraded_from and self._replicator.saves(done):
            return True
        self._replicator.look(done)
        self._replicator.begin(self._open_comm(), done)
        return False

    def _leave_epoch(self, failure: HoldfastError) -> HoldfastError:
        self._termination.obey()
        comm = self._comms.comm
        if comm is None:
            return failure
        if comm.announced is not None:
            self._epoch_guard.adopt_announced_view(comm.announced)
        return comm.in_its_ranks(failure)

    def _connect(self, runtime: Runtime, request: protocol.Connect) -> list[Vote]:
        """Replace the communicator by one of the members of a view, and exchange votes on it."""
        view, vote = request.view, request.vote
        if self._comms.comm is not None:
            self._group.drop()
            self._replicator.drop()
            self._comms.retire()
        timeouts = self._settings.timeouts
        patience = max(timeouts.rebuild, timeouts.operation)  # a member that computes notices the new epoch only later
        with profiled(f"holdfast rebuild of epoch {view.epoch}"):
            comm = self._comms.connect(
                view,
                request.rank,
                runtime.store(view),
                patience,
                over=lambda: self._epoch_guard.why_over(view.epoch),
                recorder=self._recorder,
                connect_payload=vote.numbers(),
            )
            self._view = self._living = view
            self._hosts = [member.peer.host for member in view.members]
            self._epoch_guard.bind(comm)
            self._reach("rebuild.before_votes")
            votes = collect_votes(comm, vote, patience)
        self._termination.in_steps = True
        return votes

    def _vote_among_living(self, runtime: Runtime, request: protocol.CollectVotes) -> list[Vote]:
        """Exchange votes with the members of a degraded view, over its rendezvous table."""
        view = request.view
        store = runtime.store(view)  # it waits as long as a member may compute
        keys = [f"{request.name}/{member.id}" for member in view.members]
        store.set(f"{request.name}/{self._identity}", msgspec.json.encode(request.vote.numbers()).decode())
        votes = zip(keys, store.multi_get(keys), strict=True)
        numbers = [decode(key, bytes(vote), list[int]) for key, vote in votes]
        self._living = view
        return [Vote.of(vote) for vote in numbers]

    def _open_comm(self) -> Communicator:
        """The communicator of the current epoch. Raises `StaleEpoch` if a signal's handler has closed the session."""
        if self._comms.comm is None:
            raise StaleEpoch(f"this process has left the job: {_CLOSED}")
        return self._comms.comm

    def _reach_point(self, request: protocol.Reach) -> None:
        if faultpoints.armed is not None:
            self._reach(request.point, request.view)

    def _reach(self, point: str, view: View | None = None) -> None:
        where = view or self._view
        if where is not None and faultpoints.armed is not None:
            rank = where.rank_of(self._identity)
            faultpoints.reach(point, self._commit_state.done, -1 if rank is None else rank, where.epoch)


def asked_for(metrics: str | int | None) -> str:
    """The ports for metrics ("": no metrics), from the argument or HOLDFAST_METRICS_PORT. Raises ValueError."""
    asked = os.environ.get(PORT, "") if metrics is None else str(metrics)
    if asked:
        ports(asked)
    return asked


@contextlib.contextmanager
def recorded(
    events: EventLog, job: str, metrics: str, missed_heartbeats: Callable[[], int]
) -> Iterator[Recorder | None]:
    """Give a session's events to OpenTelemetry, its flight recording, and its metrics if `metrics` asks for them.

    `metrics` is the result of `asked_for`. Yields the recorder of ops. Raises `HoldfastError` if they cannot be served.
    """
    with contextlib.ExitStack() as sinks:
        sinks.callback(otel.export(events, job))
        recorder: Recorder | None
        recorder = flight = open_recorder(events.process, job)
        if flight is not None:
            sinks.enter_context(flight)
            events.at_once(StepBegun, flight.at_step)
        if metrics:
            recorder = tally = OpTally(flight)
            sinks.callback(Metrics(metrics, job, events, tally, missed_heartbeats).close)
        yield recorder


_READABLE_OF_ATTEMPT = ("step", "comm", "epoch", "rank", "total_shards", "shards", "alive", "degraded")
"""What a forked child can still read of its parent's attempt."""


_NOTHING: AbstractContextManager[object] = contextlib.nullcontext()


def profiled(name: str) -> AbstractContextManager[object]:
    """A range of that name in a recording of `torch.profiler`; without one it costs next to nothing."""
    if not torch.autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(name)


class Attempt:
    """One attempt at step `step` (0, 1, ...), as rank `rank` of the members of `epoch`, over `comm`.

    A step's work is divided into `total_shards` shards, numbered from 0: the number that `ft.Session(shards=...)` set
    for the job (default: its `size`), the same in every epoch. `shards` are the numbers of this rank's shards; each
    shard belongs to one rank. A mean over the whole step is the sum over all shards divided by `total_shards`.

    `alive` says of each rank of `comm` whether it was a member when the attempt began. No rank does the shards of one
    that is not; only a session with `on_death="go_on"` has such attempts.

    After the `with` block, `committed` says whether the step is done, alike on all ranks. If it is not, a peer has
    failed, and `Session.steps` yields the same step again.
    """

    def __init__(self, transaction: Session, comm: Communicator, step: int, total_shards: int) -> None:
        self.step = step
        self.comm = comm
        self.epoch = comm.epoch
        self.rank = comm.rank
        self.total_shards = total_shards
        self.shards = self.share(comm.rank, comm.size)
        self.committed = False
        self.entered = False
        self.settled = False
        self._transaction = transaction
        self.alive = transaction.alive
        self._range: AbstractContextManager[object] = _NOTHING
        forks.refuse_in_children(self, f"the attempt at step {step}", _READABLE_OF_ATTEMPT)

    def __repr__(self) -> str:
        state = ", committed" * self.committed
        return f"<Attempt at step {self.step}: rank {self.rank} of {self.comm.size}, epoch {self.epoch}{state}>"

    @property
    def degraded(self) -> bool:
        """Whether a rank had died before this attempt, and the others go on without it: see `alive`."""
        return not all(self.alive)

    @property
    def lasting(self) -> Communicator:
        """A communicator of all ranks that a member's death leaves as it is: for a `Switch` or a window.

        It is made on the first use in an epoch, by all ranks alike. It ends when the next communicator is built. Raises
        HoldfastError if the session was made with `on_death="rebuild"`, or a member died before the first use.
        """
        return self._transaction.lasting()

    def share(self, part: int, parts: int) -> tuple[int, ...]:
        """The shards of part `part`, if the step is divided into `parts`: consecutive numbers, as evenly as possible.

        For ranks that work on the same shards, such as those of one tensor-parallel group.
        """
        return tuple(range(self.total_shards * part // parts, self.total_shards * (part + 1) // parts))

    def process_group(self) -> SessionProcessGroup:
        """torch.distributed's default group in this epoch, for DDP, `fully_shard` and DeviceMesh.

        It runs on `comm`. It ends with the epoch, and so does everything that was built on it. Only the creation of
        subgroups is collective. Raises HoldfastError if torch has another default group in this process.
        """
        return self._transaction.process_group()

    def __enter__(self) -> Attempt:
        if self.entered:
            raise HoldfastError("this attempt was made already; each that steps() yields can be entered once")
        self.entered = True
        self._range = profiled(f"holdfast step {self.step}")
        self._range.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            return self._end(error)
        finally:
            self._range.__exit__(None, None, None)

    def _end(self, error: BaseException | None) -> bool:
        """Commit or recover the step; returns whether `error` is dealt with."""
        if error is None:
            try:
                self.comm.settle()
            except FAILURES as unfinished:  # the body is done, and the ops that it has left are not
                error = unfinished.again()  # without its traceback, which has this frame
        cause = error if error is None or isinstance(error, FAILURES) else self._failure_behind(error)
        if error is not None and cause is None:
            return False
        self.committed = self._transaction.end_attempt(cause)
        self.settled = True
        return error is not None

    def _failure_behind(self, error: BaseException) -> HoldfastError | None:
        """The error that ended the communicator, if `error` may be a library's report of it.

        torch turns what its callbacks raise (those of DistributedDataParallel's reducer) into a RuntimeError that
        keeps only the text.
        """
        over = self.comm.over
        if isinstance(error, HoldfastError) or not isinstance(error, RuntimeError) or not isinstance(over, FAILURES):
            return None
        return over.again()
