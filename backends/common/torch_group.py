"""Base of the transports over torch's own process groups (gloo, nccl, rccl).

torch's group carries out the ops, but cannot be ended from outside. This base watches the processes of the peers, and
ends the group when the kernel reports a death, or on `abort`. It also builds some ops from others.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from holdfast.comms.errors import HoldfastError, OpTimeout, PeerFailed, Revoked, again
from holdfast.comms.rendezvous.meeting_store import wait_for
from holdfast.comms.system.files import OwnedDescriptor
from holdfast.comms.system.waiting import run_within
from holdfast.comms.transport.base import Context, Transport
from holdfast.comms.transport.liveness import Liveness

Result = TypeVar("Result")

_NOTE_KEY = "ended"
_NOTE_SECONDS = 0.5
"""How long a rank that ends a group waits for the store to take its reason, and another one to read it."""

_NOTE_LENGTH = 500

DEATH_SECONDS = 0.5
"""How long the kernel may take to call a process gone that has lost its connections."""

_log = logging.getLogger("holdfast.backends")


class TorchGroup(Transport):
    """A transport that performs its ops with the c10d backend `_group`."""

    _look_seconds: ClassVar[float | None] = None
    """Seconds between calls of `_own_failure`; None: never."""

    _watching = True

    on_end: Callable[[HoldfastError], None] = staticmethod(lambda error: None)
    """Called once, from any thread, with what has ended the group."""

    def __init__(self, context: Context) -> None:
        self.rank, self.size = context.rank, context.size
        self._epoch = context.epoch
        self._seq = 0
        self._error: HoldfastError | None = None
        self._group: Any = None
        self._liveness = Liveness(context.peers, context.rank)
        self._ending = threading.RLock()  # a signal handler may abort in the middle of an abort
        self._wake = OwnedDescriptor(os.eventfd(0, os.EFD_CLOEXEC))
        self._watcher: threading.Thread | None = None
        self._store: dist.Store | None = context.store if context.size > 1 else None

    @abstractmethod
    def _end_group(self) -> None:
        """End the op that the group is running, from any thread. Called with `_ending` held, perhaps more than once."""

    @abstractmethod
    def _release_group(self) -> None:
        """Release the group; no op is running."""

    @abstractmethod
    def _exchange(
        self, op: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], deadline: float
    ) -> None:
        """Send `inputs[j]` to rank j, on every rank; any of them may be empty."""

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], deadline: float) -> None:
        self._exchange("all_to_all", outputs, inputs, deadline)

    def gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor] | None, dst: int, deadline: float) -> None:
        nothing = tensor.view(-1)[:0]
        given = [tensor if rank == dst else nothing for rank in range(self.size)]
        self._exchange("gather", outputs or [nothing] * self.size, given, deadline)

    def scatter(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int, deadline: float) -> None:
        nothing = tensor.view(-1)[:0]
        taken = [tensor if rank == src else nothing for rank in range(self.size)]
        self._exchange("scatter", taken, inputs or [nothing] * self.size, deadline)

    def _own_failure(self) -> HoldfastError | None:
        """The failure that the group itself has found; None if there is none."""
        return None

    def _watch_peers(self, name: str) -> None:
        """Start to watch the peers: from now on a death ends the group."""
        self._watcher = threading.Thread(target=self._watch, name=f"holdfast-{name}-watch", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while self._liveness.wait(self._wake, self._look_seconds) and self._watching:
            if (death := self._death()) is not None:
                self._peers_ended(death)
            elif (failure := self._own_failure()) is not None:
                if isinstance(failure, PeerFailed) and not failure.ranks:
                    self._liveness.wait(self._wake, DEATH_SECONDS)
                    failure = self._death() or failure
                self.abort(failure)

    def _death(self) -> PeerFailed | None:
        dead = self._liveness.dead()
        return PeerFailed(dead, "the kernel says that the process is gone") if dead else None

    def _peers_ended(self, error: PeerFailed) -> None:
        """End the group, since processes of peers are gone."""
        self.abort(error)

    def _forget_peers(self) -> None:
        self._watching = False
        if self._watcher is not None:
            self._wake.wake()
            self._watcher.join()
        self._wake.close()
        self._liveness.close()

    def abort(self, error: HoldfastError) -> None:
        with self._ending:
            first = self._error is None
            if first:
                self._error = error
                if isinstance(error, Revoked) and error.own:
                    self._leave_reason(error.reason)
            try:
                self._end_group()
            except Exception:
                _log.exception("the group of rank %d could not be ended; its ops end by their timeouts", self.rank)
        if first:
            self.on_end(error)

    @property
    def ended(self) -> HoldfastError | None:
        """What has ended the group; None while it runs."""
        return self._error

    def _leave_reason(self, reason: str) -> None:
        """Write to the store why this rank ends the group: the others see a closed connection alone."""
        store, note = self._store, f"rank {self.rank} aborted: {reason}"[:_NOTE_LENGTH]
        if store is not None:
            within(_NOTE_SECONDS, lambda: store.set(_NOTE_KEY, note))

    def _reason_of_another(self) -> Revoked | None:
        """Why another rank has ended the group, if it left a reason."""
        store = self._store

        def read() -> str:
            return bytes(store.get(_NOTE_KEY)).decode() if store is not None and store.check([_NOTE_KEY]) else ""

        note = within(_NOTE_SECONDS, read)
        return Revoked(self._epoch, note) if note else None

    def close(self) -> None:
        self._forget_peers()
        self._release_group()
        self._store = None


def within(seconds: float, call: Callable[[], Result]) -> Result | None:
    """What `call()`, of a store, returns within `seconds`; None if it takes longer, or the store is gone."""
    try:
        return run_within(seconds, call, delays_exit=False)
    except (RuntimeError, TimeoutError, OSError, ValueError):
        return None


def wait_for_ranks(context: Context, liveness: Liveness, prefix: str) -> None:
    """Wait until all ranks are here. Raises `OpTimeout`, `PeerFailed`, and what `context.over` returns.

    `prefix` of the keys of the store names the place. What torch connects after that needs no time for a late rank.
    """
    store, began = context.store, time.monotonic()
    ready = [f"{prefix}ready/{rank}" for rank in range(context.size)]

    def look() -> None:
        if (over := context.over()) is not None:
            raise again(over)
        if dead := liveness.dead():
            raise PeerFailed(dead, "its process ended before it came to connect")

    store.set(ready[context.rank], "")
    try:
        wait_for(store, ready, context.deadline, look)
    except TimeoutError as error:
        late = tuple(rank for rank in range(context.size) if not store.check([ready[rank]]))
        raise OpTimeout("connect", 0, time.monotonic() - began, late) from error


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes."""
    return tensor.view(-1).view(torch.uint8)


def options(kind: Any, limit: timedelta, **fields: Any) -> Any:
    """torch's options of one op, complete by `limit` from now."""
    made = kind()
    made.timeout = limit
    for name, value in fields.items():
        setattr(made, name, value)
    return made
