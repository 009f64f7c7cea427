"""Reads one version: its manifests, then the wanted boxes of its tensors, from the parts that have them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.comms.memory_plane import MemoryPlane
from holdfast.ft.state.boxes import Box, whole
from holdfast.store.catalog.records import Catalog, Replica, Shard, Version
from holdfast.store.data.cuda_copies import on_device
from holdfast.store.data.manifest import LARGE_BYTES, Manifest, TensorEntry, check_shared, quoted, some, tensors_of
from holdfast.store.data.packing import digest_pieces
from holdfast.store.data.state_dicts import decode, merge, rebuild
from holdfast.store.read.delta import FilledTargets
from holdfast.store.read.device_copies import DeviceReads
from holdfast.store.read.filling import PartTargets, fill
from holdfast.store.read.part_source import PartSource, ReportCorrupt
from holdfast.store.read.read_plan import ReadPlan, plan_into, plan_named
from holdfast.store.reshard.plan import BoxTarget

Nearest = Callable[[Catalog, Version, Shard, float], Replica | None]
"""A callback that finds, or makes, a copy of a part that the readers of a host share, before a deadline."""

_agreed: Callable[[Hashable], set[bool]] = functools.lru_cache(16)(lambda key: set())
"""A set that is not empty once the parts with these digests were found to agree."""


@dataclass(frozen=True, slots=True)
class ReadTerms:
    """A version to read and until when, with what is known of reads before."""

    plane: MemoryPlane
    catalog: Catalog
    version: Version
    deadline: float
    report: ReportCorrupt
    filled: FilledTargets
    device_reads: DeviceReads | None = None


class VersionReader:
    """A version that is being read. For one thread.

    A tensor that several parts have is read from any of them: `Mismatch` if their bytes differ. Methods raise
    `RegionGone` if a part has no replica that can be read, `CorruptData` if none is right, `StoreTimeout` after the
    deadline.
    """

    fills_devices = True
    """Whether `fill` takes dense tensors on CUDA devices."""

    def __init__(self, terms: ReadTerms, nearest: Nearest | None = None) -> None:
        catalog, version, deadline = terms.catalog, terms.version, terms.deadline
        self.number = version.number
        self._filled, self._reader = terms.filled, os.getpid()
        self._device_reads = terms.device_reads
        self._sources = []
        for shard in version.shards:
            self._sources.append(PartSource(terms.plane, catalog, version, shard, deadline, terms.report))
            if nearest is not None and (near := nearest(catalog, version, shard, deadline)) is not None:
                self._sources[-1].prefer(near)
        self.manifests: list[Manifest] = [source.manifest() for source in self._sources]
        self.tensors = tensors_of(tuple(manifest.layout for manifest in self.manifests))
        if len(self.manifests) > 1:
            _check_shared(version, self.manifests)
        self.skeleton = merge([decode(each) for each in dict.fromkeys(one.skeleton for one in self.manifests)])

    @property
    def layouts(self) -> tuple[bytes, ...]:
        """The digests of the parts' layouts."""
        return tuple(manifest.layout.digest for manifest in self.manifests)

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors of the state dict are known to have equal bytes."""
        one, two = self.skeleton.source(name), self.skeleton.source(other)
        return one == two or (self._sums(one) is not None and self._sums(one) == self._sums(two))

    def may_be_equal(self, one: str, other: str) -> bool:
        """Whether two published tensors may have equal bytes. Only large ones are known to differ before a read."""
        sums = self._sums(one), self._sums(other)
        return None in sums or sums[0] == sums[1]

    def _sums(self, name: str) -> tuple[int, ...] | None:
        """The checksums of a large tensor that lies in one part; None for others, and for what is no tensor."""
        entry = self.tensors.get(name)
        if entry is None or entry.box is not None or entry.nbytes < LARGE_BYTES:
            return None
        for manifest in self.manifests:
            number = manifest.layout.numbers.get((name, whole(entry.shape)))
            if number is not None:
                return tuple(int(manifest.sums[piece]) for piece in manifest.layout.pieces_of[number])
        return None

    def fits(self, stored: TensorEntry, dtype: torch.dtype) -> bool:
        """Whether a tensor of the version can be read into one of a dtype."""
        return stored.dtype == str(dtype).removeprefix("torch.")

    @property
    def is_mapped(self) -> bool:
        """Whether all parts were mapped, or were not read."""
        return all(source.is_mapped for source in self._sources)

    def prepare(self, targets: Mapping[str, Sequence[BoxTarget]]) -> None:
        """Wait for what `fill` needs besides the parts. Nothing, unless the reader asked for a cast."""

    def fill(self, wanted: Sequence[BoxTarget], into: Mapping[str, torch.Tensor]) -> ReadPlan | None:
        """Fill the boxes of local tensors, by name, that `wanted` says. See `has_rows` for what tensors can be filled.

        Returns the plan, with which `carry_out` does the same again; None if there is none. Raises `Mismatch`, before a
        byte moves, if no part has some of what is wanted.
        """
        plan = plan_into([manifest.layout for manifest in self.manifests], wanted, into, self._reader)
        self.carry_out(plan, into)
        return plan

    def plan_whole(self, names: tuple[str, ...]) -> ReadPlan | None:
        """Plan to fill dense tensors with the whole tensors `names`; None unless the only part has all of them."""
        plan = plan_named(self.manifests[0].layout, names) if len(self.manifests) == 1 else None
        return None if plan is None else (plan,)

    def carry_out(self, plan: ReadPlan, into: Mapping[str, torch.Tensor], *, away: bool = True) -> None:
        """Fill local tensors by a plan for these layouts. None is on a device unless `away`."""
        targets = list(into.values())
        away = away and any(map(on_device, targets))
        for source, manifest, part in zip(self._sources, self.manifests, plan, strict=True):
            offer = source.shard.delta
            bases = self._filled.holding(part, offer.base) if offer is not None and not away else None
            fill(source, manifest, PartTargets(part, targets, away=away), bases, self._device_reads)
            if not source.is_mapped and not away:
                self._filled.remember(part, targets, source.shard.digest)

    def map(self, names: Sequence[str], *, verify: bool = False) -> dict[str, torch.Tensor]:
        """Tensors that lie in the holders' memory, without a copy. They last, whatever happens to the holders.

        To `verify` them, all pieces of the parts are read once. Raises `Unsupported` if a holder's memory cannot be
        mapped, or a tensor lies in several parts.
        """
        divided = [name for name in names if self.tensors[name].box is not None]
        if divided:
            raise Unsupported(
                f"mapping {some(divided)}, which ranks published in several parts", "load them without map=True"
            )
        found: dict[str, torch.Tensor] = {}
        for source, manifest in zip(self._sources, self.manifests, strict=True):
            entries = [manifest.layout.by_name[name][0] for name in names if name in manifest.layout.by_name]
            if not entries:
                continue
            region = source.map_for_good()
            while verify and len(wrong := np.flatnonzero(digest_pieces(manifest.layout, region) != manifest.sums)):
                source.reject(manifest.layout.pieces[wrong[0]].offset)
                region = source.map_for_good()
            for entry in entries:
                found.setdefault(entry.name, entry.of(region))
        return found


def _check_shared(version: Version, manifests: Sequence[Manifest]) -> None:
    key = tuple((shard.part, shard.digest) for shard in version.shards)
    if not (agreed := _agreed(key)):
        check_shared([shard.part for shard in version.shards], manifests)
        agreed.add(True)


class Slice(NamedTuple):
    """A box of a tensor: the index of its first element along each dimension, and its shape."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return tuple((low, low + size) for low, size in zip(self.offsets, self.shape, strict=True))


