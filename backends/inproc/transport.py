"""`inproc`: ranks as threads of one process, for tests and notebooks. Runs the collectives of `shm` on one memory."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import threading

import torch

from holdfast.backends.common.host_plane import HostPlane
from holdfast.backends.common.region_table import TableAddress
from holdfast.comms._native import Words
from holdfast.comms.algorithms.shared_memory.board import HINTS, Board, layout_of
from holdfast.comms.algorithms.shared_memory.direct import DirectTransport
from holdfast.comms.arithmetic import REDUCIBLE
from holdfast.comms.errors import CorruptData, Unsupported
from holdfast.comms.memory_plane import Handle
from holdfast.comms.onesided.mapped import OPEN, MappedWindow, Part, WindowLock, header_words, holder_word
from holdfast.comms.plugins.spec import API_VERSION, Available, BackendInfo, Capabilities, hookimpl
from holdfast.comms.rendezvous import fetch
from holdfast.comms.tensors.memory import ExposedMemory
from holdfast.comms.tensors.packing import DTYPES, names
from holdfast.comms.transport.base import Context
from holdfast.comms.transport.liveness import Liveness, this_process

_boards: dict[str, mmap.mmap] = {}
_lock = threading.Lock()


class InprocTransport(DirectTransport):
    """Ranks as threads of one process."""

    medium = "memory of one process"

    def __init__(self, context: Context, board_memory: mmap.mmap) -> None:
        super().__init__(Board(board_memory, context, dead=tuple), "inproc")

    def _read_memory(self, rank: int, address: int, into: int, nbytes: int) -> None:
        ctypes.memmove(into, address, nbytes)

    def _release(self) -> None:
        """Does nothing: the memory is freed with its last reference."""

    def window(self, tensor: torch.Tensor, deadline: float) -> MappedWindow:
        number = torch.zeros(1, dtype=torch.int64, device="cpu")
        if self.rank == 0:
            number[0] = next(_window_numbers)
            _windows[int(number)] = [None] * self.size
        self.broadcast(number, 0, deadline)
        parts = _windows[int(number)]
        header = Words(bytearray(8 * header_words(self.size)))
        header[0] = OPEN
        mine = parts[self.rank] = _OwnPart(ExposedMemory(tensor), header)
        self.barrier(deadline)
        found = [part.as_part(rank, self.rank, self.size) for rank, part in enumerate(parts) if part is not None]
        self.barrier(deadline)
        _windows.pop(int(number), None)
        window = MappedWindow(self.rank, found, check=lambda _: self._board.check(), release=mine.withdraw)
        window.check_waiting = self._board.check_waiting
        return window


class _OwnPart:
    """A rank's part of a window."""

    def __init__(self, memory: ExposedMemory, header: Words) -> None:
        self.memory, self.header, self.atomics, self.lent = memory, header, threading.Lock(), False

    def lend(self) -> None:
        self.lent = True

    def withdraw(self) -> None:
        """Leave the memory, if users have tensors over it."""
        if self.lent:
            self.memory.vacate()

    def as_part(self, rank: int, me: int, size: int) -> Part:
        atomics = self.atomics
        lock = WindowLock(
            rank, me, self.header, holder_word(size), lambda: atomics.acquire(blocking=False), atomics.release
        )
        return Part(self.header, self.memory.held.view(-1).view(torch.uint8), lock, self.lend)


_windows: dict[int, list[_OwnPart | None]] = {}
_window_numbers = itertools.count()


class InprocPlane(HostPlane):
    """The memory plane inside one process: that of a host, for the regions of this process alone."""

    name = "inproc"

    def _place(self, handle: Handle) -> TableAddress:
        place = super()._place(handle)
        if place.owner != this_process():
            raise Unsupported(
                f"the inproc plane cannot reach process {place.owner.pid}", "between processes use plane 'shm'"
            )
        return place


def connect(context: Context) -> InprocTransport:
    """Use the board that rank 0 makes, and wait until all ranks have entered it."""
    if context.device.type != "cpu":
        raise Unsupported(f"inproc on {context.device}", "use a CPU device")
    mine = context.peers[context.rank]
    if any((peer.host, peer.pid) != (mine.host, mine.pid) for peer in context.peers):
        raise Unsupported("inproc between processes", "use shm")
    if context.rank == 0:
        memory = mmap.mmap(-1, layout_of(context.size).nbytes)
        key = f"{context.name}:{id(memory)}"
        with _lock:
            _boards[key] = memory
    else:
        with contextlib.closing(Liveness(context.peers, context.rank, context.over)) as liveness:
            key = fetch(context.store, "board", context.deadline, liveness).decode(errors="replace")
        with _lock:
            found = _boards.get(key)
        if found is None:
            raise CorruptData(f"rank 0 published the board {key[:100]!r}, which this process does not have")
        memory = found
    try:
        if context.rank == 0:
            context.store.set("board", key)
        transport = InprocTransport(context, memory)
        transport.start(context.deadline)
    finally:
        with _lock:
            _boards.pop(key, None)
    return transport


@hookimpl
def holdfast_backends() -> list[BackendInfo]:
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
                windows=True,
                atomics=True,
                passive_target="none",
                memory_plane=True,
            ),
            probe=Available,
            connect=connect,
            memory=InprocPlane,
            hints=HINTS,
        )
    ]
