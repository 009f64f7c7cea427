"""The epoch that this process works in, shared by the runtime's thread and the session's thread.

The runtime installs and revokes epochs. The session waits for the next view, and holds the epoch while it does what
must not happen in a revoked one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from msgspec import UNSET

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import CorruptData, HoldfastError, OpTimeout, PeerFailed, Revoked
from holdfast.comms.system.signal_safety import HandlerEvent
from holdfast.ft.events import EpochRevoked, Event, ViewInstalled
from holdfast.ft.membership.view import Timeouts, View, ViewDelta, apply_delta, delta_between
from holdfast.ft.ports import OpPosition


class _HeldEpoch:
    """What `EpochGuard.held` returns: one for each epoch. A generator would cost a microsecond more, thrice a step."""

    __slots__ = ("_epoch", "_guard")

    def __init__(self, guard: EpochGuard, epoch: int) -> None:
        self._guard, self._epoch = guard, epoch

    def __enter__(self) -> None:
        self._guard._lock.acquire()
        try:
            self._guard._check(self._epoch)
        except BaseException:
            self._guard._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._guard._lock.release()


class EpochGuard:
    """The newest view that this process is in, whether it is revoked, and the communicator that belongs to it."""

    def __init__(self, identity: str = "", emit: Callable[[Event], None] = lambda event: None) -> None:
        """`identity` is this process's; `emit` gets the changes of its epoch, from any thread."""
        self._identity, self._emit = identity, emit
        self._lock = threading.RLock()
        self._changed = HandlerEvent()
        """Set, and replaced, when anything changes. A wait reads it before it looks, and so misses no later change."""
        self._view: View | None = None
        self._over: HoldfastError | None = None
        self._why_before: tuple[int, HoldfastError] | None = None
        self._comm: Communicator | None = None
        self._lasting: Communicator | None = None
        """What a member's death leaves as it is: it ends when its members build another communicator."""
        self._revoked: list[tuple[Communicator, HoldfastError]] = []
        self._ended: HoldfastError | None = None
        self._next: View | None = None
        self._held = _HeldEpoch(self, 0)
        self._on_over: Callable[[int], None] = lambda epoch: None

    @property
    def view(self) -> View | None:
        """The newest view that was installed here."""
        return self._view

    @property
    def ended(self) -> bool:
        """Whether this process can do nothing more in the job."""
        return self._ended is not None

    def on_over(self, tell: Callable[[int], None]) -> None:
        """Call `tell(epoch)`, from any thread, when `epoch` and those before it are over."""
        self._on_over = tell

    # Called by the runtime ------------------------------------------------------------------------------------

    def install(self, view: View) -> None:
        """Make `view` the current one, if it is newer."""
        with self._lock:
            if self._view is not None and view.epoch <= self._view.epoch:
                return
            if view.phase == "running":
                self._emit(_installed(view, view.rank_of(self._identity)))
            replaced, why = self._view, self._over
            self._why_before = (replaced.epoch, why) if replaced is not None and why is not None else None
            self._view, self._over, self._comm = view, None, None
            lasting = self._lasting
            if lasting is not None and lasting.epoch != view.degraded_from:
                self._revoked.append((lasting, Revoked(lasting.epoch, f"epoch {view.epoch} has begun: {view.reason}")))
                self._lasting = None
            self._change()
        self._on_over(view.epoch - 1)

    def revoke(self, epoch: int, error: HoldfastError, reason: str = "") -> bool:
        """End `epoch`: nothing more can be done in it. False if it was over already.

        Call `end_ops` to end its pending ops.
        """
        with self._lock:
            if self._view is None or self._view.epoch != epoch or self._over is not None:
                return False
            self._over = error
            if self._comm is not None:
                self._revoked.append((self._comm, error))
            self._emit(EpochRevoked(epoch=epoch, reason=reason))
            self._change()
        self._on_over(epoch)
        return True

    def rest(self) -> None:
        """A member has died: waits in pending ops may stop spinning, because these ops will be ended."""
        comm = self._comm
        if comm is not None:
            comm.transport.rest()

    def announce(self, view: View) -> bool:
        """Announce `view`, which the register has taken, to the ranks of the epoch before it that wait in ops.

        Returns False if there is no way to. Here the session installs the view when it waits for the next one.
        """
        old, comm = self._view, self._comm
        if old is None or comm is None or comm.epoch != old.epoch:
            return False
        change = delta_between(old, view)
        if change is None or not comm.announce(change.encode(), self._over or _why_replaced(old, view)):
            return False
        with self._lock:
            self._next = view
            self._change()
        return True

    def end_ops(self) -> None:
        """End the pending ops of revoked epochs. Their threads wake up and compete for the interpreter."""
        while self._revoked:
            comm, error = self._revoked.pop()
            comm.abort(error)

    def end(self, error: HoldfastError) -> None:
        """Record that this process can do nothing more in the job. The first reason is kept."""
        with self._lock:
            self._ended = self._ended or error
            self._over = self._over or error
            view, comms = self._view, (self._comm, self._lasting)
            self._change()
        for comm in comms:
            if comm is not None:
                comm.abort(error)
        if view is not None:
            self._on_over(view.epoch)

    # Called by the session ------------------------------------------------------------------------------------

    def adopt_announced_view(self, word: bytes) -> None:
        """Switch to the view that another rank has announced.

        Does nothing if it is not the next view, or one without this process: the runtime then installs what is valid.
        """
        old = self._view
        if old is None:
            return
        try:
            view = apply_delta(old, ViewDelta.decode(word))
        except CorruptData:
            return
        if view.phase == "running" and view.rank_of(self._identity) is not None:
            self.revoke(old.epoch, _why_replaced(old, view), f"epoch {view.epoch} replaces it: {view.reason}")
            self.install(view)

    def held(self, epoch: int) -> AbstractContextManager[None]:
        """Hold `epoch` so that it is not revoked meanwhile. Raises the reason if it is over."""
        held = self._held
        if held._epoch != epoch:
            held = self._held = _HeldEpoch(self, epoch)
        return held

    def bind(self, comm: Communicator, *, lasting: bool = False) -> None:
        """End `comm` when its epoch is revoked, or only when its members build another one if it is `lasting`.

        Raises the reason if its epoch is over.
        """
        with self._lock:
            self._check(comm.epoch)
            if lasting:
                self._lasting = comm
            else:
                self._comm = comm

    def is_over(self, epoch: int) -> bool:
        """Whether `epoch` is revoked or replaced."""
        return self._view is None or self._view.epoch != epoch or self._over is not None

    def place(self) -> OpPosition:
        """The position of this process in the ops of its epoch."""
        view, comm = self._view, self._comm
        if comm is None or view is None:
            return OpPosition(view.epoch if view is not None else 0, 0, False)
        return OpPosition(comm.epoch, *comm.progress)

    def why_over(self, epoch: int) -> HoldfastError | None:
        """The error that ended `epoch`; None while it is valid."""
        with self._lock:
            try:
                self._check(epoch)
            except HoldfastError as error:
                return error.with_traceback(None)
        return None

    def wait_over(self, epoch: int, timeout: float) -> bool:
        """Wait until `epoch` is revoked or replaced; whether it was, within `timeout` seconds."""
        until = time.monotonic() + timeout
        while True:
            changed = self._changed
            left = until - time.monotonic()
            if self.is_over(epoch) or left <= 0:
                return self.is_over(epoch)
            changed.wait(left)

    def wait(self, newer_than: int, timeout: float) -> View:
        """The newest view, once its epoch exceeds `newer_than` and it is not revoked.

        Raises the error that ended this process's part in the job, or OpTimeout after `timeout` seconds.
        """
        began = time.monotonic()
        while True:
            changed = self._changed
            with self._lock:
                following, self._next = self._next, None
            if following is not None:
                self.install(following)
            with self._lock:
                if self._ended is not None:
                    raise self._ended.again()
                view = self._view
                if view is not None and view.epoch > newer_than and self._over is None:
                    return view
                left = began + timeout - time.monotonic()
                if left <= 0:
                    raise OpTimeout("rebuild", newer_than, timeout)
            changed.wait(left)

    def next_view(self, newer_than: int, timeouts: Timeouts, failure: HoldfastError | None = None) -> View:
        """Wait for a view newer than `newer_than` that has this process.

        The wait ends after the time that a rebuild and a join may take. A spare (`newer_than` is 0) waits as long as
        the job runs. The timeout's cause is the `failure` before it.
        """
        while True:
            try:
                return self.wait(newer_than, timeouts.rebuild + timeouts.join)
            except OpTimeout as late:
                if newer_than:
                    raise late from failure

    def _change(self) -> None:
        """End the waits for a change. Under the lock."""
        changed, self._changed = self._changed, HandlerEvent()
        changed.set()

    def _check(self, epoch: int) -> None:
        if self._ended is not None:
            raise self._ended.again()
        if self._view is None or self._view.epoch != epoch:
            if self._why_before is not None and self._why_before[0] == epoch:
                raise self._why_before[1].again()
            raise Revoked(epoch, "a later epoch has begun")
        if self._over is not None:
            raise self._over.again()


def _why_replaced(old: View, new: View) -> HoldfastError:
    """What ends the ops of a view when the next one takes its place."""
    ranks = [rank for rank, member in enumerate(old.members) if member.id not in new.ranks]
    return PeerFailed(ranks, new.reason) if ranks else Revoked(old.epoch, new.reason)


def _installed(view: View, rank: int | None) -> ViewInstalled:
    return ViewInstalled(
        epoch=view.epoch,
        members=view.remember("ids", view.members, lambda: tuple(member.id for member in view.members)),
        rank=rank,
        reason=view.reason,
        min_size=view.job.min_size,
        over=view.degraded_from or UNSET,
    )
