"""Carries out a read: moves bytes from parts into tensors, and verifies every piece on the way."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from holdfast.store.data.cuda_copies import CopiesToDevices, can_digest, on_device, registrations
from holdfast.store.data.digests import (
    COUNT,
    FIRST,
    LEAST_BYTES,
    NBYTES,
    NO_COPIES,
    ROW_BYTES,
    ROW_SOURCE,
    ROW_TARGET,
    ROWS,
    SOURCE,
    SOURCE_STRIDE,
    TARGET,
    TARGET_STRIDE,
    Indexes,
    PartPlan,
    Words,
    calls,
    copy_and_digest,
    flat_bytes,
)
from holdfast.store.data.manifest import Manifest
from holdfast.store.read.delta import TensorMemory, read_delta
from holdfast.store.read.part_source import PartSource

if TYPE_CHECKING:
    from holdfast.store.read.device_copies import DeviceReads


RUN_BYTES = 8 << 20
"""About so many bytes of adjacent pieces are read from another host at once."""


class PartTargets:
    """The targets of a plan. Compiled code fills those of the host, copies of CUDA those on devices."""

    def __init__(self, plan: PartPlan, targets: Sequence[torch.Tensor], *, away: bool = False) -> None:
        """`away` says whether any target is on a device."""
        self.plan, self.targets = plan, targets
        self._addresses = np.array([target.data_ptr() for target in targets], np.uint64)
        there = [on_device(target) for target in targets] if away else [False] * len(targets)
        away_of = np.array([*there, False], bool)  # the last one is number -1: no target
        self.away = away_of[plan.job_targets]
        """The jobs whose whole piece goes to a device."""
        self._rows_away = away_of[plan.copy_targets]
        self.any_away = any(there)
        devices = {target.device for target, gone in zip(targets, there, strict=True) if gone}
        self.device = devices.pop() if len(devices) == 1 else None
        """The only device that targets are on; None if there is none, or several."""

    @functools.cached_property
    def copies_rows(self) -> bool:
        """Whether compiled code reads any piece twice: once for its checksum, and once for its rows or few bytes."""
        return bool(len(self.plan.copies) or (self.plan.jobs[:, NBYTES] < LEAST_BYTES).any())

    @functools.cached_property
    def only_away(self) -> npt.NDArray[np.bool_]:
        """The jobs that take bytes to devices alone."""
        first, count = self.plan.jobs[:, FIRST].astype(np.intp), self.plan.jobs[:, COUNT].astype(np.intp)
        here = np.concatenate(([0], np.cumsum(~self._rows_away)))
        rows_away: npt.NDArray[np.bool_] = (count > 0) & (here[first + count] == here[first])
        return self.away | rows_away

    def addressed(self, base: int) -> tuple[Words, Words]:
        """Jobs and row copies with addresses, for a region at `base`. They leave the targets on devices out."""
        jobs, copies = self.plan.addressed(base, self._addresses)
        jobs[self.away, TARGET] = 0
        copies[self._rows_away, ROWS] = 0
        return jobs, copies

    def place(self, start: int, nbytes: int) -> torch.Tensor | None:
        """The bytes of the host that receive `nbytes` of whole pieces from job `start` on; None if there are none."""
        target = int(self.plan.job_targets[start])
        if target < 0 or self.away[start]:
            return None
        return TensorMemory.of(self.targets[target]).span(int(self.plan.jobs[start, TARGET]), nbytes)

    def begin_copies(self, memory: torch.Tensor, first: int, todo: Indexes) -> CopiesToDevices:
        """Begin to copy what the jobs `todo` take to devices, from `memory`, which has the region from `first` on."""
        plan, pairs = self.plan, list[tuple[torch.Tensor, torch.Tensor]]()
        whole = todo[self.away[todo]]
        for start, stop in runs_of(plan, whole, None):
            job, last = plan.jobs[whole[start]], plan.jobs[whole[stop - 1]]
            at, into = int(job[SOURCE]) - first, int(job[TARGET])
            nbytes = int(last[SOURCE] + last[NBYTES] - job[SOURCE])
            data = flat_bytes(self.targets[plan.job_targets[whole[start]]])
            pairs.append((memory[at : at + nbytes], data[into : into + nbytes]))
        for job in plan.jobs[todo[plan.jobs[todo, COUNT] > 0]]:
            for number in range(int(job[FIRST]), int(job[FIRST] + job[COUNT])):
                if self._rows_away[number]:
                    row, data = plan.copies[number], flat_bytes(self.targets[plan.copy_targets[number]])
                    shape = int(row[ROWS]), int(row[ROW_BYTES])
                    pairs.append(
                        (
                            _rows(memory, shape, int(row[ROW_SOURCE]) - first, int(row[SOURCE_STRIDE])),
                            _rows(data, shape, int(row[ROW_TARGET]), int(row[TARGET_STRIDE])),
                        )
                    )
        return CopiesToDevices(pairs, self.device)

    def whole_there(self, todo: Indexes) -> tuple[npt.NDArray[np.bool_], Words]:
        """Which of the jobs `todo` bring their whole piece to where the only device can digest it; the addresses."""
        jobs, targets = self.plan.jobs[todo], self.plan.job_targets[todo]
        places = self._addresses[targets] + jobs[:, TARGET] if len(self._addresses) else jobs[:, TARGET]
        found = self.away[todo] & can_digest(places, jobs[:, NBYTES])
        return found if self.device is not None else np.zeros(len(todo), bool), places


def _rows(data: torch.Tensor, shape: tuple[int, int], start: int, stride: int) -> torch.Tensor:
    """Rows of flat bytes."""
    if shape[0] == 1:
        return data[start : start + shape[1]]
    return data.as_strided(shape, (stride, 1), data.storage_offset() + start)


def runs_of(plan: PartPlan, todo: Indexes, most: int | None) -> list[tuple[int, int]]:
    """Ranges of `todo` that are adjacent in the region and, if they are copied whole, in one target.

    Each has about `most` bytes at most.
    """
    jobs, targets = plan.jobs[todo], plan.job_targets[todo]
    ends = jobs[:, SOURCE] + jobs[:, NBYTES]
    goes_on = (targets[1:] < 0) | (jobs[:-1, TARGET] + jobs[:-1, NBYTES] == jobs[1:, TARGET])
    adjacent = (ends[:-1] == jobs[1:, SOURCE]) & (targets[:-1] == targets[1:]) & goes_on
    cuts = [0, *(np.flatnonzero(~adjacent) + 1).tolist(), len(todo)]
    runs: list[tuple[int, int]] = []
    for start, stop in pairwise(cuts):
        while start < stop:
            room = (
                stop
                if most is None
                else start + int(np.searchsorted(ends[start:stop], jobs[start, SOURCE] + np.uint64(most), "right"))
            )
            runs.append((start, max(start + 1, room)))
            start = runs[-1][1]
    return runs


def fill(
    source: PartSource,
    manifest: Manifest,
    into: PartTargets,
    bases: Sequence[TensorMemory | None] | None = None,
    device_reads: DeviceReads | None = None,
) -> None:
    """Fill targets with what their plan takes from a part. Pieces that fail are read from the next replica.

    What `device_reads` finds on the targets' device is not read from the host. Where the part is not mapped and has a
    delta from the bytes in `bases`, laid out like the targets, that is read.
    Raises the errors of `PartSource.manifest`; what was filled before stays.
    """
    plan = into.plan
    expected = manifest.sums[plan.pieces]
    todo = np.arange(len(plan.jobs))
    if bases is not None and len(todo) and source.mapped() is None:
        todo = read_delta(source, manifest, plan, into.targets, bases)
    if device_reads is not None and len(todo):
        todo = device_reads.fill(source, into, expected, todo)
    while len(todo):
        mapped = source.mapped()
        if mapped is not None:
            todo = _from_mapping(source, into, mapped, expected, todo)
        else:
            todo = _by_reading(source, into, expected, todo)


def copy_part(source: PartSource, into: torch.Tensor, base: torch.Tensor | None = None) -> Manifest:
    """Copy the whole region of a part into a flat uint8 tensor of its size.

    The bytes lie as the publisher laid them out. `base` is the region of the part that its delta starts from, if this
    process has it.
    """
    manifest = source.manifest()
    encoded = np.frombuffer(manifest.encode(), np.uint8)
    into[source.shard.manifest_at :].numpy()[:] = encoded
    fill(source, manifest, PartTargets(_whole(manifest), [into]), None if base is None else [TensorMemory.of(base)])
    return manifest


def verify_part(source: PartSource) -> None:
    """Read all pieces of a part, and compare their checksums. Raises the errors of `PartSource.manifest`."""
    manifest = source.manifest()
    plan = _whole(manifest)
    plan.jobs[:, TARGET] = 0
    plan = replace(plan, job_targets=np.full(len(plan.jobs), -1, np.intp))
    fill(source, manifest, PartTargets(plan, []))


def _whole(manifest: Manifest) -> PartPlan:
    """The plan that copies all pieces to where they are in the part."""
    pieces = manifest.layout.pieces
    jobs = np.zeros((len(pieces), 5), np.uint64)
    jobs[:, SOURCE] = jobs[:, TARGET] = [piece.offset for piece in pieces]
    jobs[:, NBYTES] = [piece.nbytes for piece in pieces]
    none = np.zeros(0, np.intp)
    return PartPlan(np.arange(len(pieces)), jobs, np.zeros(len(pieces), np.intp), NO_COPIES, none)


def _from_mapping(
    source: PartSource, into: PartTargets, mapped: torch.Tensor, expected: Words, todo: Indexes
) -> Indexes:
    """Do the jobs `todo` from a mapped region; return those that are still to do."""
    if into.any_away:
        shared = source.mapped_for_devices()
        if shared is None:
            return todo
        registrations.register(shared)
        mapped = shared
    jobs, copies = into.addressed(mapped.data_ptr())
    jobs = jobs[todo]
    wrong = []
    for call in calls(jobs):
        source.left()
        if into.any_away:
            sums = _by_devices(into, mapped, todo[call], jobs[call], copies)
        else:
            sums = copy_and_digest(jobs[call], copies)
        wrong.append(todo[call][sums != expected[todo[call]]])
    if (into.any_away or into.copies_rows) and not source.confirm():
        return todo  # what was copied after it was verified may be other bytes: those of a part that lies there now
    failed = np.concatenate(wrong)
    if len(failed):
        source.reject(int(into.plan.jobs[failed[0], SOURCE]))
    return failed


def _by_devices(into: PartTargets, mapped: torch.Tensor, todo: Indexes, jobs: Words, copies: Words) -> Words:
    """Do jobs of which some take bytes to devices; return the checksums.

    A device computes those of the pieces that it gets whole, from what it got; the host computes the others.
    """
    there, places = into.whole_there(todo)
    sums, digested = np.zeros(len(todo), np.uint64), None
    under_way = into.begin_copies(mapped, 0, todo)
    try:
        if into.device is not None and there.any():
            digested = under_way.digest(into.device, places[there], jobs[there, NBYTES])
        here = ~there if digested is not None else np.ones(len(todo), bool)
        sums[here] = copy_and_digest(jobs[here], copies)
    finally:
        under_way.wait()
    if digested is not None:
        sums[there] = digested()
    return sums


def _by_reading(source: PartSource, into: PartTargets, expected: Words, todo: Indexes) -> Indexes:
    """Do the jobs `todo` with reads: of whole pieces straight into their targets. Return those still to do."""
    plan = into.plan
    for start, stop in runs_of(plan, todo, RUN_BYTES):
        run = todo[start:stop]
        first, last = plan.jobs[run[0]], plan.jobs[run[-1]]
        offset = int(first[SOURCE])
        nbytes = int(last[SOURCE] + last[NBYTES]) - offset
        place = into.place(int(run[0]), nbytes)
        if place is None:
            place = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if not source.read(offset, place):
            return todo[start:]
        jobs, copies = into.addressed(place.data_ptr() - offset)
        jobs = jobs[run]
        jobs[:, TARGET] = 0
        failed = run[copy_and_digest(jobs, copies) != expected[run]]
        if len(failed):
            source.reject(int(plan.jobs[failed[0], SOURCE]))
            return np.concatenate((failed, todo[stop:]))
        if into.any_away:
            into.begin_copies(place, offset, run).wait()
    return todo[:0]
