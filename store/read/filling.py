"""Carries out a read: moves bytes from parts into tensors, and verifies every piece on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from holdfast.store.data.digests import NBYTES, NO_COPIES, SOURCE, TARGET, Words, calls, copy_and_digest
from holdfast.store.data.manifest import Manifest
from holdfast.store.read.delta import TensorMemory, read_delta
from holdfast.store.read.part_plan import Indexes, PartPlan
from holdfast.store.read.part_source import PartSource

RUN_BYTES = 8 << 20
"""About so many bytes of adjacent pieces are read from another host at once."""


def fill(
    source: PartSource,
    manifest: Manifest,
    plan: PartPlan,
    targets: Sequence[torch.Tensor],
    bases: Sequence[TensorMemory] | None = None,
) -> None:
    """Fill the targets with what `plan` takes from a part. Pieces that fail are read from the next replica.

    Where the part is not mapped and has a delta from the bytes in `bases`, laid out like the targets, that is read.
    Raises the errors of `PartSource.manifest`; what was filled before stays.
    """
    addresses = np.array([target.data_ptr() for target in targets], np.uint64)
    expected = manifest.sums[plan.pieces]
    todo = np.arange(len(plan.jobs))
    if bases is not None and len(todo) and source.mapped() is None:
        todo = read_delta(source, manifest, plan, targets, bases)
    while len(todo):
        mapped = source.mapped()
        if mapped is not None:
            todo = _from_mapping(source, plan, mapped, addresses, expected, todo)
        else:
            todo = _by_reading(source, plan, targets, addresses, expected, todo)


def copy_part(source: PartSource, into: torch.Tensor, base: torch.Tensor | None = None) -> Manifest:
    """Copy the whole region of a part into a flat uint8 tensor of its size.

    The bytes lie as the publisher laid them out. `base` is the region of the part that its delta starts from, if this
    process has it.
    """
    manifest = source.manifest()
    encoded = np.frombuffer(manifest.encode(), np.uint8)
    into[source.shard.manifest_at :].numpy()[:] = encoded
    fill(source, manifest, _whole(manifest), [into], None if base is None else [TensorMemory.of(base)])
    return manifest


def verify_part(source: PartSource) -> None:
    """Read all pieces of a part, and compare their checksums. Raises the errors of `PartSource.manifest`."""
    manifest = source.manifest()
    plan = _whole(manifest)
    plan.jobs[:, TARGET] = 0
    fill(source, manifest, replace(plan, job_targets=np.full(len(plan.jobs), -1, np.intp)), [])


def _whole(manifest: Manifest) -> PartPlan:
    """The plan that copies all pieces to where they are in the part."""
    pieces = manifest.layout.pieces
    jobs = np.zeros((len(pieces), 5), np.uint64)
    jobs[:, SOURCE] = jobs[:, TARGET] = [piece.offset for piece in pieces]
    jobs[:, NBYTES] = [piece.nbytes for piece in pieces]
    none = np.zeros(0, np.intp)
    return PartPlan(np.arange(len(pieces)), jobs, np.zeros(len(pieces), np.intp), NO_COPIES, none)


def _from_mapping(
    source: PartSource, plan: PartPlan, mapped: torch.Tensor, addresses: Words, expected: Words, todo: Indexes
) -> Indexes:
    """Do the jobs `todo` from a mapped region; return those that found wrong bytes."""
    jobs, copies = plan.addressed(mapped.data_ptr(), addresses)
    jobs = jobs[todo]
    wrong = []
    for call in calls(jobs):
        source.left()
        sums = copy_and_digest(jobs[call], copies)
        wrong.append(todo[call][sums != expected[todo[call]]])
    failed = np.concatenate(wrong)
    if len(failed):
        source.reject(int(plan.jobs[failed[0], SOURCE]))
    return failed


def _by_reading(
    source: PartSource,
    plan: PartPlan,
    targets: Sequence[torch.Tensor],
    addresses: Words,
    expected: Words,
    todo: Indexes,
) -> Indexes:
    """Do the jobs `todo` with reads: of whole pieces straight into their targets. Return those still to do."""
    for start, stop in _runs(plan, todo):
        run = todo[start:stop]
        first, last = plan.jobs[run[0]], plan.jobs[run[-1]]
        offset = int(first[SOURCE])
        nbytes = int(last[SOURCE] + last[NBYTES]) - offset
        target = int(plan.job_targets[run[0]])
        if target >= 0:
            begin = int(first[TARGET])
            place = _bytes_of(targets[target])[begin : begin + nbytes]
        else:
            place = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if not source.read(offset, place):
            return todo[start:]
        jobs, copies = plan.addressed(place.data_ptr() - offset, addresses)
        jobs = jobs[run]
        jobs[:, TARGET] = 0
        failed = run[copy_and_digest(jobs, copies) != expected[run]]
        if len(failed):
            source.reject(int(plan.jobs[failed[0], SOURCE]))
            return np.concatenate((failed, todo[stop:]))
    return todo[:0]


def _runs(plan: PartPlan, todo: Indexes) -> list[tuple[int, int]]:
    """Ranges of `todo` that are adjacent in the region and, if they are copied whole, in one target."""
    runs: list[tuple[int, int]] = []
    start = 0
    for at in range(1, len(todo) + 1):
        if at < len(todo):
            before, here = plan.jobs[todo[at - 1]], plan.jobs[todo[at]]
            source = before[SOURCE] + before[NBYTES] == here[SOURCE]
            one = plan.job_targets[todo[at - 1]] == plan.job_targets[todo[at]]
            target = plan.job_targets[todo[at]] < 0 or before[TARGET] + before[NBYTES] == here[TARGET]
            room = here[SOURCE] + here[NBYTES] - plan.jobs[todo[start]][SOURCE] <= RUN_BYTES
            if source and one and target and room:
                continue
        runs.append((start, at))
        start = at
    return runs


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8)
