"""The layout of a part's region: small tensors packed together, then large tensors, then a manifest.

The manifest lists every tensor, and a checksum for every piece: a run of small tensors, or a range of a large one.
Readers copy and verify piece by piece. So the digest of the manifest identifies all the bytes; it does not depend on
the order of the state dict, on strides, or on storage that tensors share.

The layout is the same for all versions of a training run, so it is made, encoded and decoded once. Tensors that several
parts of a version have must have equal bytes (`check_shared`): readers read them from any of the parts.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from holdfast.comms.errors import UNDECODABLE, CorruptData, Mismatch
from holdfast.ft.state.boxes import Box, shape_of, whole
from holdfast.store.data.digests import Words
from holdfast.store.data.state_dicts import decode as decode_skeleton
from holdfast.store.reshard.plan import listed

PIECE_BYTES = 2 << 20
"""The most bytes of a piece: few enough to verify it while it is in the cache."""
LARGE_BYTES = 256 << 10
"""Tensors of at least this many bytes have pieces of their own, and are read straight into place."""
ALIGNMENT = 64

_HEADER = struct.Struct("<4sIII")
"""Magic, number of checksums, bytes of the skeleton, bytes of the layout."""
_MAGIC = b"hfw3"
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_ITEMSIZES = {name: dtype.itemsize for name, dtype in _DTYPES.items()}


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor, or a box of one, and the byte of the region where it starts.

    `dtype` is torch's name. `shape` is that of the whole tensor, `box` the part of it that lies here, row-major; None
    if that is all of it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    box: Box | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape of what lies here."""
        return self.shape if self.box is None else shape_of(self.box)

    @property
    def nbytes(self) -> int:
        return math.prod(self.extent) * _ITEMSIZES[self.dtype]

    def of(self, region: torch.Tensor) -> torch.Tensor:
        """What lies here, in the memory of a part."""
        data = region[self.offset : self.offset + self.nbytes]
        return data.view(self.torch_dtype).view(self.extent)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """Bytes that are copied and verified together, and their tensors (positions in the layout)."""

    offset: int
    nbytes: int
    entries: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LayoutArrays:
    """Where the entries and pieces of a layout lie, as arrays; `first_entry` is the first one of each piece."""

    entry_offsets: Words
    entry_nbytes: Words
    piece_offsets: Words
    piece_nbytes: Words
    first_entry: npt.NDArray[np.intp]


