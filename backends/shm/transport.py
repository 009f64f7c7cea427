"""`shm`: ranks as processes of one host. Flags in shared memory, payloads copied straight between processes.

The board lies on a `SharedSegment`, which rank 0 made or all have kept from the epoch before. Large payloads of
messages are read with process_vm_readv from the tensor of the sender.
"""

from __future__ import annotations

import contextlib
import time

import torch

from holdfast.backends.common.process_memory import permit_peers, put_on_huge_pages, read_process
from holdfast.backends.common.process_memory import probe as probe_copies
from holdfast.backends.shm.segment import SegmentAddress, SharedSegment, decode_address
from holdfast.comms.algorithms.shared_memory.board import HINTS, Board
from holdfast.comms.algorithms.shared_memory.direct import DirectTransport
from holdfast.comms.arithmetic import REDUCIBLE
from holdfast.comms.errors import OpTimeout, PeerFailed, Unsupported
from holdfast.comms.onesided.host_window import make_window
from holdfast.comms.onesided.mapped import MappedWindow
from holdfast.comms.onesided.peer_watch import gone
from holdfast.comms.plugins.kernel_calls import refused
from holdfast.comms.plugins.spec import (
    API_VERSION,
    Available,
    BackendInfo,
    Capabilities,
    Unavailable,
    hookimpl,
)
from holdfast.comms.rendezvous import fetch
from holdfast.comms.system.local_causes import unreadable_memory
from holdfast.comms.tensors.packing import DTYPES, names
from holdfast.comms.transport.base import Context
from holdfast.comms.transport.liveness import Liveness

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
        super().__init__(Board(self._slot, context, self._liveness.dead, segment.address.rows), "shm")
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
            raise gone(rank)
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
    if not all_know:
        context.store.set(_BOARD, segment.address.encode())
    transport = ShmTransport(context, segment)
    try:
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
    from holdfast.backends.shm.memory_plane import open_plane

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
            memory=open_plane,
            auto={"cpu": 100, "memory": 100},
            hints=HINTS,
        )
    ]
