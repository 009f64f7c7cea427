"""How a version comes to a reader: staged beside the tensors that it serves, then put in their place."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from holdfast.comms import _native
from holdfast.comms.tensors.overlap import span
from holdfast.comms.tensors.shared import alias_key, groups_sharing_memory
from holdfast.store.catalog.fleet_targets import Digests
from holdfast.store.data.digests import NBYTES, SOURCE, TARGET, copy_elements, lies_in_order
from holdfast.store.data.skeleton import build_value, rebuild
from holdfast.store.data.tree import FlatState, flatten_targets
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
    """Copy tensors and values into a state dict; returns once the bytes are there."""
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
    for name, slot in flatten_targets(source.state).values.items():
        there = into.values[name]
        there.container[there.key] = build_value(slot.node)


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
