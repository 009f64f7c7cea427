"""Base of the windows over UCX. Subclasses differ in how bytes move and how ranks notify each other.

The others write two words a peer to a rank: whether they have closed their window, and how often they have signalled.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from typing import Any, Generic, Protocol, TypeVar

import torch

from holdfast.backends.ucx.onesided.worker import OneSidedWorker
from holdfast.comms.errors import HoldfastError
from holdfast.comms.tensors.exposed import ExposedMemory
from holdfast.comms.transport.base import Transport
from holdfast.comms.transport.window_memory import WindowMemory, closed_here, closed_there

YIELDS = 200
SLEEP_SECONDS = 0.0002
LEAVE_SECONDS = 0.3
"""How long `close` waits until peers know of it, and for writers in the middle of a block."""
_LEAST_SECONDS = 0.02


class Sized(Protocol):
    """A rank's part, as this rank accesses it."""

    @property
    def nbytes(self) -> int: ...


PartOf = TypeVar("PartOf", bound=Sized)
SideOf = TypeVar("SideOf", bound=OneSidedWorker)


class UcxWindow(WindowMemory, Generic[SideOf, PartOf]):
    """See the module. Calls may come from several threads."""

    _mine: Any
    """The words that the others write to this rank."""

    def __init__(self, side: SideOf, transport: Transport, tensor: torch.Tensor, deadline: float) -> None:
        super().__init__(side.size)
        self._side, self._exposed = side, ExposedMemory(tensor)
        self._worker, self._call = side.worker, side.worker.lib.call
        self._rank, self._size = side.rank, side.size
        self._signalling = threading.Lock()
        self._closed = False
        self._parts: list[PartOf] = []
        self._signalled = [0] * side.size
        self._prepare()
        try:
            self._open(transport, deadline)
            self.sizes = [part.nbytes for part in self._parts]
            transport.barrier(deadline)
        except BaseException:
            self._closed = True
            self._release_memory()
            raise

    @abstractmethod
    def _prepare(self) -> None:
        """Allocate the words that the others write, before they can."""

    @abstractmethod
    def _open(self, transport: Transport, deadline: float) -> None:
        """Expose the tensor, and find the parts of all ranks; collective."""

    # -- liveness

    def check_live(self, rank: int) -> None:
        self._live(rank)

    def _live(self, rank: int) -> PartOf:
        if self.leaving:
            raise closed_here()
        if self._mine[2 * rank]:
            raise closed_there(rank)
        self._side.check(rank)
        return self._parts[rank]

    # -- signals

    def signal(self, rank: int, deadline: float) -> None:
        part = self._live(rank)
        with self._signalling:
            self._signalled[rank] += 1
            self._notify(rank, part, 2 * self._rank + 1, self._signalled[rank], deadline, "signal")

    @abstractmethod
    def _notify(self, rank: int, part: PartOf, word: int, value: int, deadline: float, op: str) -> None:
        """Set a word in a rank's header, after all that was issued to it before."""

    def _poll(self) -> None:
        """Progress the words of the others, where that takes this rank's help."""

    def count_signals(self, rank: int) -> int:
        self._poll()
        return int(self._mine[2 * rank + 1])

    # -- the end

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._announce_close()
        finally:
            self._release_memory()

    def _announce_close(self) -> None:
        """Tell all living ranks that this window is closed; unless stopped, they know it when this returns."""
        until = time.monotonic() + LEAVE_SECONDS
        self._mine[2 * self._rank] = 1
        try:
            dead = self._side.find_dead()
        except HoldfastError:
            dead = frozenset()
        for told in (False, True):
            for rank in range(self._size):
                if rank == self._rank or rank in dead:
                    continue
                limit = max(until, time.monotonic() + _LEAST_SECONDS)
                try:
                    if told:
                        self._await_delivery(rank, limit)
                    else:
                        self._notify(rank, self._parts[rank], 2 * self._rank, 1, limit, "closing a window")
                except HoldfastError:
                    continue  # the peer is stopped or gone

    def _await_delivery(self, rank: int, deadline: float) -> None:
        """Wait until a rank has received its words."""

    def _release_memory(self) -> None:
        self._parts.clear()
        self._withdraw()

    @abstractmethod
    def _withdraw(self) -> None:
        """Stop exposing the tensor's memory. Transfers that arrive later must not find memory in use."""
