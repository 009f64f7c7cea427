"""What `StoreInspector` finds: plain data, for tables and JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from holdfast.ft.state.boxes import Box
from holdfast.store.data.rebuild import build_value
from holdfast.store.data.skeleton import Skeleton


@dataclass(frozen=True, slots=True)
class HolderReport:
    """An open store that holds replicas. They, their casts and deltas take `nbytes` of `limit` (None: no limit).

    A process on another host counts as alive as long as the catalogue lists it. If that host is `away`, because it no
    longer beats in the register, its replicas do not count.

    `touched` is all memory that the process has ready for parts of its stores, those to come too, `huge` what of it
    lies on huge pages; None for a process whose memory cannot be looked at, such as one of another host. `slow` says
    why its copies from CUDA devices are slow, if they are.
    """

    id: str
    pid: int
    host: str
    alive: bool
    leaving: bool
    away: bool
    replicas: int
    nbytes: int
    limit: int | None
    touched: int | None
    huge: int | None
    slow: str = ""


@dataclass(frozen=True, slots=True)
class PinReport:
    """A lease on a version, and the process that has it."""

    version: int
    pid: int
    host: str


@dataclass(frozen=True, slots=True)
class VersionReport:
    """A version. `parts` of it are wanted and `there` are published; `lacking` replicas have still to be made.

    `tensors` is None if no holder of some part could be read. `disk` is "waits" before a copy of it is on disk,
    "written" while the catalogue remembers that copy, else "".
    """

    number: int
    visible: bool
    latest: bool
    parts: int
    there: int
    tensors: int | None
    nbytes: int
    replicas: int
    lacking: int
    hosts: int
    holders: tuple[str, ...]
    pins: tuple[PinReport, ...]
    disk: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class StoreReport:
    """A store: its versions, oldest first, its holders, and the versions that were lost with their last holder."""

    url: str
    latest: int | None
    keep: int
    fence: int | None
    versions: tuple[VersionReport, ...]
    holders: tuple[HolderReport, ...]
    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorReport:
    """A tensor of a version, or the `box` of it in one part. `shape` is that of the whole tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box | None
    nbytes: int
    part: int

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found


@dataclass(frozen=True, slots=True)
class PartReport:
    """A part of a version: its digest in hexadecimal, its bytes, and the ids of the stores that hold it."""

    part: int
    digest: str
    nbytes: int
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VersionContent:
    """A version with its parts and tensors, the tensors by part and name, and the structure of its state dict."""

    version: VersionReport
    parts: tuple[PartReport, ...]
    tensors: tuple[TensorReport, ...]
    skeleton: Skeleton

    def values(self) -> dict[str, object]:
        """The values of the state dict that are not tensors, by dotted name."""
        return {name: build_value(node) for name, node in self.skeleton.values.items()}

    def whole_tensors(self) -> tuple[TensorReport, ...]:
        """Each tensor once, with all of its bytes, in whatever parts they are."""
        found = {each.name: each for each in self.tensors}
        return tuple(
            replace(each, box=None, nbytes=math.prod(each.shape) * each.torch_dtype.itemsize) for each in found.values()
        )


@dataclass(frozen=True, slots=True)
class ReplicaCheck:
    """The result of reading one replica: "right", "wrong" (other bytes), or "unreachable", and why."""

    version: int
    part: int
    holder: str
    pid: int
    nbytes: int
    result: str
    why: str = ""

    @property
    def right(self) -> bool:
        return self.result == "right"
