"""The plan of a read: the pieces to verify, and the bytes that go from each to the reader's tensors.

A plan depends only on the layouts of the parts and of the targets, so that readers of one model make it once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from holdfast.comms.tensors.overlap import overlaps_itself
from holdfast.ft.state.boxes import Box, shape_of, whole
from holdfast.store.data.digests import COUNT, FIRST, NBYTES, SOURCE, TARGET
from holdfast.store.data.manifest import RegionLayout
from holdfast.store.read.part_plan import LocalTensor, PartPlan
from holdfast.store.read.strides import Rows, dense_strides, rows_of
from holdfast.store.read.whole_tensors import plan_named, plan_whole_tensors
from holdfast.store.recent import Recent
from holdfast.store.reshard.plan import BoxCopy, BoxTarget, PartBox, plan

CACHED_PLANS = 16


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """What is read of each part."""

    parts: tuple[PartPlan, ...]


def plan_read(
    layouts: Sequence[RegionLayout], wanted: Sequence[BoxTarget], into: Mapping[str, LocalTensor], reader: int = 0
) -> ReadPlan:
    """Plan to fill local tensors, by name, with the boxes `wanted` of tensors in parts of these layouts.

    The targets of a part plan are numbered as in `into`. `reader` and errors: see `holdfast.store.reshard.plan.plan`.
    """
    if len(layouts) == 1 and (usual := plan_whole_tensors(layouts[0], wanted, into)) is not None:
        return ReadPlan((usual,))
    sources = sources_of(layouts)
    builders = [_PartBuilder(layout) for layout in layouts]
    numbers = {name: number for number, name in enumerate(into)}
    for copy in plan(wanted, sources, reader):
        builders[copy.part].add(copy, numbers[copy.into], into[copy.into])
    return ReadPlan(tuple(builder.build() for builder in builders))


def sources_of(layouts: Sequence[RegionLayout]) -> Mapping[str, Sequence[PartBox]]:
    """The boxes of each tensor that parts of these layouts have."""
    sources: defaultdict[str, list[PartBox]] = defaultdict(list)
    for part, layout in enumerate(layouts):
        for entry in layout.entries:
            sources[entry.name].append(PartBox(part, entry.box or whole(entry.shape)))
    return sources


@dataclass(slots=True)
class _PartBuilder:
    layout: RegionLayout
    rows: defaultdict[int, list[tuple[int, Rows]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, copy: BoxCopy, number: int, into: LocalTensor) -> None:
        """Add a copy to target `number`."""
        at = self.layout.numbers[copy.name, copy.source]
        entry = self.layout.entries[at]
        strides = dense_strides(entry.extent, into.itemsize)
        source, target = entry.offset + _first(copy.take, strides), _first(copy.put, into.strides)
        for rows in rows_of(shape_of(copy.put), strides, into.strides, into.itemsize, source, target):
            for piece in self.layout.pieces_of[at]:
                known = self.layout.pieces[piece]
                for part in rows.between(known.offset, known.offset + known.nbytes):
                    self.rows[piece].append((number, part))

    def build(self) -> PartPlan:
        pieces = sorted(self.rows)
        jobs = np.zeros((len(pieces), 5), np.uint64)
        job_targets = np.full(len(pieces), -1, np.intp)
        copies: list[Rows] = []
        copy_targets: list[int] = []
        for number, piece in enumerate(pieces):
            known, rows = self.layout.pieces[piece], self.rows[piece]
            jobs[number, SOURCE], jobs[number, NBYTES] = known.offset, known.nbytes
            if len(rows) == 1 and (rows[0][1].source, rows[0][1].row_bytes) == (known.offset, known.nbytes):
                job_targets[number], jobs[number, TARGET] = rows[0][0], rows[0][1].target
                continue
            jobs[number, FIRST], jobs[number, COUNT] = len(copies), len(rows)
            for target, each in rows:
                copies.append(each)
                copy_targets.append(target)
        return PartPlan(
            np.array(pieces, np.intp),
            jobs,
            job_targets,
            np.array(copies, np.uint64).reshape(len(copies), 6),
            np.array(copy_targets, np.intp),
        )


def _first(box: Box, strides: Sequence[int]) -> int:
    """The byte of the first element of a box."""
    return sum(low * stride for (low, _), stride in zip(box, strides, strict=True))


class PlanCache:
    """The plans of the last reads, by layouts. Thread-safe."""

    def __init__(self) -> None:
        self._plans: Recent[ReadPlan] = Recent(CACHED_PLANS)

    def get(
        self,
        layouts: Sequence[RegionLayout],
        wanted: Sequence[BoxTarget],
        into: Mapping[str, torch.Tensor],
        reader: int,
        key: Hashable | None,
    ) -> ReadPlan:
        """See `plan_read`. Equal layouts have the same plan. `key`, if given, stands for `wanted` and `into`."""
        digests = tuple(layout.digest for layout in layouts)
        found = None if key is None else self._plans.get((digests, key, reader))
        if found is not None:
            return found
        memory = {name: local_tensor(each) for name, each in into.items()}
        whole_key = digests, (tuple(wanted), tuple(memory.items())), reader
        found = self._plans.get(whole_key)
        if found is None:
            found = plan_read(layouts, wanted, memory, reader)
            self._plans.put(whole_key, found)
        if key is not None:
            self._plans.put((digests, key, reader), found)
        return found

    def whole(self, layouts: Sequence[RegionLayout], names: tuple[str, ...], key: Hashable) -> ReadPlan | None:
        """The plan of `plan_named`, if there is one part. `key` stands for `names`."""
        if len(layouts) != 1:
            return None
        digest = layouts[0].digest
        found = self._plans.get((digest, key))
        if found is None:
            found = self._plans.get((digest, names))
            if found is None and (planned := plan_named(layouts[0], names)) is not None:
                found = ReadPlan((planned,))
                self._plans.put((digest, names), found)
            if found is not None:
                self._plans.put((digest, key), found)
        return found


def local_tensor(tensor: torch.Tensor) -> LocalTensor:
    size = tensor.itemsize
    return LocalTensor(size, tuple([stride * size for stride in tensor.stride()]))


def has_rows(tensor: torch.Tensor) -> bool:
    """Whether bytes can be copied into a tensor: it is on the CPU, and stores its elements themselves, each once."""
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.is_contiguous() or not overlaps_itself(tensor)
