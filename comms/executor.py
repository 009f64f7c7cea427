"""`Executor`: runs a communicator's ops in issue order, in the calling thread or on a worker thread.

It keeps the order and the numbers of ops, calls hooks and the journal, and ends the communicator when an op fails.
What an op does is not its concern. An op goes through these steps:

1. `Communicator.all_reduce` asks the fast path, compiled code, which runs usual ops from beginning to end. It declines
   the others, or begins one over a board and leaves it: then `issue` gets the same op with `order.begun`.
2. `issue` enters the `Order`, which one thread at a time may do, and gives the op its number. Then it wraps the op's
   body, from the inside out: checks of all ranks (`_IssuedOp.run`), the journal (`_recorded`), the wait for queued
   ops before it (`_after`), hooks (`_observed`).
3. `_run` runs that in this thread, or `_enqueue` hands it to the worker, which has one queue: no op overtakes another.
4. `_failed` decides what an error means. An op that no rank has begun gives its number back, and the communicator
   lives. Any other error ends it, since the ranks no longer agree on their position in the order of ops.

The end comes once, from any thread or a signal's handler (`_ending`): the first reason stays in `over`, the transport
is aborted so that blocked ops raise, then the abort hooks run, outside the lock. `close` waits for ops to leave the
transport before it releases that.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch

from holdfast.comms import _native
from holdfast.comms.errors import (
    ConcurrentCall,
    HoldfastError,
    Mismatch,
    NotConnected,
    OpTimeout,
    PeerFailed,
    Revoked,
    Unsupported,
    describe,
    valid_text,
)
from holdfast.comms.hooks import AddedHooks, Hooks
from holdfast.comms.ops import Journal, OpDescription, Recorder
from holdfast.comms.plugins.hints import Hints
from holdfast.comms.plugins.spec import OpEvent
from holdfast.comms.quantities import seconds
from holdfast.comms.system import forks
from holdfast.comms.system.local_causes import local_cause
from holdfast.comms.system.signal_safety import HandlerLock, run_shielded
from holdfast.comms.system.waiting import Wait
from holdfast.comms.tensors.packing import dlpack_device
from holdfast.comms.transport.base import Context, Transport, gather_bytes
from holdfast.comms.transport.liveness import stopped_ranks
from holdfast.comms.work import DONE, REPORT_SECONDS, Failure, Lane, UntoldFailure, Work

Body = Callable[[float], None]
"""One op: called with its deadline (`time.monotonic()` seconds)."""

Prepare = Callable[[], Body]
"""Makes the body of an op when its turn has come. It moves no byte, so its errors leave the communicator usable."""

_CLOSE_SECONDS = 10.0
_DIGEST, _LENGTH = 16, 4
_PARTING_SECONDS = 1.0
"""How long a rank that found a `Mismatch` waits for the others to find it, too."""
_LOOKS = Wait(yields=0, sleep_seconds=0.0005)
"""How often `close` checks whether the op that it aborted has ended."""


_until_exit: forks.Living[Executor] = forks.Living()


@dataclass(frozen=True, slots=True)
class OpSettings:
    """How the ops of a communicator run, beside its transport.

    `timeout` is that of ops, in seconds. With `check` the ranks compare each op before it runs. `on_close` is called
    once the transport is closed. `recorder` makes the journals of parts. `hooks` go on from a communicator before.
    """

    timeout: float
    check: bool = False
    on_close: Callable[[], None] | None = None
    recorder: Recorder | None = None
    hooks: Hooks | None = None


class Executor:
    """Runs the ops of one communicator over its transport."""

    def __init__(self, transport: Transport, context: Context, settings: OpSettings, hooks: Hooks) -> None:
        self.timeout, self.settings = seconds(settings.timeout), settings
        self._journal = context.journal
        self._transport = transport
        self._name, self._epoch, self._rank = context.name, context.epoch, context.rank
        self._peers = context.peers
        self._agreement = Agreement(transport) if settings.check and context.size > 1 else None
        self.hooks = hooks
        self.hooks.move_to(context.name, context.epoch, context.rank)
        self._order = _native.Order()
        self._ending = HandlerLock()
        self._lane = Lane(f"holdfast-ops-{self._name}", f"an op of communicator {self._name!r}")
        self._settled_by = 0.0
        """The latest deadline of an op that `settle` may have to wait for; those with the usual timeout aside."""
        self.untold = UntoldFailure()
        """Of the asynchronous ops, those of parts among them."""
        self._over: HoldfastError | None = None
        self.over_once_closed: HoldfastError = Revoked(context.epoch, "closed", own=True)
        """What ops raise after `close`, unless something else has ended this before."""
        self._aborted = False
        self._closed, self._released = False, False
        self._leaking = False
        """Whether `close` has found ops that had not ended, of which the hooks do not know yet."""
        self._parts: forks.Living[Executor] | None = None
        self.split_from: tuple[str, tuple[int, ...]] = ("", ())
        """The name of the communicator that this one was split from, and the ranks there of its members."""
        if transport.ends_before_exit:
            _until_exit.add(self)
        forks.reset_in_children(self)

    def reset_in_child(self) -> None:
        """Refuse ops in a forked child: a prepared one must not use the transport of its parent."""
        self._order.over = True

    def fast_path(self, plan: Callable[..., Any]) -> _native.FastPath | None:
        """The compiled path of usual ops, by plans that `plan` makes.

        None if agreement checks are on, or tensors of the device are never plain.
        """
        device = dlpack_device(self._transport.device or torch.device("cpu"))
        if self._agreement is not None or device is None:
            return None
        return _native.FastPath(
            self._transport.rank,
            self._transport.size,
            self._order,
            plan,
            self.hooks,
            self._journal,
            self.timeout,
            self._failed,
            device,
            self._transport.board,
            DONE,
        )

    @property
    def over(self) -> HoldfastError | None:
        """Why no more ops can run; None while they can."""
        return self._over

    @property
    def checks(self) -> bool:
        """Whether ops are compared between the ranks before they run."""
        return self._agreement is not None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def progress(self) -> tuple[int, bool]:
        """How many collectives were issued, and whether any op is running. From any thread."""
        return self._order.joint, self._order.busy or not self._lane.last.done()

    def issue(
        self,
        description: OpDescription,
        prepare: Prepare,
        async_op: bool,
        timeout: float | None,
        hints: Hints | None = None,
    ) -> Work:
        """Give an op its number, and run it in this thread, or with `async_op` queue it on the worker thread."""
        order = self._order
        with order as entered:
            if not entered:  # another thread is inside an op: after an abort, say that instead
                if self._over is not None:
                    self._raise_revoked()
                raise ConcurrentCall(
                    f"{description.name} was called while another thread is inside an op of communicator "
                    f"{self._name!r}: their order could differ from rank to rank; use one thread, a lock, or a "
                    "communicator each (split)"
                )
            # The caller completes what a fast path has begun by the same call; any other call means that it was cut
            # short, and the other ranks have taken its inputs already.
            if order.begun and (order.lost or async_op or timeout is not None or hints):
                self._end(Revoked(self._epoch, "an earlier op was interrupted after it had begun"))
            if self._over is not None:  # the fast path has entered its op in the journal: it must leave, too
                if order.begun and self._journal is not None:
                    self._journal.leave(self._over)
                self._raise_revoked()
            deadline = time.monotonic() + (self.timeout if timeout is None else seconds(timeout))
            if async_op or timeout is not None:
                self._settled_by = max(self._settled_by, deadline)
            order.seq += 1
            joint = 0
            if description.collective:
                joint = order.joint = order.joint + 1
            if hints:
                prepare = partial(self._prepare_hinted, hints, prepare)
            op = _IssuedOp(description, order.seq, joint, prepare, order.begun, self.hooks.added)
            if self._agreement is not None and description.collective:
                agreed = description.agreed() + (f" with hints {dict(sorted(hints.items()))}" if hints else "")
                op.check = partial(self._agreement.check, f"{description.name}({agreed}) as op {joint}")
            body: Body = op.run
            if self._journal is not None:
                body = partial(_recorded, self._journal, op, body)
            if async_op:
                body = partial(self._unless_over, body)
            elif order.queued:  # no op overtakes those that the worker has still to run
                if self._lane.last.done():
                    order.queued = False
                else:
                    body = partial(self._after, self._lane.last, body)
            if self.hooks.observed and not op.begun:
                try:  # a hook may refuse the op; its number is free again
                    event = self.hooks.begin(description, op.seq, async_op)
                except BaseException:
                    self._reuse_number(op.seq, joint)
                    raise
                body = partial(self._observed, op, event, body)
            if not async_op:
                self._run(op, body, deadline)
                return DONE
            if self._transport.streams:
                return self._transport.launch(description.name, lambda: self._run(op, body, deadline))
            return self._enqueue(op, body, deadline)

    def _after(self, earlier: Work, body: Body, deadline: float) -> None:
        """Run `body` once the `earlier` op is complete. That op may have a later deadline than this one."""
        began = time.monotonic()
        if not earlier.ends_within(max(deadline - began, 0.0)):
            raise OpTimeout("an earlier op", 0, time.monotonic() - began)  # 0: this one was not begun
        self._unless_over(body, deadline)

    def _unless_over(self, body: Body, deadline: float) -> None:
        if self._over is not None:
            self._raise_revoked()
        body(deadline)

    def _run(self, op: _IssuedOp, body: Body, deadline: float) -> None:
        try:
            body(deadline)
        except BaseException as error:
            if op.complete:  # only a hook failed: no rank waits for this one
                raise
            if op.refused and threading.current_thread() is not self._lane.thread:  # no byte has moved
                self._reuse_number(op.seq, op.joint)
                raise
            self._failed(op.description.name, op.seq, op.joint, error)

    def _prepare_hinted(self, hints: Hints, prepare: Prepare) -> Body:
        """Make the body of an op with hints of its own, which its transport reads while it runs."""
        body, transport = prepare(), self._transport

        def hinted(deadline: float) -> None:
            before, transport.op_hints = transport.op_hints, hints
            try:
                body(deadline)
            finally:
                transport.op_hints = before

        return hinted

    def _reuse_number(self, seq: int, joint: int) -> None:
        """Give the number of a refused op to the next one, as on ranks where it was not issued.

        Not on the worker thread: later ops have numbers already, and all ranks refuse what the worker refuses.
        """
        order = self._order
        if order.seq == seq and threading.current_thread() is not self._lane.thread:
            order.seq -= 1
            order.joint -= 1 if joint else 0

    def _failed(self, name: str, seq: int, joint: int, error: BaseException) -> NoReturn:
        """Raise the error of a failed op, and end the communicator.

        `Unsupported` does not end it: no byte has moved. An error of this process is raised as its local cause.
        """
        try:
            if isinstance(error, Unsupported):
                self._reuse_number(seq, joint)
                raise error
            if not isinstance(error, HoldfastError):  # Ctrl-C, or an error of torch: the library below may go on
                self._transport.interrupted = True
            if isinstance(error, OpTimeout):
                error = self._named(error, name, seq, joint)
            elif isinstance(error, PeerFailed):
                error.communicator, error.split_from = self._name, self.split_from
            elif (local := _local_failure(error, name)) is not None:
                local.__cause__ = error
                error = local
            self._end(Revoked(self._epoch, f"an earlier op failed: {describe(error)}", type(error)))
            raise error
        finally:
            del error  # breaks the cycle of the error and this frame, which is in its traceback

    def _named(self, error: OpTimeout, name: str, seq: int, joint: int) -> OpTimeout:
        """A transport's timeout as that of a communicator's op. It blames stopped local ranks first, if any."""
        missing = (stopped_ranks(self._peers) if joint else ()) or error.missing_ranks
        named = OpTimeout(name, seq, error.waited, missing)
        named.communicator, named.joint = self._name, joint if error.seq else 0
        named.split_from = self.split_from
        named.__suppress_context__ = True
        return named

    def check_usable(self) -> None:
        """Raise `Revoked` once no more ops can run."""
        if self._over is not None:
            self._raise_revoked()

    def _raise_revoked(self) -> None:
        over = self._over
        if isinstance(over, NotConnected):
            raise over.again()
        raise Revoked(self._epoch, over.reason if isinstance(over, Revoked) else str(over)) from over

    def _enqueue(self, op: _IssuedOp, body: Body, deadline: float) -> Work:
        inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def task() -> None:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):  # as in the caller's thread
                self._run(op, body, deadline)

        self._order.queued = True
        work = Work(op.description.name)
        self._lane.issue(work, partial(work.run, task, self._note_failure))
        return work

    def _note_failure(self, failure: Failure) -> None:
        if not self._closed:  # who closes a communicator gives up its pending ops
            self.untold.note(failure)

    def settle(self) -> None:
        """`Communicator.settle`, without parts and windows."""
        last = self._lane.last
        if not self._closed and (self._transport.streams or not last.done()):
            began = time.monotonic()
            try:
                if not last.ends_within(max(self._settled_by - began, 0.0) + REPORT_SECONDS):
                    raise OpTimeout("an earlier op", 0, time.monotonic() - began)
                if self._transport.streams:
                    self._transport.settle(max(began + self.timeout, self._settled_by))
            except BaseException as error:
                self._failed("settle", self._order.seq, 0, error)
        self.untold.tell()

    def _observed(self, op: _IssuedOp, event: OpEvent, body: Body, deadline: float) -> None:
        """Run the body of an op, and then the hooks after it."""
        began = time.perf_counter()
        try:
            body(deadline)
        except BaseException as error:
            self.hooks.end(replace(event, seconds=time.perf_counter() - began, error=error))
            raise
        op.complete = True
        self.hooks.end(replace(event, seconds=time.perf_counter() - began))

    def abort(self, reason: str | HoldfastError) -> None:
        """Make the running op, and all later ones, raise. The first reason stays."""
        self._end(reason if isinstance(reason, HoldfastError) else Revoked(self._epoch, valid_text(reason), own=True))

    def abort_part_on_end(self, part: Executor) -> None:
        """Abort `part` when this communicator ends for another reason than `close`."""

        def add() -> None:
            if self._over is None:
                if self._parts is None:
                    self._parts = forks.Living()
                self._parts.add(part)
            else:
                part.abort(self._end_of_whole(self._over))

        self._ending.run(add, add)

    def announce(self, word: bytes, why: HoldfastError) -> bool:
        """`Transport.announce`; False once this communicator is over."""
        announced: list[bool] = []

        def announce() -> None:
            announced.append(self._over is None and self._transport.announce(word, why))

        self._ending.run(announce, lambda: None)
        return announced == [True]

    def _end(self, error: HoldfastError) -> None:
        self._ending.run(partial(self._end_once, error), partial(self._end, error))
        self._run_abort_hooks()

    def _run_abort_hooks(self) -> None:
        """Run the abort hooks of this communicator and its parts, if it is aborted.

        Outside `_ending`: they may abort and close, here or elsewhere, and wait for threads that do.
        """
        if not self._aborted:
            return
        assert self._over is not None
        for part in list(self._parts or ()):
            part._run_abort_hooks()
        self.hooks.aborted(self._over)

    def _end_once(self, error: HoldfastError) -> None:
        """End with `error`, unless that is done; an end that a signal's handler cut short goes on."""
        if self._aborted or self._closed:
            return
        if self._over is None:
            self._over, self._order.over = error, True
        over = self._over
        self._transport.abort(over)
        for part in list(self._parts or ()):
            reason = self._end_of_whole(over)
            part._ending.run(partial(part._end_once, reason), partial(part._end, reason))
        self._aborted = True

    def _end_of_whole(self, error: HoldfastError) -> Revoked:
        return Revoked(self._epoch, f"{self._name!r}, which it was split from, is over: {error}")

    def begin_unconnected(self) -> None:
        """Refuse all ops until this executor is replaced."""
        self._over, self._order.over = NotConnected(self._name), True
        self._closed = self._released = True

    def close_when_done(self) -> None:
        """Wait for the ops that were issued, then close. For a collected communicator: a work may still be awaited."""
        self._lane.last.ends_within(self.timeout)
        with contextlib.suppress(HoldfastError):
            self.close()

    def discard(self) -> None:
        """Refuse all ops, and do not touch the transport: its owner has closed it. For an executor that ran none."""
        self._closed, self._released = True, True
        if self._over is None:
            self._over, self._order.over = Revoked(self._epoch, "closed", own=True), True

    def close(self) -> None:
        """Abort pending ops and close the transport. Idempotent.

        In a signal's handler that has interrupted an op of this communicator, the transport is closed once that has
        ended.
        """
        if self._released:
            return
        self._ending.run(self._begin_close, self.close)
        if self._leaking:
            self._leaking = False
            self.hooks.aborted(self._over or Revoked(self._epoch, "closed", own=True))
        if self._closed and not self._order.when_left(self.close):
            run_shielded(self._release)

    def _begin_close(self) -> None:
        if self._over is None:
            self._over, self._order.over = self.over_once_closed, True
        if not self._closed and not self._aborted and not (self._lane.last.done() and self._order.idle):
            self._transport.abort(self._over)  # an op is pending: it must not be in the transport when that is freed
            self._leaking = True
        self._closed = True

    def _release(self) -> None:
        if self._released:
            return
        self._released = True
        idle = _LOOKS.reaches(lambda: self._order.idle, time.monotonic() + _CLOSE_SECONDS)
        ended = self._lane.end(_CLOSE_SECONDS)  # after the ops before it, which the abort has ended
        if not idle or not ended:
            raise HoldfastError(
                f"communicator {self._name!r} cannot be closed: its backend did not end a pending op within "
                f"{_CLOSE_SECONDS:.0f} s of its abort; its resources are kept until the process ends"
            )
        self._transport.close()
        if self.settings.on_close is not None:
            self.settings.on_close()


