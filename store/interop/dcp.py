"""A version as a directory of torch.distributed.checkpoint (DCP), and back.

Plain DCP reads what is exported, and DCP's pickles are in it: DCP unpickles them without restrictions, so load such
directories with it only where you trust their origin. The import here does not: of the metadata, which is a pickle,
only the types that DCP itself writes there are built, and all that they hold is checked.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import pickletools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import IO, Any, Literal, cast

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _create_file_view
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast.comms.errors import CorruptData, HoldfastError, Unsupported
from holdfast.ft.state.boxes import Box, cover, whole
from holdfast.store.data.state_dicts import build_value, decode, encode, rebuild
from holdfast.store.data.state_nodes import DictNode, ListNode, StateNode, TensorNode, TiedNode, TupleNode, children
from holdfast.store.errors import CopyFailed
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

Refused = pickle.UnpicklingError
"""The error of `torch.load` for a value that is damaged, or of a type that it does not take for safe."""
METADATA = ".metadata"
MOST_ITEMS = 1 << 20
"""The most values of a list in a state dict."""
_DCP = "torch.distributed.checkpoint"
_DCP_METADATA = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED = {
    *((f"{_DCP}.metadata", name) for name in _DCP_METADATA),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _Paths(msgspec.Struct):
    paths: dict[str, tuple[str | int, ...]]


@contextmanager
def _damage(what: str) -> Iterator[None]:
    """Raise `CorruptData` in place of errors of other kinds: a pickle that was tampered with can fail in any way."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        raise CorruptData(f"{what} is damaged: {error}") from error


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _ALLOWED or isinstance(dtype, torch.dtype):
            return super().find_class(module, name)
        raise CorruptData(f"it asks for {module}.{name}, which DCP does not write there")


def _check_sizes(data: bytes) -> None:
    """Raise unless each op of a pickle lies in it, and numbers as many values at most.

    The unpickler allocates what an op announces before it looks whether that is there: gigabytes for one wrong bit.
    """
    for op, argument, _ in pickletools.genops(data):
        if op.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= int(argument or 0) <= len(data):
            raise CorruptData(f"it numbers a value {argument}, and has {len(data)} bytes")


def read_metadata(directory: Path) -> Metadata:
    """The metadata of a checkpoint. Raises `CorruptData`, `CopyFailed`."""
    path = directory / METADATA
    with disk_errors(path):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise CopyFailed(directory, f"it has no {METADATA} of torch.distributed.checkpoint") from None
    with _damage(str(path)):
        _check_sizes(data)
        found = _MetadataUnpickler(io.BytesIO(data)).load()
        if not isinstance(found, Metadata) or not all(isinstance(name, str) for name in found.state_dict_metadata):
            raise CorruptData(f"{path} is not the metadata of a checkpoint")
        return found


def _faults(directory: Path, metadata: Metadata) -> Iterator[str]:
    """What torch's reader does not look for: files that are missing or short, and tensors that are not there whole."""
    with disk_errors(directory):
        there = {file.name: file.stat().st_size for file in directory.iterdir() if file.is_file()}
    for name, known in metadata.state_dict_metadata.items():
        if not isinstance(known, TensorStorageMetadata):
            yield from _misplaced(there, metadata, name, None, 0)
            continue
        shape, boxes = tuple(known.size), list[Box]()
        for chunk in known.chunks:
            yield from _misplaced(there, metadata, name, chunk, known.properties.dtype.itemsize)
            boxes.append(tuple((at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True)))
            if not all(0 <= low <= high <= size for (low, high), size in zip(boxes[-1], shape, strict=True)):
                yield f"{name!r} has a piece {boxes[-1]} outside of {shape}"
        if 0 not in shape and (lacking := cover(whole(shape), boxes)[1]):
            yield f"{name!r} lacks {lacking[0]} of {shape}"


