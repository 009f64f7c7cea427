"""How ops run: in the order issued, each by its deadline, here or on a worker thread; and how they all end.

An `Executor` knows nothing of what an op does. It holds a communicator's order, its observers, and its end.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial

from holdfast.comms.agreement import Agreement
from holdfast.comms.errors import HoldfastError, Mismatch, OpTimeout, PeerFailed, Revoked
from holdfast.comms.journal import About, Journal
from holdfast.comms.plugins import OpEvent
from holdfast.comms.registry import registry
from holdfast.comms.transport import Context, Transport
from holdfast.comms.work import DONE, Work

Body = Callable[[float], None]
"""One op: called with its deadline (`time.monotonic()` seconds)."""

_CLOSE_SECONDS = 10.0
_LATEST = 1e9
"""Deadlines are earlier: in nanoseconds, as systems count them, later ones would overflow."""


class Executor:
    """Runs the ops of one communicator over its transport."""

    def __init__(
        self,
        transport: Transport,
        context: Context,
        timeout: float,
        check: bool,
        on_close: Callable[[], None] | None,
        journal: Journal | None = None,
    ) -> None:
        self.timeout = timeout
        self._journal = journal
        self._transport = transport
        self._name, self._epoch, self._rank = context.name, context.epoch, context.rank
        self._agreement = Agreement(transport) if check and context.size > 1 else None
        self._on_close = on_close
        self._registry = registry()
        self._entry = threading.Lock()
        self._ending = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Work, Callable[[], None]] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._last: Work = DONE
        self._seq = self._joint = 0
        self._over: HoldfastError | None = None
        self._closed = False
        self._parts: weakref.WeakSet[Executor] = weakref.WeakSet()

    @property
    def over(self) -> HoldfastError | None:
        """Why no more ops can run; None while they can."""
        return self._over

    @property
    def progress(self) -> tuple[int, bool]:
        """How many ops of all ranks together were issued, and whether any op is running. From any thread."""
        return self._joint, self._entry.locked() or not self._last.done()

    def issue(
        self,
        name: str,
        nbytes: int,
        body: Body,
        async_op: bool,
        timeout: float | None,
        agreed: Callable[[], str] | None,
        about: About = None,
        detail: Hashable = None,
        peer: int = -1,
    ) -> Work:
        """Put an op in order and run it: here, or behind those that are still running.

        `agreed()` says in words what all ranks must agree on; None for point-to-point ops. `about`, `detail` and
        `peer` say the same to a journal.
        """
        if not self._entry.acquire(False):
            if self._over is not None:
                self._refuse()
            raise Mismatch(
                f"{name} was called while another thread is inside an op of communicator {self._name!r}: their "
                "order could differ from rank to rank; use one thread, a lock, or a communicator each (split)"
            )
        try:
            if self._over is not None:
                self._refuse()
            try:
                deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
            except TypeError:
                raise TypeError(f"timeout={timeout!r}: a timeout is a number of seconds") from None
            if not deadline < _LATEST:
                raise ValueError(f"timeout={timeout!r}: every op has an end; pass less than {_LATEST:.0e} seconds")
            self._seq += 1
            self._joint += agreed is not None
            joint = self._joint if agreed is not None else 0
            if self._agreement is not None and agreed is not None:
                body = self._agreement.checked(body, name, agreed)
            if self._registry.observed:
                body = self._observed(body, name, self._seq, nbytes)
            if self._journal is not None:
                body = partial(_recorded, self._journal, body, name, self._seq, nbytes, about, detail, peer)
            if not async_op:
                if self._last is not DONE and not self._last.done():
                    body = partial(self._after, self._last, body)
                self._run(name, self._seq, joint, body, deadline)
                return DONE
            if self._transport.streams:
                seq = self._seq
                return self._transport.launch(name, lambda: self._run(name, seq, joint, body, deadline))
            return self._enqueue(name, self._seq, joint, body, deadline)
        finally:
            self._entry.release()

    def _after(self, earlier: Work, body: Body, deadline: float) -> None:
        """Run `body` once an earlier op is complete, which may have more time than this one."""
        began = time.monotonic()
        with contextlib.suppress(Exception):
            earlier.wait(max(deadline - began, 0.0))
        if not earlier.done():
            raise OpTimeout("an earlier op", 0, time.monotonic() - began)  # 0: this one was not begun
        if self._over is not None:
            self._refuse()
        body(deadline)

    def _run(self, name: str, seq: int, joint: int, body: Body, deadline: float) -> None:
        try:
            body(deadline)
        except OpTimeout as error:
            named = OpTimeout(name, seq, error.waited, error.missing_ranks)
            named.communicator, named.joint = self._name, joint if error.seq else 0
            self._end(Revoked(self._epoch, f"an earlier op failed: {named}"))
            raise named from None
        except BaseException as error:
            if isinstance(error, PeerFailed):
                error.communicator = self._name
            self._end(Revoked(self._epoch, f"an earlier op failed: {error}"))
            raise

    def _refuse(self) -> None:
        over = self._over
        raise Revoked(self._epoch, over.reason if isinstance(over, Revoked) else str(over)) from over

    def _enqueue(self, name: str, seq: int, joint: int, body: Body, deadline: float) -> Work:
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name=f"holdfast-ops-{self._name}", daemon=True)
            self._worker.start()

        def task() -> None:
            if self._over is not None:
                self._refuse()
            self._run(name, seq, joint, body, deadline)

        self._last = work = Work(name)
        self._queue.put((work, task))
        return work

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            work, task = item
            work.run(task)

    def _observed(self, body: Body, name: str, seq: int, nbytes: int) -> Body:
        def observed(deadline: float) -> None:
            event = OpEvent(self._name, self._epoch, self._rank, seq, name, nbytes)
            self._registry.before_op(event)
            began = time.perf_counter()
            error: BaseException | None = None
            try:
                body(deadline)
            except BaseException as caught:
                error = caught
                raise
            finally:
                seconds = time.perf_counter() - began
                self._registry.after_op(replace(event, seconds=seconds, error=error))

        return observed

    def abort(self, reason: str | HoldfastError) -> None:
        """End the op that is running, and all later ones. The first reason stays."""
        self._end(reason if isinstance(reason, HoldfastError) else Revoked(self._epoch, reason))

    def carry(self, part: Executor) -> None:
        """End `part` when this ends, unless that is by being closed."""
        with self._ending:
            if self._over is None:
                self._parts.add(part)
                return
        part.abort(self._end_of_whole(self._over))

    def announce(self, word: bytes) -> bool:
        """`Transport.announce`, while ops can run here."""
        with self._ending:
            return self._over is None and self._transport.announce(word)

    def _end(self, error: HoldfastError) -> None:
        with self._ending:
            if self._over is not None:
                return
            self._over = error
            self._transport.abort(error)
            parts = list(self._parts)
        for part in parts:
            part.abort(self._end_of_whole(error))

    def _end_of_whole(self, error: HoldfastError) -> Revoked:
        return Revoked(self._epoch, f"{self._name!r}, which it was split from, is over: {error}")

    def close(self) -> None:
        """Abort what is pending and release the transport. Idempotent."""
        with self._ending:
            if self._closed:
                return
            self._closed = True
            idle = self._last.done() and self._entry.acquire(blocking=False)
            if self._over is None:
                self._over = Revoked(self._epoch, "closed")
                if not idle:
                    self._transport.abort(self._over)
        if not idle:
            idle = self._entry.acquire(timeout=_CLOSE_SECONDS)
        if self._worker is not None:
            self._queue.put(None)
            self._worker.join(_CLOSE_SECONDS)
        if not idle or (self._worker is not None and self._worker.is_alive()):
            raise HoldfastError(
                f"communicator {self._name!r} cannot be closed: its backend did not end a pending op within "
                f"{_CLOSE_SECONDS:.0f} s of its abort; its resources are kept until the process ends"
            )
        self._transport.close()
        if self._on_close is not None:
            self._on_close()


def _recorded(
    journal: Journal,
    body: Body,
    name: str,
    seq: int,
    nbytes: int,
    about: About,
    detail: Hashable,
    peer: int,
    deadline: float,
) -> None:
    """Run an op between two words to a journal."""
    journal.enter(name, seq, nbytes, about, detail, peer)
    try:
        body(deadline)
    except BaseException as error:
        journal.leave(error)
        raise
    journal.leave(None)
