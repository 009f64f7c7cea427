"""Carries out a read: moves bytes from parts into tensors, and verifies every piece on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from holdfast.store.data.cuda_copies import registrations
from holdfast.store.data.digests import (
    NBYTES,
    NO_COPIES,
    SOURCE,
    TARGET,
    Words,
    calls,
    copy_and_digest,
)
from holdfast.store.data.manifest import Manifest
from holdfast.store.read.delta import TensorMemory, read_delta
from holdfast.store.read.device_copies import DeviceReads
from holdfast.store.read.part_plan import Indexes, PartPlan, PartTargets, runs_of
from holdfast.store.read.part_source import PartSource

RUN_BYTES = 8 << 20
"""About so many bytes of adjacent pieces are read from another host at once."""


def fill(
    source: PartSource,
    manifest: Manifest,
    plan: PartPlan,
    targets: Sequence[torch.Tensor],
    bases: Sequence[TensorMemory] | None = None,
    device_reads: DeviceReads | None = None,
) -> None:
    """Fill the targets with what `plan` takes from a part. Pieces that fail are read from the next replica.

    What `device_reads` finds on the targets' device is not read from the host. Where the part is not mapped and has a
    delta from the bytes in `bases`, laid out like the targets, that is read.
    Raises the errors of `PartSource.manifest`; what was filled before stays.
    """
    into = PartTargets(plan, targets)
    expected = manifest.sums[plan.pieces]
    todo = np.arange(len(plan.jobs))
    if bases is not None and len(todo) and source.mapped() is None:
        todo = read_delta(source, manifest, plan, targets, bases)
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
    if into.any_away and not source.confirm():
        return todo  # the devices may have got other bytes than those that were verified
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
