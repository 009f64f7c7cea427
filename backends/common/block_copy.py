"""`BlockCopy`: what a memory plane has to copy, block by block, and the checks of what it was given for that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import msgspec
import torch
import xxhash

from holdfast.comms.errors import CorruptData, Unsupported
from holdfast.comms.memory_plane import Handle
from holdfast.comms.tensors.memory import plain_tensor

SHARE_BYTES = 8 << 20
"""The least bytes of a large read for each thread that shares it: a thread costs 0.1 ms."""


class BlockCopy(msgspec.Struct, frozen=True):
    """Bytes to copy from a region to the memory at `address`, or the other way if `writing`.

    `look()` raises if the plane was closed or the time is over.
    """

    handle: Handle
    address: int
    offset: int
    nbytes: int
    deadline: float
    writing: bool
    look: Callable[[], None]

    def part(self, start: int, nbytes: int) -> BlockCopy:
        """The copy of `nbytes` of the bytes, from number `start` on."""
        if nbytes == self.nbytes:
            return self
        address, offset = self.address + start, self.offset + start
        return BlockCopy(self.handle, address, offset, nbytes, self.deadline, self.writing, self.look)

    def blocks(self, most: int) -> Iterator[BlockCopy]:
        """The copies of its blocks, of at most so many bytes; one if it has no bytes."""
        for start in range(0, self.nbytes, most) or (0,):
            yield self.part(start, min(most, self.nbytes - start))


class HeldUntil:
    """Hold a lock, which another copy may hold for long; `copy.look` raises if it is not free by the deadline.

    A class, since it is entered for each block.
    """

    __slots__ = ("_copy", "_lock")

    def __init__(self, lock: threading.RLock, copy: BlockCopy) -> None:
        self._lock, self._copy = lock, copy

    def __enter__(self) -> None:
        while not self._lock.acquire(timeout=max(self._copy.deadline - time.monotonic(), 0.001)):
            self._copy.look()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def check_size(handle: Handle, nbytes: int) -> None:
    """Raise `CorruptData` unless a handle has the size of its region."""
    if handle.nbytes != nbytes:
        raise forged(f"it names {handle.nbytes} bytes, and its region has {nbytes}")


class SealedAddress(msgspec.Struct, frozen=True, array_like=True):
    """The address of a region, with a checksum: for a library that would trust any bytes."""

    def encode(self) -> bytes:
        body = msgspec.msgpack.encode(self)
        return xxhash.xxh3_64_digest(body) + body

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode an address. Raises `CorruptData` for anything but what `encode` made."""
        if xxhash.xxh3_64_digest(data[8:]) != data[:8]:
            raise forged("the checksum of its address is wrong")
        try:
            return msgspec.msgpack.decode(data[8:], type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise forged(error) from error


def forged(why: object) -> CorruptData:
    """The error of a handle that no owner of a region can have made."""
    return CorruptData(f"the handle of a region is forged or damaged: {why}; ask the owner for it again")


def thread_count(nbytes: int) -> int:
    """The number of threads that share a large read: as many as torch would use."""
    return max(1, min(torch.get_num_threads(), nbytes // SHARE_BYTES))


def run_in_threads(nbytes: int, count: int, copy: Callable[[int, int, int], None]) -> None:
    """Run `copy(number, start, nbytes)` for `count` pieces, the first in this thread, each other in its own.

    Returns or raises only after all of them have ended.
    """
    if count == 1:
        copy(0, 0, nbytes)
        return
    share = -(-nbytes // count)
    with ThreadPoolExecutor(count - 1, "holdfast-read") as pool:
        others = [
            pool.submit(copy, number, number * share, min(share, nbytes - number * share)) for number in range(1, count)
        ]
        copy(0, 0, share)
    for other in others:
        other.result()


def contiguous_address(tensor: torch.Tensor, what: str, plane: str) -> int:
    """The address of a tensor.

    Raises TypeError, ValueError or `Unsupported` unless it is contiguous CPU memory of its own.
    """
    flat = plain_tensor(tensor, what)
    if flat.device.type != "cpu":
        raise Unsupported(f"{what} on {flat.device.type} over memory plane {plane!r}", "copy it to the CPU")
    if not flat.is_contiguous() or flat.is_conj() or flat.is_neg():
        raise ValueError(f"{what} must be contiguous and resolved: call .contiguous() (or resolve_conj) first")
    return flat.data_ptr()
