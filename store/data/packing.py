"""Packs the tensors of a part into its region, with checksums, in one pass over memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from holdfast.comms.errors import Unsupported
from holdfast.comms.tensors.memory import PlainTensors
from holdfast.ft.state.boxes import Box
from holdfast.store.data.cuda_copies import (
    CHUNK_BYTES,
    HostCopy,
    can_digest,
    digest_beside,
    on_device,
    registrations,
    to_host,
)
from holdfast.store.data.digests import (
    COUNT,
    FIRST,
    NBYTES,
    ROW_BYTES,
    ROW_SOURCE,
    ROW_TARGET,
    ROWS,
    SOURCE,
    TARGET,
    Words,
    copy_and_digest,
    copy_elements,
    flat_bytes,
    is_dense,
    lies_in_order,
)
from holdfast.store.data.manifest import ALIGNMENT, LARGE_BYTES, Manifest, RegionLayout, TensorEntry, aligned

ROWS_OF_JOB = 64
"""The number of small tensors that one thread copies at a time."""
CACHED_PLANS = 16
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PartBlock:
    """What a part has of a tensor.

    `tensor` holds the `box` of the whole tensor, which has shape `shape`; all of it if `box` is None.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    box: Box | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LocatedSources:
    """The tensors of a layout: their addresses on the host, and which of them are copied into place otherwise.

    `away` are the copies from devices that are still to do; `there` has the addresses of dense tensors on each device
    (0 for the others).
    """

    addresses: Words
    copied: Flags
    away: Sequence[HostCopy] = ()
    there: Mapping[torch.device, Words] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PackedPart:
    """A part in memory of its own: the first `nbytes` of `memory`, with the manifest from `manifest_at` on."""

    memory: torch.Tensor
    nbytes: int
    manifest: Manifest
    manifest_at: int
    digest: bytes


class _PackPlan:
    """The layout of blocks of given names, dtypes, shapes and boxes, and the jobs that fill it.

    `order` are the blocks' numbers in the order of the layout. A large block has a job for each piece, small blocks
    share one job, which copies them into place; then the pieces of small blocks are digested.
    """

    def __init__(self, key: tuple[tuple[str, str, tuple[int, ...], Box | None, int], ...]) -> None:
        places = sorted((each[4] >= LARGE_BYTES, each[0], each[3] or (), at) for at, each in enumerate(key))
        self.order = [at for *_, at in places]
        entries, offset = [], 0
        for at in self.order:
            name, dtype, shape, box, nbytes = key[at]
            entries.append(TensorEntry(name, dtype, shape, offset, box))
            offset += aligned(nbytes)
        self.layout = RegionLayout(tuple(entries), [key[at][4] for at in self.order])
        self.small = sum(1 for at in self.order if key[at][4] < LARGE_BYTES)
        self.small_bytes = sum(aligned(key[at][4]) for at in self.order[: self.small])
        self.has_gaps = any(key[at][4] % ALIGNMENT for at in self.order[: self.small])


_plan = functools.lru_cache(maxsize=CACHED_PLANS)(_PackPlan)
_plain_plans: Callable[[Hashable], list[_PackPlan]] = functools.lru_cache(CACHED_PLANS)(lambda key: [])
"""A list with the plan of plain tensors of the same names and forms, once that is made."""


def pack(blocks: Sequence[PartBlock], skeleton: bytes, allocate: Callable[[int], torch.Tensor]) -> PackedPart:
    """Copy blocks into memory from `allocate(nbytes)` (flat uint8, at least that long); they may change afterwards."""
    plan = _plan(
        tuple(
            (each.name, str(each.tensor.dtype)[6:], each.shape, each.box, each.tensor.nbytes) for each in blocks
        )  # "torch." is left out
    )
    sources = [blocks[at].tensor for at in plan.order]
    return _pack(plan, skeleton, allocate, lambda memory: _locate(plan, sources, memory))


