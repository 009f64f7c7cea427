"""`PartPlan`: what is read of one part, and where it goes: `PartTargets`, on the host and on devices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from holdfast.store.data.cuda_copies import CopiesToDevices, can_digest, on_device
from holdfast.store.data.digests import (
    COUNT,
    FIRST,
    NBYTES,
    ROW_BYTES,
    ROW_SOURCE,
    ROW_TARGET,
    ROWS,
    SOURCE,
    SOURCE_STRIDE,
    TARGET,
    TARGET_STRIDE,
    Words,
    flat_bytes,
)

Indexes = npt.NDArray[np.intp]


class LocalTensor(NamedTuple):
    """The memory of a target: bytes of an element, and strides in bytes."""

    itemsize: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PartPlan:
    """What is read of one part. `jobs` and `copies` have offsets in the region and in the targets, not addresses.

    `pieces` are the numbers of the jobs' pieces; `job_targets` and `copy_targets` the numbers of the targets that
    receive a whole piece, or rows of it (-1: none).
    """

    pieces: Indexes
    jobs: Words
    job_targets: Indexes
    copies: Words
    copy_targets: Indexes

    def addressed(self, base: int, targets: Words) -> tuple[Words, Words]:
        """Jobs and copies with addresses: of the region at `base`, and of the `targets`."""
        jobs, copies = self.jobs.copy(), self.copies.copy()
        jobs[:, SOURCE] += np.uint64(base)
        whole = self.job_targets >= 0
        jobs[whole, TARGET] += targets[self.job_targets[whole]]
        copies[:, ROW_SOURCE] += np.uint64(base)
        copies[:, ROW_TARGET] += targets[self.copy_targets]
        return jobs, copies


class PartTargets:
    """The targets of a plan. Compiled code fills those of the host, copies of CUDA those on devices."""

    def __init__(self, plan: PartPlan, targets: Sequence[torch.Tensor]) -> None:
        self.plan, self._targets = plan, targets
        self._addresses = np.array([target.data_ptr() for target in targets], np.uint64)
        away = np.array([*map(on_device, targets), False], bool)  # the last one is number -1: no target
        self.away = away[plan.job_targets]
        """The jobs whose whole piece goes to a device."""
        self._rows_away = away[plan.copy_targets]
        self.any_away = bool(away.any())
        devices = {target.device for target in targets if on_device(target)}
        self.device = devices.pop() if len(devices) == 1 else None
        """The only device that targets are on; None if there is none, or several."""

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
        begin = int(self.plan.jobs[start, TARGET])
        return flat_bytes(self._targets[target])[begin : begin + nbytes]

    def begin_copies(self, memory: torch.Tensor, first: int, todo: Indexes) -> CopiesToDevices:
        """Begin to copy what the jobs `todo` take to devices, from `memory`, which has the region from `first` on."""
        plan, pairs = self.plan, list[tuple[torch.Tensor, torch.Tensor]]()
        whole = todo[self.away[todo]]
        for start, stop in runs_of(plan, whole, None):
            job, last = plan.jobs[whole[start]], plan.jobs[whole[stop - 1]]
            at, into = int(job[SOURCE]) - first, int(job[TARGET])
            nbytes = int(last[SOURCE] + last[NBYTES] - job[SOURCE])
            data = flat_bytes(self._targets[plan.job_targets[whole[start]]])
            pairs.append((memory[at : at + nbytes], data[into : into + nbytes]))
        for job in plan.jobs[todo[plan.jobs[todo, COUNT] > 0]]:
            for number in range(int(job[FIRST]), int(job[FIRST] + job[COUNT])):
                if self._rows_away[number]:
                    row, data = plan.copies[number], flat_bytes(self._targets[plan.copy_targets[number]])
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
