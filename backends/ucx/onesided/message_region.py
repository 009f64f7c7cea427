"""Regions of the memory plane by requests and replies: those of this process, and access to those of others."""

from __future__ import annotations

import secrets

from holdfast.backends.ucx.onesided.regions import UcxAddress
from holdfast.backends.ucx.onesided.remote import Owner, OwnerUnreachable
from holdfast.backends.ucx.worker import UcxWorker
from holdfast.comms.errors import CorruptData, HoldfastError, OpTimeout, RegionGone, Unsupported
from holdfast.comms.onesided import requests
from holdfast.comms.onesided.requests import GONE, Exposed, Requests
from holdfast.comms.tensors.exposed import ExposedMemory
from holdfast.comms.transport.base import Peer


class MessageTable:
    """The regions of this process. The plane's lock is held around each call."""

    def __init__(self, asked: Requests, worker: UcxWorker, owner: Peer) -> None:
        self._requests, self._worker, self._owner = asked, worker, owner
        self._generation = secrets.randbits(62)

    def expose(self, memory: ExposedMemory, writable: bool) -> UcxAddress:
        self._generation += 1
        self._requests.expose(self._generation, Exposed(memory, writable))
        return UcxAddress(self._owner, self._worker.address, b"", 0, self._generation, b"", 0, memory.nbytes, writable)

    def invalidate(self, address: UcxAddress) -> None:
        """Withdraw a region: no peer reads or writes its memory any more."""
        self._requests.withdraw(address.generation)

    def wait_for_writer(self, address: UcxAddress) -> None:
        """Does nothing: the owner itself carries out the writes, one message at a time."""

    def free(self, address: UcxAddress) -> None:
        """Does nothing: a generation is never used twice."""

    def close(self) -> None:
        """Does nothing: the plane has closed the regions."""


class MessageRegion(requests.Owner):
    """A region with an owner that carries out reads and writes. The plane's lock is held around each call."""

    def __init__(self, owner: Owner, address: UcxAddress, asked: Requests) -> None:
        self.owner, self.address, self._requests = owner, address, asked
        self.to = owner.endpoint

    def check(self, deadline: float) -> None:
        """Raise `RegionGone` unless the region is open now."""
        self._requests.read(self, self.address.generation, 0, (0, 0), None, deadline, "memory access")

    def pull(self, into: int, offset: int, nbytes: int, deadline: float) -> None:
        """Copy one block of the region to the address `into`. Raises `RegionGone` if it must not be used."""
        self._requests.read(self, self.address.generation, offset, (into, nbytes), None, deadline, "memory read")

    def push(self, source: int, offset: int, nbytes: int, deadline: float) -> None:
        """Copy one block at the address `source` into the region."""
        if not self.address.writable:
            raise Unsupported("writing to a read-only region", "its owner must expose it with writable=True")
        self._requests.write(self, self.address.generation, offset, (source, nbytes), None, deadline, "memory write")

    def check_live(self) -> None:
        self.owner.check()
        if self.to in self._requests.channel.broken:
            raise OwnerUnreachable(f"process {self.owner.pid} could not be asked; its connection broke")

    def error(self, outcome: int, op: str) -> HoldfastError:
        if outcome == GONE:
            return RegionGone(f"process {self.owner.pid} closed the region; what was read of it must not be used")
        return CorruptData(f"process {self.owner.pid} refuses a {op}: no such bytes in the region; a forged handle")

    def late(self, op: str, seconds: float) -> OpTimeout:
        return OpTimeout(op, 0, seconds)

    def close(self) -> None:
        """Does nothing: no resource is held."""
