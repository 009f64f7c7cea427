"""`shm`: ranks as processes of one host. Flags in shared memory, payloads copied straight between processes.

The board lies in a memfd of rank 0, which the others open through /proc: it never has a name, so nothing is left
behind however a process dies. Large payloads are read with process_vm_readv from the tensor where they are.
"""

from __future__ import annotations

import mmap
import os

import torch

from holdfast.backends.process_memory import PeerMemory, permit_peers
from holdfast.backends.process_memory import probe as probe_copies
from holdfast.backends.shm_window import make_window
from holdfast.comms.algorithms.arithmetic import REDUCIBLE
from holdfast.comms.algorithms.board import Board, Layout
from holdfast.comms.algorithms.direct import DirectTransport
from holdfast.comms.algorithms.mapped_window import MappedWindow
from holdfast.comms.errors import PeerFailed, Unsupported
from holdfast.comms.liveness import Liveness
from holdfast.comms.plugins import (
    API_VERSION,
    Available,
    BackendInfo,
    Capabilities,
    Unavailable,
    hookimpl,
)
from holdfast.comms.rendezvous import fetch
from holdfast.comms.tensors import DTYPES, names
from holdfast.comms.transport import Context


class ShmTransport(DirectTransport):
    """Ranks as processes of one host."""

    def __init__(self, context: Context, board_memory: mmap.mmap, liveness: Liveness) -> None:
        super().__init__(
            Board(board_memory, context.rank, context.size, context.epoch, liveness.dead, journal=context.journal)
        )
        self._memory = board_memory
        self._liveness = liveness
        self._processes = context.peers
        self._peers = [PeerMemory(peer.pid) for peer in context.peers]

    def _read_memory(self, rank: int, address: int, into: int, nbytes: int) -> None:
        try:
            self._peers[rank].read(address, into, nbytes)
        except ProcessLookupError:
            raise PeerFailed((rank,), "its process is gone") from None
        except OSError as error:
            raise PeerFailed((rank,), f"its memory cannot be read: {error}") from error

    def window(self, tensor: torch.Tensor, deadline: float) -> MappedWindow:
        return make_window(self, self._processes, tensor, deadline, self._liveness.dead, self._board.check)

    def _release(self) -> None:
        self._liveness.close()
        self._memory.close()


def connect(context: Context) -> ShmTransport:
    """Map the board and wait until all ranks have."""
    if context.device.type != "cpu":
        raise Unsupported(f"shm on {context.device}", "use nccl for CUDA tensors, or a CPU device")
    permit_peers()
    liveness = Liveness(context.peers, context.rank, context.over)
    descriptor = -1
    try:
        if context.rank == 0:
            descriptor = os.memfd_create(f"holdfast-{context.name[:100]}", os.MFD_CLOEXEC)
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, Layout(context.size).nbytes)
            context.store.set("board", str(descriptor))
        else:
            descriptor = _open_board(context, liveness)
        memory = mmap.mmap(descriptor, Layout(context.size).nbytes)
    except BaseException:
        liveness.close()
        raise
    else:
        transport = ShmTransport(context, memory, liveness)
        transport.start(context.deadline)
        return transport
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _open_board(context: Context, liveness: Liveness) -> int:
    number = int(fetch(context.store, "board", context.deadline, liveness))
    try:
        descriptor = os.open(f"/proc/{context.peers[0].pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise PeerFailed((0,), f"its shared memory cannot be opened: {error}") from error
    if os.fstat(descriptor).st_size != Layout(context.size).nbytes:
        os.close(descriptor)
        raise PeerFailed((0,), "what it shares is not the board of this communicator")
    return descriptor


def probe() -> Available | Unavailable:
    """Whether one process may read another's memory here."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return Unavailable("it needs Linux 5.3 with memfd and pidfd", "use gloo")
    return probe_copies()


@hookimpl
def holdfast_backends() -> list[BackendInfo]:
    from holdfast.backends.shm_memory import open_plane

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
        )
    ]
