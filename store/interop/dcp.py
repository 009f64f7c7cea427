"""A version as a directory of torch.distributed.checkpoint (DCP), and back.

Plain DCP reads what is exported, and DCP's pickles are in it: DCP unpickles them without restrictions, so load such
directories with it only where you trust their origin. The import here does not.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import Queue
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast.comms.errors import CorruptData, HoldfastError
from holdfast.store.data.skeleton import (
    DictNode,
    ListNode,
    StateNode,
    TensorNode,
    TiedNode,
    TupleNode,
    build_value,
    decode,
    encode,
    rebuild,
)
from holdfast.store.errors import CopyFailed
from holdfast.store.inspection import TensorReport
from holdfast.store.interop.dcp_files import DcpFiles
from holdfast.store.interop.dcp_metadata import read_metadata
from holdfast.store.interop.disk_record import DiskRecord, read_record
from holdfast.store.interop.new_directory import disk_errors, need_room, new_directory
from holdfast.store.interop.publish_copy import checksum, publish_copy
from holdfast.store.interop.version_source import Progress, VersionSource
from holdfast.store.weight_store import WeightStore

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
    fence: int | None = None,
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
    return publish_copy(store, found, version, part, parts, fence, timeout, progress)


class DcpDirectory:
    """A directory that `torch.distributed.checkpoint.save` wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = read_record(path)
        self._checkpoint = read_metadata(path)
        self._files = DcpFiles(path, self._checkpoint)
        tensors = self._checkpoint.tensors
        wanted = tensors.keys() if self.record is None else self.record.checksums.keys()
        known = wanted if self.record is None else wanted | decode(self.record.skeleton).ties.keys()
        faults = [f"no {name}" for name in sorted(known - tensors.keys())]
        faults += [f"{name} besides" for name in sorted(tensors.keys() - known)]
        faults += self._files.faults()
        if faults:
            raise CorruptData(f"{path} is damaged: {'; '.join(faults)}")
        self.sizes: Mapping[str, int] = {name: tensors[name].nbytes for name in wanted}

    def read(self, name: str) -> torch.Tensor:
        """A tensor, mapped if it was saved in one piece."""
        return self._files.tensor(name)

    def state(self, tensors: Mapping[str, torch.Tensor], part: int, parts: int) -> Mapping[str, Any]:
        """The state dict that was saved; or a part of it, flat, with the values in part 0."""
        values = {name: self._files.value(name) for name in self._checkpoint.values} if part == 0 else {}
        return _nested({**tensors, **values}, self._checkpoint.paths) if parts == 1 else {**tensors, **values}


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
