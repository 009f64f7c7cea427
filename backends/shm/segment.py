"""The shared memory under the boards of one job on one host, which outlives each board.

It has a few slots, one board each. Each epoch takes the next slot, so survivors of a death begin their next board in
the same memory: nothing is allocated, mapped or looked up. A new rank opens the segment through /proc. It lies in a
memfd without a name, so no crash leaves it behind.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import msgspec

from holdfast.comms.algorithms.shared_memory.board import layout_of
from holdfast.comms.errors import CorruptData, PeerFailed
from holdfast.comms.system.descriptors import OwnedDescriptor
from holdfast.comms.system.local_causes import unopenable_file
from holdfast.comms.system.mappings import advise, map_file
from holdfast.comms.transport.base import Peer

BOARD_SLOTS = 4
"""The number of consecutive epochs with boards that do not overlap."""

MOST_RANKS = 4096

PREFAULT_BYTES = 16 * 1024 * 1024
"""How much of a segment is mapped beforehand, if that covers everything but the stages.

Otherwise the first ops of a later epoch would wait for it, page by page.
"""

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14


class SegmentAddress(msgspec.Struct, frozen=True, array_like=True):
    """How to open a segment: a descriptor in the process that publishes it, and the inode of the file.

    `rows` is the number of ranks for which a board on it has room.
    """

    descriptor: int
    inode: int
    rows: int

    def encode(self) -> str:
        """Encode the address; see `decode_address`."""
        return msgspec.json.encode(self).decode()


class SharedSegment:
    """One process's view of a segment. It is unmapped when its last slot is released."""

    def __init__(self, descriptor: OwnedDescriptor, rows: int, peers: Sequence[Peer]) -> None:
        """Take over `descriptor`."""
        self._descriptor = descriptor
        self._board_bytes = layout_of(rows).nbytes
        self._held: set[int] = set()
        self.peers = frozenset(peers)
        self.address = SegmentAddress(int(descriptor), os.fstat(descriptor).st_ino, rows)
        try:
            self._memory: memoryview | None = map_file(descriptor, BOARD_SLOTS * self._board_bytes)
        except BaseException:
            descriptor.close()
            raise

    @staticmethod
    def make(name: str, peers: Sequence[Peer]) -> SharedSegment:
        """Make a segment for as many ranks as there are peers."""
        descriptor = os.memfd_create(f"holdfast-{name[:100]}", os.MFD_CLOEXEC)
        try:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, BOARD_SLOTS * layout_of(len(peers)).nbytes)
        except BaseException:
            os.close(descriptor)
            raise
        return SharedSegment(OwnedDescriptor(descriptor), len(peers), peers)

    @staticmethod
    def open(said: bytes, peers: Sequence[Peer]) -> SharedSegment:
        """Open the segment that rank 0 of `peers` published.

        Raises `PeerFailed` if it cannot be opened or is another file, `CorruptData` if the address cannot be decoded.
        """
        place = decode_address(said)
        if not len(peers) <= place.rows <= MOST_RANKS:
            raise CorruptData(f"rank 0 offers a board for {place.rows} ranks to {len(peers)}")
        try:
            descriptor = os.open(f"/proc/{peers[0].pid}/fd/{place.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise unopenable_file("shm", 0, "shared memory", error) from error
        found = os.fstat(descriptor)
        if (found.st_ino, found.st_size) != (place.inode, BOARD_SLOTS * layout_of(place.rows).nbytes):
            os.close(descriptor)
            raise PeerFailed((0,), "what it shares is not the memory of this job")
        return SharedSegment(OwnedDescriptor(descriptor), place.rows, peers)

    def prefault(self) -> None:
        """Map the memory that later epochs will need first."""
        layout = layout_of(self.address.rows)
        row, used = 8 * layout.row_words, 8 * layout.stage
        if self._memory is not None and BOARD_SLOTS * layout.size * used <= PREFAULT_BYTES:
            with contextlib.suppress(OSError):  # an older kernel maps pages on first touch
                for start in range(0, BOARD_SLOTS * self._board_bytes, row):
                    advise(self._memory, _POPULATE_WRITE, start, used)

    def has_room(self, epoch: int, size: int) -> bool:
        """Whether a board of `size` ranks may begin in this segment in `epoch`."""
        return bool(self._held) and size <= self.address.rows and epoch % BOARD_SLOTS not in self._held

    def take(self, epoch: int, peers: Sequence[Peer]) -> memoryview:
        """The slot of `epoch`. It still holds the board of an epoch long ago."""
        slot = epoch % BOARD_SLOTS
        if slot in self._held:
            raise ValueError(f"the board of an earlier epoch lies where that of epoch {epoch} should")
        assert self._memory is not None
        self._held.add(slot)
        self.peers = frozenset(peers)
        return self._memory[slot * self._board_bytes : (slot + 1) * self._board_bytes]

    def release_slot(self, epoch: int) -> None:
        """Release the slot of `epoch`: this process uses nothing in it any more."""
        self._held.discard(epoch % BOARD_SLOTS)
        if not self._held and self._memory is not None:
            self._memory = None
            self._descriptor.close()


def decode_address(said: bytes) -> SegmentAddress:
    """Decode the address of a segment. Raises `CorruptData` if that is impossible."""
    try:
        return msgspec.json.decode(said, type=SegmentAddress)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptData(f"where the board of rank 0 is cannot be read: {error}") from error
