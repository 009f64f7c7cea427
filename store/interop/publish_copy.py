"""Publishes a version from a directory on disk, whole or a share of it, after its checksums were compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash

from holdfast.comms.errors import CorruptData
from holdfast.store.data.digests import as_bytes
from holdfast.store.data.skeleton import Skeleton, build_value, decode, rebuild
from holdfast.store.interop.disk_record import DiskRecord
from holdfast.store.interop.version_source import Progress
from holdfast.store.weight_store import WeightStore


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
    fence: int | None,
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
    store.publish(version, state, part=part, parts=parts, fence=fence, timeout=timeout)
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