def pack_plain(
    tensors: Mapping[str, torch.Tensor], plain: PlainTensors, skeleton: bytes, allocate: Callable[[int], torch.Tensor]
) -> PackedPart:
    """Copy whole tensors, which `plain` describes: see `pack`."""
    made = _plain_plans((plain.names, plain.forms))
    if not made:
        kinds = ((name, str(each.dtype)[6:], tuple(each.shape), None, each.nbytes) for name, each in tensors.items())
        made.append(_PackPlan(tuple(kinds)))
    plan = made[0]
    located = LocatedSources(plain.addresses[plan.order], np.zeros(len(plan.order), bool))
    return _pack(plan, skeleton, allocate, lambda memory: located)


def _pack(
    plan: _PackPlan,
    skeleton: bytes,
    allocate: Callable[[int], torch.Tensor],
    locate: Callable[[torch.Tensor], LocatedSources],
) -> PackedPart:
    """Make the part in new memory, from what `_locate` finds."""
    layout = plan.layout
    memory = allocate(region_bytes(layout, skeleton))
    if plan.has_gaps:
        memory[: plan.small_bytes].numpy().fill(0)
    return seal(layout, memory, skeleton, _fill(plan, locate(memory), memory.data_ptr()))


def region_bytes(layout: RegionLayout, skeleton: bytes = b"") -> int:
    """The size of a part's region."""
    sums, small_sums = (np.zeros(len(each), np.uint64) for each in (layout.pieces, layout.small))
    return layout.manifest_at + len(Manifest(layout, sums, small_sums, skeleton).encode())


def seal(layout: RegionLayout, memory: torch.Tensor, skeleton: bytes, sums: Words) -> PackedPart:
    """Write the manifest behind tensors that lie in place, and have these checksums of pieces."""
    manifest = Manifest(layout, sums, digest_small(layout, memory), skeleton)
    encoded = manifest.encode()
    nbytes = layout.manifest_at + len(encoded)
    memory[layout.manifest_at : nbytes].numpy()[:] = np.frombuffer(encoded, np.uint8)
    return PackedPart(memory, nbytes, manifest, layout.manifest_at, manifest.digest)


def digest_pieces(layout: RegionLayout, memory: torch.Tensor) -> Words:
    """The checksums of the pieces of a region."""
    return _digests(memory, layout.piece_ranges)


def digest_small(layout: RegionLayout, memory: torch.Tensor) -> Words:
    """The checksums of the small tensors of a region."""
    return _digests(memory, layout.small_ranges)


def _digests(memory: torch.Tensor, ranges: Words) -> Words:
    jobs = np.zeros((len(ranges), 5), np.uint64)
    jobs[:, [SOURCE, NBYTES]] = ranges
    jobs[:, SOURCE] += np.uint64(memory.data_ptr())
    return copy_and_digest(jobs)


def _locate(plan: _PackPlan, sources: Sequence[torch.Tensor], memory: torch.Tensor) -> LocatedSources:
    """Locate the sources, in the order of the layout; copy those that do not have their bytes in order."""
    addresses = np.zeros(len(sources), np.uint64)
    copied = np.zeros(len(sources), bool)
    away: list[HostCopy] = []
    there: dict[torch.device, Words] = {}
    for number, source in enumerate(sources):
        if on_device(source):
            if is_dense(source):
                there.setdefault(source.device, np.zeros(len(sources), np.uint64))[number] = source.data_ptr()
            away += _from_device(source, plan.layout.entries[number], memory)
        elif lies_in_order(source):
            addresses[number] = source.data_ptr()
            continue
        else:
            _copy_elements(source, plan.layout.entries[number], memory)
        copied[number] = True
    if away:
        registrations.register(memory)
    return LocatedSources(addresses, copied, away, there)


