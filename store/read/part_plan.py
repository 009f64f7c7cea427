"""`PartPlan`: what is read of one part, and where it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.store.data.digests import ROW_SOURCE, ROW_TARGET, SOURCE, TARGET, Words

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
