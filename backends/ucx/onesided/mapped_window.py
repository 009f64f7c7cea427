"""Windows in memory that UCX itself reads and writes: the registered tensor of every rank, and a header.

A header is memory allocated by UCX. It holds what the others write to its rank, a lock for atomics, and one word a peer
that means "I am writing into your memory". How these are written differs: `near_window` over shared memory,
`far_window` over a network that does so in hardware.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.backends.ucx.onesided.deferred_free import sweep
from holdfast.backends.ucx.onesided.regions import Mapping
from holdfast.backends.ucx.onesided.window import UcxWindow
from holdfast.backends.ucx.onesided.worker import OneSidedWorker, exchange
from holdfast.comms.system.cpu_wait import words_at
from holdfast.comms.transport.base import Transport


class _PartAddress(msgspec.Struct, frozen=True, array_like=True):
    """The addresses of a rank's header and memory. `key` is empty for a window without elements."""

    header: int
    header_key: bytes
    memory: int
    key: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class RemotePart:
    """A rank's part, as this rank accesses it. `mapped` is the address of its header here, or 0."""

    endpoint: Any
    header: int
    header_key: Any
    mapped: int
    memory: int
    key: Any
    nbytes: int


class RegisteredWindow(UcxWindow[OneSidedWorker, RemotePart]):
    """A window in memory that is registered with UCX, which reads and writes it itself."""

    def _prepare(self) -> None:
        sweep()
        self._side.sweep()
        self._plain = self._worker.plain
        self._memory: Mapping | None = None
        words = self._header_words = 3 * self._size + 1
        with self._side.lock:
            self._header = Mapping(self._worker, 8 * words, None)
        ctypes.memset(self._header.address, 0, 8 * words)
        self._mine = words_at(self._header.address, words)

    def _open(self, transport: Transport, deadline: float) -> None:
        exposed = self._exposed
        with self._side.lock:
            if exposed.nbytes:
                self._memory = Mapping(self._worker, exposed.nbytes, exposed.address)
        memory = self._memory
        card = _PartAddress(
            self._header.address,
            self._header.key,
            memory.address if memory else 0,
            memory.key if memory else b"",
            exposed.nbytes,
        )
        cards = exchange(transport, msgspec.msgpack.encode(card), deadline)
        for rank, text in enumerate(cards):
            self._parts.append(self._reach(rank, msgspec.msgpack.decode(text, type=_PartAddress)))

    def _reach(self, rank: int, card: _PartAddress) -> RemotePart:
        side = self._side
        with side.lock:
            header_key = side.unpack(rank, card.header_key)
            key = side.unpack(rank, card.key) if card.key else None
            mapped = self._mapped(header_key, card.header)
        return RemotePart(side.endpoints[rank], card.header, header_key, mapped, card.memory, key, card.nbytes)

    def _mapped(self, key: Any, header: int) -> int:
        """The address at which a rank's header is mapped into this process; 0 if it cannot be."""
        return 0

    def _release_memory(self) -> None:
        with self._side.lock:
            for part in self._parts:
                for key in (part.header_key, part.key):
                    if key is not None:
                        self._call.ucp_rkey_destroy(key)
        super()._release_memory()

    def _unmap(self) -> None:
        """Release the registered memory."""
        with self._side.lock:
            for mapping in (self._memory, self._header):
                if mapping is not None:
                    mapping.close()
