"""The table of the memory that a process exposes, for the other processes of the host to look up.

Readers read its slots straight from the memory of the owner, which fails once that process has ended or runs another
program. It lies in a memfd, which writers and mappers open as /proc/<pid>/fd/<n>, for a lock of the kernel or a look
at a slot; it has no name, so no crash leaves it behind.

A slot is four aligned 8-byte words: generation, address, nbytes, flags. A generation is never used twice (it counts up
from a random number), is written last when a slot is filled, and cleared first when it is invalidated (`Words` keep
that order). A reader that finds the same generation before and after a copy has copied from that very region. The
kernel takes and releases locks between the pieces of one copy, so it reads them in order, too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Self

import msgspec
import xxhash

from holdfast.comms._native import Words
from holdfast.comms.errors import UNDECODABLE, BackendUnavailable, CorruptData, OpTimeout, RegionGone, Unsupported
from holdfast.comms.memory_plane import Handle
from holdfast.comms.system.files import OwnedDescriptor, map_file, read_at, write_all
from holdfast.comms.system.waiting import Wait
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import region_gone, start_time

SLOTS = 1 << 20
"""The file is sparse: a slot costs memory once it has been used."""
WRITABLE = 1
WRITER_SECONDS = 2.0
"""How long `wait_for_writers` waits for a writer in the middle of a block."""

_NAME = "holdfast-regions"
_MAGIC = b"holdfast table 1"
_HEADER = struct.Struct("=16sQQQ")  # magic, pid, start time, where the owner has the file mapped
_SLOTS_AT = 64
_SLOT_BYTES = 32
_FLOCK = struct.Struct("hhqqi")


class TableAddress(msgspec.Struct, frozen=True, array_like=True):
    """The address in a handle: the owner, its table, the slot and its generation. A checksum protects it.

    The table is named by its descriptor in the owner and its address there, `base`. `memory` is the descriptor of the
    memfd that holds the region, and the region's first byte in it; None if it lies in other memory, which cannot be
    mapped.
    """

    owner: Peer
    descriptor: int
    base: int
    slot: int
    generation: int
    memory: tuple[int, int] | None

    @property
    def row(self) -> int:
        """The address of the slot in its owner."""
        return self.base + _SLOTS_AT + self.slot * _SLOT_BYTES

    def encode(self) -> bytes:
        body = msgspec.msgpack.encode(self)
        return xxhash.xxh3_64_digest(body) + body

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode an address. Raises `CorruptData` for all that no owner of a table can have written."""
        if xxhash.xxh3_64_digest(data[8:]) != data[:8]:
            raise forged("the checksum of its address is wrong")
        try:
            address = msgspec.msgpack.decode(data[8:], type=cls)
        except UNDECODABLE as error:
            raise forged(error) from error
        plausible = (
            0 < address.owner.pid < 1 << 31
            and 0 <= address.descriptor < 1 << 31
            and 0 < address.base < 1 << 62
            and 0 <= address.slot < SLOTS
            and 0 < address.generation < 1 << 64
            and (address.memory is None or all(0 <= each < 1 << 62 for each in address.memory))
        )
        if not plausible:
            raise forged(address)
        return address


def forged(why: object) -> CorruptData:
    """The error of a handle that no owner of a region can have made."""
    return CorruptData(f"the handle of a region is forged or damaged: {why}; ask the owner for it again")


def check_size(handle: Handle, nbytes: int) -> None:
    """Raise `CorruptData` unless a handle has the size of its region."""
    if handle.nbytes != nbytes:
        raise forged(f"it names {handle.nbytes} bytes, and its region has {nbytes}")


