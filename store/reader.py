"""Reads parts piece by piece from their holders, verifies each piece, and fills the tensors of a state dict.

If a replica fails, the next one is read.
"""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import xxhash

from holdfast.comms.errors import CorruptData, Mismatch, OpTimeout, RegionGone
from holdfast.comms.memory_plane import MemoryPlane
from holdfast.comms.tensors.overlap import overlaps_itself
from holdfast.comms.tensors.shared import alias_key, check_agreement, groups_sharing_memory
from holdfast.comms.transport.liveness import this_process
from holdfast.store.catalog import Catalog, Replica, Shard, Version
from holdfast.store.errors import StoreTimeout
from holdfast.store.layout import (
    LARGE_BYTES,
    CopyPiece,
    Manifest,
    TensorEntry,
    as_bytes,
    checksum,
    digest_of,
    lies_in_order,
)

Condemn = Callable[[int, int, str], None]
"""A callback for a replica with wrong bytes: version, part, holder's id."""


class PartReader:
    """Reads one part of a version from any of its replicas. For one thread."""

    def __init__(
        self,
        plane: MemoryPlane,
        catalog: Catalog,
        version: Version,
        shard: Shard,
        deadline: float,
        condemn: Condemn,
    ) -> None:
        self.version, self.shard = version.number, shard
        self._plane, self._deadline, self._condemn = plane, deadline, condemn
        self._began = time.monotonic()
        self._replicas = deque(_by_preference(catalog, shard))
        self._failures: list[str] = []
        self._corrupt = False

    @property
    def nbytes(self) -> int:
        """The size of the part's region."""
        return self.shard.replicas[0].handle.nbytes

    def manifest(self, into: torch.Tensor | None = None) -> Manifest:
        """The part's manifest; its bytes are left in `into` if given."""
        start = self.shard.manifest_at
        if not 0 <= start <= self.nbytes:
            raise CorruptData(f"version {self.version} part {self.shard.part}: a manifest outside its region")
        data = torch.empty(self.nbytes - start, dtype=torch.uint8, device="cpu") if into is None else into
        self._pull(start, data, lambda: digest_of(data.numpy().data) == self.shard.digest)
        return Manifest.decode(data.numpy().tobytes(), start)

    def piece(self, piece: CopyPiece, expected: int, into: torch.Tensor) -> None:
        """Read and verify the bytes of a piece into a flat uint8 tensor of that size.

        Raises `RegionGone` if no replica can be read, `CorruptData` if one can and none is right.
        """
        self._pull(piece.offset, into, lambda: checksum(into) == expected)

    def everything(self, into: torch.Tensor) -> None:
        """Read the whole region, as its publisher laid it out, into a flat uint8 tensor of `nbytes`."""
        manifest = self.manifest(into[self.shard.manifest_at :])
        for piece, expected in zip(manifest.pieces(), manifest.checksums, strict=True):
            self.piece(piece, expected, into[piece.offset : piece.offset + piece.nbytes])

    def _pull(self, offset: int, into: torch.Tensor, right: Callable[[], bool]) -> None:
        while self._replicas:
            replica = self._replicas[0]
            try:
                left = max(self._deadline - time.monotonic(), 0.0)
                self._plane.read(replica.handle, into, offset, timeout=left).wait()
            except RegionGone as error:
                self._failures.append(str(error))
            except OpTimeout as error:
                why = "; ".join((*self._failures, "the time was up before the last byte"))
                raise StoreTimeout("get", self.version, time.monotonic() - self._began, why) from error
            else:
                if right():
                    return
                self._corrupt = True
                self._failures.append(f"holder {replica.holder} has wrong bytes at {offset}")
                self._condemn(self.version, self.shard.part, replica.holder)
            self._replicas.popleft()
        what = f"version {self.version} part {self.shard.part}"
        kind = CorruptData if self._corrupt else RegionGone
        raise kind(f"no replica of {what} can be read: {'; '.join(self._failures) or 'there is none'}")


def _by_preference(catalog: Catalog, shard: Shard) -> Sequence[Replica]:
    """In reading order: this process first, leaving holders last, others in an order that differs by reader."""
    me = this_process()

    def preference(replica: Replica) -> tuple[bool, bool, int]:
        holder = catalog.holder(replica.holder)
        leaving, mine = holder is None or holder.leaving, holder is not None and holder.peer == me
        return leaving, not mine, xxhash.xxh3_64_intdigest(f"{me.pid} {replica.holder}".encode())

    return sorted(shard.replicas, key=preference)