def _misplaced(
    there: Mapping[str, int], metadata: Metadata, name: str, chunk: ChunkStorageMetadata | None, itemsize: int
) -> Iterator[str]:
    """What is wrong with the place of a value or a piece, among files of these sizes."""
    place = metadata.storage_data.get(MetadataIndex(name, None if chunk is None else chunk.offsets))
    nbytes = 0 if chunk is None else math.prod(chunk.sizes) * itemsize
    if place is None or place.offset < 0:
        yield f"there is no data for {name!r}"
    elif getattr(place, "transform_descriptors", None):
        yield f"{name!r} was saved through an extension, which cannot be read here"
    elif Path(file := place.relative_path).name != file:
        yield f"{name!r} lies outside of the directory, in {file}"
    elif file not in there:
        yield f"no file {file}"
    elif there[file] < place.offset + place.length:
        yield f"{file} is cut off"
    elif place.length < nbytes:
        yield f"{name!r} has too few bytes"


_STORAGE = "data/0"
"""What `torch.save` calls the elements of a tensor in its archive. It never compresses them."""
FILE_BYTES = 256 << 20
"""The most bytes of a file, unless one tensor is larger: DCP keeps the tensors of a file until it is written."""


def export_version(
    store: WeightStore,
    version: int | Literal["latest"],
    directory: str | Path,
    *,
    timeout: float = 30.0,
    progress: Progress | None = None,
    alone: bool = False,
) -> int:
    """Write a version to a new directory that `torch.distributed.checkpoint.load` reads; returns its number.

    It needs no process group. The directory appears whole, once it is on the disk, or not at all. About 256 MiB, or
    the largest tensor, are in memory. `alone` says that no other process writes there now.

    Raises `NoSuchVersion`, `NoRoomOnDisk`, `CopyFailed`.
    """
    target = Path(directory).absolute()
    with VersionSource(store, version, timeout, progress) as source, new_directory(target, alone=alone) as draft:
        need_room(target, source.nbytes)
        planner = _StreamingPlanner(source)
        state = _state_without_memory(source)
        try:
            dcp.save(state, storage_writer=_BoundedWriter(draft), planner=planner, no_dist=True)
        except CheckpointException as error:
            raise _cause(error, target) from error
        record = DiskRecord(
            version=source.number,
            format="dcp",
            nbytes=source.nbytes,
            checksums=planner.checksums,
            skeleton=encode(source.skeleton.root),
        )
        record.write(draft)
        return source.number


def _state_without_memory(source: VersionSource) -> dict[str, Any]:
    """The state dict of a version on `meta`.

    Nested as it was if DCP can take it apart, else by dotted names.
    """
    skeleton = source.skeleton
    tensors = {each.name: torch.empty(each.shape, dtype=each.torch_dtype, device="meta") for each in source.tensors}
    if not skeleton.subclasses and _dcp_nests(skeleton.root):
        return rebuild(skeleton, tensors)
    tied = {name: tensors[tensor] for name, tensor in skeleton.ties.items()}
    values = {name: build_value(node) for name, node in skeleton.values.items()}
    return {**tensors, **tied, **values, **{name: [] for name in _empty_lists(skeleton.root, "")}}


def _empty_lists(node: DictNode | ListNode | TupleNode, prefix: str) -> Iterator[str]:
    """The names of the lists without an item, each of which DCP takes for a value."""
    for name, item in children(node, prefix):
        if isinstance(item, DictNode | ListNode) or (isinstance(item, TupleNode) and _has_tensors(item)):
            if isinstance(item, ListNode) and not item.items:
                yield name
            yield from _empty_lists(item, f"{name}.")


def _dcp_nests(node: StateNode) -> bool:
    """Whether DCP finds each tensor below a node by its dotted name.

    It takes dicts and lists apart, and no tuples.
    """
    match node:
        case DictNode(keys, items):
            return all(type(key) in (str, int) for key in keys) and all(map(_dcp_nests, items))
        case ListNode(items):
            return all(map(_dcp_nests, items))
        case TupleNode(items):
            return not any(map(_has_tensors, items))
    return True