class RegionTable:
    """The table of this process. Not thread-safe: callers hold the plane's lock, except for `wait_for_writers`."""

    def __init__(self, owner: Peer) -> None:
        self._owner = owner
        self._file = OwnedDescriptor(os.memfd_create(_NAME, os.MFD_CLOEXEC))
        os.ftruncate(self._file, _SLOTS_AT + SLOTS * _SLOT_BYTES)
        memory = map_file(self._file, _SLOTS_AT + SLOTS * _SLOT_BYTES)
        self._words = Words(memory)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._generation = secrets.randbits(62)
        self._used = 0
        self._free: list[int] = []
        write_all(self._file, _HEADER.pack(_MAGIC, owner.pid, owner.started, self._base))

    @property
    def memory(self) -> tuple[int, int]:
        """The address of the table in this process, and its size in bytes."""
        return self._base, _SLOTS_AT + SLOTS * _SLOT_BYTES

    def fill(self, address: int, nbytes: int, writable: bool, memory: tuple[int, int] | None) -> TableAddress:
        """Enter a region, which lies in `memory` if that can be mapped. Raises `Unsupported` if a million are open."""
        if self._free:
            slot = self._free.pop()
        elif self._used < SLOTS:
            slot, self._used = self._used, self._used + 1
        else:
            raise Unsupported(
                f"more than {SLOTS} exposed regions in one process", "close some of them, or expose larger ones"
            )
        self._generation += 1
        words, row = self._words, _row(slot)
        words[row + 1], words[row + 2], words[row + 3] = address, nbytes, WRITABLE if writable else 0
        words[row] = self._generation
        return TableAddress(self._owner, int(self._file), self._base, slot, self._generation, memory)

    def invalidate(self, slot: int) -> bool:
        """Invalidate a slot: no block of its region is copied whole any more.

        Returns whether a writer may be in the middle of one.
        """
        self._words[_row(slot)] = 0
        return bool(self._words[_row(slot) + 3] & WRITABLE)

    def wait_for_writers(self, slot: int) -> None:
        """Wait until no process writes to the region of an invalidated slot. Needs no lock. Raises `OpTimeout`."""
        Wait(yields=0).until(
            lambda: _lock(self._file, fcntl.F_WRLCK, slot),
            lambda: None,
            time.monotonic() + WRITER_SECONDS,
            lambda waited: OpTimeout("closing a region that another process is writing to", slot, waited),
        )
        _lock(self._file, fcntl.F_UNLCK, slot)

    def free(self, slot: int) -> None:
        """Release an invalidated slot for reuse."""
        self._free.append(slot)

    def close(self) -> None:
        """Close the table. Its contents stay: in a forked child they belong to the parent."""
        self._words.release()
        self._file.close()


def _row(slot: int) -> int:
    """The first word of a slot."""
    return (_SLOTS_AT + slot * _SLOT_BYTES) // 8


def open_memfd(plane: str, owner: Peer, descriptor: int, name: str, flags: int) -> OwnedDescriptor:
    """Open the memfd with this name that `owner` has as `descriptor`. `plane` is what errors call the memory plane.

    Raises `RegionGone` if the process or its memfd is gone, `BackendUnavailable` if it may not be opened.
    """
    path = Path(f"/proc/{owner.pid}/fd/{descriptor}")
    gone = RegionGone(f"process {owner.pid} is gone, or has closed the memory of this region; ask it for another one")
    try:
        if not str(path.readlink()).startswith(f"/memfd:{name} "):
            raise gone
        opened = OwnedDescriptor(os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
    except PermissionError as error:
        reason = f"process {owner.pid} may not be read: {error.strerror}"
        raise BackendUnavailable(plane, reason, "run all processes as one user") from error
    except OSError as error:
        raise gone from error
    try:
        if start_time(owner.pid) == owner.started:
            return opened
    except ProcessLookupError:
        pass
    opened.close()
    raise region_gone(owner.pid)


@contextmanager
def open_table(plane: str, address: TableAddress) -> Iterator[OwnedDescriptor]:
    """Open the table that `address` names; yields its file. Raises as `open_memfd`."""
    owner = address.owner
    with closing(open_memfd(plane, owner, address.descriptor, _NAME, os.O_RDONLY)) as table:
        if read_at(table, _HEADER.size, 0) != _HEADER.pack(_MAGIC, owner.pid, owner.started, address.base):
            raise RegionGone(f"process {owner.pid} has closed the memory plane of this region; ask it for another one")
        yield table


def generation_in(descriptor: int, slot: int) -> int:
    """The generation in a slot of an opened table; 0 if the slot is free."""
    return int.from_bytes(read_at(descriptor, 8, 8 * _row(slot)), sys.byteorder)


@contextmanager
def held_open(descriptor: int, slot: int, deadline: float) -> Iterator[None]:
    """Delay the owner's closing of a region while a block is written to it.

    Uses an open-file-description lock of the kernel on the slot's byte: it ends with this process.
    """
    Wait(yields=0).until(
        lambda: _lock(descriptor, fcntl.F_RDLCK, slot),
        lambda: None,
        deadline,
        lambda _: RegionGone("the owner of the region is closing it; ask it for another one"),
    )
    try:
        yield
    finally:
        _lock(descriptor, fcntl.F_UNLCK, slot)


def _lock(descriptor: int, kind: int, slot: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, slot, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