def chosen(reader: VersionReader, names: str | Iterable[str] | Mapping[str, Slice] | None) -> dict[str, Box]:
    """What is asked for: the box of each tensor. Raises `Mismatch`, listing all faults, for what is not there."""
    there = {**reader.tensors, **{name: reader.tensors[source] for name, source in reader.skeleton.ties.items()}}
    if names is None:
        return {name: whole(entry.shape) for name, entry in reader.tensors.items()}
    if isinstance(names, str):
        found = {name: whole(entry.shape) for name, entry in there.items() if name.startswith(names)}
        if not found:
            raise Mismatch(f"the version has no tensor whose name begins with {names!r}")
        return found
    slices = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names)
    faults = []
    if missing := sorted(slices.keys() - there.keys()):
        faults.append(f"the version has no {quoted(missing)}")
    boxes: dict[str, Box] = {}
    for name in [name for name in slices if name in there]:
        shape, wanted = there[name].shape, slices[name]
        if wanted is None:
            boxes[name] = whole(shape)
        elif len(wanted.offsets) != len(shape) or len(wanted.shape) != len(shape):
            faults.append(
                f"{there[name]} has {len(shape)} dimensions, the slice {wanted.offsets} {wanted.shape} others"
            )
        else:
            boxes[name] = wanted.box
            if any(not 0 <= low <= high <= size for (low, high), size in zip(wanted.box, shape, strict=True)):
                faults.append(f"the slice {wanted.offsets} of shape {wanted.shape} is outside of {there[name]}")
    if faults:
        raise Mismatch("; ".join(faults))
    return boxes


def copied(reader: VersionReader, boxes: Mapping[str, Box]) -> dict[str, torch.Tensor]:
    """The boxes as new tensors on the CPU."""
    found, wanted = {}, []
    for name, box in boxes.items():
        source = reader.skeleton.source(name)
        shape = [high - low for low, high in box]
        found[name] = torch.empty(shape, dtype=reader.tensors[source].torch_dtype, device="cpu")
        wanted.append(BoxTarget(name, source, box, whole(shape)))
    reader.fill(wanted, found)
    return found


def mapped(reader: VersionReader, boxes: Mapping[str, Box]) -> dict[str, torch.Tensor]:
    """The boxes as views of mapped memory. Raises `Unsupported` for tensors that cannot be mapped."""
    source = reader.skeleton.source
    found = reader.map([source(name) for name in boxes])
    return {name: found[source(name)][tuple(slice(low, high) for low, high in box)] for name, box in boxes.items()}


def mapped_state(reader: VersionReader, like: Mapping[str, TensorEntry], strict: bool) -> dict[str, Any]:
    """The whole state dict, in mapped memory that was verified.

    If `like` has tensors, the version must have them, and with `strict` no others: `Mismatch`, listing all faults.
    """
    there = {**reader.tensors, **{name: reader.tensors[source] for name, source in reader.skeleton.ties.items()}}
    faults = [f"the version has no {quoted(missing)}"] if (missing := sorted(like.keys() - there.keys())) else []
    if like and strict and (extra := sorted(there.keys() - like.keys())):
        faults.append(f"the version also has {quoted(extra)}; give strict=False to take them")
    faults += [
        f"the version has {there[name]}, `into` has {mine}"
        for name, mine in like.items()
        if name in there and (there[name].dtype, there[name].shape) != (mine.dtype, mine.shape)
    ]
    if faults:
        raise Mismatch("; ".join(faults))
    return rebuild(reader.skeleton, reader.map(list(reader.tensors), verify=True))
