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
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import HoldfastError, StaleEpoch
from holdfast.comms.quantities import integer
from holdfast.comms.system import forks
from holdfast.comms.system.local_causes import reraise_local_cause
from holdfast.comms.system.signal_safety import OwnSteps
from holdfast.ft import departure, error_history, event_lines, events, faultpoints, settings
from holdfast.ft.attempt import FAILURES, Attempt, profiled
from holdfast.ft.commit import voting
from holdfast.ft.commit.commit_state import CommitState
from holdfast.ft.commit.decision import FOUNDER, NEWCOMER, Decision, decide
from holdfast.ft.communicators import CommunicatorManager
from holdfast.ft.departure import OnError
from holdfast.ft.membership.events import EpochBroken, LocalFinished
from holdfast.ft.membership.view import View
from holdfast.ft.node.epoch_guard import EpochEventLogger, EpochGuard
from holdfast.ft.node.register import Register
from holdfast.ft.node.runtime import Runtime, new_identity
from holdfast.ft.state.attachments import Attachments
from holdfast.ft.state.replicator import StateReplicator
from holdfast.ft.state.sharded import Build, Shape, Sharded
from holdfast.ft.state.transfer import Stateful
from holdfast.ft.telemetry import event_logger, telemetry
from holdfast.ft.telemetry.event_log import EventLog, flush_all
from holdfast.ft.termination import TerminationRequest
from holdfast.ft.timeouts import Timeouts
from holdfast.ft.torch_default_group import DefaultGroup

if TYPE_CHECKING:
    from holdfast.comms.torchdist.session_group import SessionProcessGroup

_READABLE = ("identity", "view", "epoch", "rank", "size", "step")
"""Attributes that a forked child can still read of its parent's session."""

faultpoints.run_before_kill(flush_all)

EVIDENT_SECONDS = 0.002
"""Seconds to wait, after an op failed, for the next epoch or for a better reason from the other members."""


_CLOSED = "its session was closed"

