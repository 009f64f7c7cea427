"""What all formats on disk share: a new directory, its record, a version read in batches, and its publication.

A directory appears whole or not at all, whatever dies on the way. A version is read in batches of bounded size, so a
writer never has the whole of it in memory; one on disk is published after its checksums were compared.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import torch
import xxhash

from holdfast.comms.errors import UNDECODABLE, CorruptData
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import is_gone, this_process
from holdfast.store.data.digests import as_bytes
from holdfast.store.data.state_dicts import Skeleton, build_value, decode, rebuild
from holdfast.store.errors import CopyFailed, NoRoomOnDisk
from holdfast.store.inspection import TensorReport
from holdfast.store.weight_store import WeightStore

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_count = itertools.count()


@contextmanager
def new_directory(path: Path, *, alone: bool = False) -> Iterator[Path]:
    """Yield a hidden directory beside `path`; move it there once all that was written into it is on the disk.

    After an error nothing is left. What processes that died in the middle have left for `path` is removed first; with
    `alone` the caller knows that no living process writes this directory, and all of it is removed.

    Raises `CopyFailed` if `path` exists or cannot be made, `NoRoomOnDisk` if there is no room.
    """
    with disk_errors(path):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CopyFailed(path, "it exists already; name a new directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path, alone=alone)
        draft = path.with_name(f".{path.name}.{_owner(this_process())}-{next(_count)}.partial")
        try:
            draft.mkdir()
            yield draft
            for each in (*sorted(draft.rglob("*")), draft):
                sync(each)
            draft.rename(path)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        sync(path.parent)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a hidden path beside `path` for a file, which is moved to `path` once it is on the disk.

    After an error no file is left. Raises `CopyFailed` if `path` exists or cannot be made.
    """
    with disk_errors(path):
        if path.exists():
            raise CopyFailed(path, "it exists already; name a new file")
        draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            yield draft
            sync(draft)
            draft.rename(path)
        finally:
            draft.unlink(missing_ok=True)
        sync(path.parent)


def remove_leftovers(path: Path, *, alone: bool) -> None:
    """Remove the unfinished directories that dead processes of this host, or `alone` any, have left for `path`."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.([0-9a-f]+)-([0-9]+)-([0-9]+)-[0-9]+\.partial")
    mine = this_process()
    for each in path.parent.iterdir():
        if not (found := pattern.fullmatch(each.name)):
            continue
        host, pid, started = found[1], int(found[2]), int(found[3])
        if alone or (host == _host(mine) and is_gone(Peer(mine.host, pid, started))):
            shutil.rmtree(each, ignore_errors=True)


def need_room(path: Path, nbytes: int) -> None:
    """Raise `NoRoomOnDisk` unless the disk of the new directory `path` has room for `nbytes`, before any is written."""
    free = shutil.disk_usage(path.parent).free
    if free < nbytes:
        raise NoRoomOnDisk(
            path, f"the version takes {nbytes} bytes, the disk has {free} left; free some, or name another"
        )


def sync(path: Path) -> None:
    """Return once a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise `NoRoomOnDisk` and `CopyFailed` in place of errors of the operating system."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise NoRoomOnDisk(path, str(error)) from error
        raise CopyFailed(path, str(error)) from error


def _owner(process: Peer) -> str:
    return f"{_host(process)}-{process.pid}-{process.started}"


def _host(process: Peer) -> str:
    return xxhash.xxh3_64_hexdigest(process.host.encode())


RECORD = "holdfast.json"
LARGEST = 256 << 20
"""The most bytes of a record: far more than that of a model with a million tensors."""

Format = Literal["safetensors", "dcp"]


class DiskRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a directory holds. `checksums` has the xxh3 (64 bits) of each tensor's bytes, row-major.

    `skeleton` describes the state dict: its structure, its values that are not tensors, and which tensors are tied.
    """

    layout: Literal[1] = 1
    version: int
    format: Format
    nbytes: int
    checksums: dict[str, int]
    skeleton: bytes

    def write(self, directory: Path) -> None:
        (directory / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(self)))


def read_record(directory: Path) -> DiskRecord | None:
    """The record in a directory; None if there is none. Raises `CorruptData`, `CopyFailed`."""
    path = directory / RECORD
    with disk_errors(path):
        try:
            if path.stat().st_size > LARGEST:
                raise CorruptData(f"{path} is larger than any record of a version")
            data = path.read_bytes()
        except FileNotFoundError:
            return None
    try:
        record = msgspec.json.decode(data, type=DiskRecord)
        if decode(record.skeleton).tensors.keys() != record.checksums.keys():
            raise CorruptData(f"{path} has checksums of other tensors than its state dict has")
        return record
    except UNDECODABLE as error:
        raise CorruptData(f"{path} is not the record of a version: {error}") from error


BATCH_BYTES = 64 << 20
"""Bytes that are read at a time; a larger tensor is a batch of its own."""
ALIGNMENT = 64

Progress = Callable[[int, int], None]
"""A callback for long work: bytes done, bytes to do."""


class VersionSource:
    """A version of a store, pinned while this context manager is open. For one thread.

    `timeout` is the limit, in seconds, for each read of the holders. Raises `NoSuchVersion`.
    """

    def __init__(
        self, store: WeightStore, version: int | Literal["latest"], timeout: float, progress: Progress | None
    ) -> None:
        self._store, self._timeout, self._progress = store, timeout, progress
        self._lease = store.pin(version)
        try:
            content = store.inspect(timeout).content(self._lease.version)
        except BaseException:
            self._lease.release()
            raise
        self.number = self._lease.version
        self.tensors, self.skeleton = content.whole_tensors(), content.skeleton
        self.nbytes = sum(each.nbytes for each in self.tensors)
        self._done = 0
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def __enter__(self) -> VersionSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._lease.release()

    def read(self, wanted: Iterable[TensorReport]) -> Iterator[tuple[TensorReport, torch.Tensor]]:
        """Each wanted tensor in its order, contiguous on the CPU; valid until the next one is asked for."""
        for batch in _batches(wanted):
            tensors = self._allocate(batch)
            self._store.get(self.number, tensors, strict=False, timeout=self._timeout)
            for each in batch:
                yield each, tensors[each.name]
                self._done += each.nbytes
                if self._progress is not None:
                    self._progress(min(self._done, self.nbytes), self.nbytes)

    def _allocate(self, batch: list[TensorReport]) -> dict[str, torch.Tensor]:
        """Tensors in one buffer, which is used again for the next batch: fresh memory is slow to touch."""
        needed = sum(_aligned(each.nbytes) for each in batch)
        if self._buffer.nbytes < needed:
            self._buffer = torch.empty(max(needed, BATCH_BYTES), dtype=torch.uint8, device="cpu")
        tensors, offset = {}, 0
        for each in batch:
            data = self._buffer[offset : offset + each.nbytes]
            tensors[each.name] = data.view(each.torch_dtype).view(each.shape)
            offset += _aligned(each.nbytes)
        return tensors


def _batches(wanted: Iterable[TensorReport]) -> Iterator[list[TensorReport]]:
    batch: list[TensorReport] = []
    taken = 0
    for each in wanted:
        if batch and taken + _aligned(each.nbytes) > BATCH_BYTES:
            yield batch
            batch, taken = [], 0
        batch.append(each)
        taken += _aligned(each.nbytes)
    if batch:
        yield batch


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class OpenedCopy(Protocol):
    """A version on disk: the names and bytes of its tensors, and its record.

    `record` is None unless it was exported from a store.
    """

    path: Path
    record: DiskRecord | None
    sizes: Mapping[str, int]

    def read(self, name: str) -> torch.Tensor: ...

    def state(self, tensors: Mapping[str, torch.Tensor], part: int, parts: int) -> Mapping[str, Any]: ...


def publish_copy(
    store: WeightStore,
    copy: OpenedCopy,
    version: int | None,
    part: int,
    parts: int,
    timeout: float | None,
    progress: Progress | None,
) -> int:
    """Publish part `part` of `parts` of a copy. Raises `CorruptData` before anything is published."""
    if version is None:
        if copy.record is None:
            raise ValueError(f"{copy.path} was not exported from a store: say which version it is to be")
        version = copy.record.version
    if not 0 <= part < parts:
        raise ValueError(f"part {part} of {parts} parts: parts are numbered from 0")
    mine = shares(copy.sizes, parts)[part]
    total, done = sum(copy.sizes[name] for name in mine), 0
    tensors, wrong = {}, []
    for name in mine:
        tensors[name] = copy.read(name)
        if copy.record is not None and checksum(tensors[name]) != copy.record.checksums[name]:
            wrong.append(name)
        done += copy.sizes[name]
        if progress is not None:
            progress(done, total)
    if wrong:
        raise CorruptData(f"{copy.path} has other bytes than were exported, in {', '.join(wrong)}")
    if copy.record is None:
        state = copy.state(tensors, part, parts)
    else:
        state = _exported(decode(copy.record.skeleton), tensors, part, parts)
    store.publish(version, state, part=part, parts=parts, timeout=timeout)
    return version


def _exported(skeleton: Skeleton, tensors: Mapping[str, torch.Tensor], part: int, parts: int) -> Mapping[str, Any]:
    """The state dict that was exported, or a part of it.

    A part has its tensors by dotted names; part 0 has the values too.
    """
    if parts == 1:
        return rebuild(skeleton, tensors)
    tied = {name: tensors[source] for name, source in skeleton.ties.items() if source in tensors}
    values = {name: build_value(node) for name, node in skeleton.values.items()} if part == 0 else {}
    return {**tensors, **tied, **values}


def shares(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """The names divided into `count` shares of about equal bytes, the same in every process."""
    found: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = min(range(count), key=lambda share: (loads[share], share))
        found[least].append(name)
        loads[least] += sizes[name]
    return [sorted(share) for share in found]


def checksum(tensor: torch.Tensor) -> int:
    """The xxh3 (64 bits) of a tensor's bytes, row-major."""
    data = as_bytes(tensor.contiguous())
    assert data is not None
    return xxhash.xxh3_64_intdigest(data.numpy().data)
