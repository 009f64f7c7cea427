"""The plan of a read: the pieces to verify, and the bytes that go from each to the reader's tensors.

A plan depends only on the layouts of the parts and of the targets, so that readers of one model make it once. The usual
read, of whole tensors from one part, is planned without a loop over boxes.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from holdfast.comms.tensors.overlap import overlaps_itself
from holdfast.ft.state.boxes import Box, shape_of, whole
from holdfast.store.data.digests import (
    COUNT,
    FIRST,
    NBYTES,
    ROW_BYTES,
    ROW_SOURCE,
    ROWS,
    SOURCE,
    TARGET,
    Indexes,
    PartPlan,
)
from holdfast.store.data.manifest import LARGE_BYTES, RegionLayout
from holdfast.store.reshard.plan import BoxCopy, BoxTarget, PartBox, plan

CACHED_PLANS = 32
FEW_ROWS = 64
BYTES_OF_ROWS = 64 << 10
"""In the time in which one `Rows` is planned, so many bytes are copied."""


class LocalTensor(NamedTuple):
    """The memory of a target: bytes of an element, and strides in bytes."""

    itemsize: int
    strides: tuple[int, ...]


class Rows(NamedTuple):
    """`rows` rows of `row_bytes` bytes: where the first begins in source and target, and how far apart they are."""

    source: int
    target: int
    rows: int
    row_bytes: int
    source_stride: int
    target_stride: int

    def between(self, first: int, last: int) -> Iterator[Rows]:
        """What is copied of the source's bytes `first` to `last` (exclusive): at most three copies."""
        if self.rows == 1 or self.row_bytes == self.source_stride == self.target_stride:
            begin, end = max(first, self.source), min(last, self.source + self.rows * self.row_bytes)
            if begin < end:
                yield Rows(begin, self.target + begin - self.source, 1, end - begin, 0, 0)
            return
        whole_from = max(0, -(-(first - self.source) // self.source_stride))
        whole_to = min(self.rows, (last - self.row_bytes - self.source) // self.source_stride + 1)
        touched_from = max(0, (first - self.row_bytes - self.source) // self.source_stride + 1)
        touched_to = min(self.rows, -(-(last - self.source) // self.source_stride))
        if whole_from >= whole_to:
            whole_from = whole_to = touched_from
        for number in (*range(touched_from, whole_from), *range(whole_to, touched_to)):
            start = self.source + number * self.source_stride
            begin, end = max(first, start), min(last, start + self.row_bytes)
            if begin < end:
                target = self.target + number * self.target_stride + begin - start
                yield Rows(begin, target, 1, end - begin, 0, 0)
        if whole_from < whole_to:
            yield Rows(
                self.source + whole_from * self.source_stride,
                self.target + whole_from * self.target_stride,
                whole_to - whole_from,
                self.row_bytes,
                self.source_stride,
                self.target_stride,
            )


_Loop = tuple[int, int, int]
"""How often, and how far apart in source and target."""


def _loops(
    sizes: Sequence[int], source_strides: Sequence[int], target_strides: Sequence[int], itemsize: int
) -> tuple[int, _Loop, list[_Loop]]:
    """The bytes of a run that is dense in source and target, the longest loop over runs, and the loops around it."""
    run = itemsize
    loops: list[_Loop] = []
    for size, there, here in zip(reversed(sizes), reversed(source_strides), reversed(target_strides), strict=True):
        if size == 1:
            continue
        if not loops and there == here == run:
            run *= size
        elif loops and (there, here) == (loops[-1][0] * loops[-1][1], loops[-1][0] * loops[-1][2]):
            loops[-1] = loops[-1][0] * size, *loops[-1][1:]
        else:
            loops.append((size, there, here))
    if not loops:
        return run, (1, 0, 0), []
    longest = max(range(len(loops)), key=lambda number: loops[number][0])
    return run, loops.pop(longest), loops


def rows_of(
    sizes: Sequence[int],
    source_strides: Sequence[int],
    target_strides: Sequence[int],
    itemsize: int,
    source: int = 0,
    target: int = 0,
) -> Iterator[Rows]:
    """The rows of a copy of `sizes` elements, given strides in bytes, and the first byte in source and target.

    Nothing is copied if a size is 0.
    """
    if 0 in sizes:
        return
    run, (rows, source_stride, target_stride), outer = _loops(sizes, source_strides, target_strides, itemsize)
    for place in itertools.product(*(range(size) for size, _, _ in outer)):
        there = sum(at * stride for at, (_, stride, _) in zip(place, outer, strict=True))
        here = sum(at * stride for at, (_, _, stride) in zip(place, outer, strict=True))
        yield Rows(source + there, target + here, rows, run, source_stride, target_stride)


def dense_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides, in bytes, of a row-major array."""
    strides, step = [], itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _whole_names(
    layout: RegionLayout, wanted: Sequence[BoxTarget], into: Sequence[tuple[str, LocalTensor]]
) -> tuple[str, ...] | None:
    """The names of the wanted tensors, in the targets' order, if whole tensors fill dense targets; else None."""
    if [target.into for target in wanted] != [name for name, _ in into]:
        return None
    for target, (_, memory) in zip(wanted, into, strict=True):
        number = layout.whole_numbers.get(target.name)
        shape = () if number is None else layout.entries[number].shape
        if not target.box == target.local == whole(shape) or memory.strides != dense_strides(shape, memory.itemsize):
            return None
    return tuple(target.name for target in wanted)


@lru_cache(maxsize=CACHED_PLANS)
def plan_named(layout: RegionLayout, names: tuple[str, ...]) -> PartPlan | None:
    """Plan to fill dense tensors with the whole tensors of these names, in this order, from the only part.

    None if the part does not have all of them, or one is named twice.
    """
    numbers = layout.whole_numbers
    taken = [numbers.get(name, -1) for name in names]
    if -1 in taken or len(set(taken)) < len(taken):
        return None
    receivers = np.full(len(layout.entries), -1, np.intp)
    receivers[taken] = np.arange(len(taken))
    return _plan(layout, receivers)


def _plan(layout: RegionLayout, receivers: Indexes) -> PartPlan:
    """The plan that copies each entry to the target that is its receiver (-1: none)."""
    at = layout.arrays
    small = np.flatnonzero((receivers >= 0) & (at.entry_nbytes > 0) & (at.entry_nbytes < LARGE_BYTES))
    piece_of_small = np.searchsorted(at.piece_offsets, at.entry_offsets[small], "right") - 1
    is_large = at.entry_nbytes[at.first_entry] >= LARGE_BYTES
    has_small = np.zeros(len(at.piece_offsets), bool)
    has_small[piece_of_small] = True
    pieces = np.flatnonzero(np.where(is_large, receivers[at.first_entry] >= 0, has_small))
    alone = is_large | (at.piece_nbytes == at.entry_nbytes[at.first_entry])
    direct = alone[pieces]
    jobs = np.zeros((len(pieces), 5), np.uint64)
    jobs[:, SOURCE], jobs[:, NBYTES] = at.piece_offsets[pieces], at.piece_nbytes[pieces]
    job_targets = np.where(direct, receivers[at.first_entry[pieces]], -1)
    jobs[direct, TARGET] = (at.piece_offsets - at.entry_offsets[at.first_entry])[pieces][direct]
    within = ~alone[piece_of_small]
    rows, piece_of_row = small[within], piece_of_small[within]
    jobs[~direct, FIRST] = np.searchsorted(piece_of_row, pieces[~direct], "left")
    jobs[~direct, COUNT] = np.searchsorted(piece_of_row, pieces[~direct], "right") - jobs[~direct, FIRST].astype(
        np.intp
    )
    copies = np.zeros((len(rows), 6), np.uint64)
    copies[:, ROW_SOURCE], copies[:, ROW_BYTES] = at.entry_offsets[rows], at.entry_nbytes[rows]
    copies[:, ROWS] = 1
    return PartPlan(pieces, jobs, job_targets, copies, receivers[rows])


ReadPlan = tuple[PartPlan, ...]
"""What is read of each part."""


def plan_into(
    layouts: Sequence[RegionLayout], wanted: Sequence[BoxTarget], into: Mapping[str, torch.Tensor], reader: int = 0
) -> ReadPlan:
    """The plan of `plan_read` for tensors. Equal layouts, targets and strides have the same plan."""
    memory = tuple([(name, local_tensor(each)) for name, each in into.items()])
    return plan_read(tuple(layouts), tuple(wanted), memory, reader)


@lru_cache(maxsize=CACHED_PLANS)
def plan_read(
    layouts: tuple[RegionLayout, ...],
    wanted: tuple[BoxTarget, ...],
    into: tuple[tuple[str, LocalTensor], ...],
    reader: int = 0,
) -> ReadPlan:
    """Plan to fill local tensors, by name, with the boxes `wanted` of tensors in parts of these layouts.

    The targets of a part plan are numbered as in `into`. `reader` and errors: see `holdfast.store.reshard.plan.plan`.
    """
    if len(layouts) == 1 and (names := _whole_names(layouts[0], wanted, into)) is not None:
        usual = plan_named(layouts[0], names)
        if usual is not None:
            return (usual,)
    builders = [_PartBuilder(layout) for layout in layouts]
    numbers = {name: (number, memory) for number, (name, memory) in enumerate(into)}
    for copy in plan(wanted, sources_of(layouts), reader):
        builders[copy.part].add(copy, *numbers[copy.into])
    return tuple(builder.build() for builder in builders)


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
        pieces = self.layout.pieces_of[at]
        begins = [self.layout.pieces[piece].offset for piece in pieces]
        for rows in rows_of(shape_of(copy.put), strides, into.strides, into.itemsize, source, target):
            end = rows.source + (rows.rows - 1) * rows.source_stride + rows.row_bytes
            for piece in pieces[bisect_right(begins, rows.source) - 1 : bisect_left(begins, end)]:
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


def local_tensor(tensor: torch.Tensor) -> LocalTensor:
    size = tensor.itemsize
    return LocalTensor(size, tuple([stride * size for stride in tensor.stride()]))


def has_rows(tensor: torch.Tensor) -> bool:
    """Whether bytes are copied straight into a tensor of the CPU, as rows. If not, they go through a dense copy of it.

    It must store its elements themselves, each once. To plan very many rows, as of a large transposed matrix or of
    filters in `torch.channels_last`, takes longer than to copy all elements once more.
    """
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.is_contiguous():
        return True
    size, strides = local_tensor(tensor)
    _, _, outer = _loops(tensor.shape, dense_strides(tensor.shape, size), strides, size)
    planned = math.prod(count for count, _, _ in outer)
    return planned <= max(FEW_ROWS, tensor.nbytes // BYTES_OF_ROWS) and not overlaps_itself(tensor)
