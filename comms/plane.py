"""One-sided access without a group: any process reads memory that another exposed.

The weight store stands on it. A backend that can do it returns a `MemoryPlane` from its plugin's `memory` factory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec
import torch

from holdfast.comms.errors import CorruptData
from holdfast.comms.work import Work


class Handle(msgspec.Struct, frozen=True):
    """Where a region is: small, serialisable, safe to receive from anybody (decoding runs no code).

    `address` is the backend's own text; `nbytes` the region's size in bytes.
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
        except msgspec.DecodeError as error:
            raise CorruptData(f"not a memory handle: {error}") from error


class Region(ABC):
    """Memory that this process exposes, until `close`. Keeps its tensor alive. A context manager."""

    handle: Handle

    @abstractmethod
    def close(self) -> None:
        """From here on readers get `RegionGone`. Idempotent."""

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class MemoryPlane(ABC):
    """Expose memory, read and write the memory of others. Safe to use from several threads."""

    name: str

    @abstractmethod
    def expose(self, tensor: torch.Tensor, writable: bool = False) -> Region:
        """Let any process of this job read (and, if `writable`, write) the contiguous `tensor` where it lies."""

    @abstractmethod
    def read(
        self, handle: Handle, into: torch.Tensor, offset: int = 0, *, timeout: float = 30.0
    ) -> Work:
        """Copy `into.nbytes` bytes from byte `offset` of the region into the contiguous tensor `into`.

        `wait()` of the returned work raises `RegionGone` if the region was closed, or its process died, at any
        time before the last byte had arrived; `ValueError` at once if the range is outside the region.
        """

    @abstractmethod
    def write(
        self, handle: Handle, source: torch.Tensor, offset: int = 0, *, timeout: float = 30.0
    ) -> Work:
        """Copy the contiguous tensor `source` to byte `offset` of a writable region."""

    @abstractmethod
    def close(self) -> None:
        """Close every region of this plane and let go of what it holds of others. Idempotent."""

    def __enter__(self) -> MemoryPlane:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
