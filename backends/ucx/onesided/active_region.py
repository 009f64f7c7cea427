"""Regions of the memory plane by active messages: those of this process, and access to those of others."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from holdfast.backends.ucx.onesided import active_messages
from holdfast.backends.ucx.onesided.active_messages import ActiveMessages, ActiveRequest, ExposedRange, in_pieces
from holdfast.backends.ucx.onesided.regions import UcxAddress
from holdfast.backends.ucx.onesided.remote import Owner, OwnerUnreachable
from holdfast.backends.ucx.worker import UcxWorker
from holdfast.comms.errors import CorruptData, RegionGone, Unsupported
from holdfast.comms.tensors.exposed import ExposedMemory
from holdfast.comms.transport.base import Peer


class ActiveTable:
    """The regions of this process. The plane's lock is held around each call."""

    def __init__(self, messages: ActiveMessages, worker: UcxWorker, owner: Peer) -> None:
        self._messages, self._worker, self._owner = messages, worker, owner
        self._generation = secrets.randbits(62)

    def expose(self, memory: ExposedMemory, writable: bool) -> UcxAddress:
        self._generation += 1
        self._messages.expose(self._generation, ExposedRange(memory, writable))
        return UcxAddress(self._owner, self._worker.address, b"", 0, self._generation, b"", 0, memory.nbytes, writable)

    def invalidate(self, address: UcxAddress) -> None:
        """Withdraw a region: no peer reads or writes its memory any more."""
        self._messages.withdraw(address.generation)

    def wait_for_writer(self, address: UcxAddress) -> None:
        """Does nothing: the owner itself carries out the writes, one message at a time."""

    def free(self, address: UcxAddress) -> None:
        """Does nothing: a generation is never used twice."""

    def close(self) -> None:
        """Does nothing: the plane has closed the regions."""


class ActiveRegion:
    """A region with an owner that carries out reads and writes. The plane's lock is held around each call."""

    def __init__(self, owner: Owner, address: UcxAddress, messages: ActiveMessages) -> None:
        self.owner, self.address, self._messages = owner, address, messages

    def check(self, deadline: float) -> None:
        """Raise `RegionGone` unless the region is open now."""
        self._in_pieces(lambda offset, nbytes: self._read(0, offset, nbytes), 0, deadline, "memory access")

    def pull(self, into: int, offset: int, nbytes: int, deadline: float) -> None:
        """Copy one block of the region to the address `into`. Raises `RegionGone` if it must not be used."""
        self._in_pieces(
            lambda start, part: self._read(into + start, offset + start, part), nbytes, deadline, "memory read"
        )

    def _read(self, into: int, offset: int, nbytes: int) -> ActiveRequest:
        return self._messages.read(self.owner.endpoint, self.address.generation, offset, into, nbytes)

    def push(self, source: int, offset: int, nbytes: int, deadline: float) -> None:
        """Copy one block at the address `source` into the region."""
        if not self.address.writable:
            raise Unsupported("writing to a read-only region", "its owner must expose it with writable=True")
        write, endpoint, region = self._messages.write, self.owner.endpoint, self.address.generation
        self._in_pieces(
            lambda start, part: write(endpoint, region, offset + start, source + start, part, None),
            nbytes,
            deadline,
            "memory write",
        )

    def _in_pieces(self, begin: Callable[[int, int], ActiveRequest], nbytes: int, deadline: float, op: str) -> None:
        in_pieces(nbytes, begin, lambda ask: self._finish(ask, deadline, op), self._messages.forget)

    def _finish(self, ask: ActiveRequest, deadline: float, op: str) -> None:
        self.owner.until(lambda: ask.status != active_messages.WAITING, deadline, op)
        pid = self.owner.pid
        if ask.status == active_messages.GONE:
            raise RegionGone(f"process {pid} closed the region; what was read of it must not be used")
        if ask.status == active_messages.REFUSED:
            raise CorruptData(f"process {pid} refuses a {op}: no such bytes in the region; a forged handle")
        if ask.status == active_messages.BROKEN:
            self.owner.check()
            raise OwnerUnreachable(f"process {pid} could not be asked; its connection broke")

    def close(self) -> None:
        """Does nothing: no resource is held."""
