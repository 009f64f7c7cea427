"""How a version comes to a reader: staged beside the tensors that it serves, then put in their place.

`StagedVersions` knows which tensors hold which version, which are served, and which may be overwritten.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from holdfast.comms import _native
from holdfast.comms.errors import Mismatch
from holdfast.comms.tensors.overlap import span
from holdfast.ft.state.aliases import alias_key, groups_sharing_memory
from holdfast.store.catalog.fleet import Digests, digests_of
from holdfast.store.catalog.records import Catalog
from holdfast.store.data.digests import NBYTES, SOURCE, TARGET, copy_elements, lies_in_order
from holdfast.store.data.state_dicts import (
    FlatState,
    ValueSlot,
    build_value,
    cannot_change,
    flatten_targets,
    rebuild,
)
from holdfast.store.data.state_nodes import StateNode, encode_node
from holdfast.store.reshard.placements import is_dtensor, local_of

Tensors = Mapping[str, torch.Tensor]
ALIGNMENT = 64
PIECE_BYTES = 2 << 20
"""Threads share a swap in pieces of this size: one that gets no processor delays it by one piece."""
MOST_THREADS = 4
"""So many threads fill the memory's bandwidth on most machines."""


@dataclass(slots=True, eq=False)
class StagingState:
    """A state dict for a version; the tensors that were made for it lie in `locals`, by dotted name.

    Once `complete` it holds `version`; `digests` are those of its parts. `seen` is the version of the register at which
    it was wanted. A `reserved` one is about to be overwritten.
    """

    state: dict[str, Any]
    locals: Tensors = field(default_factory=dict)
    version: int | None = None
    digests: Digests = ()
    complete: bool = False
    reserved: bool = False
    seen: int = 0

    def holds(self, version: int, digests: Digests) -> bool:
        """Whether this has the bytes of a version; `digests` are () if the store does not have it any more."""
        return self.complete and not self.reserved and self.version == version and digests in (self.digests, ())


class Staging(ABC):
    """How versions are staged. `keeps_before`: a version that was swapped out stays here, for the way back."""

    keeps_before = True

    @abstractmethod
    def new(self) -> StagingState:
        """Room for a version."""

    @abstractmethod
    def read(self, version: int, into: StagingState) -> None:
        """Read a version, verified, into the room. Raises the errors of `WeightStore.get`."""

    @abstractmethod
    def put(self, staged: StagingState) -> None:
        """Put what was staged in the place of what the reader serves."""


class CopiedStaging(Staging):
    """Versions are read into tensors like those of `into` by `get`, and copied from there."""

    def __init__(self, into: FlatState, get: Callable[[int, dict[str, Any]], object]) -> None:
        self._into, self._get = into, get

    def new(self) -> StagingState:
        return staging_for(self._into)

    def read(self, version: int, into: StagingState) -> None:
        self._get(version, into.state)

    def put(self, staged: StagingState) -> None:
        copy_state(staged, self._into)


class MappedStaging(Staging):
    """Versions are mapped by `load`; the items of the dict `into` are exchanged for theirs: nothing is copied."""

    keeps_before = False  # a mapping keeps its publisher from using the memory again

    def __init__(self, into: MutableMapping[str, Any], load: Callable[[int], dict[str, Any]]) -> None:
        self._into, self._load = into, load

    def new(self) -> StagingState:
        return StagingState({})

    def read(self, version: int, into: StagingState) -> None:
        into.state = {}
        into.state = self._load(version)

    def put(self, staged: StagingState) -> None:
        self._into.clear()
        self._into.update(staged.state)


def staging_for(into: FlatState) -> StagingState:
    """A new state dict with the structure of `into`.

    Its tensors are on the CPU, pinned if those of `into` are on CUDA. Tensors that share memory there share it here, so
    that a version that contradicts itself in it is refused before the swap.
    """
    there = {name: local_of(tensor) for name, tensor in into.tensors.items()}
    found: dict[str, torch.Tensor] = {}
    for group in groups_sharing_memory(there):
        found.update(_sharing({name: there[name] for name in group}))
    for name, local in there.items():
        if name not in found:
            found[name] = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
    tensors = {name: _placed_like(tensor, found[name]) for name, tensor in into.published.items()}
    return StagingState(rebuild(into.skeleton, tensors), found)


