"""The bytes of dense tensors, and checksums of pieces (xxh3, 64 bits) that are computed while they are copied.

A `PartPlan` says what a read copies, in the columns of the compiled code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from holdfast.comms import _native


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor are laid out as in a contiguous tensor."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def lies_in_order(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the CPU with its bytes laid out as in a contiguous tensor."""
    return tensor.device.type == "cpu" and is_dense(tensor)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, on its device."""
    return tensor.view(-1).view(torch.uint8)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """The bytes of a tensor as a flat uint8 view; None unless `lies_in_order`."""
    return flat_bytes(tensor) if lies_in_order(tensor) else None


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into one of its shape and dtype, of any strides and device.

    torch cannot copy all dtypes of one byte (`int4`, `float4_e2m1fn_x2`): their bytes are copied.
    """
    if target.itemsize == 1:
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source)


Words = npt.NDArray[np.uint64]
Indexes = npt.NDArray[np.intp]
LEAST_BYTES = 241
"""The compiled code computes checksums of at least so many bytes; of fewer, xxhash does."""
SHARE_BYTES = 4 << 20
"""The least bytes for each thread that shares a call: a thread costs 0.1 ms."""
CALL_BYTES = 1 << 30
"""About so many bytes are moved between two looks at the deadline."""

SOURCE, NBYTES, TARGET, FIRST, COUNT = range(5)
"""The columns of a job: a piece, the address that all of it is copied to (or 0), and its row copies."""
ROW_SOURCE, ROW_TARGET, ROWS, ROW_BYTES, SOURCE_STRIDE, TARGET_STRIDE = range(6)
"""The columns of a row copy."""

NO_COPIES: Words = np.zeros((0, 6), np.uint64)


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


def copy_and_digest(jobs: Words, copies: Words = NO_COPIES) -> Words:
    """Do all jobs (rows of `jobs`, with addresses of this process); return the checksum of each piece.

    A job copies its piece of `NBYTES` bytes to `TARGET`, unless that is 0, and then makes `COUNT` of the row copies
    `copies`, from number `FIRST` on.
    """
    jobs = np.ascontiguousarray(jobs)
    sums = np.zeros(len(jobs), np.uint64)
    if not len(jobs):
        return sums
    copies = np.ascontiguousarray(copies)
    nbytes = int(jobs[:, NBYTES].sum() + (copies[:, ROWS] * copies[:, ROW_BYTES]).sum())
    threads = max(1, min(torch.get_num_threads(), nbytes // SHARE_BYTES))
    _native.digest_copies(jobs.ctypes.data, len(jobs), copies.ctypes.data, sums.ctypes.data, threads)
    for number in np.flatnonzero(jobs[:, NBYTES] < LEAST_BYTES):
        source, short = int(jobs[number, SOURCE]), int(jobs[number, NBYTES])
        sums[number] = xxhash.xxh3_64_intdigest(ctypes.string_at(source, short) if short else b"")
    return sums


def calls(jobs: Words) -> Iterator[slice]:
    """Ranges of jobs that move about `CALL_BYTES` each."""
    ends = np.cumsum(jobs[:, NBYTES], dtype=np.uint64)
    start = 0
    while start < len(jobs):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + CALL_BYTES, "right")))
        yield slice(start, stop)
        start = stop
