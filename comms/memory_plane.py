"""`MemoryPlane`: one-sided access without a group. Any process of a job reads memory that another exposed.

The weight store uses it. A backend that supports it returns a `MemoryPlane` from its plugin's `memory` factory;
`memory` opens one by name.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import ClassVar

import msgspec
import torch

from holdfast.comms.errors import UNDECODABLE, BackendUnavailable, CorruptData, Unsupported
from holdfast.comms.plugins.spec import Unavailable
from holdfast.comms.work import Work


class Handle(msgspec.Struct, frozen=True):
    """The address of a region, to send to other processes. It is small, and decoding it runs no code.

    `plane` names the backend, `address` is that backend's own encoding, `nbytes` the region's size in bytes.
    """

    plane: str
    address: bytes
    nbytes: int

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> Handle:
        """Decode a handle. Raises `CorruptData` for bytes that are not an encoded handle."""
        try:
            return msgspec.msgpack.decode(data, type=Handle)
        except UNDECODABLE as error:
            raise CorruptData(f"not a memory handle: {error}") from error


class Region(ABC):
    """Memory that this process exposes until `close`. Keeps its tensor alive. A context manager.

    The region is the memory that the tensor had when it was exposed. That memory is kept, and torch refuses to resize
    it. If the tensor gets other memory nevertheless (`t.data = ...`, `set_`), the owner's next read of `handle` closes
    the region and raises `RegionGone`; until then other processes access the old memory.

    A forked child does not own the regions of its parent: `close` does nothing there.
    """

    handle: Handle

    @abstractmethod
    def close(self) -> None:
        """Stop exposing the memory: readers and writers get `RegionGone`, also during a copy. Idempotent.

        Raises `OpTimeout` if a writer (such as a stopped process) does not finish the block that it is writing; that
        block may still arrive.
        """

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class MemoryPlane(ABC):
    """Exposes memory of this process, and reads and writes that of others. Thread-safe."""

    name: str
    can_map: ClassVar[bool] = False
    """Whether `map` maps regions in mappable memory of `empty`, of processes on this host."""

    @abstractmethod
    def expose(self, tensor: torch.Tensor, writable: bool = False) -> Region:
        """Let any process of this job read the contiguous `tensor` in place, and write it if `writable`.

        Raises ValueError for a tensor that is not contiguous, `Unsupported` for memory that this plane cannot access.
        """

    def empty(self, nbytes: int, *, mappable: bool = False) -> torch.Tensor:
        """Allocate `nbytes` of the memory that this plane reads fastest, uninitialised, as a uint8 tensor.

        If `mappable`, regions in it can be mapped where this plane can do that; its pages are touched already.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def improve(self, memory: torch.Tensor) -> None:  # noqa: B027
        """Do for mappable memory of `empty` what makes access to it faster, but takes longer than to allocate it.

        The memory may be in use, by other processes too; its contents stay.
        """

    def map(self, handle: Handle, *, lasting: bool) -> torch.Tensor:
        """Map a region of this host into this process, without a copy, as a uint8 tensor.

        The tensor keeps the memory alive. What is written into the tensor stays in this process. If `lasting`, the
        bytes stay as they are, whatever happens to the region and its process: `is_lent` tells the owner not to reuse
        the memory. Else they may change once the region is closed (verify what was read), and the mapping is prepared
        for a copy of all of it.

        Raises `Unsupported` if this plane cannot map the region, `RegionGone` if it was closed or its process died.
        """
        raise Unsupported(f"mapping a region of plane {self.name!r}", "read it")

    def map_read_only(self, handle: Handle) -> torch.Tensor:
        """Map a region of this host, to be read alone. Its bytes may change once it is closed (verify what was read).

        Nothing may be written into the tensor. Devices can be told of its memory. Raises the errors of `map`.
        """
        return self.map(handle, lasting=False)

    def map_writable(self, handle: Handle) -> torch.Tensor:
        """Map a writable region of this host: what is written into the tensor is in the region.

        Nothing tells the owner when writers are done: they say so themselves. Raises the errors of `map`,
        and `Unsupported` for a read-only region.
        """
        raise Unsupported(f"mapping a region of plane {self.name!r}", "write it")

    def is_lent(self, memory: torch.Tensor) -> bool:
        """Whether a process has a lasting mapping of memory that `empty` of this process allocated."""
        return False

    @abstractmethod
    def read(self, handle: Handle, into: torch.Tensor, offset: int = 0, *, timeout: float = 30.0) -> Work:
        """Copy `into.nbytes` bytes from byte `offset` of the region into the contiguous tensor `into`.

        `wait()` of the returned work raises `RegionGone` if the region was closed, or its process died, before the last
        byte arrived; `CorruptData` for a handle that no plane made; `OpTimeout` after `timeout` seconds. Raises
        ValueError at once if the range is outside the region.
        """

    @abstractmethod
    def write(self, handle: Handle, source: torch.Tensor, offset: int = 0, *, timeout: float = 30.0) -> Work:
        """Copy the contiguous tensor `source` to byte `offset` of a writable region.

        Raises the errors of `read`, and `Unsupported` for a read-only region, in which case nothing is written.
        """

    @abstractmethod
    def close(self) -> None:
        """Close every region of this plane, and release its access to other processes' memory. Idempotent."""

    def __enter__(self) -> MemoryPlane:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def memory(name: str = "auto") -> MemoryPlane:
    """Open the memory plane of the backend `name`, or with "auto" the best one between processes of this host.

    HOLDFAST_PLANE says what "auto" means. Raises `BackendUnavailable`, with the reasons, if there is none. "auto" never
    takes a plane that works within one process only.
    """
    from holdfast.comms.plugins.registry import registry

    known = registry()
    name = os.environ.get("HOLDFAST_PLANE", name) if name == "auto" else name
    if name != "auto":
        backend = known.backend(name)
        if isinstance(backend.status, Unavailable):
            raise BackendUnavailable(name, backend.status.reason, backend.status.install_hint)
        if backend.info.memory is None:
            having = ", ".join(sorted(each for each, info in known.backends.items() if info.memory)) or "none"
            raise BackendUnavailable(name, "it has no memory plane", f"backends that have one: {having}")
        return backend.info.memory()
    reasons = []
    first = known.by_priority("memory")
    for each in [*first, *sorted(known.backends.keys() - set(first))]:
        info = known.backends[each]
        if info.memory is None or info.capabilities.one_process:
            continue
        status = known.backend(each).status
        if isinstance(status, Unavailable):
            reasons.append(f"{each}: {status.reason}")
            continue
        return info.memory()
    raise BackendUnavailable(
        "auto",
        "no memory plane reaches other processes here: " + ("; ".join(reasons) or "no backend offers one"),
        "see `holdfast backends`",
    )