def _sharing(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Tensors that lie to each other as `tensors` do."""
    extents = [span(each) for each in tensors.values()]
    begin, end = min(first for first, _ in extents), max(last for _, last in extents)
    pinned = any(each.is_cuda for each in tensors.values())
    memory = torch.empty(end - begin + 2 * ALIGNMENT, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    start = -memory.data_ptr() % ALIGNMENT + begin % ALIGNMENT - begin
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        alias = torch.empty(0, dtype=tensor.dtype, device="cpu")
        offset = (start + tensor.data_ptr()) // tensor.itemsize
        alias.set_(memory.untyped_storage(), offset, tensor.size(), tensor.stride())
        alias = torch._neg_view(alias) if tensor.is_neg() else alias
        found[name] = alias.conj() if tensor.is_conj() else alias
    return found


def _placed_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if not is_dtensor(tensor):
        return local
    dtensor: Any = type(tensor)
    return dtensor(local, tensor._spec, requires_grad=False)  # type: ignore[attr-defined,no-any-return]


def copy_state(source: StagingState, into: FlatState) -> None:
    """Copy tensors and values into a state dict; returns once the bytes are there.

    Raises `Mismatch`, before anything is changed, if a value differs from one that cannot be changed.
    """
    values = list(_values_to_write(source, into))
    done: set[tuple[object, ...]] = set()
    devices: set[torch.device] = set()
    dense: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for name, tensor in into.tensors.items():
            local, staged = local_of(tensor), source.locals[name]
            if (key := alias_key(local)) in done:
                continue
            done.add(key)
            if lies_in_order(local) and lies_in_order(staged):
                dense.append((staged, local))
                continue
            with torch.inference_mode(local.is_inference()):
                if local.is_cuda:
                    local.copy_(staged, non_blocking=True)
                    devices.add(local.device)
                else:
                    copy_elements(local, staged)
        _copy_dense(dense)
    into.bump_versions()
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    for there, node in values:
        there.container[there.key] = build_value(node)


def _values_to_write(source: StagingState, into: FlatState) -> Iterator[tuple[ValueSlot, StateNode]]:
    """The values that were staged, and where they go."""
    for name, staged in flatten_targets(source.state).values.items():
        there = into.values[name]
        if there.can_change:
            yield there, staged.node
        elif encode_node(staged.node) != encode_node(there.node):
            raise Mismatch(cannot_change(name, there.container))


def _copy_dense(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the bytes of each first tensor to the second, past the caches, by a thread for each processor."""
    places = np.array([(one.data_ptr(), other.data_ptr(), one.nbytes) for one, other in pairs], np.uint64)
    if not len(places):
        return
    counts = (-(-places[:, 2].astype(np.int64) // PIECE_BYTES)).astype(np.intp)
    tensor = np.repeat(np.arange(len(pairs)), counts)
    at = ((np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)) * PIECE_BYTES).astype(np.uint64)
    jobs = np.zeros((len(tensor), 5), np.uint64)
    jobs[:, SOURCE], jobs[:, TARGET] = places[tensor, 0] + at, places[tensor, 1] + at
    jobs[:, NBYTES] = np.minimum(places[tensor, 2] - at, PIECE_BYTES)
    sums = np.zeros(len(jobs), np.uint64)
    threads = min(len(os.sched_getaffinity(0)), MOST_THREADS, max(1, int(places[:, 2].sum()) // PIECE_BYTES))
    _native.digest_copies(jobs.ctypes.data, len(jobs), 0, sums.ctypes.data, threads)


SETS = 3
"""The most sets of tensors: for the version that is served, the one before it, and the next one."""


@dataclass(frozen=True, slots=True)
class Return:
    """A reader went back from version `left` to `to`; it takes no version after that up to `newest`."""

    left: int
    to: int
    newest: int

    def refuses(self, version: int) -> bool:
        return version == self.left or self.to < version <= self.newest


class StagedVersions:
    """Sets of staging tensors. Safe to use from the thread that serves and from the background at once.

    `changed` is notified when a version becomes ready or is served. Sets are made by `make` when they are first needed,
    then used again; with `keeps_before` one keeps the version that was served before.
    """

    def __init__(self, make: Callable[[], StagingState], keeps_before: bool = True) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.served: StagingState | None = None
        self.before: int | None = None
        self.returning: int | None = None
        self._make, self._keeps_before = make, keeps_before
        self._sets: list[StagingState] = []
        self._taken: StagingState | None = None
        self._previous: StagingState | None = None
        self._return: Return | None = None

    # -- for the thread that serves

    def find(self, version: int, digests: Digests) -> StagingState | None:
        """The tensors with the bytes of a version."""
        with self.changed:
            return next((each for each in self._sets if each.holds(version, digests)), None)

    def take(self, version: int, digests: Digests) -> StagingState | None:
        """As `find`; the tensors stay as they are until `swapped` or `put_back`."""
        with self.changed:
            self._taken = self.find(version, digests)
            return self._taken

    def find_newest(self, catalog: Catalog) -> StagingState | None:
        """The newest version that is ready, if it was the latest after the one that is served was."""
        latest = catalog.latest
        with self.changed:
            if latest is None or self.refuses(latest):
                return None
            if self.served and self.served.holds(latest, digests_of(catalog, latest)):
                return None
            since = -1 if self.served is None else self.served.seen
            found = [
                each
                for each in self._sets
                if each.version is not None
                and each.holds(each.version, digests_of(catalog, each.version))
                and (each.version == latest or (each.version < latest and each.seen > since))
                and not self.refuses(each.version)
            ]
            return max(found, key=lambda each: (each.version == latest, each.seen), default=None)

    def take_newest(self, catalog: Catalog) -> StagingState | None:
        """As `find_newest`; the tensors stay as they are until `swapped` or `put_back`."""
        with self.changed:
            self._taken = self.find_newest(catalog)
            return self._taken

    def put_back(self) -> None:
        """Give up what was taken; the served version stays."""
        with self.changed:
            self._taken = None

    def swapped(self) -> None:
        """What was taken is served from now on."""
        with self.changed:
            taken, self._taken, self.returning = self._taken, None, None
            if taken is None or taken is self.served:
                return
            self._previous, self.served = self.served, taken
            self.before = None if self._previous is None else self._previous.version
            if self._return is not None and taken.version != self._return.to:
                self._return = None
            elif self._return is not None:
                self.before = None
            if self._previous is not None and not self._keeps_before:
                self._previous.state, self._previous.version, self._previous.complete = {}, None, False
            self.changed.notify_all()

    def go_back(self, reader: str, latest: int | None) -> int:
        """Ask for the version before, and refuse the later ones that are there; returns its number."""
        with self.changed:
            if self.before is None or self.served is None or self.served.version is None:
                raise Mismatch(f"reader {reader!r} has no version to go back to: it has swapped none out")
            left = self.served.version
            self._return = Return(left, self.before, max(left, latest or 0))
            self.returning = self.before
            self.changed.notify_all()
            return self.before

    def stay(self) -> None:
        """Undo a `go_back` that did not succeed."""
        with self.changed:
            self._return = self.returning = None

    def refuses(self, version: int) -> bool:
        """Whether the reader has gone back from this version."""
        return self._return is not None and self._return.refuses(version)

    # -- for the background

    def room_for(self, urgent: Collection[int], beside: Collection[int]) -> StagingState | None:
        """Reserve tensors for another version; None if all hold versions that are needed more.

        Versions of `beside` are never overwritten. `urgent` says in which order others are to be kept.
        """
        with self.changed:
            if len(self._sets) < SETS:
                found = self._make()
                self._sets.append(found)
            else:
                free = [each for each in self._sets if each not in (self.served, self._taken)]
                free = [each for each in free if not (each.complete and each.version in beside)]
                if not free:
                    return None
                found = min(free, key=lambda each: self._worth(each, urgent))
            found.reserved = True
            return found

    def _worth(self, each: StagingState, urgent: Collection[int]) -> tuple[int, int]:
        if not each.complete or each.version is None:
            return (0, 0)
        if each is self._previous:
            return (2, each.seen)
        return (3 if each.version in urgent or self._follows(each) else 1, each.seen)

    def fill(self, found: StagingState, version: int, digests: Digests, seen: int) -> None:
        """The background overwrites a reserved set from now on."""
        with self.changed:
            found.version, found.digests, found.seen = version, digests, seen
            found.complete = found.reserved = False
            if found is self._previous:
                self._previous = None

    def release(self, found: StagingState) -> None:
        """A reserved set is not overwritten after all."""
        with self.changed:
            found.reserved = False

    def complete(self, found: StagingState) -> None:
        with self.changed:
            found.complete = True
            self.changed.notify_all()

    def holdings(self, version: int | None = None) -> tuple[set[int], dict[int, Digests]]:
        """The versions to keep in the store (and `version`), and those with their bytes here."""
        with self.changed:
            sets = [each for each in self._sets if not each.reserved]
            pinned = {each.version for each in sets if each is self.served or not each.complete or self._follows(each)}
            ready = {each.version: each.digests for each in sets if each.complete and each.version is not None}
        return {number for number in (*pinned, version) if number is not None}, ready

    def _follows(self, each: StagingState) -> bool:
        """Whether a version was wanted after the one that is served."""
        return each is not self._previous and (self.served is None or each.seen > self.served.seen)

    def clear(self) -> None:
        with self.changed:
            self._sets, self.served, self._previous, self._taken = [], None, None, None
            self.changed.notify_all()
