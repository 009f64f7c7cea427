"""How each contestant publishes and gets: what a worker of it calls, and what is timed."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import sys
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path

import torch

from holdfast.comms.system.files import url_of
from holdfast.ft.console.units import counted
from holdfast.harness.bench.store.data import State
from holdfast.store.follow.follower import Follower

HOLDFAST, MEMCPY, SAFETENSORS, DCP, TORCHSTORE = "holdfast", "memcpy", "safetensors", "dcp", "torchstore"
PINNED = "pinned"
PEERS = (TORCHSTORE, MEMCPY, SAFETENSORS, DCP)

_MEMCPY_BYTES = 8 << 20
_ALONE_BYTES = 16 << 20
"""Fewer bytes are copied by one thread: more only wait for each other."""
WAIT_SECONDS = 60.0
"""The limit of a wait for a version."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What a worker is: its role, a folder on disk and one in shared memory that its team shares.

    A publisher's part of a version has `replicas` replicas. `rank` counts the workers of a role; `plane` moves the
    bytes; `device` is where the tensors are. With `device_copies` they go from process to process within the GPU.
    """

    role: str
    rank: int
    folder: Path
    shared: Path
    replicas: int
    plane: str
    device: str = "cpu"
    device_copies: bool = False


class StoreDriver(ABC):
    """A contestant in one process. The calls are coroutines because some libraries have no others."""

    detail: str

    @abstractmethod
    async def publish(self, version: int, state: State) -> None:
        """Return once the version can be got."""

    @abstractmethod
    async def get(self, version: int, into: State) -> None:
        """Fill existing tensors."""

    async def follow(self, version: int, into: State) -> None:
        """Fill existing tensors, always the same, as soon as the version is published."""
        raise NotImplementedError("it cannot wait for a version")

    async def copy(self, version: int, into: State) -> None:
        """Do the copies of a get, but verify nothing."""
        raise NotImplementedError("its gets verify nothing")

    async def load(self, version: int) -> State:
        """The tensors of a version as new ones."""
        raise NotImplementedError("it fills existing tensors only")

    async def map(self, version: int) -> State:
        """The tensors of a version where they lie."""
        raise NotImplementedError("it maps no memory of others")

    def close(self) -> None:  # noqa: B027
        """Let go of everything. Idempotent."""


class HoldfastStoreDriver(StoreDriver):
    """Our store, over a register on disk, as the processes of a host use it."""

    def __init__(self, plan: WorkerPlan) -> None:
        from holdfast.store import WeightStore

        self.detail = f"holdfast {version_of('holdfast')}"
        url = url_of("sqlite", plan.folder / "register")
        holds = plan.role != "reader"
        self._store = WeightStore(
            url, replicas=plan.replicas, hold=holds, keep=2, plane=plan.plane, device_copies=plan.device_copies
        )
        self._mapped: tuple[int, State] = 0, {}
        self._follower: Follower | None = None
        self._pool = ThreadPoolExecutor(torch.get_num_threads())

    async def publish(self, version: int, state: State) -> None:
        self._store.publish(version, state)

    async def get(self, version: int, into: State) -> None:
        self._store.get(version, into)

    async def follow(self, version: int, into: State) -> None:
        if self._follower is None:
            self._follower = self._store.follow(into, timeout=WAIT_SECONDS)
        while self._follower.version != version:
            self._follower.next_version()

    async def copy(self, version: int, into: State) -> None:
        if self._mapped[0] != version:
            self._mapped = version, self._store.load(version, map=True)
        memcpy(self._mapped[1], into, self._pool, torch.get_num_threads())

    async def load(self, version: int) -> State:
        return self._store.load(version)

    async def map(self, version: int) -> State:
        return self._store.load(version, map=True)

    def close(self) -> None:
        self._mapped = 0, {}
        if self._follower is not None:
            self._follower.close()
        self._pool.shutdown()
        self._store.close()


class MemcpyDriver(StoreDriver):
    """memcpy by as many threads as torch has, within one process: what memory allows.

    A publish copies into memory of its own, a get copies from there.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        self._threads = torch.get_num_threads()
        self.detail = f"memcpy of the same bytes in one process, {counted(self._threads, 'thread')}"
        self._pool = ThreadPoolExecutor(self._threads)
        self._kept: State = {}

    async def publish(self, version: int, state: State) -> None:
        if not self._kept:
            self._kept = {name: torch.empty_like(each) for name, each in state.items()}
        memcpy(state, self._kept, self._pool, self._threads)

    async def get(self, version: int, into: State) -> None:
        memcpy(self._kept, into, self._pool, self._threads)

    async def load(self, version: int) -> State:
        found = {name: torch.empty_like(each) for name, each in self._kept.items()}
        memcpy(self._kept, found, self._pool, self._threads)
        return found

    def close(self) -> None:
        self._pool.shutdown()


