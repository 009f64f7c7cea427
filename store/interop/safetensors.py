"""A version as a directory of sharded safetensors, as `transformers` loads it, and back."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from holdfast.comms.errors import UNDECODABLE, CorruptData, Unsupported
from holdfast.store.data.digests import as_bytes
from holdfast.store.data.state_dicts import encode
from holdfast.store.inspection import TensorReport
from holdfast.store.interop.disk_copy import (
    DiskRecord,
    Progress,
    VersionSource,
    checksum,
    disk_errors,
    need_room,
    new_directory,
    read_record,
)
from holdfast.store.weight_store import WeightStore

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
SHARD_BYTES = 1 << 30


DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
"""torch's names of dtypes, and the format's."""
_ITEMSIZES: dict[str, int] = {name: getattr(torch, dtype).itemsize for dtype, name in DTYPES.items()}

_PAD = 8


def file_order(tensors: Iterable[TensorReport]) -> list[TensorReport]:
    """Tensors in an order that aligns each of them: widest elements first, then by name."""
    return sorted(tensors, key=lambda each: (-each.torch_dtype.itemsize, each.name))


def write_file(path: Path, tensors: Sequence[TensorReport], data: Iterable[tuple[TensorReport, torch.Tensor]]) -> None:
    """Write a file of `tensors`; `data` yields them, contiguous on the CPU, in the same order.

    The safetensors package would keep the interpreter's lock while it writes, which would stop training, and would need
    all tensors of a file in memory.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for each in tensors:
        header[each.name] = {
            "dtype": DTYPES[each.dtype],
            "shape": list(each.shape),
            "data_offsets": [offset, offset + each.nbytes],
        }
        offset += each.nbytes
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % _PAD)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for _, tensor in data:
            found = as_bytes(tensor)
            assert found is not None
            file.write(found.numpy().data)


def export_version(
    store: WeightStore,
    version: int | Literal["latest"],
    directory: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    timeout: float = 30.0,
    progress: Progress | None = None,
    alone: bool = False,
) -> int:
    """Write a version to a new directory of safetensors files of at most `shard_bytes`; returns its number.

    A tensor larger than that has a file of its own. The directory appears whole, once it is on the disk, or not at
    all. At most 64 MiB, or the largest tensor, are in memory. `alone` says that no other process writes there now.

    Raises `NoSuchVersion`, `Unsupported` for a dtype that the format lacks, `NoRoomOnDisk`, `CopyFailed`.
    """
    target = Path(directory).absolute()
    with VersionSource(store, version, timeout, progress) as source:
        if lacking := [f"{each.name} ({each.dtype})" for each in source.tensors if each.dtype not in DTYPES]:
            raise Unsupported(f"safetensors of {', '.join(lacking)}", "the format has no such dtype; export as dcp")
        with new_directory(target, alone=alone) as draft:
            need_room(target, source.nbytes)
            _write(source, draft, shard_bytes)
        return source.number


def _write(source: VersionSource, draft: Path, shard_bytes: int) -> None:
    shards = _shards(source.tensors, shard_bytes)
    checksums: dict[str, int] = {}
    places: dict[str, str] = {}

    def checked(tensors: Sequence[TensorReport]) -> Iterator[tuple[TensorReport, torch.Tensor]]:
        for each, tensor in source.read(tensors):
            checksums[each.name] = checksum(tensor)
            yield each, tensor

    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(draft / name, shard, checked(shard))
        places |= {each.name: name for each in shard}
    index = {"metadata": {"total_size": source.nbytes}, "weight_map": dict(sorted(places.items()))}
    (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    skeleton = encode(source.skeleton.root)
    record = DiskRecord(
        version=source.number, format="safetensors", nbytes=source.nbytes, checksums=checksums, skeleton=skeleton
    )
    record.write(draft)


def _shards(tensors: Sequence[TensorReport], shard_bytes: int) -> list[list[TensorReport]]:
    """The tensors of each file: neighbours by name, `0.weight` before `10.weight`. At least one file, maybe empty."""
    shards: list[list[TensorReport]] = [[]]
    taken = 0
    for each in sorted(tensors, key=lambda each: _natural(each.name)):
        if shards[-1] and taken + each.nbytes > shard_bytes:
            shards.append([])
            taken = 0
        shards[-1].append(each)
        taken += each.nbytes
    return [file_order(shard) for shard in shards]


def _natural(name: str) -> str:
    return re.sub("[0-9]+", lambda digits: digits[0].zfill(20), name)


class SafetensorsDirectory:
    """A directory of safetensors: those that `model.safetensors.index.json` names, or `model.safetensors` alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = ExitStack()
        with disk_errors(path):
            self.record = read_record(path)
            places = self._places()
            names = sorted(set(places.values()))
            if odd := [name for name in names if Path(name).name != name]:
                raise CorruptData(f"{path / INDEX} names files outside of its directory: {', '.join(odd)}")
            with ExitStack() as opened:
                files = self._open(names, opened)
                self._tensors = {name: files[place] for name, place in places.items()}
                self.sizes: Mapping[str, int] = self._look(places, files)
                self._files = opened.pop_all()

    def __enter__(self) -> SafetensorsDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read(self, name: str) -> torch.Tensor:
        """A tensor, as a mapping of its file."""
        found: torch.Tensor = self._tensors[name].get_tensor(name)
        return found

    def state(self, tensors: Mapping[str, torch.Tensor], part: int, parts: int) -> Mapping[str, Any]:
        """The state dict, or a part of it: the tensors by name."""
        return tensors

    def _places(self) -> dict[str, str]:
        """The file of each tensor."""
        if not (self.path / INDEX).exists():
            with ExitStack() as opened:
                return dict.fromkeys(self._open([WHOLE], opened)[WHOLE].keys(), WHOLE)
        try:
            return msgspec.json.decode((self.path / INDEX).read_bytes(), type=_FileIndex).weight_map
        except UNDECODABLE as error:
            raise CorruptData(f"{self.path / INDEX} is not an index of safetensors: {error}") from error

    def _open(self, names: Sequence[str], opened: ExitStack) -> dict[str, Any]:
        files, faults = {}, []
        for name in names:
            try:
                files[name] = opened.enter_context(safe_open(self.path / name, framework="pt"))
            except (SafetensorError, OSError) as error:
                faults.append(f"{name}: {error}")
        if faults:
            raise CorruptData(f"{self.path} is damaged: {'; '.join(faults)}")
        return files

    def _look(self, places: Mapping[str, str], files: Mapping[str, Any]) -> dict[str, int]:
        there = {place: set(file.keys()) for place, file in files.items()}
        faults = [f"{place} has no {name}" for name, place in places.items() if name not in there[place]]
        if self.record is not None:
            faults += [f"no {name}" for name in sorted(self.record.checksums.keys() - places.keys())]
            faults += [f"{name} besides" for name in sorted(places.keys() - self.record.checksums.keys())]
        if faults:
            raise CorruptData(f"{self.path} is damaged: {'; '.join(faults)}")
        slices = {name: files[place].get_slice(name) for name, place in places.items()}
        dtypes = {name: each.get_dtype() for name, each in slices.items()}
        if strange := [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in _ITEMSIZES]:
            raise Unsupported(f"safetensors of {', '.join(strange)}", f"use one of {', '.join(_ITEMSIZES)}")
        return {name: math.prod(each.get_shape()) * _ITEMSIZES[dtypes[name]] for name, each in slices.items()}


class _FileIndex(msgspec.Struct):
    weight_map: dict[str, str]