def _has_tensors(node: StateNode) -> bool:
    match node:
        case DictNode(_, items) | ListNode(items) | TupleNode(items):
            return any(map(_has_tensors, items))
    return isinstance(node, TensorNode | TiedNode)


class _StreamingPlanner(dcp.DefaultSavePlanner):
    """Plans with tensors that have no memory, and reads each from the store when its turn comes to be written."""

    def __init__(self, source: VersionSource) -> None:
        super().__init__()
        self.checksums: dict[str, int] = {}
        self._source = source
        known = {each.name: each for each in source.tensors}
        self._known = known | {name: known[tensor] for name, tensor in source.skeleton.ties.items()}
        self._coming: Iterator[tuple[TensorReport, torch.Tensor]] = iter(())

    def read_in_order(self, items: Sequence[WriteItem]) -> None:
        """Take note of the order in which the tensors of all files are written."""
        names = [each.index.fqn for each in items if each.type != WriteItemType.BYTE_IO]
        self._coming = self._source.read(self._known[name] for name in names)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        found, tensor = next(self._coming)
        assert found is self._known[write_item.index.fqn]
        self.checksums[found.name] = checksum(tensor)
        return tensor


class _BoundedWriter(dcp.FileSystemWriter):
    """Writes one file after the other, each of at most `FILE_BYTES`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, per_thread_copy_ahead=0, overwrite=False)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert isinstance(planner, _StreamingPlanner)
        files: Queue[tuple[Path, str, list[WriteItem]]] = Queue()
        groups = _files(plan.items)
        for number, group in enumerate(groups):
            name = f"__0_{number}{DEFAULT_SUFFIX}"
            files.put((Path(self.path) / name, name, group))
        planner.read_in_order([item for group in groups for item in group])
        return self._write_data(planner, files)


def _files(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    files: list[list[WriteItem]] = [[]]
    taken = 0
    for item in items:
        data = item.tensor_data
        nbytes = data.chunk.sizes.numel() * data.properties.dtype.itemsize if data is not None else 0
        if files[-1] and taken + nbytes > FILE_BYTES:
            files.append([])
            taken = 0
        files[-1].append(item)
        taken += nbytes
    return files


def _cause(error: CheckpointException, target: Path) -> HoldfastError:
    """The error behind one that DCP raised: the store's own, or that of the disk."""
    found: BaseException | None = next(iter(error.failures.values()))[0]
    first = found
    while found is not None:
        if isinstance(found, HoldfastError):
            return found
        if isinstance(found, OSError):
            try:
                with disk_errors(target):
                    raise found
            except CopyFailed as typed:
                return typed
        found = found.__cause__ or found.__context__
    return CopyFailed(target, str(first))


