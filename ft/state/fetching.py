"""Bytes from whoever has them: in parallel, checked, and from another source where one is gone.

What has arrived is kept by its checksum until all is there, so that what is asked for again in the next epoch (somebody
died on the way) is not moved again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import xxhash

from holdfast.comms.errors import CorruptData, HoldfastError, PeerFailed, RegionGone, again
from holdfast.comms.memory_plane import Handle, MemoryPlane

BLOCK = 4 << 20
"""Bytes that are read and checked at a time."""
MOST_READERS = 4


@dataclass(frozen=True, slots=True)
class Source:
    """Where bytes are: from byte `offset` of a region of rank `rank`."""

    rank: int
    handle: Handle
    offset: int


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that are wanted `into` a contiguous uint8 tensor, and who has them."""

    digest: bytes
    into: torch.Tensor
    sources: tuple[Source, ...]


@dataclass(slots=True)
class Fetched:
    """What a fetch did: bytes `moved` by rank, bytes `kept` from an earlier one, and why ranks were `lost`."""

    moved: dict[int, int] = field(default_factory=dict)
    kept: int = 0
    lost: dict[int, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.moved.values())


def digest(data: torch.Tensor) -> bytes:
    """The checksum (XXH3, 128 bits) of a contiguous tensor's bytes."""
    return xxhash.xxh3_128_digest(data.cpu().numpy().data)


def blocks_of(buffer: torch.Tensor) -> list[torch.Tensor]:
    """A contiguous uint8 tensor as the pieces that are read and checked at a time."""
    return list(torch.split(buffer, BLOCK)) if buffer.numel() else []


class Fetcher:
    """Fetches for one process, one fetch at a time; `forget` when what was fetched is in use."""

    def __init__(self) -> None:
        self._kept: dict[bytes, torch.Tensor] = {}

    def forget(self) -> None:
        """Nothing that arrived so far will be asked for again."""
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
        """Fill every block, calling `before` ahead of each that is read. Each is read within `timeout` seconds.

        Raises `PeerFailed` if nobody is left who has a block, and what `over()` gives once that is not None; what has
        arrived by then is kept.
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
        """Take blocks from the queue until it is empty, or a reader has failed."""
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
        """All take turns in being asked first; those that are lost are not asked."""
        with self.lock:
            able = [source for source in sources if source.rank not in self.done.lost]
            self.turn += 1
            first = self.turn % max(len(able), 1)
        return able[first:] + able[:first]
