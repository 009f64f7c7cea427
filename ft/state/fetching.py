"""Reads blocks of bytes from several ranks in parallel, verifies them, and retries lost ones from other ranks.

`MemoryPlanes` chooses the memory plane by which the members of a job read each other's state.
Arrived blocks are kept by checksum until all have arrived. If a rank dies meanwhile, the next epoch asks for the same
blocks, and those that are kept are not read again.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import xxhash

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import CorruptData, HoldfastError, PeerFailed, RegionGone, again
from holdfast.comms.memory_plane import Handle, MemoryPlane, memory
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import Unavailable

BLOCK = 4 << 20
"""The most bytes that are read and verified at a time."""
MOST_READERS = 4


@dataclass(frozen=True, slots=True)
class Source:
    """A place to read bytes from: byte `offset` of the region `handle` of rank `rank`."""

    rank: int
    handle: Handle
    offset: int


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes to read `into` a contiguous uint8 tensor, their checksum, and the ranks that have them."""

    digest: bytes
    into: torch.Tensor
    sources: tuple[Source, ...]


@dataclass(slots=True)
class Fetched:
    """The result of a fetch: bytes `moved` by rank, bytes `kept` from an earlier fetch, why ranks were `lost`."""

    moved: dict[int, int] = field(default_factory=dict)
    kept: int = 0
    lost: dict[int, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.moved.values())


Fetch = Callable[[MemoryPlane, Iterable[Block]], Fetched]
"""`Fetcher.fetch` with the time that a read may take, and with what ends it."""


def digest(data: torch.Tensor) -> bytes:
    """The checksum (XXH3, 128 bits) of a contiguous tensor's bytes."""
    return xxhash.xxh3_128_digest(data.cpu().numpy().data)


def blocks_of(buffer: torch.Tensor) -> list[torch.Tensor]:
    """A contiguous uint8 tensor, split into the pieces that are read and verified at a time."""
    return list(torch.split(buffer, BLOCK)) if buffer.numel() else []


class Fetcher:
    """Fetches blocks for one process, one fetch at a time. Call `forget` before the fetched tensors are changed."""

    def __init__(self) -> None:
        self._kept: dict[bytes, torch.Tensor] = {}

    def forget(self) -> None:
        """Drop the kept blocks: none of them will be asked for again."""
        self._kept.clear()

    def fetch(
        self,
        plane: MemoryPlane,
        blocks: Iterable[Block],
        *,
        timeout: float,
        over: Callable[[], HoldfastError | None] = lambda: None,
        before: Callable[[], None] = lambda: None,
    ) -> Fetched:
        """Fill every block; `before` is called ahead of each read, and each read may take `timeout` seconds.

        Raises `PeerFailed` if no rank is left that has a block, and the error of `over()` once that is not None. Blocks
        that have arrived by then are kept.
        """
        done = Fetched()
        waiting: queue.SimpleQueue[Block] = queue.SimpleQueue()
        wanted = 0
        for block in blocks:
            kept = self._kept.get(block.digest)
            if kept is not None and kept.numel() == block.into.numel():
                block.into.copy_(kept)
                done.kept += kept.numel()
            else:
                waiting.put(block)
                wanted += 1
        readers = min(MOST_READERS, wanted)
        task = _Task(plane, waiting, done, self._kept, timeout, over, before)
        if readers <= 1:
            task.work()
        else:
            with ThreadPoolExecutor(readers, "holdfast-fetch") as pool:
                for reader in [pool.submit(task.work) for _ in range(readers)]:
                    reader.result()
        return done


@dataclass(slots=True)
class _Task:
    plane: MemoryPlane
    waiting: queue.SimpleQueue[Block]
    done: Fetched
    kept: dict[bytes, torch.Tensor]
    timeout: float
    over: Callable[[], HoldfastError | None]
    before: Callable[[], None]
    lock: threading.Lock = field(default_factory=threading.Lock)
    turn: int = 0
    failed: bool = False

    def work(self) -> None:
        """Read blocks from the queue until it is empty or a reader has failed."""
        try:
            while not self.failed:
                try:
                    block = self.waiting.get_nowait()
                except queue.Empty:
                    return
                self.before()
                self._read(block)
        except BaseException:
            self.failed = True
            raise

    def _read(self, block: Block) -> None:
        for source in self._in_order(block.sources):
            why = self.over()
            if why is not None:
                raise again(why)
            try:
                self.plane.read(source.handle, block.into, source.offset, timeout=self.timeout).wait()
                if digest(block.into) != block.digest:
                    raise CorruptData(f"{block.into.numel()} bytes of rank {source.rank} have another checksum")
            except (RegionGone, CorruptData, TimeoutError) as error:
                with self.lock:
                    self.done.lost.setdefault(source.rank, str(error))
                continue
            with self.lock:
                self.done.moved[source.rank] = self.done.moved.get(source.rank, 0) + block.into.numel()
                self.kept[block.digest] = block.into
            return
        ranks = sorted({source.rank for source in block.sources})
        reasons = "; ".join(self.done.lost.get(rank, "") for rank in ranks)
        raise PeerFailed(ranks, f"nobody is left who has a part of the state: {reasons}")

    def _in_order(self, sources: Sequence[Source]) -> list[Source]:
        """The sources in the order to ask them: without lost ranks, and each time with another one first."""
        with self.lock:
            able = [source for source in sources if source.rank not in self.done.lost]
            self.turn += 1
            first = self.turn % max(len(able), 1)
        return able[first:] + able[:first]


_ONE_HOST = ("shm",)
_ANY_HOST = ("ucx", "nixl")


class MemoryPlanes:
    """The memory planes of this process, each opened at its first use."""

    def __init__(self) -> None:
        self._open: dict[str, MemoryPlane] = {}

    def agree(self, comm: Communicator, hosts: Sequence[str]) -> MemoryPlane | None:
        """The plane that all ranks can use; None if there is none. Collective over `comm`.

        `hosts` are the ranks' hosts. On one host it is `shm` if that works, else ucx or nixl. Between hosts it is ucx
        or nixl, and only if UCX_TLS is set: without a network named there, these planes use shared memory alone.
        """
        offers = comm.all_gather_object(_able(hosts))
        for name in offers[0]:
            if all(name in offer for offer in offers):
                if name not in self._open:
                    self._open[name] = memory(name)
                return self._open[name]
        return None

    def close(self) -> None:
        """Close every plane and its regions. Idempotent."""
        with contextlib.ExitStack() as closing:
            while self._open:
                closing.callback(self._open.popitem()[1].close)


def _able(hosts: Sequence[str]) -> list[str]:
    """The planes that this process can open and that reach all `hosts`, in order of preference."""
    if len(set(hosts)) > 1:
        return [name for name in _ANY_HOST if _works(name)] if os.environ.get("UCX_TLS") else []
    able = [name for name in _ONE_HOST if _works(name)]
    return able or [name for name in _ANY_HOST if _works(name)]


def _works(name: str) -> bool:
    backend = registry().backends.get(name)
    if backend is None or backend.memory is None:
        return False
    return not isinstance(registry().backend(name).status, Unavailable)
