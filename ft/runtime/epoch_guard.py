"""The epoch that this process works in, between the thread that learns of it and the thread that works in it.

The runtime installs and revokes; the session waits for the next view, and does what must not happen in an epoch that
is over while it holds the epoch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import CorruptData, HoldfastError, OpTimeout, PeerFailed, Revoked
from holdfast.ft.detectors.stragglers import OpPosition
from holdfast.ft.membership.view import View
from holdfast.ft.membership.view_delta import ViewDelta, applied, between
from holdfast.ft.telemetry.event_log import EventLog


class Witness(Protocol):
    """Who is told what happens to a tenure, as it happens, from any thread."""

    def installed(self, view: View) -> None:
        """`view`, which is running, holds."""

    def revoked(self, epoch: int, reason: str) -> None:
        """`epoch` holds no more."""


class EpochEventLogger:
    """The witness that writes it into the events of a process."""

    def __init__(self, identity: str, events: EventLog) -> None:
        self._identity, self._events = identity, events

    def installed(self, view: View) -> None:
        members = [member.id for member in view.members]
        rank = view.rank_of(self._identity)
        self._events.emit("installed", epoch=view.epoch, members=members, rank=rank, reason=view.reason)

    def revoked(self, epoch: int, reason: str) -> None:
        self._events.emit("revoked", epoch=epoch, reason=reason)


class EpochGuard:
    """The newest view that this process is in, whether it still holds, and the communicator that lives in it."""

    def __init__(self, identity: str = "", witness: Witness | None = None) -> None:
        """For the process `identity`."""
        self._identity, self._witness = identity, witness
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._view: View | None = None
        self._over: HoldfastError | None = None
        self._why_before: tuple[int, HoldfastError] | None = None
        self._comm: Communicator | None = None
        self._revoked: list[tuple[Communicator, HoldfastError]] = []
        self._ended: HoldfastError | None = None
        self._next: View | None = None
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
        """Call `tell(epoch)`, from any thread, when `epoch` and those before it hold no more."""
        self._on_over = tell

    # What the runtime says ------------------------------------------------------------------------------------

    def install(self, view: View) -> None:
        """`view` holds from now on, if it is newer than the one at hand."""
        with self._lock:
            if self._view is not None and view.epoch <= self._view.epoch:
                return
            if view.phase == "running" and self._witness is not None:
                self._witness.installed(view)
            replaced, why = self._view, self._over
            self._why_before = (replaced.epoch, why) if replaced is not None and why is not None else None
            self._view, self._over, self._comm = view, None, None
            self._changed.notify_all()
        self._on_over(view.epoch - 1)

    def revoke(self, epoch: int, error: HoldfastError, reason: str = "") -> bool:
        """`epoch` is over: nothing more can be done in it. False if that was known.

        The ops that are pending in it end when `end_ops` is called.
        """
        with self._lock:
            if self._view is None or self._view.epoch != epoch or self._over is not None:
                return False
            self._over = error
            if self._comm is not None:
                self._revoked.append((self._comm, error))
            if self._witness is not None:
                self._witness.revoked(epoch, reason)
            self._changed.notify_all()
        self._on_over(epoch)
        return True

    def rest(self) -> None:
        """Somebody has died: the ops that are pending will be ended, and need not be quick to notice."""
        comm = self._comm
        if comm is not None:
            comm.transport.rest()

    def announce(self, view: View) -> bool:
        """Leave word of `view`, which the register has taken, where the other ranks of the epoch before it wait in ops.
        Whether there is such a way. Here the session installs it, once it looks for what comes next.
        """
        old, comm = self._view, self._comm
        if old is None or comm is None or comm.epoch != old.epoch:
            return False
        change = between(old, view)
        if change is None or not comm.announce(change.encode()):
            return False
        with self._lock:
            self._next = view
            self._changed.notify_all()
        return True

    def end_ops(self) -> None:
        """End the ops that are pending in revoked epochs. Their threads wake up, and compete for the interpreter."""
        while self._revoked:
            comm, error = self._revoked.pop()
            comm.abort(error)

    def end(self, error: HoldfastError) -> None:
        """This process can do nothing more in the job. The first reason stays."""
        with self._lock:
            self._ended = self._ended or error
            self._over = self._over or error
            view, comm = self._view, self._comm
            self._changed.notify_all()
        if comm is not None:
            comm.abort(error)
        if view is not None:
            self._on_over(view.epoch)

    # What the session does ------------------------------------------------------------------------------------

    def adopt_announced_view(self, word: bytes) -> None:
        """Go on in the view that another rank has announced. If that is not the next one, or not one for this process
        to go on in, nothing happens: what holds then, the runtime will say.
        """
        old = self._view
        if old is None:
            return
        try:
            view = applied(old, ViewDelta.decode(word))
        except CorruptData:
            return
        if view.phase == "running" and view.rank_of(self._identity) is not None:
            ranks = [rank for rank, member in enumerate(old.members) if member.id not in view.ranks]
            why = PeerFailed(ranks, view.reason) if ranks else Revoked(old.epoch, view.reason)
            self.revoke(old.epoch, why, f"epoch {view.epoch} replaces it: {view.reason}")
            self.install(view)

    @contextmanager
    def held(self, epoch: int) -> Iterator[None]:
        """Do something in `epoch` that cannot be overtaken by its revocation. Raises why it is over if it is."""
        with self._lock:
            self._check(epoch)
            yield

    def carry(self, comm: Communicator) -> None:
        """End `comm` when its epoch is revoked. Raises why it is over if it is."""
        with self._lock:
            self._check(comm.epoch)
            self._comm = comm

    def is_over(self, epoch: int) -> bool:
        """Whether `epoch` is revoked or replaced."""
        return self._view is None or self._view.epoch != epoch or self._over is not None

    def place(self) -> OpPosition:
        """How far this process is in the ops of its epoch."""
        view, comm = self._view, self._comm
        if comm is None or view is None:
            return OpPosition(view.epoch if view is not None else 0, 0, False)
        return OpPosition(comm.epoch, *comm.progress)

    def why_over(self, epoch: int) -> HoldfastError | None:
        """Why `epoch` is over; None while it holds."""
        with self._lock:
            try:
                self._check(epoch)
            except HoldfastError as error:
                return error.with_traceback(None)
        return None

    def wait_over(self, epoch: int, timeout: float) -> bool:
        """Wait until `epoch` is revoked or replaced; whether it was, within `timeout` seconds."""
        if self.is_over(epoch):
            return True
        with self._lock:
            return self._changed.wait_for(lambda: self.is_over(epoch), timeout)

    def wait(self, newer_than: int, timeout: float) -> View:
        """The newest view once its epoch exceeds `newer_than` and it holds.

        Raises why this process can do nothing more in the job, or OpTimeout after `timeout` seconds.
        """
        began = time.monotonic()
        while True:
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
                if self._next is None:
                    self._changed.wait(left)

    def _check(self, epoch: int) -> None:
        if self._ended is not None:
            raise self._ended.again()
        if self._view is None or self._view.epoch != epoch:
            if self._why_before is not None and self._why_before[0] == epoch:
                raise self._why_before[1].again()
            raise Revoked(epoch, "a later epoch has begun")
        if self._over is not None:
            raise self._over.again()
