"""A version as a directory of torch.distributed.checkpoint (DCP), and back.

Plain DCP reads what is exported, and DCP's pickles are in it: DCP unpickles them without restrictions, so load such
directories with it only where you trust their origin. The import here does not: of the metadata, which is a pickle,
only the types that DCP itself writes there are built, and all that they hold is checked.
"""

from __future__ import annotations

import io
import mmap
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import IO, Any, Literal, cast

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _create_file_view
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast.comms.errors import CorruptData, HoldfastError, Unsupported
from holdfast.ft.state.boxes import Box, cover, shape_of, whole
from holdfast.store.data.state_dicts import build_value, decode, encode, rebuild
from holdfast.store.data.state_nodes import DictNode, ListNode, StateNode, TensorNode, TiedNode, TupleNode
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
    publish_copy,
    read_record,
)
from holdfast.store.weight_store import WeightStore

Refused = pickle.UnpicklingError
"""The error of `torch.load` for a value that is damaged, or of a type that it does not take for safe."""
METADATA = ".metadata"
MOST_DIMENSIONS = 64
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


class Item(msgspec.Struct, frozen=True):
    """Where a value or a piece of a tensor is: a range of a file."""

    file: str
    offset: int
    length: int


class DcpPiece(msgspec.Struct, frozen=True):
    """A box of a tensor, and where it is."""

    box: Box
    item: Item


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint; its pieces cover it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[DcpPiece, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a directory.

    Tensors and other values by flat name, and the paths of the names in the state dict.
    """

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Item]
    paths: Mapping[str, tuple[str | int, ...]]


class _Paths(msgspec.Struct):
    paths: dict[str, tuple[str | int, ...]]


def read_metadata(directory: Path) -> Checkpoint:
    """The metadata of a checkpoint. Raises `CorruptData` with all that is wrong with it, `CopyFailed`."""
    path = directory / METADATA
    with disk_errors(path):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise CopyFailed(directory, f"it has no {METADATA} of torch.distributed.checkpoint") from None
    try:
        return _checked(_MetadataUnpickler(io.BytesIO(data)).load())
    except CorruptData as error:
        raise CorruptData(f"{path}: {error}") from error
    except Exception as error:  # a pickle that was tampered with can fail in any way
        raise CorruptData(f"{path} is not the metadata of a checkpoint: {error}") from error


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _ALLOWED or isinstance(dtype, torch.dtype):
            return super().find_class(module, name)
        raise CorruptData(f"it asks for {module}.{name}, which DCP does not write there")


def _checked(found: object) -> Checkpoint:
    if not isinstance(found, Metadata):
        raise CorruptData("it is not the metadata of a checkpoint")
    faults: list[str] = []
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, Item] = {}
    for name, known in found.state_dict_metadata.items():
        if not isinstance(name, str):
            raise CorruptData(f"{name!r} is no name")
        try:
            if isinstance(known, TensorStorageMetadata):
                tensors[name] = _tensor(name, known, found.storage_data)
            elif isinstance(known, BytesStorageMetadata):
                values[name] = _item(name, None, found.storage_data)
            else:
                raise CorruptData(f"{name!r} is neither a tensor nor a value")
        except CorruptData as error:
            faults.append(str(error))
    if faults:
        raise CorruptData("; ".join(faults))
    planner_data = found.planner_data if isinstance(found.planner_data, dict) else {}
    paths = msgspec.convert({"paths": planner_data}, _Paths).paths
    return Checkpoint(tensors, values, paths)


def _tensor(name: str, known: TensorStorageMetadata, places: Mapping[MetadataIndex, Any]) -> StoredTensor:
    dtype, shape = known.properties.dtype, tuple(known.size)
    if not isinstance(dtype, torch.dtype) or len(shape) > MOST_DIMENSIONS or not all(map(_is_size, shape)):
        raise CorruptData(f"{name!r} has no possible dtype and shape")
    pieces = tuple(_pieces(name, known, places))
    if _is_empty(shape):
        return StoredTensor(dtype, shape, pieces[:1])
    if lacking := cover(whole(shape), [piece.box for piece in pieces])[1]:
        raise CorruptData(f"{name!r} lacks {lacking[0]} of {shape}")
    return StoredTensor(dtype, shape, pieces)


def _pieces(name: str, known: TensorStorageMetadata, places: Mapping[MetadataIndex, Any]) -> Iterator[DcpPiece]:
    for chunk in known.chunks:
        if len(chunk.offsets) != len(known.size) or len(chunk.sizes) != len(known.size):
            raise CorruptData(f"{name!r} has a piece of other dimensions")
        box = tuple((start, start + length) for start, length in zip(chunk.offsets, chunk.sizes, strict=True))
        if not all(0 <= low <= high <= size for (low, high), size in zip(box, known.size, strict=True)):
            raise CorruptData(f"{name!r} has a piece {box} outside of {tuple(known.size)}")
        yield DcpPiece(box, _item(name, chunk.offsets, places))


def _item(name: str, offsets: Any, places: Mapping[MetadataIndex, Any]) -> Item:
    info = places.get(MetadataIndex(name, offsets))
    if info is None:
        raise CorruptData(f"there is no data for {name!r}")
    if getattr(info, "transform_descriptors", None):
        raise CorruptData(f"{name!r} was saved through an extension, which cannot be read here")
    item = msgspec.convert({"file": info.relative_path, "offset": info.offset, "length": info.length}, Item)
    if Path(item.file).name != item.file or item.offset < 0 or item.length < 0:
        raise CorruptData(f"{name!r} lies outside of the directory, in {item.file}")
    return item


def _is_size(length: object) -> bool:
    return isinstance(length, int) and 0 <= length < 1 << 62


def _is_empty(shape: tuple[int, ...]) -> bool:
    return 0 in shape


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
    return {**tensors, **tied, **{name: build_value(node) for name, node in skeleton.values.items()}}


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


def import_version(
    store: WeightStore,
    directory: str | Path,
    version: int | None = None,
    *,
    part: int = 0,
    parts: int = 1,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> int:
    """Publish what `torch.distributed.checkpoint.save` wrote as a version; returns its number.

    The number is that of the exported version; directories from elsewhere need `version`. With `parts` processes each
    publishes its share of the tensors, of about equal bytes, as its `part`. Tensors that were saved in one piece are
    mapped; those that were sharded are put together in memory. No code from the directory runs: a type that DCP does
    not write itself is refused.

    Raises `CorruptData` with all that is wrong with the directory before anything is published, `Unsupported` for
    values of other types, `CopyFailed` if it cannot be read, and the errors of `publish`.
    """
    found = DcpDirectory(Path(directory))
    return publish_copy(store, found, version, part, parts, timeout, progress)


class DcpDirectory:
    """A directory that `torch.distributed.checkpoint.save` wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = read_record(path)
        self._checkpoint = read_metadata(path)
        self._mappings: dict[str, mmap.mmap] = {}
        tensors = self._checkpoint.tensors
        wanted = tensors.keys() if self.record is None else self.record.checksums.keys()
        known = wanted if self.record is None else wanted | decode(self.record.skeleton).ties.keys()
        faults = [f"no {name}" for name in sorted(known - tensors.keys())]
        faults += [f"{name} besides" for name in sorted(tensors.keys() - known)]
        faults += self._faults()
        if faults:
            raise CorruptData(f"{path} is damaged: {'; '.join(faults)}")
        self.sizes: Mapping[str, int] = {name: tensors[name].nbytes for name in wanted}

    def state(self, tensors: Mapping[str, torch.Tensor], part: int, parts: int) -> Mapping[str, Any]:
        """The state dict that was saved; or a part of it, flat, with the values in part 0."""
        values = {name: self._value(name) for name in self._checkpoint.values} if part == 0 else {}
        return _nested({**tensors, **values}, self._checkpoint.paths) if parts == 1 else {**tensors, **values}

    def _faults(self) -> list[str]:
        """The files that are missing or too short."""
        items = [piece.item for tensor in self._checkpoint.tensors.values() for piece in tensor.pieces]
        found: dict[str, None] = {}
        for item in (*items, *self._checkpoint.values.values()):
            try:
                self._bytes(item)
            except HoldfastError as error:
                found[str(error)] = None
        return list(found)

    def _value(self, name: str) -> Any:
        """A value that is not a tensor. Raises `Unsupported` for one of a type that torch does not take for safe."""
        data = bytes(self._bytes(self._checkpoint.values[name]))
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Refused as error:
            reason = str(error).partition("\n")[0]
            raise Unsupported(f"{name!r} in {self.path}: {reason}", "leave it out of the checkpoint") from error
        except Exception as error:
            raise CorruptData(f"{name!r} in {self.path} is damaged: {error}") from error

    def read(self, name: str) -> torch.Tensor:
        """A tensor: a mapping of its file, if it was saved in one piece. It lasts as long as it is used."""
        known = self._checkpoint.tensors[name]
        if len(known.pieces) == 1 and shape_of(known.pieces[0].box) == known.shape:
            return self._piece(name, known.pieces[0], known.dtype)
        found = torch.empty(known.shape, dtype=known.dtype, device="cpu")
        for piece in known.pieces:
            target = found[tuple(slice(*each) for each in piece.box)]
            target.copy_(self._piece(name, piece, known.dtype))
        return found

    def _piece(self, name: str, piece: DcpPiece, dtype: torch.dtype) -> torch.Tensor:
        data, path = self._bytes(piece.item), self.path / piece.item.file
        try:
            with path.open("rb", buffering=0) as file:
                saved = cast("IO[bytes]", _create_file_view(file, piece.item.offset, piece.item.length))
                like = torch.load(saved, map_location="meta", weights_only=True)
                saved.seek(0)
                reader: Any = torch._C.PyTorchFileReader(saved)
                stored = data[reader.get_record_offset(_STORAGE) :] if reader.has_record(_STORAGE) else data[:0]
        except Exception as error:
            raise CorruptData(f"{name!r} in {self.path} is damaged: {error}") from error
        if not isinstance(like, torch.Tensor) or like.dtype != dtype or tuple(like.shape) != shape_of(piece.box):
            raise CorruptData(f"{name!r} in {self.path} is not what its metadata says")
        if not like.numel():
            return torch.empty(like.shape, dtype=dtype, device="cpu")
        last = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        if stored.nbytes < (like.storage_offset() + last + 1) * dtype.itemsize:
            raise CorruptData(f"{name!r} in {self.path} has too few bytes")
        flat = torch.frombuffer(stored, dtype=torch.uint8)[: stored.nbytes // dtype.itemsize * dtype.itemsize]
        return flat.view(dtype).as_strided(like.shape, like.stride(), like.storage_offset())

    def _bytes(self, item: Item) -> memoryview:
        """The bytes of an item, mapped. What is written into them stays in this process."""
        path = self.path / item.file
        if item.file not in self._mappings:
            with disk_errors(path), path.open("rb") as file:
                try:
                    self._mappings[item.file] = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE)
                except ValueError as error:
                    raise CorruptData(f"{path} is empty") from error
        found = memoryview(self._mappings[item.file])[item.offset : item.offset + item.length]
        if len(found) < item.length:
            raise CorruptData(f"{path} is cut off")
        return found


def _nested(flat: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]]) -> dict[str, Any]:
    """Values in dicts, by their paths. A dict with the keys 0, 1, 2, ... was a list, as far as DCP knows."""
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        *above, last = paths.get(name) or (name,)
        at = root
        for key in above:
            at = at.setdefault(key, _Branch())
            if not isinstance(at, _Branch):
                raise CorruptData(f"{name!r} lies within another value of the state dict")
        if last in at:
            raise CorruptData(f"{name!r} is in the state dict twice")
        at[last] = value
    return {key: _with_lists(value) for key, value in root.items()}


class _Branch(dict[Any, Any]):
    """A dict or list of the state dict, not one of its values."""


def _with_lists(value: Any) -> Any:
    if not isinstance(value, _Branch):
        return value
    items = {key: _with_lists(each) for key, each in value.items()}
    numbered = all(isinstance(key, int) for key in items) and sorted(items) == list(range(len(items)))
    return [items[number] for number in range(len(items))] if numbered else items
