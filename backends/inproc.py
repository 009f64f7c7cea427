"""`inproc`: ranks as threads of one process, for tests and notebooks. The same collectives as `shm`, on one memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

from holdfast.comms.algorithms.arithmetic import REDUCIBLE
from holdfast.comms.algorithms.board import Board, Layout
from holdfast.comms.algorithms.direct import DirectTransport
from holdfast.comms.errors import Unsupported
from holdfast.comms.plugins import API_VERSION, Available, BackendInfo, Capabilities, hookimpl
from holdfast.comms.rendezvous import fetch
from holdfast.comms.tensors import DTYPES, names
from holdfast.comms.transport import Context

_boards: dict[str, mmap.mmap] = {}
_lock = threading.Lock()


class InprocTransport(DirectTransport):
    """Ranks as threads of one process."""

    def __init__(self, context: Context, board_memory: mmap.mmap) -> None:
        board = Board(board_memory, context.rank, context.size, context.epoch, dead=tuple, looks=1)
        super().__init__(board)

    def _read_memory(self, rank: int, address: int, into: int, nbytes: int) -> None:
        ctypes.memmove(into, address, nbytes)

    def _release(self) -> None:
        """The board goes with its last rank."""


def connect(context: Context) -> InprocTransport:
    """Share the board that rank 0 makes, and wait until all ranks have it."""
    if context.device.type != "cpu":
        raise Unsupported(f"inproc on {context.device}", "use a CPU device")
    if any(peer.pid != os.getpid() for peer in context.peers):
        raise Unsupported("inproc between processes", "use shm")
    if context.rank == 0:
        memory = mmap.mmap(-1, Layout(context.size).nbytes)
        key = f"{context.name}:{id(memory)}"
        with _lock:
            _boards[key] = memory
        context.store.set("board", key)
    else:
        key = fetch(context.store, "board", context.deadline).decode()
        with _lock:
            memory = _boards[key]
    try:
        transport = InprocTransport(context, memory)
        transport.start(context.deadline)
    finally:
        with _lock:
            _boards.pop(key, None)
    return transport


@hookimpl
def holdfast_backends() -> list[BackendInfo]:
    from holdfast.backends.inproc_memory import open_plane

    return [
        BackendInfo(
            name="inproc",
            api=API_VERSION,
            description="threads of one process, for tests and notebooks",
            capabilities=Capabilities(
                reduces={"cpu": names(REDUCIBLE)},
                moves={"cpu": names(DTYPES)},
                one_host=True,
                one_process=True,
                memory_plane=True,
            ),
            probe=Available,
            connect=connect,
            memory=open_plane,
        )
    ]
