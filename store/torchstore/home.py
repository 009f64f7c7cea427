"""The process that initialised a store keeps its register, and the memory of all that is put.

The register is a file in a folder of the owner's, by which other processes find the store; it holds the directory. The
owner's thread follows that, as a holder of `WeightStore` follows the catalogue, and grants memory to those that ask.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from holdfast.comms.errors import HoldfastError
from holdfast.comms.memory_plane import Region, memory
from holdfast.comms.system import forks
from holdfast.comms.system.files import url_of
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import is_gone, read_proc_stat, this_host, this_process
from holdfast.ft.launch.held_directory import SHARED_MEMORY, HeldDirectory
from holdfast.store.catalog.client import gone
from holdfast.store.holding.memory_pool import available_memory
from holdfast.store.torchstore.record import (
    EMPTY,
    MOST_GRANTS,
    Claim,
    RecordClient,
    Slab,
    StoreRecord,
    add,
    release,
    sizes,
    without_surplus,
)

IDLE_SECONDS = 1.0
ADDERS = 4
"""Threads that touch new memory, each for one put."""
_ROOT = SHARED_MEMORY or Path(tempfile.gettempdir())
_SPAWNED_BY_MONARCH = b"HYPERACTOR_MESH_BOOTSTRAP_MODE="
_log = logging.getLogger("holdfast.store")


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where a store is: its folder, and the process that owns it."""

    store_name: str
    folder: Path
    owner: Peer

    @property
    def running(self) -> bool:
        return self.folder.is_dir() and not is_gone(self.owner)

    @property
    def url(self) -> str:
        return url_of("sqlite", f"{self.folder}/register.sqlite")

    def open_record(self) -> RecordClient:
        return RecordClient(self.url)


class StoreHome:
    """A running store of this process, until its record says that it has ended, or the process ends."""

    def __init__(self, store_name: str, about: StoreRecord) -> None:
        """Start it. Raises OSError if it cannot make its folder, `BackendUnavailable` without a memory plane."""
        self._folder = HeldDirectory(_prefix(store_name), _ROOT)
        self.address = StoreAddress(store_name, self._folder.path, this_process())
        self._ending = weakref.finalize(self, self._folder.close)
        self._plane = memory()
        self._kept: dict[int, Region] = {}
        self._numbers = itertools.count(1)
        self._adding = set[tuple[int, int]]()
        self._adders = ThreadPoolExecutor(ADDERS, "holdfast-torchstore-memory")
        self._record = self.address.open_record()
        owner = self.address.owner
        self._record.cell.change(lambda _: replace(about, owner=owner))
        (self._folder.path / f"{owner.pid}-{owner.started}").touch()
        self._thread = threading.Thread(target=self._run, name=f"holdfast-torchstore-{os.getpid()}", daemon=True)
        self._thread.start()
        forks.reset_in_children(self)
        forks.refuse_in_children(self, f"store {store_name!r}", ("address",))

    def reset_in_child(self) -> None:
        self._ending.detach()

    def join(self) -> None:
        """Wait, once the store has ended, until its memory is free."""
        self._thread.join()

    def _run(self) -> None:
        cell, seen, now = self._record.cell, 0, EMPTY
        try:
            while not now.ended:
                seen, now = cell.wait(seen, IDLE_SECONDS) or cell.read()
                self._serve(now)
        except HoldfastError as error:
            if self._ending.alive:
                _log.warning("store %r has ended: %s", self.address.store_name, error)
        finally:
            self._ending()
            self._adders.shutdown()
            for each in (self._record, self._plane):
                each.close()

    def _serve(self, now: StoreRecord) -> None:
        """Grant memory to claims that wait, end those of dead processes, and let memory go that is too much."""
        dead = gone({each.peer for each in now.claims})
        _, now = self._record.update(
            lambda now, found: without_surplus(
                release(now, {each.id for each in now.claims if each.peer in dead}), found.grants
            )
        )
        for first in self._kept.keys() - {each.first for each in now.slabs}:
            self._kept.pop(first).close()
        for waiting in [each for each in now.claims if each.nbytes and not each.grants]:
            if (asked := (waiting.id, waiting.nbytes)) not in self._adding:
                self._adding.add(asked)
                self._adders.submit(self._add, waiting)

    def _add(self, waiting: Claim) -> None:
        """Memory for a claim, which ends if there is none."""
        size, count = sizes(waiting.nbytes)
        try:
            if waiting.ahead and 2 * size > available_memory():
                raise MemoryError("it is more than half of what the machine has left")
            region = self._plane.expose(self._plane.empty(size * count, mappable=True), writable=True)
            slab = Slab(next(self._numbers) * MOST_GRANTS, region.handle, size, count)
            self._record.cell.change(partial(add, slab=slab))
            self._kept[slab.first] = region
        except (OSError, MemoryError, HoldfastError) as error:
            level = logging.INFO if waiting.ahead or not self._ending.alive else logging.WARNING
            _log.log(level, "store %r: no memory for a put: %s", self.address.store_name, error)
            with suppress(HoldfastError):
                self._record.cell.change(partial(release, ids={waiting.id}))
        finally:
            self._adding.discard((waiting.id, waiting.nbytes))


# -- how processes find a store


def find(store_name: str, in_job: bool = False) -> StoreAddress | None:
    """The store of this process, of its Monarch job, or, unless `in_job`, of the nearest process that started it."""
    mine = os.getpid()
    ancestors, root = [] if in_job else list(_ancestors(mine)), _job_root(mine)
    near = {mine: 0, **{pid: place for place, pid in enumerate(ancestors, 2)}}
    found = {
        each: near.get(each.owner.pid, 1 if _job_root(each.owner.pid) == root else None) for each in running(store_name)
    }
    reachable = [(place, each) for each, place in found.items() if place is not None]
    return min(reachable, key=lambda each: each[0])[1] if reachable else None


def resolve(store_name: str, reference: str) -> StoreAddress | None:
    """The store in the folder that `reference` names; None if it has ended."""
    return next((each for each in running(store_name) if str(each.folder) == reference), None)


def _prefix(store_name: str) -> str:
    return f"holdfast-torchstore-{hashlib.sha256(store_name.encode()).hexdigest()[:16]}-"


def running(store_name: str) -> Iterator[StoreAddress]:
    """All running stores of a name that this user has on this host."""
    for folder in _ROOT.glob(f"{_prefix(store_name)}*"):
        with suppress(OSError):  # stores end, and their folders go, while we look
            if folder.stat().st_uid == os.geteuid():
                marks = [mark.name.split("-") for mark in folder.glob("[0-9]*-[0-9]*")]
                owners = [Peer(this_host(), int(pid), int(started)) for pid, started in marks]
                addresses = [StoreAddress(store_name, folder, owner) for owner in owners]
                yield from [each for each in addresses if each.running]


def _ancestors(pid: int) -> Iterator[int]:
    while (pid := _parent(pid)) > 1:
        yield pid


def _parent(pid: int) -> int:
    fields = read_proc_stat(pid)
    return int(fields[1]) if fields else 0


def _job_root(pid: int) -> int:
    """The process that started the Monarch job of a process; itself, if Monarch did not start it."""
    while _spawned_by_monarch(pid) and (parent := _parent(pid)) > 1:
        pid = parent
    return pid


def _spawned_by_monarch(pid: int) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(each.startswith(_SPAWNED_BY_MONARCH) for each in environment)
