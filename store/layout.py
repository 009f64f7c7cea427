"""The layout of a part's region: small tensors packed together, then large tensors, then a manifest.

The manifest lists every tensor, and a checksum for every piece: a run of small tensors, or a range of a large one.
Readers copy and verify piece by piece. So the digest of the manifest identifies all the bytes; it does not depend on
the order of the state dict, on strides, or on storage that tensors share.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from holdfast.comms.errors import CorruptData, Unsupported
from holdfast.comms.tensors.memory import plain_tensor

PIECE_BYTES = 2 << 20
"""The most bytes of a piece: few enough to verify it while it is in the cache."""
LARGE_BYTES = 256 << 10
"""Tensors of at least this many bytes have pieces of their own, and are read straight into place."""
ALIGNMENT = 64
DEEPEST = 200
"""The most levels of mappings, or dots in a name, of a state dict."""

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor: name, dtype (torch's name of it), shape, and the byte of the region where it starts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """Bytes that are copied and verified together, and their tensors (positions in the manifest)."""

    offset: int
    nbytes: int
    entries: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """The content of a part: `entries` in the order of their offsets, `checksums` (xxh3, 64 bits) of the pieces."""

    entries: tuple[TensorEntry, ...]
    checksums: tuple[int, ...]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes, data_bytes: int) -> Manifest:
        """The manifest in `data`. Raises `CorruptData` if it cannot be that of `data_bytes` bytes of tensors."""
        try:
            manifest = _manifests.decode(data)
            end = 0
            for entry in manifest.entries:
                if entry.offset < end or any(size < 0 for size in entry.shape):
                    raise CorruptData(f"a manifest of weights in which {entry} lies wrong")
                end = entry.offset + entry.nbytes
        except (msgspec.DecodeError, KeyError) as error:
            raise CorruptData(f"not a manifest of weights: {error}") from error
        if end > data_bytes or len(manifest.pieces()) != len(manifest.checksums):
            raise CorruptData("a manifest of weights that does not belong to its region")
        return manifest

    def pieces(self) -> tuple[CopyPiece, ...]:
        return tuple(_pieces(self.entries))


_manifests = msgspec.msgpack.Decoder(Manifest)


def _pieces(entries: tuple[TensorEntry, ...]) -> Iterator[CopyPiece]:
    run: list[int] = []
    start = end = 0
    for position, entry in enumerate(entries):
        if run and (entry.nbytes >= LARGE_BYTES or entry.offset + entry.nbytes - start > PIECE_BYTES):
            yield CopyPiece(start, end - start, tuple(run))
            run = []
        if entry.nbytes >= LARGE_BYTES:
            for done in range(0, entry.nbytes, PIECE_BYTES):
                yield CopyPiece(entry.offset + done, min(PIECE_BYTES, entry.nbytes - done), (position,))
        elif entry.nbytes:
            start = start if run else entry.offset
            run.append(position)
            end = entry.offset + entry.nbytes
    if run:
        yield CopyPiece(start, end - start, tuple(run))


def flatten(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Names and tensors of a state dict; names in nested mappings are joined with dots.

    Raises TypeError for anything but tensors, ValueError for a name that occurs twice or is not valid text,
    `Unsupported` for tensors without plain memory of their own.
    """
    try:
        return _flatten(state, "")
    except RecursionError:
        raise TypeError("the state dict is nested too deeply, or contains itself") from None


def _flatten(state: Mapping[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    if not isinstance(state, Mapping):
        raise TypeError(f"a state dict maps names to tensors; this is a {type(state).__name__}")
    if prefix.count(".") > DEEPEST:
        raise TypeError(f"{prefix[:80]}...: a state dict is nested at most {DEEPEST} levels deep")
    flat: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if not isinstance(key, str):
            raise TypeError(f"{prefix}{key!r}: names in a state dict are strings, not {type(key).__name__}")
        name = prefix + key
        if not _is_text(name):
            raise ValueError(f"{name!r}, a name in the state dict, is not valid Unicode text")
        found = _flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: _plain(name, value)}
        if twice := flat.keys() & found.keys():
            raise ValueError(f"{min(twice)!r} is in the state dict twice")
        flat.update(found)
    return flat


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name!r} is a {type(value).__name__}, not a tensor")
    tensor = plain_tensor(value, repr(name))
    if tensor.is_quantized:
        raise Unsupported(f"{name!r} is a quantized tensor", "give dense tensors")
    return tensor.detach()


