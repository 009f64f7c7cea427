"""One-sided access without a group: any process reads memory that another exposed.

The weight store stands on it. A backend that can do it returns a `MemoryPlane` from its plugin's `memory`
factory; `memory` opens one by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec
import torch

from holdfast.comms.errors import BackendUnavailable, CorruptData
from holdfast.comms.plugins.spec import Unavailable
from holdfast.comms.work import Work


class Handle(msgspec.Struct, frozen=True):
    """Where a region is: small, serialisable, safe to receive from anybody (decoding runs no code).

    `plane` names the backend, `address` is that backend's own encoding, `nbytes` the region's size in bytes.
    """

    plane: str
    address: bytes
    nbytes: int

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> Handle:
        """Raises `CorruptData` for anything that is not an encoded handle."""
        try:
            return msgspec.msgpack.decode(data, type=Handle)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptData(f"not a memory handle: {error}") from error


class Region(ABC):
    """Memory that this process exposes, until `close`. Keeps its tensor alive. A context manager.

    It is the memory that the tensor had when it was exposed, which is kept, and which torch refuses to resize from then
    on. If the tensor is given other memory all the same (`t.data = ...`, `set_`), the owner's next look at `handle`
    closes the region and raises `RegionGone`; until then others reach the memory that the tensor had.

    A process forked from the one that exposed it does not own it: `close` does nothing there.
    """

    handle: Handle

    @abstractmethod
    def close(self) -> None:
        """From here on readers and writers get `RegionGone`, those in the middle of a copy included.
        Idempotent.

        Raises `OpTimeout` if a writer does not finish the block that it is writing (a stopped process):
        that block may still arrive.
        """

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class MemoryPlane(ABC):
    """Expose memory, read and write the memory of others. Safe to use from several threads."""

    name: str

    @abstractmethod
    def expose(self, tensor: torch.Tensor, writable: bool = False) -> Region:
        """Let any process of this job read (and, if `writable`, write) the contiguous `tensor` where it
        lies.

        Raises ValueError for a tensor that is not contiguous, `Unsupported` for one that this plane cannot
        reach.
        """

    def empty(self, nbytes: int) -> torch.Tensor:
        """Uninitialised memory, as a uint8 tensor of `nbytes` elements, of the kind that this plane reads
        fastest.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    @abstractmethod
    def read(self, handle: Handle, into: torch.Tensor, offset: int = 0, *, timeout: float = 30.0) -> Work:
        """Copy `into.nbytes` bytes from byte `offset` of the region into the contiguous tensor `into`.

        `wait()` of the returned work raises `RegionGone` if the region was closed, or its process died, at
        any time before the last byte had arrived; `CorruptData` for a handle that nobody made; `OpTimeout`
        after `timeout` seconds. ValueError at once if the range is outside the region.
        """

    @abstractmethod
    def write(self, handle: Handle, source: torch.Tensor, offset: int = 0, *, timeout: float = 30.0) -> Work:
        """Copy the contiguous tensor `source` to byte `offset` of a writable region.

        Errors as in `read`, and `Unsupported` for a region that is read-only; nothing is written then.
        """

    @abstractmethod
    def close(self) -> None:
        """Close every region of this plane and let go of what it holds of others. Idempotent."""

    def __enter__(self) -> MemoryPlane:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def memory(name: str = "auto") -> MemoryPlane:
    """Open the memory plane of the backend `name`, or with "auto" the best one that reaches other processes
    here.

    Raises `BackendUnavailable`, with the reasons, if it cannot be had: "auto" does not settle for one that
    reaches only this process.
    """
    from holdfast.comms.plugins.registry import registry

    known = registry()
    if name != "auto":
        backend = known.backend(name)
        if isinstance(backend.status, Unavailable):
            raise BackendUnavailable(name, backend.status.reason, backend.status.install_hint)
        if backend.info.memory is None:
            having = ", ".join(sorted(each for each, info in known.backends.items() if info.memory)) or "none"
            raise BackendUnavailable(name, "it has no memory plane", f"backends that have one: {having}")
        return backend.info.memory()
    reasons = []
    for each in sorted(known.backends, key=lambda each: (each != "shm", each)):
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