class RegionLayout:
    """The tensors of a part in the order of their offsets, and their pieces. Immutable; `digest` identifies it."""

    def __init__(self, entries: tuple[TensorEntry, ...], sizes: Sequence[int] | None = None) -> None:
        """`sizes` are the bytes of the entries, if they are known."""
        self.entries = entries
        self._sizes = [entry.nbytes for entry in entries] if sizes is None else sizes
        self.pieces = tuple(_pieces(entries, self._sizes))
        self.encoded = msgspec.msgpack.encode(entries)
        self.digest = xxhash.xxh3_128_digest(self.encoded)
        self.data_bytes = entries[-1].offset + self._sizes[-1] if entries else 0
        self.manifest_at = aligned(self.data_bytes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RegionLayout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @functools.cached_property
    def arrays(self) -> LayoutArrays:
        """The offsets and sizes of entries and pieces."""
        return LayoutArrays(
            np.array([entry.offset for entry in self.entries], np.uint64),
            np.array(self._sizes, np.uint64),
            np.array([piece.offset for piece in self.pieces], np.uint64),
            np.array([piece.nbytes for piece in self.pieces], np.uint64),
            np.array([piece.entries[0] for piece in self.pieces], np.intp),
        )

    @functools.cached_property
    def whole_numbers(self) -> dict[str, int]:
        """The position of each entry that has all of its tensor, by name."""
        return {entry.name: number for number, entry in enumerate(self.entries) if entry.box is None}

    @functools.cached_property
    def by_name(self) -> dict[str, tuple[TensorEntry, ...]]:
        """The entries of each tensor."""
        found: dict[str, list[TensorEntry]] = {}
        for entry in self.entries:
            found.setdefault(entry.name, []).append(entry)
        return {name: tuple(entries) for name, entries in found.items()}

    @functools.cached_property
    def numbers(self) -> dict[tuple[str, Box], int]:
        """The position of each entry, by the tensor's name and the box of it that lies here."""
        return {(each.name, each.box or whole(each.shape)): number for number, each in enumerate(self.entries)}

    @functools.cached_property
    def pieces_of(self) -> tuple[tuple[int, ...], ...]:
        """For each entry, the numbers of the pieces that its bytes are in."""
        found: list[list[int]] = [[] for _ in self.entries]
        for number, piece in enumerate(self.pieces):
            for entry in piece.entries:
                found[entry].append(number)
        return tuple(map(tuple, found))

    @functools.cached_property
    def small(self) -> dict[int, int]:
        """The entries that have no pieces of their own, by position, and the place of each among them."""
        found = [number for number, nbytes in enumerate(self._sizes) if nbytes < LARGE_BYTES]
        return {number: place for place, number in enumerate(found)}

    @functools.cached_property
    def piece_ranges(self) -> Words:
        """The first byte and the size of each piece."""
        return np.stack((self.arrays.piece_offsets, self.arrays.piece_nbytes), axis=1)

    @functools.cached_property
    def small_ranges(self) -> Words:
        """The first byte and the size of each entry in `small`."""
        small = list(self.small)
        return np.stack((self.arrays.entry_offsets[small], self.arrays.entry_nbytes[small]), axis=1)

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def decode(data: bytes) -> RegionLayout:
        """The layout in `data`. Raises `CorruptData` for bytes that are not an encoded layout."""
        try:
            entries = _entries.decode(data)
            sizes = [
                math.prod(each.shape) * _ITEMSIZES[each.dtype] if each.box is None else each.nbytes for each in entries
            ]
        except (*UNDECODABLE, KeyError) as error:
            raise CorruptData(f"not a manifest of weights: {error}") from error
        end = 0
        for entry, nbytes in zip(entries, sizes, strict=True):
            if entry.offset < end or not _plausible(entry):
                raise CorruptData(f"a manifest of weights in which {entry} lies wrong")
            end = entry.offset + nbytes
        return RegionLayout(entries, sizes)


_entries = msgspec.msgpack.Decoder(tuple[TensorEntry, ...])


def _plausible(entry: TensorEntry) -> bool:
    if entry.shape and min(entry.shape) < 0:
        return False
    if entry.box is None:
        return True
    sides = zip(entry.box, entry.shape, strict=False)
    return len(entry.box) == len(entry.shape) and all(0 <= low <= high <= size for (low, high), size in sides)


def _pieces(entries: tuple[TensorEntry, ...], sizes: Sequence[int]) -> Iterator[CopyPiece]:
    run: list[int] = []
    start = end = 0
    for position, (entry, nbytes) in enumerate(zip(entries, sizes, strict=True)):
        if run and (nbytes >= LARGE_BYTES or entry.offset + nbytes - start > PIECE_BYTES):
            yield CopyPiece(start, end - start, tuple(run))
            run = []
        if nbytes >= LARGE_BYTES:
            for done in range(0, nbytes, PIECE_BYTES):
                yield CopyPiece(entry.offset + done, min(PIECE_BYTES, nbytes - done), (position,))
        elif nbytes:
            start = start if run else entry.offset
            run.append(position)
            end = entry.offset + nbytes
    if run:
        yield CopyPiece(start, end - start, tuple(run))


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """The content of a part: its layout, the checksums (xxh3, 64 bits) of its pieces, and its skeleton.

    `small_sums` are the checksums of each small tensor, by which parts are compared. The skeleton describes the state
    dict that the tensors came from (`holdfast.store.data.state_dicts`).
    """

    layout: RegionLayout
    sums: Words
    small_sums: Words
    skeleton: bytes

    @property
    def digest(self) -> bytes:
        """16 bytes that identify all the bytes of the part, and its state, whatever the order of its dicts."""
        identity = self._encoded_sums(), _skeleton_digest(self.skeleton), self.layout.digest
        return xxhash.xxh3_128_digest(b"".join(identity))

    def sums_of(self, number: int) -> tuple[int, ...]:
        """The checksums of an entry: of equal bytes in two parts they are equal."""
        place = self.layout.small.get(number)
        if place is not None:
            return (int(self.small_sums[place]),)
        return tuple(int(self.sums[piece]) for piece in self.layout.pieces_of[number])

    def encode(self) -> bytes:
        header = _HEADER.pack(_MAGIC, len(self.sums), len(self.skeleton), len(self.layout.encoded))
        return b"".join((header, self._encoded_sums(), self.skeleton, self.layout.encoded))

    def _encoded_sums(self) -> bytes:
        return np.concatenate((self.sums, self.small_sums)).astype("<u8").tobytes()

    @staticmethod
    def decode(data: bytes | memoryview, data_bytes: int) -> Manifest:
        """The manifest in `data`. Raises `CorruptData` if it cannot be that of `data_bytes` bytes of tensors."""
        data = bytes(data)
        if len(data) < _HEADER.size:
            raise CorruptData("not a manifest of weights: too short")
        magic, count, skeleton, layout = _HEADER.unpack_from(data)
        start = len(data) - skeleton - layout
        if magic != _MAGIC or start < _HEADER.size + 8 * count or (start - _HEADER.size) % 8:
            raise CorruptData("not a manifest of weights: its parts do not fit")
        sums = np.frombuffer(data, "<u8", (start - _HEADER.size) // 8, _HEADER.size).astype(np.uint64)
        decoded = RegionLayout.decode(data[start + skeleton :])
        if decoded.data_bytes > data_bytes or len(decoded.pieces) != count or len(decoded.small) != len(sums) - count:
            raise CorruptData("a manifest of weights that does not belong to its region")
        return Manifest(decoded, sums[:count], sums[count:], data[start : start + skeleton])


@functools.lru_cache(maxsize=64)
def _skeleton_digest(skeleton: bytes) -> bytes:
    return decode_skeleton(skeleton).digest if skeleton else b""


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def difference(ours: Manifest, theirs: Manifest) -> str:
    """How two parts differ, in words; "" if they do not."""
    mine, other = ours.layout.by_name, theirs.layout.by_name
    if missing := sorted(other.keys() - mine.keys()):
        return f"it lacks {some(missing)}"
    if extra := sorted(mine.keys() - other.keys()):
        return f"it has {some(extra)} besides"
    for name, entries in sorted(mine.items()):
        if (entries[0].dtype, entries[0].shape) != (other[name][0].dtype, other[name][0].shape):
            return f"it has {entries[0]}, not {other[name][0]}"
        if [entry.box for entry in entries] != [entry.box for entry in other[name]]:
            return f"it has other parts of {entries[0]}"
    changed: set[str] = set()
    for piece, before, after in zip(ours.layout.pieces, ours.sums, theirs.sums, strict=True):
        if before != after:
            changed.update(ours.layout.entries[position].name for position in piece.entries)
    if changed:
        return f"other values in or near {some(sorted(changed))}"
    return "" if ours.skeleton == theirs.skeleton else "other values besides its tensors"


def quoted(names: list[str]) -> str:
    """The same for names that may hold any character."""
    return some([repr(name) for name in names])


def some(names: list[str]) -> str:
    """The first names of a list, and how many there are besides."""
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


@functools.lru_cache(maxsize=16)
def tensors_of(layouts: tuple[RegionLayout, ...]) -> Mapping[str, TensorEntry]:
    """Each tensor of a version: an entry that has all of it if there is one.

    Raises `Mismatch` if parts disagree about its shape or dtype.
    """
    found: dict[str, TensorEntry] = {}
    for layout in layouts:
        for entry in layout.entries:
            known = found.get(entry.name)
            if known is not None and (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise Mismatch(f"a part of the version has {entry}, another {known}: publish it alike on all ranks")
            if known is None or known.box is not None:
                found[entry.name] = entry
    return found


def check_shared(parts: Sequence[int], manifests: Sequence[Manifest]) -> None:
    """Check that parts with these numbers have equal bytes of each box of a tensor that several of them have.

    Raises `Mismatch`, naming the tensors and the parts.
    """
    faults: dict[str, None] = {}
    for name, (first, at), (second, there) in _shared(tuple(manifest.layout for manifest in manifests)):
        if manifests[first].sums_of(at) != manifests[second].sums_of(there):
            faults[f"{name!r} has other bytes in part {parts[second]} than in part {parts[first]}"] = None
    if faults:
        raise Mismatch(
            f"parts of the version disagree: {listed(faults)}; publish equal bytes, or each tensor in one part"
        )


class _Place(NamedTuple):
    """The position of a part's manifest, and that of an entry in its layout."""

    part: int
    entry: int


@functools.lru_cache(maxsize=16)
def _shared(layouts: tuple[RegionLayout, ...]) -> tuple[tuple[str, _Place, _Place], ...]:
    """The boxes that several parts have: the tensor's name, the first place of each, and another one."""
    first: dict[tuple[str, Box], _Place] = {}
    found = []
    for part, layout in enumerate(layouts):
        for number, entry in enumerate(layout.entries):
            here = _Place(part, number)
            known = first.setdefault((entry.name, entry.box or whole(entry.shape)), here)
            if known is not here:
                found.append((entry.name, known, here))
    return tuple(found)