def memcpy(state: State, into: State, pool: ThreadPoolExecutor, threads: int) -> None:
    """Copy contiguous tensors by `threads` threads, each as many bytes; few bytes by one."""
    pieces = [
        (into[name].data_ptr() + start, each.data_ptr() + start, min(_MEMCPY_BYTES, each.nbytes - start))
        for name, each in state.items()
        for start in range(0, each.nbytes, _MEMCPY_BYTES)
    ]
    used = threads if sum(nbytes for _, _, nbytes in pieces) >= _ALONE_BYTES else 1
    list(pool.map(_memcpy, (pieces[first::used] for first in range(used))))


def _memcpy(pieces: list[tuple[int, int, int]]) -> None:
    for piece in pieces:
        ctypes.memmove(*piece)


class SafetensorsDriver(StoreDriver):
    """A safetensors file a version, in shared memory."""

    def __init__(self, plan: WorkerPlan) -> None:
        self.detail = f"safetensors {version_of('safetensors')}, files in shared memory"
        self._folder = plan.shared

    async def publish(self, version: int, state: State) -> None:
        from safetensors.torch import save_file

        save_file(state, self._path(version))
        with contextlib.suppress(FileNotFoundError):
            self._path(version - 1).unlink()

    async def get(self, version: int, into: State) -> None:
        for name, each in (await self.load(version)).items():
            into[name].copy_(each)

    async def load(self, version: int) -> State:
        from safetensors.torch import load_file

        return load_file(self._path(version))

    def _path(self, version: int) -> Path:
        return self._folder / f"{version}.safetensors"


class DcpDriver(StoreDriver):
    """torch.distributed.checkpoint, a folder a version, in shared memory."""

    def __init__(self, plan: WorkerPlan) -> None:
        self.detail = f"torch.distributed.checkpoint of torch {torch.__version__}, files in shared memory"
        self._folder = plan.shared

    async def publish(self, version: int, state: State) -> None:
        from torch.distributed.checkpoint import FileSystemWriter, save

        writer = FileSystemWriter(self._path(version), sync_files=False, thread_count=torch.get_num_threads())
        save(dict(state), storage_writer=writer, no_dist=True)
        shutil.rmtree(self._path(version - 1), ignore_errors=True)

    async def get(self, version: int, into: State) -> None:
        from torch.distributed.checkpoint import FileSystemReader, load

        load(dict(into), storage_reader=FileSystemReader(self._path(version)), no_dist=True)

    def _path(self, version: int) -> Path:
        return self._folder / str(version)


class PinnedDriver(StoreDriver):
    """One copy between a GPU and pinned memory within one process: what the bus allows.

    A publish copies to memory of its own, a get copies from there.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        self.detail = "a copy of the same bytes between the GPU and pinned memory, in one process"
        self._kept: State = {}

    async def publish(self, version: int, state: State) -> None:
        if not self._kept:
            self._kept = {
                name: torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for name, each in state.items()
            }
        _copy_on_device(state, self._kept)

    async def get(self, version: int, into: State) -> None:
        _copy_on_device(self._kept, into)


def _copy_on_device(state: State, into: State) -> None:
    for name, each in state.items():
        into[name].copy_(each, non_blocking=True)
    torch.cuda.synchronize()


DRIVERS: dict[str, type[HoldfastStoreDriver | MemcpyDriver | PinnedDriver | SafetensorsDriver | DcpDriver]] = {
    HOLDFAST: HoldfastStoreDriver,
    PINNED: PinnedDriver,
    MEMCPY: MemcpyDriver,
    SAFETENSORS: SafetensorsDriver,
    DCP: DcpDriver,
}
"""The contestants with processes of their own as workers. Those of torchstore are actors of Monarch."""


def torchstore_home() -> Path:
    """The folder of torchstore's dependencies (`make store-peers`), whether or not it is there."""
    return Path(sys.prefix) / "peers" / "torchstore"