def check_fit(parts: Sequence[Manifest], wanted: Mapping[str, torch.Tensor], strict: bool) -> None:
    """Raise `Mismatch` unless `parts` have every wanted tensor with its shape and dtype and, if `strict`, no other."""
    there: dict[str, TensorEntry] = {}
    for manifest in parts:
        for entry in manifest.entries:
            if entry.name in there:
                raise Mismatch(f"{entry.name!r} is in two parts of the version; publish it in one")
            there[entry.name] = entry
    if missing := sorted(wanted.keys() - there.keys()):
        raise Mismatch(f"the version has no {missing[0]!r} ({len(missing)} wanted tensors are not in it)")
    if strict and (extra := sorted(there.keys() - wanted.keys())):
        raise Mismatch(
            f"the version also has {extra[0]!r} ({len(extra)} tensors that were not asked for); "
            "give strict=False to read only some"
        )
    for name, tensor in wanted.items():
        entry = there[name]
        if (tensor.dtype, tuple(tensor.shape)) != (entry.torch_dtype, entry.shape):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise Mismatch(f"the version has {entry}, `into` has {name} {dtype}{list(tensor.shape)}")
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise Mismatch(f"{name!r} of `into` is an expanded tensor, whose elements share memory; clone it")


def fill_shared(parts: Sequence[tuple[PartReader, Manifest]], wanted: Mapping[str, torch.Tensor]) -> set[str]:
    """Fill the wanted tensors that share memory, from a copy; returns their names.

    Of tied tensors that get the same bytes, one is left for `fill`. Raises `Mismatch`, before any tensor is changed, if
    two get different bytes in one place.
    """
    groups = groups_sharing_memory(wanted)
    sums = _sums_of_large(manifest for _, manifest in parts) if groups else {}
    ready: list[tuple[str, torch.Tensor]] = []
    filled: set[str] = set()
    for group in groups:
        distinct = {(alias_key(wanted[name]), sums.get(name, name)): name for name in reversed(group)}
        filled.update(set(group) - set(distinct.values()))
        if len(distinct) == 1 and not overlaps_itself(wanted[group[0]]):
            continue
        targets = {name: wanted[name] for name in distinct.values()}
        sources = {name: torch.empty(each.shape, dtype=each.dtype, device="cpu") for name, each in targets.items()}
        for reader, manifest in parts:
            fill(reader, manifest, sources)
        check_agreement(targets, sources, "`into`")
        ready += sources.items()
        filled.update(targets)
    for name, source in ready:
        _place(source, wanted[name])
    return filled


def _sums_of_large(manifests: Iterable[Manifest]) -> dict[str, tuple[int, ...]]:
    """The checksums of each large tensor's pieces: equal for tensors of equal bytes."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for manifest in manifests:
        for piece, known in zip(manifest.pieces(), manifest.checksums, strict=True):
            entry = manifest.entries[piece.entries[0]]
            if entry.nbytes >= LARGE_BYTES:
                found[entry.name].append(known)
    return {name: tuple(sums) for name, sums in found.items()}


def fill(reader: PartReader, manifest: Manifest, wanted: Mapping[str, torch.Tensor]) -> None:
    """Read the wanted tensors of a part, which all fit; of the rest, only neighbours of small tensors are read."""
    staging = torch.empty(0, dtype=torch.uint8, device="cpu")
    staged: dict[int, torch.Tensor] = {}
    for piece, expected in zip(manifest.pieces(), manifest.checksums, strict=True):
        entries = [manifest.entries[each] for each in piece.entries if manifest.entries[each].name in wanted]
        if not entries:
            continue
        first = manifest.entries[piece.entries[0]]
        if first.nbytes >= LARGE_BYTES:
            data = as_bytes(wanted[first.name])
            if data is None:
                data = staged.setdefault(first.offset, torch.empty(first.nbytes, dtype=torch.uint8, device="cpu"))
            start = piece.offset - first.offset
            reader.piece(piece, expected, data[start : start + piece.nbytes])
            if start + piece.nbytes == first.nbytes and first.offset in staged:
                _place(_as_in(first, staged.pop(first.offset)), wanted[first.name])
            continue
        if staging.nbytes < piece.nbytes:
            staging = torch.empty(piece.nbytes, dtype=torch.uint8, device="cpu")
        data = staging[: piece.nbytes]
        reader.piece(piece, expected, data)
        for entry in entries:
            start = entry.offset - piece.offset
            _place(_as_in(entry, data[start : start + entry.nbytes]), wanted[entry.name])


def _as_in(entry: TensorEntry, data: torch.Tensor) -> torch.Tensor:
    """The bytes of an entry as a tensor of its dtype and shape."""
    return data.view(entry.torch_dtype).view(entry.shape)


def _place(source: torch.Tensor, into: torch.Tensor) -> None:
    """Copy a contiguous tensor on the CPU into one of the same shape and dtype, of any strides and device."""
    with torch.inference_mode(into.is_inference()):
        if lies_in_order(into):
            ctypes.memmove(into.data_ptr(), source.data_ptr(), source.nbytes)
            if not into.is_inference():
                torch.autograd.graph.increment_version(into)
        else:
            into.copy_(source)
