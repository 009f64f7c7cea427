"""Reads only what changed, by a delta from bytes that this process has. Used where parts cannot be mapped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from holdfast.comms.errors import CorruptData
from holdfast.store.data.delta import Delta, element_pieces, patch
from holdfast.store.data.digests import NBYTES, TARGET, Indexes, PartPlan
from holdfast.store.data.manifest import Manifest
from holdfast.store.read.part_source import PartSource

_log = logging.getLogger("holdfast.store")


MOST_KNOWN = 8
"""The number of fills that are remembered: a reader that prefetches needs two for each part."""


@dataclass(frozen=True, slots=True)
class TensorMemory:
    """The storage that a tensor lies in, as bytes, and the byte where the tensor starts."""

    bytes: torch.Tensor
    start: int

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorMemory:
        storage = tensor.untyped_storage()
        return TensorMemory(_bytes_of(storage), tensor.data_ptr() - storage.data_ptr())

    def span(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes of the tensor."""
        return self.bytes[self.start + offset : self.start + offset + nbytes]


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    plan: PartPlan
    digest: bytes
    addresses: tuple[int, ...]
    storages: tuple[StorageWeakRef, ...]
    sizes: tuple[int, ...]
    starts: tuple[int, ...]

    def memories(self) -> list[TensorMemory | None]:
        """The memory of each target; None for one that was freed, by a `resize_` of its storage too."""
        found: list[TensorMemory | None] = []
        for reference, nbytes, start in zip(self.storages, self.sizes, self.starts, strict=True):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            there = storage is not None and storage.nbytes() == nbytes
            found.append(TensorMemory(_bytes_of(storage), start) if there else None)
        return found


class FilledTargets:
    """Remembers which part's bytes the tensors of the last reads got, without keeping them alive. Thread-safe.

    That is a hint: they may have changed since, so what is made from them is verified.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[_Known] = []

    def remember(self, plan: PartPlan, targets: Sequence[torch.Tensor], digest: bytes) -> None:
        """Targets have been filled by `plan` with the part that has this digest."""
        addresses = tuple(target.data_ptr() for target in targets)
        storages = [target.untyped_storage() for target in targets]
        sizes = tuple(storage.nbytes() for storage in storages)
        starts = tuple(at - storage.data_ptr() for at, storage in zip(addresses, storages, strict=True))
        known = _Known(plan, digest, addresses, tuple(map(StorageWeakRef, storages)), sizes, starts)
        with self._lock:
            others = [each for each in self._known if each.addresses != addresses or each.plan is not plan]
            self._known = [known, *others][:MOST_KNOWN]

    def holding(self, plan: PartPlan, digest: bytes) -> list[TensorMemory | None] | None:
        """The memory of each target that `plan` filled with the part of this digest, None for one that was freed.

        Of several fills it is the one of which most is left; None if nothing is.
        """
        with self._lock:
            fills = [each for each in self._known if each.plan is plan and each.digest == digest]
        left = max((each.memories() for each in fills), key=_count_living, default=[])
        return left if _count_living(left) else None


def _count_living(memories: Sequence[TensorMemory | None]) -> int:
    return sum(memory is not None for memory in memories)


def read_delta(
    source: PartSource,
    manifest: Manifest,
    plan: PartPlan,
    targets: Sequence[torch.Tensor],
    bases: Sequence[TensorMemory | None],
) -> Indexes:
    """Make whole pieces in the targets from `bases`, laid out like them, and the part's delta; verify them.

    Returns the jobs of the plan that are still to do: pieces that changed too much, that are not copied whole, or came
    out wrong. If the delta cannot be read, that is all of them.
    """
    offer = source.shard.delta
    todo = np.arange(len(plan.jobs))
    if offer is None:
        return todo
    known = np.array([base is not None for base in bases], bool)
    direct = np.flatnonzero(plan.job_targets >= 0)
    direct = direct[known[plan.job_targets[direct]]]
    data = torch.empty(offer.handle.nbytes, dtype=torch.uint8, device="cpu")
    if not len(direct) or not source.read_beside(offer.handle, data):
        return todo
    memories = [TensorMemory.of(target) for target in targets]
    rows = [(int(plan.job_targets[at]), int(plan.jobs[at, TARGET]), int(plan.jobs[at, NBYTES])) for at in direct]
    before = [base.span(offset, nbytes) for target, offset, nbytes in rows if (base := bases[target]) is not None]
    after = [memories[target].span(offset, nbytes) for target, offset, nbytes in rows]
    numbers = plan.pieces[direct]
    try:
        delta = Delta.decode(data, offer.base, source.shard.digest, element_pieces(manifest.layout))
        left = patch(before, after, delta.only(numbers.tolist()), manifest.sums[numbers].tolist())
    except CorruptData as error:
        _log.warning("%s is read whole: %s", source.what, error)
        return todo
    done = np.delete(direct, left)
    _log.debug("%s: %d of %d pieces came by a delta of %d bytes", source.what, len(done), len(todo), data.nbytes)
    return np.delete(todo, done)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (storage.nbytes(),), (1,))