class _IssuedOp:
    """One op from its issue to its end. `begun`: a fast path has begun it and entered it in the journal."""

    __slots__ = ("added_hooks", "begun", "check", "complete", "description", "joint", "prepare", "refused", "seq")

    def __init__(
        self,
        description: OpDescription,
        seq: int,
        joint: int,
        prepare: Prepare,
        begun: bool,
        added_hooks: AddedHooks,
    ) -> None:
        self.description, self.seq, self.joint, self.prepare, self.begun = description, seq, joint, prepare, begun
        self.added_hooks = added_hooks
        """Kept, since the communicator may be dropped before the op has ended."""
        self.check: Body | None = None
        self.refused = False
        """Whether it failed before any byte moved."""
        self.complete = False
        """Whether only hooks are left to run."""

    def run(self, deadline: float) -> None:
        try:
            body = self.prepare()
        except BaseException:
            self.refused = not self.begun
            raise
        if self.check is not None:
            self.check(deadline)
        body(deadline)


class Agreement:
    """Compares op descriptions over a transport. HOLDFAST_CHECK=1 turns it on.

    Before each collective the ranks exchange a digest of its description in one small all-gather. If the digests
    differ, they exchange the descriptions, all ranks raise the same `Mismatch`, and no byte of the op has moved.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def check(self, description: str, deadline: float) -> None:
        """Raise `Mismatch` unless `description` (the next collective and its number) is the same on every rank.

        Sends and receives are not counted in that number, since ranks may differ in them.
        """
        encoded = description.encode()
        digest = hashlib.blake2b(encoded, digest_size=_DIGEST).digest()
        messages = gather_bytes(self._transport, digest + len(encoded).to_bytes(_LENGTH, "little"), deadline)
        if len(set(messages)) > 1:
            words = self._descriptions(messages, encoded, deadline)
            # The first rank to raise aborts. Over MPI, that ends the exchange of ranks that are still in it.
            with contextlib.suppress(HoldfastError):
                self._transport.barrier(min(deadline, time.monotonic() + _PARTING_SECONDS))
            common = max(set(words), key=lambda word: (words.count(word), -words.index(word)))
            odd = "; ".join(f"rank {r} called {word}" for r, word in enumerate(words) if word != common)
            raise Mismatch(
                f"{odd}; rank {words.index(common)} called {common}; every rank must issue the same ops, in the same "
                "order, with the same shapes and dtypes"
            )

    def _descriptions(self, messages: Sequence[bytes], mine: bytes, deadline: float) -> list[str]:
        """Every rank's description. All ranks have seen the same messages, so all call this."""
        lengths = [int.from_bytes(message[_DIGEST:], "little") for message in messages]
        texts = [torch.zeros(length, dtype=torch.uint8, device="cpu") for length in lengths]
        self._transport.all_gather(texts, torch.tensor([*mine], dtype=torch.uint8, device="cpu"), deadline)
        return [bytes(text.numpy()).decode(errors="replace") for text in texts]


def _local_failure(error: BaseException, op: str) -> HoldfastError | None:
    """The error that says that this process, not a peer, caused `error`; None if `error` says enough itself."""
    if isinstance(error, OSError | RuntimeError | MemoryError) and not isinstance(error, HoldfastError):
        if (cause := local_cause(error, op)) is not None:
            return cause
        if type(error) is RuntimeError:
            return HoldfastError(f"{op} failed in this process, by no peer's fault: {describe(error)}")
    return None


def _recorded(journal: Journal, op: _IssuedOp, body: Body, deadline: float) -> None:
    """Run the body of an op between the journal's `enter` and `leave`."""
    if not op.begun:
        call = op.description
        journal.enter(call.name, op.seq, call.nbytes, call.tensors, call.detail, call.peer)
    try:
        body(deadline)
    except BaseException as error:
        journal.leave(error)
        raise
    journal.leave(None)


@atexit.register
def _close_before_exit() -> None:
    """Close communicators before the interpreter ends: a thread that returns from C++ later would cause SIGABRT."""
    for executor in _until_exit:
        with contextlib.suppress(HoldfastError):
            executor.abort("the process ends")
            executor.close()


forks.run_in_children(_until_exit.clear)