def _from_device(source: torch.Tensor, entry: TensorEntry, memory: torch.Tensor) -> list[HostCopy]:
    """The copies of a tensor from a device: of ranges of its bytes, if they lie in order."""
    target, end = memory[entry.offset : entry.offset + entry.nbytes], entry.offset + entry.nbytes
    if not entry.nbytes:
        return []
    if not is_dense(source):
        if source.itemsize == 1:  # torch cannot copy all dtypes of one byte
            return [HostCopy(source.view(torch.uint8), target.view(entry.extent), end)]
        return [HostCopy(source, target.view(entry.torch_dtype).view(entry.extent), end)]
    data = flat_bytes(source)
    return [
        HostCopy(data[at : at + CHUNK_BYTES], target[at : at + CHUNK_BYTES], min(entry.offset + at + CHUNK_BYTES, end))
        for at in range(0, entry.nbytes, CHUNK_BYTES)
    ]


def _fill(plan: _PackPlan, sources: LocatedSources, base: int) -> Words:
    """Copy what is not in place yet into the memory at `base`; return the checksums of all pieces."""
    arrays = plan.layout.arrays
    rows = _small_rows(plan, sources, base)
    in_place = sources.copied[arrays.first_entry]
    large = arrays.first_entry >= plan.small
    jobs = np.zeros((len(arrays.piece_offsets), 5), np.uint64)
    jobs[:, SOURCE] = arrays.piece_offsets + np.uint64(base)
    jobs[:, NBYTES] = arrays.piece_nbytes
    direct = large & ~in_place
    within = arrays.piece_offsets[direct] - arrays.entry_offsets[arrays.first_entry[direct]]
    jobs[direct, TARGET] = jobs[direct, SOURCE]
    jobs[direct, SOURCE] = sources.addresses[arrays.first_entry[direct]] + within
    if len(rows):
        shares = np.zeros((-(-len(rows) // ROWS_OF_JOB), 5), np.uint64)
        shares[:, FIRST] = np.arange(len(shares)) * ROWS_OF_JOB
        shares[:, COUNT] = np.minimum(len(rows) - shares[:, FIRST], ROWS_OF_JOB)
        copy_and_digest(shares, rows)
    sums = np.zeros(len(jobs), np.uint64)
    ends, done = arrays.piece_offsets + arrays.piece_nbytes, 0
    under_way = []
    for device, tensors in sources.there.items():
        starts = tensors[arrays.first_entry]
        mine = large & (starts > 0) & can_digest(starts, arrays.piece_nbytes)
        places = starts + arrays.piece_offsets - arrays.entry_offsets[arrays.first_entry]
        if mine.any() and (result := digest_beside(device, places[mine], arrays.piece_nbytes[mine])):
            under_way.append((mine, result))
    here = ~np.logical_or.reduce([mine for mine, _ in under_way]) if under_way else None

    def digest_before(end: int) -> None:
        nonlocal done
        upto = int(np.searchsorted(ends, end, "right"))
        mine = slice(done, upto) if here is None else done + np.flatnonzero(here[done:upto])
        sums[mine] = copy_and_digest(jobs[mine])
        done = upto

    if sources.away:
        to_host(sources.away, digest_before)
    digest_before(plan.layout.data_bytes)
    for mine, result in under_way:
        sums[mine] = result()
    return sums


def _small_rows(plan: _PackPlan, sources: LocatedSources, base: int) -> Words:
    """Row copies of one row each, which bring the small sources into place."""
    arrays = plan.layout.arrays
    wanted = np.flatnonzero(~sources.copied[: plan.small] & (arrays.entry_nbytes[: plan.small] > 0))
    rows = np.zeros((len(wanted), 6), np.uint64)
    rows[:, ROW_SOURCE] = sources.addresses[wanted]
    rows[:, ROW_TARGET] = arrays.entry_offsets[wanted] + np.uint64(base)
    rows[:, ROWS] = 1
    rows[:, ROW_BYTES] = arrays.entry_nbytes[wanted]
    return rows


def _copy_elements(source: torch.Tensor, entry: TensorEntry, memory: torch.Tensor) -> None:
    target = memory[entry.offset : entry.offset + entry.nbytes].view(entry.torch_dtype).view(entry.extent)
    try:
        copy_elements(target, source)
    except NotImplementedError as error:
        raise Unsupported(f"copying {entry}", "make it contiguous, on the CPU") from error
