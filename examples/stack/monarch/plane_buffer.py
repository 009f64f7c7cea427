"""`PlaneBuffer`: the calls of Monarch's `RDMABuffer` over a memory plane of holdfast's. It travels as a handle."""

import asyncio
import functools

import torch

from holdfast import comms


@functools.cache
def plane() -> comms.MemoryPlane:
    """The plane of this process: between processes of one host it copies from memory to memory."""
    return comms.memory()


class PlaneBuffer:
    """Memory of this process, for all processes of the user on this host, until `drop`."""

    def __init__(self, data: torch.Tensor) -> None:
        self._region: comms.Region | None = plane().expose(data, writable=True)
        self._handle = self._region.handle

    def __getstate__(self) -> bytes:
        return self._handle.encode()

    def __setstate__(self, handle: bytes) -> None:
        self._region, self._handle = None, comms.Handle.decode(handle)

    async def read_into(self, dst: torch.Tensor) -> None:
        """Read the whole buffer. Raises `RegionGone` if it was dropped, or its process died."""
        await asyncio.to_thread(lambda: plane().read(self._handle, dst).wait())

    async def write_from(self, src: torch.Tensor) -> None:
        """Write into the first bytes of the buffer; otherwise as `read_into`."""
        await asyncio.to_thread(lambda: plane().write(self._handle, src).wait())

    async def drop(self) -> None:
        """Stop exposing the memory, in the process that made the buffer."""
        assert self._region is not None
        self._region.close()