class DcpDirectory:
    """A directory that `torch.distributed.checkpoint.save` wrote."""

    def __init__(self, path: Path) -> None:
        self.path, self.record, self._metadata = path, read_record(path), read_metadata(path)
        self._mappings: dict[str, mmap.mmap] = {}
        known = self._metadata.state_dict_metadata
        tensors = {name: each for name, each in known.items() if isinstance(each, TensorStorageMetadata)}
        self._values = [name for name in known if name not in tensors]
        wanted = tensors.keys() if self.record is None else self.record.checksums.keys()
        names = wanted if self.record is None else wanted | decode(self.record.skeleton).ties.keys()
        faults = [f"no {name}" for name in sorted(names - tensors.keys())]
        faults += [f"{name} besides" for name in sorted(tensors.keys() - names)]
        with _damage(str(path / METADATA)):
            faults += dict.fromkeys(_faults(path, self._metadata))
        if faults:
            raise CorruptData(f"{path} is damaged: {'; '.join(faults)}")
        self._tensors = {name: tensors[name] for name in wanted}
        self.sizes: Mapping[str, int] = {
            name: math.prod(each.size) * each.properties.dtype.itemsize for name, each in self._tensors.items()
        }

    def state(self, tensors: Mapping[str, torch.Tensor], part: int, parts: int) -> Mapping[str, Any]:
        """The state dict that was saved; or a part of it, flat, with the values in part 0."""
        flat = dict(tensors)
        if part == 0:
            flat |= {name: self._value(name) for name in self._values}
        if parts > 1:
            return flat
        with _damage(str(self.path / METADATA)):
            data = self._metadata.planner_data
            paths = msgspec.convert({"paths": data if isinstance(data, dict) else {}}, _Paths).paths
            if any(isinstance(key, int) and not 0 <= key < MOST_ITEMS for path in paths.values() for key in path):
                raise CorruptData(f"{self.path / METADATA} has a list of more than {MOST_ITEMS} values")
            places = {name: paths.get(name) or (name,) for name in flat}
            taken = set(places.values())
            if len(taken) < len(places) or any(path[:end] in taken for path in taken for end in range(1, len(path))):
                raise CorruptData(f"{self.path / METADATA} has two values at one place of the state dict")
            return unflatten_state_dict(flat, places)

    def read(self, name: str) -> torch.Tensor:
        """A tensor: a mapping of its file, if it was saved in one piece. It lasts as long as it is used."""
        known = self._tensors[name]
        with _damage(f"{name!r} in {self.path}"):
            if len(known.chunks) == 1 and known.chunks[0].sizes == known.size:
                return self._piece(name, known.chunks[0])
            found = torch.empty(known.size, dtype=known.properties.dtype, device="cpu")
            for chunk in known.chunks:
                box = (slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
                found[tuple(box)].copy_(self._piece(name, chunk))
            return found

    def _piece(self, name: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        dtype = self._tensors[name].properties.dtype
        place = self._metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        with (self.path / place.relative_path).open("rb", buffering=0) as file:
            saved = cast("IO[bytes]", _create_file_view(file, place.offset, place.length))
            like = torch.load(saved, map_location="meta", weights_only=True)
            saved.seek(0)
            reader: Any = torch._C.PyTorchFileReader(saved)
            at = reader.get_record_offset(_STORAGE) if reader.has_record(_STORAGE) else place.length
        if not isinstance(like, torch.Tensor) or like.dtype != dtype or like.shape != chunk.sizes:
            raise CorruptData(f"{name!r} in {self.path} is not what its metadata says")
        if not like.numel():
            return torch.empty(like.shape, dtype=dtype, device="cpu")
        stored = self._bytes(place)[at:]
        flat = torch.frombuffer(stored, dtype=torch.uint8)[: stored.nbytes // dtype.itemsize * dtype.itemsize]
        last = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        if like.storage_offset() + last >= flat.numel() // dtype.itemsize:
            raise CorruptData(f"{name!r} in {self.path} has too few bytes")
        return flat.view(dtype).as_strided(like.shape, like.stride(), like.storage_offset())

    def _value(self, name: str) -> Any:
        """A value that is not a tensor. Raises `Unsupported` for one of a type that torch does not take for safe."""
        try:
            with _damage(f"{name!r} in {self.path}"):
                data = bytes(self._bytes(self._metadata.storage_data[MetadataIndex(name)]))
                return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except CorruptData as error:
            if not isinstance(error.__cause__, Refused):
                raise
            reason = str(error.__cause__).partition("\n")[0]
            raise Unsupported(f"{name!r} in {self.path}: {reason}", "leave it out of the checkpoint") from error

    def _bytes(self, place: Any) -> memoryview:
        """The bytes at a place, mapped. What is written into them stays in this process."""
        file = self.path / place.relative_path
        if place.relative_path not in self._mappings:
            with disk_errors(file), file.open("rb") as opened:
                self._mappings[place.relative_path] = mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE)
        return memoryview(self._mappings[place.relative_path])[place.offset : place.offset + place.length]
