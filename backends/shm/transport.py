"""`shm`: ranks as processes of one host. Flags in shared memory, payloads copied straight between processes.

The board lies on a `SharedSegment`, which rank 0 made or all have kept from the epoch before. Large payloads of
messages are read with process_vm_readv from the tensor of the sender.

A segment outlives each board. It has a few slots, one board each. Each epoch takes the next slot, so survivors of a
death begin their next board in the same memory: nothing is allocated, mapped or looked up. A new rank opens the segment
through /proc. It lies in a memfd without a name, so no crash leaves it behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Sequence

import msgspec
import torch

from holdfast.backends.common.host_plane import HostPlane
from holdfast.backends.common.process_memory import permit_peers, put_on_huge_pages, read_process
from holdfast.backends.common.process_memory import probe as probe_copies
from holdfast.comms.algorithms.shared_memory.board import HINTS, Board, layout_of
from holdfast.comms.algorithms.shared_memory.direct import DirectTransport
from holdfast.comms.arithmetic import REDUCIBLE
from holdfast.comms.errors import UNDECODABLE, CorruptData, OpTimeout, PeerFailed, Unsupported
from holdfast.comms.onesided.mapped import MappedWindow, make_window
from holdfast.comms.plugins.spec import (
    API_VERSION,
    Available,
    BackendInfo,
    Capabilities,
    Unavailable,
    hookimpl,
    refused,
)
from holdfast.comms.rendezvous import fetch
from holdfast.comms.system.files import OwnedDescriptor, advise, map_file
from holdfast.comms.system.local_causes import unopenable_file, unreadable_memory
from holdfast.comms.tensors.packing import DTYPES, names
from holdfast.comms.transport.base import Context, Peer
from holdfast.comms.transport.liveness import Liveness, window_gone

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
            address = ctypes.addressof(ctypes.c_uint8.from_buffer(self._memory))
            for start in range(address, address + BOARD_SLOTS * self._board_bytes, row):
                if not advise(start, used, _POPULATE_WRITE):
                    return  # an older kernel maps pages on first touch

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
    except UNDECODABLE as error:
        raise CorruptData(f"where the board of rank 0 is cannot be read: {error}") from error


PATIENCE_SECONDS = 0.005
"""Seconds after which a rank on a kept segment asks which segment rank 0 uses."""

LOOK_SECONDS = 0.001

REGISTER_SECONDS = 2.0
"""How long `register` may move memory to huge pages: 64 MiB take 0.04 to 0.3 s."""

FIRST_PHASES = 20
"""After a failure, this many phases wait without yielding: the kernel still frees the memory of the dead process."""

_BOARD = "board"


class ShmTransport(DirectTransport):
    """Ranks as processes of one host."""

    def __init__(self, context: Context, segment: SharedSegment) -> None:
        """Begin a board on `segment`, which is released with its last board."""
        self.segment = segment
        self._epoch = context.epoch
        self._slot = segment.take(context.epoch, context.peers)
        self._liveness = Liveness(context.peers, context.rank, context.over)
        try:
            board = Board(self._slot, context, self._liveness.dead, segment.address.rows)
        except BaseException:
            segment.release_slot(context.epoch)
            raise
        super().__init__(board, "shm")
        if context.previous is not None:
            self._board.stop_spinning(FIRST_PHASES)
        self._processes = context.peers

    def _read_memory(self, rank: int, address: int, into: int, nbytes: int) -> None:
        try:
            copied = read_process(self._processes[rank].pid, into, address, nbytes)
        except ProcessLookupError:
            raise PeerFailed((rank,), "its process is gone") from None
        except OSError as error:
            raise unreadable_memory("shm", rank, error.errno or 0) from error
        if copied != nbytes:
            raise PeerFailed((rank,), f"of {nbytes} bytes of its memory only the first {copied} can be read")

    def register(self, tensor: torch.Tensor) -> str:
        moved = put_on_huge_pages(tensor.data_ptr(), tensor.nbytes, REGISTER_SECONDS)
        if not moved:
            return f"nothing to gain: no whole huge page in its {tensor.nbytes} bytes, or the kernel has none"
        return f"{moved} of {tensor.nbytes} bytes on huge pages, through which peers find them faster"

    def window(self, tensor: torch.Tensor, deadline: float) -> MappedWindow:
        window = make_window("shm", self, self._processes, tensor, deadline, self._check_window)
        window.check_waiting = self._board.check_waiting
        return window

    def _check_window(self, rank: int) -> None:
        if self._liveness.is_ending(rank):
            raise window_gone(rank)
        self._board.check()

    def withdraw(self) -> None:
        """Undo `enter`, and close: this rank guessed the wrong segment."""
        self._board.withdraw()
        self.close()

    def _release(self) -> None:
        self._liveness.close()
        self._slot.release()
        self.segment.release_slot(self._epoch)


def connect(context: Context) -> ShmTransport:
    """Begin a board in the kept segment, or in a new one of rank 0; wait for all ranks.

    Rank 0 decides. It publishes the segment for ranks that cannot know it. A rank that has kept the same segment enters
    at once, and asks rank 0 only if the others do not come.
    """
    if context.device.type != "cpu":
        raise Unsupported(f"shm on {context.device}", "use nccl for CUDA tensors, or a CPU device")
    kept = _kept_segment(context)
    if kept is None:
        permit_peers()
    if context.rank == 0:
        return _connect_rank_0(context, kept)
    if kept is not None and (transport := _connect_on_kept(context, kept)) is not None:
        return transport
    with contextlib.closing(Liveness(context.peers, context.rank, context.over)) as liveness:
        said = fetch(context.store, _BOARD, context.deadline, liveness)
    transport = ShmTransport(context, _prefaulted(context, SharedSegment.open(said, context.peers)))
    transport.start(context.deadline, context.connect_payload)
    return transport


def _kept_segment(context: Context) -> SharedSegment | None:
    """The segment of the epoch before, if a board of this epoch can begin there."""
    previous = context.previous
    if isinstance(previous, ShmTransport) and previous.segment.has_room(context.epoch, context.size):
        return previous.segment
    return None


def _prefaulted(context: Context, segment: SharedSegment) -> SharedSegment:
    """Prepare a new segment for later epochs, if ranks pass a connect payload, as those of a job do."""
    if context.connect_payload:
        segment.prefault()
    return segment


def _connect_rank_0(context: Context, kept: SharedSegment | None) -> ShmTransport:
    """Connect as rank 0: on the kept segment, or on a new one."""
    all_know = kept is not None and kept.peers.issuperset(context.peers)
    segment = kept or _prefaulted(context, SharedSegment.make(context.name, context.peers))
    transport = ShmTransport(context, segment)
    try:
        if not all_know:
            context.store.set(_BOARD, segment.address.encode())
        transport.enter(context.connect_payload)
        context.meanwhile(transport)
        if all_know:
            with contextlib.suppress(OpTimeout):
                transport.wait_for_ranks(min(context.deadline, time.monotonic() + PATIENCE_SECONDS))
                return transport
            context.store.set(_BOARD, segment.address.encode())
        transport.wait_for_ranks(context.deadline)
    except BaseException:
        transport.close()
        raise
    return transport


def _connect_on_kept(context: Context, kept: SharedSegment) -> ShmTransport | None:
    """Connect as another rank, on the kept segment; None if rank 0 uses another one."""
    transport = ShmTransport(context, kept)
    try:
        transport.enter(context.connect_payload)
        context.meanwhile(transport)
        while True:
            with contextlib.suppress(OpTimeout):
                transport.wait_for_ranks(min(context.deadline, time.monotonic() + PATIENCE_SECONDS))
                return transport
            said = _published_address(context)
            if said is not None and said.inode != kept.address.inode:
                transport.withdraw()
                return None
            if said is not None or time.monotonic() >= context.deadline:
                transport.wait_for_ranks(context.deadline)
                return transport
    except BaseException:
        transport.close()
        raise


def _published_address(context: Context) -> SegmentAddress | None:
    """The segment that rank 0 has published; None as long as it has published none."""
    with contextlib.suppress(TimeoutError):
        return decode_address(fetch(context.store, _BOARD, time.monotonic() + LOOK_SECONDS, None))
    return None


def probe() -> Available | Unavailable:
    """Whether one process may read the memory of another here."""
    return refused("memfd_create", "pidfd_open") or probe_copies()


@hookimpl
def holdfast_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="shm",
            api=API_VERSION,
            description="processes of one host: flags in shared memory, direct copies",
            capabilities=Capabilities(
                reduces={"cpu": names(REDUCIBLE)},
                moves={"cpu": names(DTYPES)},
                one_host=True,
                windows=True,
                atomics=True,
                passive_target="none",
                memory_plane=True,
            ),
            probe=probe,
            connect=connect,
            memory=HostPlane,
            auto={"cpu": 100, "memory": 100},
            hints=HINTS,
        )
    ]