def lies_in_order(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the CPU with its bytes laid out as in a contiguous tensor."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """The bytes of a tensor as a flat uint8 view; None unless `lies_in_order`."""
    return tensor.view(-1).view(torch.uint8) if lies_in_order(tensor) else None


def checksum(data: torch.Tensor) -> int:
    """xxh3 of a flat uint8 tensor on the CPU."""
    return xxhash.xxh3_64_intdigest(data.numpy().data)


def digest_of(manifest: bytes | memoryview) -> bytes:
    """The digest (16 bytes) that identifies all the bytes of a part."""
    return xxhash.xxh3_128_digest(manifest)


@dataclass(frozen=True, slots=True)
class PackedPart:
    """A part in memory of its own: the first `nbytes` of `memory`, with the manifest from `manifest_at` on."""

    memory: torch.Tensor
    nbytes: int
    manifest: Manifest
    manifest_at: int
    digest: bytes


def pack(tensors: Mapping[str, torch.Tensor], allocate: Callable[[int], torch.Tensor]) -> PackedPart:
    """Copy tensors into memory from `allocate(nbytes)` (flat uint8, at least that long); they may change afterwards."""
    entries, data_bytes = _place(tensors)
    pieces = tuple(_pieces(entries))
    manifest_at = _aligned(data_bytes)
    space = len(Manifest(entries, (2**64 - 1,) * len(pieces)).encode())
    memory = allocate(manifest_at + space)
    small = sum(_aligned(entry.nbytes) for entry in entries if entry.nbytes < LARGE_BYTES)
    memory[:small].numpy().fill(0)
    data = memory.numpy().data
    sums = []
    for piece in pieces:
        for entry in (entries[position] for position in piece.entries):
            _copy_in(tensors[entry.name], entry, memory, piece)
        sums.append(xxhash.xxh3_64_intdigest(data[piece.offset : piece.offset + piece.nbytes]))
    manifest = Manifest(entries, tuple(sums))
    encoded = manifest.encode()
    nbytes = manifest_at + len(encoded)
    memory[manifest_at:nbytes].numpy()[:] = np.frombuffer(encoded, np.uint8)
    return PackedPart(memory, nbytes, manifest, manifest_at, digest_of(encoded))


def _place(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[TensorEntry, ...], int]:
    """The entries, small tensors first, then large ones, by name; and the bytes that they take."""
    entries, offset = [], 0
    for name in sorted(tensors, key=lambda name: (tensors[name].nbytes >= LARGE_BYTES, name)):
        tensor = tensors[name]
        entries.append(TensorEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
        offset += _aligned(tensor.nbytes)
    return tuple(entries), offset


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _copy_in(source: torch.Tensor, entry: TensorEntry, memory: torch.Tensor, piece: CopyPiece) -> None:
    """Copy the bytes of `piece`, so that it is checksummed while it is in the cache.

    Tensors that do not lie in order are copied whole, with their first piece.
    """
    if lies_in_order(source):
        start = max(piece.offset - entry.offset, 0)
        nbytes = min(entry.nbytes - start, piece.nbytes)
        ctypes.memmove(memory.data_ptr() + entry.offset + start, source.data_ptr() + start, nbytes)
    elif entry.offset >= piece.offset:
        try:
            target = memory[entry.offset : entry.offset + entry.nbytes]
            target.view(entry.torch_dtype).view(entry.shape).copy_(source)
        except NotImplementedError as error:
            raise Unsupported(f"copying {entry}", "make it contiguous, on the CPU") from error


def difference(ours: Manifest, theirs: Manifest) -> str:
    """How two parts differ, in words; "" if they do not."""
    mine, other = ({entry.name: entry for entry in manifest.entries} for manifest in (ours, theirs))
    if missing := sorted(other.keys() - mine.keys()):
        return f"it lacks {_some(missing)}"
    if extra := sorted(mine.keys() - other.keys()):
        return f"it has {_some(extra)} besides"
    for name, entry in sorted(mine.items()):
        if (entry.dtype, entry.shape) != (other[name].dtype, other[name].shape):
            return f"it has {entry}, not {other[name]}"
    changed: set[str] = set()
    for piece, before, after in zip(ours.pieces(), ours.checksums, theirs.checksums, strict=True):
        if before != after:
            changed.update(ours.entries[position].name for position in piece.entries)
    return f"other values in or near {_some(sorted(changed))}" if changed else ""


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
