"""The plan of a read of whole tensors from one part: the usual read, planned without a loop over boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.ft.state.boxes import whole
from holdfast.store.data.digests import (
    COUNT,
    FIRST,
    NBYTES,
    ROW_BYTES,
    ROW_SOURCE,
    ROWS,
    SOURCE,
    TARGET,
)
from holdfast.store.data.manifest import LARGE_BYTES, RegionLayout
from holdfast.store.read.part_plan import Indexes, LocalTensor, PartPlan
from holdfast.store.read.strides import dense_strides
from holdfast.store.reshard.plan import BoxTarget


def plan_whole_tensors(
    layout: RegionLayout, wanted: Sequence[BoxTarget], into: Mapping[str, LocalTensor]
) -> PartPlan | None:
    """Plan to fill dense tensors with whole tensors of the only part. None if anything else is wanted."""
    numbers, places = layout.whole_numbers, {name: place for place, name in enumerate(into)}
    fits: dict[tuple[object, ...], bool] = {}
    taken: list[int] = []
    for target in wanted:
        number = numbers.get(target.name)
        if number is None:
            return None
        shape, memory = layout.entries[number].shape, into[target.into]
        key = shape, memory, target.box, target.local
        if key not in fits:
            dense = memory.strides == dense_strides(shape, memory.itemsize)
            fits[key] = dense and target.box == target.local == whole(shape)
        if not fits[key]:
            return None
        taken.append(number)
    if len(set(taken)) < len(taken):
        return None
    receivers = np.full(len(layout.entries), -1, np.intp)
    receivers[taken] = [places[target.into] for target in wanted]
    return _plan(layout, receivers)


def plan_named(layout: RegionLayout, names: Sequence[str]) -> PartPlan | None:
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