P = ParamSpec("P")
T = TypeVar("T")


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
    ) -> None:
        if on_error not in ("raise", "replace"):
            raise ValueError(f"on_error={on_error!r} is neither 'raise' nor 'replace'")
        self._on_error = on_error
        self._metrics = telemetry.asked_for(metrics)
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
        )
        self._register = Register.open(self._settings.register)
        try:
            settings.candidate_job(self._settings, self._register.read())
            settings.check_single(self._settings)
            if self._register.lasts:
                self._register.close()
        except BaseException:
            self._register.close()
            raise
        faultpoints.arm_from_environment()
        self._identity = new_identity()
        self._events = EventLog(self._identity)
        event_logger.log_events(self._events)
        self._epoch_guard = EpochGuard(self._identity, EpochEventLogger(self._identity, self._events))
        self._runtime: Runtime | None = None
        self._telemetry: telemetry.Telemetry | None = None
        over = self._epoch_guard.why_over
        self._replicator = StateReplicator(self._settings.timeouts, self._events, over, self._reach)
        self._attachments = Attachments(self._replicator, self._settings.size)
        self._group = DefaultGroup()
        self._recovery_times = RecoveryTimes()
        self._comms = CommunicatorManager(self._settings)
        self._view: View | None = None
        self._commit_state = CommitState()
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
        """The view that this process works in; None before its first view."""
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
        self._attachments.attach(name, thing)

    @_in_own_steps
    def attach_sharded(self, build: Build, *, copies: int = 1, mesh: Shape | None = None) -> Sharded:
        """Keep the dict that `build(mesh)` returns (model, optimizer ...), sharded over a DeviceMesh of all ranks.

        The mesh has one dimension, or those that `mesh(size)` returns, such as {"replicate": size // 2, "shard": 2}.
        Each epoch builds the dict anew and loads its state: `copies` neighbours of each rank keep a copy of its part in
        memory, refreshed with every commit. A part that is lost with all its copies comes from the newest of the
        `checkpoints`. It belongs to the transaction: change it (`optimizer.step()`) inside the attempt.

        Raises TypeError and ValueError for arguments that cannot work, HoldfastError if something sharded is attached.
        """
        return self._attachments.attach_sharded(build, copies=copies, mesh=mesh)

    @_in_own_steps
    def checkpoints(self, directory: str | os.PathLike[str], *, every: int, last: int | None = None) -> None:
        """Save all attached state with torch.distributed.checkpoint every `every` steps, to a `directory` of all ranks.

        With `last`, it is saved after so many steps too, and never later. A job that finds checkpoints there at its
        start continues from the newest. Raises ValueError, TypeError, OSError for arguments that cannot work; the steps
        raise `Mismatch`, before the first one, if the ranks do not share the directory.
        """
        self._attachments.checkpoints(directory, every=every, last=last)

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
        if self._attachments.closed:
            raise HoldfastError("steps() can be called once: a job is one run of steps")
        self._replicator.check()
        self._attachments.closed = True
        self._commit_state.total = total
        return self._steps(self._runtime)

    @reraise_local_cause("joining a job")
    @_in_own_steps
    def __enter__(self) -> Session:
        if self._runtime is not None:
            raise HoldfastError("a session can be entered once; make another one")
        with contextlib.ExitStack() as undo:  # each is closed whatever the others raise, the last one first
            self._telemetry = telemetry.Telemetry(
                self._identity,
                self._settings.name,
                self._events,
                self._metrics,
                lambda: 0 if self._runtime is None else self._runtime.node.missed_heartbeats,
            )
            undo.push(self._close_telemetry)
            settings.open_single(self._settings)
            undo.callback(settings.close_single, self._settings)
            self._runtime = Runtime(self._settings, self._epoch_guard, self._events, self._identity)
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

    def _close_telemetry(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._telemetry is not None:
            self._telemetry.close(error)

    def _leave(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Tell the others that this process leaves, unless the job is over or ends with this."""
        if error is not None:
            self._events.emit(events.SessionFailed(error=f"{type(error).__name__}: {error}"))
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
        view, rank, done = self._view, self.rank, self._commit_state.done
        if not self._attachments.closed or view is None or rank is None or self._commit_state.standing == NEWCOMER:
            return False
        if error is None:
            why = f"all members stopped after {done} of {self._commit_state.total} steps"
            return departure.stop_with_all(runtime, self._epoch_guard, self._settings, self._identity, view, why)
        if self._epoch_guard.ended:
            return False
        known = error_history.describe(error, done, rank)
        return departure.end_with(runtime, self._epoch_guard, self._settings, view, error, known, self._on_error)

    # The steps ------------------------------------------------------------------------------------------------

    def _steps(self, runtime: Runtime) -> Iterator[Attempt]:
        with self._own_steps:
            self._enter_job(runtime)
            self._termination.in_steps = True
        while (attempt := self._next_attempt(runtime)) is not None:
            yield attempt
            if not attempt.entered:
                raise HoldfastError("an attempt that steps() yields must be entered: write `with attempt:`")
            if not attempt.settled:
                raise HoldfastError(
                    f"step {attempt.step} ended here in an error that was caught outside of `with attempt:`, while the "
                    "other ranks went on with it; let the error leave the session, or catch it inside of the block"
                )
            self._termination.obey()
        self._termination.in_steps = False
        self._events.emit(events.StepsFinished(step=self._commit_state.done - 1))

    @_in_own_steps
    def _next_attempt(self, runtime: Runtime) -> Attempt | None:
        """The next attempt; None if the job is over."""
        while not self._over and self._ready():
            if self._commit_state.done < self._commit_state.total:
                assert self._view is not None
                return Attempt(self, self._open_comm(), self._commit_state.done, self._view.job.shards)
            self._finish(runtime)
        return None

    def _open_comm(self) -> Communicator:
        """The communicator of the current epoch. Raises `StaleEpoch` if a signal's handler has closed the session."""
        if self._comms.comm is None:
            raise StaleEpoch(f"this process has left the job: {_CLOSED}")
        return self._comms.comm

    def _enter_job(self, runtime: Runtime) -> None:
        """Wait until this process is in a running view or the job is over, and build its first communicator."""
        runtime.soon(runtime.node.ready)
        view = self._next_view(0)
        if view.phase != "running":
            self._over = True
            return
        if not runtime.node.was_spare:
            self._commit_state.found()
        self._rebuild(view)

    def _ready(self) -> bool:
        """Transfer the state to newcomers and begin an attempt, in the newest epoch; False if the job is over."""
        while not self._over:
            comm = self._open_comm()
            assert self._runtime is not None
            try:
                self._synchronise(comm)
                self._runtime.step = self._commit_state.done
                if self._telemetry is not None:
                    self._telemetry.at_step(self._commit_state.done)
                with self._epoch_guard.held(comm.epoch):
                    self._reach("step.begin")
                    if self._commit_state.done < self._commit_state.total:
                        self._events.emit(events.StepBegun(step=self._commit_state.done, epoch=comm.epoch))
                return True
            except FAILURES as failure:
                self._go_on(failure)
        return False

    @_in_own_steps
    def commit(self) -> None:
        """Agree with all ranks that the step is done, once this rank's part of it is.

        Communicators of earlier epochs are closed only here, where no rank waits for the next one.
        """
        comm = self._open_comm()
        self._replicator.stage(comm, self._hosts(), self._commit_state.done + 1)
        self._reach("commit.before_prepare")
        with self._epoch_guard.held(comm.epoch):
            self._commit_state.prepare()
            self._events.emit(events.StepPrepared(step=self._commit_state.done, epoch=comm.epoch))
        self._reach("commit.before_barrier")
        comm.barrier()
        self._reach("commit.after_barrier")
        with self._epoch_guard.held(comm.epoch):
            self._note_commit("normal", comm.epoch)
        self._reach("commit.after_commit")
        self._comms.close_retired()

    @_in_own_steps
    def recover(self, failure: HoldfastError) -> bool:
        """Continue in the next epoch after `failure` ended this one; return whether the open step is committed."""
        comm, done = self._open_comm(), self._commit_state.done
        self._go_on(failure)
        if self._commit_state.done == done:
            self._events.emit(events.StepAborted(step=done, epoch=comm.epoch))
        return self._commit_state.done > done

    def _go_on(self, failure: HoldfastError) -> None:
        self._termination.obey()
        comm = self._open_comm()
        epoch, word = comm.epoch, comm.announced
        if word is not None:
            self._epoch_guard.adopt_announced_view(word)
        failure = comm.in_its_ranks(failure)
        self._await_end(epoch, failure)
        self._rebuild(self._next_view(epoch, failure))

    def _finish(self, runtime: Runtime) -> None:
        """Declare the job finished, and wait until that is agreed."""
        comm = self._open_comm()
        self._reach("finish.before_propose")
        runtime.feed(LocalFinished(comm.epoch))
        self._rebuild(self._next_view(comm.epoch))

    def _conclude(self, view: View) -> None:
        """End the steps here: the job is finished, and with it an open step, unless the job was stopped before."""
        if not view.stopped and self._commit_state.finishes():
            self._note_commit("finished", view.epoch)
        self._over = True

    # The next epoch -------------------------------------------------------------------------------------------

    def _next_view(self, newer_than: int, failure: HoldfastError | None = None) -> View:
        return self._epoch_guard.next_view(newer_than, self._settings.timeouts, failure)

    def _await_end(self, epoch: int, failure: HoldfastError) -> None:
        """Wait until `epoch` is over; if the detectors find no cause meanwhile, end it here.

        Raises `failure` once more than `BROKEN_EPOCHS` epochs would end this way between two commits.
        """
        timeouts, runtime = self._settings.timeouts, self._runtime
        assert runtime is not None
        if not self._epoch_guard.wait_over(epoch, EVIDENT_SECONDS):
            runtime.soon(runtime.node.failed, failure)
        if self._epoch_guard.wait_over(epoch, 3 * timeouts.suspect + 2 * timeouts.heartbeat):
            return
        if not self._commit_state.may_break():
            raise failure
        runtime.feed(EpochBroken(epoch, str(failure)))

    def _rebuild(self, view: View) -> None:
        """Build the communicator of `view`, or of the first later view that holds, and settle the open step."""
        began = time.monotonic()
        while view.phase == "running":
            try:
                with profiled(f"holdfast rebuild of epoch {view.epoch}"):
                    decision = self._build(view)
            except FAILURES as failure:
                self._await_end(view.epoch, failure)
                view = self._next_view(view.epoch, failure)
                continue
            if decision.committed:
                self._note_commit("recovered", view.epoch)
            self._commit_state.settle(decision)
            seconds = time.monotonic() - began
            size = len(view.members)
            self._events.emit(events.CommunicatorBuilt(epoch=view.epoch, seconds=seconds, rank=self.rank, size=size))
            return
        self._conclude(view)

    def _build(self, view: View) -> Decision:
        """Connect the members of `view` and agree on what becomes of the open step."""
        rank = view.rank_of(self._identity)
        assert self._runtime is not None and rank is not None
        if self._comms.comm is not None:
            self._group.drop()
            self._replicator.drop()
            self._comms.retire()
        timeouts = self._settings.timeouts
        patience = max(timeouts.rebuild, timeouts.operation)  # a member that computes notices the new epoch only later
        self._reach("rebuild.before_connect", view)
        mine = self._commit_state.vote()
        comm = self._comms.connect(
            view,
            rank,
            self._runtime.store(view),
            patience,
            over=lambda: self._epoch_guard.why_over(view.epoch),
            recorder=None if self._telemetry is None else self._telemetry.recorder,
            connect_payload=mine.numbers(),
        )
        self._view = view
        self._epoch_guard.bind(comm)
        self._reach("rebuild.before_votes")
        decision = decide(voting.collect(comm, mine, patience), rank)
        self._reach("rebuild.after_votes")
        return decision

    def _synchronise(self, comm: Communicator) -> None:
        """Transfer the state to newcomers and restore sharded state; collective.

        All ranks that hold the state are at the start of the same step.
        """
        decision = self._commit_state.pending
        if decision is not None:
            founding = self._commit_state.standing == FOUNDER
            taken = self._replicator.transfer_state(
                comm, self._hosts(), decision, self._commit_state.done, founding=founding
            )
            if taken is not None:
                self._commit_state.take_over(taken)
                self._reach("sync.after_load")
                self._replicator.confirm_transfer(comm)
            self._commit_state.synchronised()
        self._replicator.look(self._commit_state.done)
        if self._replicator.needs_group:
            self.process_group()
            done = self._replicator.enter(comm, self._hosts(), self._commit_state.done)
            if done != self._commit_state.done:
                self._commit_state.go_back(done)
            self._replicator.begin(comm, done)

    def _note_commit(self, how: str, epoch: int) -> None:
        self._events.emit(events.StepCommitted(step=self._commit_state.done, epoch=epoch, how=how))
        self._commit_state.commit()
        self._replicator.committed(self._commit_state.done)
        assert self._view is not None
        gap = self._recovery_times.commit(time.monotonic(), self._view, self._commit_state.done - 1, how == "normal")
        if gap is not None:
            self._events.emit(gap)

    def _hosts(self) -> list[str]:
        """The host of each member, by rank."""
        assert self._view is not None
        return [member.peer.host for member in self._view.members]

    def _reach(self, point: str, view: View | None = None) -> None:
        where = view or self._view
        if where is not None and faultpoints.armed():
            rank = where.rank_of(self._identity)
            faultpoints.reach(point, self._commit_state.done, -1 if rank is None else rank, where.epoch)


_USUAL = 64


class RecoveryTimes:
    """The longest time between two commits of one process across a change of view."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._view: View | None = None
        self._longest = 0.0
        self._usual: deque[float] = deque(maxlen=_USUAL)

    def commit(self, now: float, view: View, step: int, normal: bool) -> events.RecoveryEnded | None:
        """Note a commit of `step` at `now` (seconds) in `view`: a `normal` one, or one that a rebuild found out.

        For the first normal commit of a view after an earlier view, returns the event: the longest time between two
        commits since that view (`seconds`), the time that a step takes (`usual`, the median), and how many members
        `joined` and `left`. Otherwise None.
        """
        last, before = self._last, self._view
        self._last = now
        if last is None or before is None:
            self._view = view
            return None
        if before.epoch == view.epoch:
            self._usual.append(now - last)
            return None
        self._longest = max(self._longest, now - last)
        if not normal:
            return None
        seconds, self._longest, self._view = self._longest, 0.0, view
        joined = sum(before.rank_of(member.id) is None for member in view.members)
        usual = median(self._usual) if self._usual else None
        left = len(view.left_since(before))
        return events.RecoveryEnded(step=step, epoch=view.epoch, seconds=seconds, usual=usual, joined=joined, left=left)
