"""`StoreInspector`: describes a store and checks its replicas, without holding anything or changing the catalogue."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from holdfast.comms.errors import CorruptData, HoldfastError, OpTimeout, RegionGone
from holdfast.comms.memory_plane import MemoryPlane, memory
from holdfast.comms.quantities import seconds
from holdfast.comms.system.files import touched_pages
from holdfast.comms.transport.liveness import this_host
from holdfast.ft.state.boxes import Box
from holdfast.store.catalog.client import DEFAULT, CatalogClient, gone
from holdfast.store.catalog.part_casts import casts_of
from holdfast.store.catalog.records import Catalog, Holder, Replica, Shard, Version
from holdfast.store.data.manifest import Manifest
from holdfast.store.data.state_dicts import Skeleton, build_value, decode, merge
from holdfast.store.read.filling import verify_part
from holdfast.store.read.part_source import PartSource


@dataclass(frozen=True, slots=True)
class HolderReport:
    """An open store that holds replicas. They, their casts and deltas take `nbytes` of `limit` (None: no limit).

    A process on another host counts as alive as long as the catalogue lists it. If that host is `away`, because it no
    longer beats in the register, its replicas do not count.

    `touched` is all memory that the process has ready for parts of its stores, those to come too, `huge` what of it
    lies on huge pages; None if the memory cannot be looked at, as that of another host. `slow` says
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
            dataclasses.replace(each, box=None, nbytes=math.prod(each.shape) * each.torch_dtype.itemsize)
            for each in found.values()
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


class StoreInspector:
    """Looks into a store. `timeout` is the limit, in seconds, for each read of a holder.

    It does not become a holder, and changes nothing: dead holders and wrong replicas stay in the catalogue. Calls raise
    `RegisterAway` while the register cannot be reached.
    """

    def __init__(self, client: CatalogClient, plane: MemoryPlane, timeout: float) -> None:
        self._client, self._plane, self._timeout = client, plane, timeout

    def report(self) -> StoreReport:
        """All versions, those that are not visible yet too, and all holders."""
        _, catalog = self._client.read()
        view = _Living(catalog)
        return StoreReport(
            self._client.url,
            catalog.latest,
            catalog.keep,
            catalog.fence,
            tuple(self._version(view, version) for version in catalog.versions),
            tuple(view.holder(holder) for holder in catalog.holders),
            catalog.lost,
        )

    def content(self, version: int | str) -> VersionContent:
        """A visible version's parts and tensors. Raises `NoSuchVersion`, `RegionGone` if no holder can be read."""
        _, catalog = self._client.read()
        found, view = catalog.need(version), _Living(catalog)
        parts, tensors, skeletons = [], [], []
        for shard in found.shards:
            manifest = self._source(catalog, found, shard).manifest()
            skeletons.append(decode(manifest.skeleton))
            holders = tuple(replica.holder for replica in shard.replicas)
            parts.append(PartReport(shard.part, shard.digest.hex(), _nbytes(shard), holders))
            tensors += _tensors(shard.part, manifest)
        count = len({each.name for each in tensors})
        return VersionContent(view.version(found, count), tuple(parts), tuple(tensors), merge(skeletons))

    def replicas(self, version: int | str = "all") -> tuple[tuple[int, int, str], ...]:
        """Version, part and holder of each replica of a version, or of all visible ones. Raises `NoSuchVersion`."""
        _, catalog = self._client.read()
        return tuple(
            (found.number, shard.part, replica.holder)
            for found in _chosen(catalog, version)
            for shard in found.shards
            for replica in shard.replicas
        )

    def verify(self, version: int | str = "all") -> Iterator[ReplicaCheck]:
        """Read every replica of a version, or of all visible ones, and compare its bytes with their checksums.

        Raises `NoSuchVersion`. A version that is let go in the meantime is not reported.
        """
        _, catalog = self._client.read()
        for found in _chosen(catalog, version):
            for shard in found.shards:
                for replica in shard.replicas:
                    check = self._check(catalog, found, shard, replica)
                    if check.right or self._is_listed(found.number, shard.part, replica):
                        yield check

    def _check(self, catalog: Catalog, version: Version, shard: Shard, replica: Replica) -> ReplicaCheck:
        alone = replace(shard, replicas=(replica,))
        source = self._source(catalog, version, alone)
        holder = catalog.holder(replica.holder)
        result, why = "right", ""
        try:
            verify_part(source)
        except CorruptData as error:
            result, why = "wrong", str(error)
        except (RegionGone, OpTimeout) as error:
            result, why = "unreachable", str(error)
        pid = holder.pid if holder else 0
        return ReplicaCheck(version.number, shard.part, replica.holder, pid, replica.handle.nbytes, result, why)

    def _is_listed(self, number: int, part: int, replica: Replica) -> bool:
        shard = self._client.read()[1].shard(number, part)
        return shard is not None and replica in shard.replicas

    def _version(self, view: _Living, version: Version) -> VersionReport:
        names: set[str] = set()
        for shard in version.shards:
            try:
                names.update(self._source(view.catalog, version, shard).manifest().layout.by_name)
            except HoldfastError as error:
                return view.version(version, None, str(error))
        return view.version(version, len(names))

    def _source(self, catalog: Catalog, version: Version, shard: Shard) -> PartSource:
        deadline = time.monotonic() + self._timeout
        return PartSource(self._plane, catalog, version, shard, deadline, lambda *_: None)


@contextmanager
def inspector(url: str, name: str = DEFAULT, *, timeout: float = 30.0) -> Iterator[StoreInspector]:
    """Look into the store `name` at a register URL, without a `WeightStore`."""
    with ExitStack() as opened:
        client = CatalogClient(url, lambda before, after: None, name)
        opened.callback(client.close)
        memory_plane = opened.enter_context(memory("inproc" if url.startswith("memory://") else "auto"))
        yield StoreInspector(client, memory_plane, seconds(timeout))


class _Living:
    """A catalogue, and which of its processes have ended although it still lists them."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._gone = gone(catalog.peers())
        self._living = replace(catalog, holders=tuple(each for each in catalog.holders if each.peer not in self._gone))

    def holder(self, holder: Holder) -> HolderReport:
        held = [
            replica.handle.nbytes
            for version in self.catalog.versions
            for shard in version.shards
            for replica in shard.replicas
            if replica.holder == holder.id
        ]
        cast = sum(form.handle.nbytes for _, _, form in casts_of(self.catalog, holder.id, packed=True) if form.handle)
        deltas = sum(
            shard.delta.handle.nbytes
            for version in self.catalog.versions
            for shard in version.shards
            if shard.delta is not None and shard.delta.holder == holder.id
        )
        alive, used = holder.peer not in self._gone, sum(held) + cast + deltas
        pages = touched_pages(holder.pid) if alive and holder.peer.host == this_host() else None
        return HolderReport(
            holder.id,
            holder.pid,
            holder.peer.host,
            alive,
            holder.leaving,
            self.catalog.is_away(holder.id),
            len(held),
            used,
            holder.limit,
            None if pages is None else pages.nbytes,
            None if pages is None else pages.huge,
            holder.slow,
        )

    def version(self, version: Version, tensors: int | None, why: str = "") -> VersionReport:
        keeping = [self._living.keeping(shard) for shard in version.shards]
        lacking = sum(self._living.lacking(version, shard)[0] for shard in version.shards)
        lacking += (version.parts - len(version.shards)) * version.replicas
        pins = [pin for pin in self.catalog.pins if pin.version == version.number and pin.peer not in self._gone]
        holders = [replica.holder for shard in version.shards for replica in shard.replicas]
        disk = ["written" if each.done else "waits" for each in self.catalog.disk if each.version == version.number]
        return VersionReport(
            version.number,
            version.visible,
            version.number == self.catalog.latest,
            version.parts,
            len(version.shards),
            tensors,
            sum(_nbytes(shard) for shard in version.shards),
            version.replicas,
            lacking,
            len({peer.host for peers in keeping for peer in peers}),
            tuple(dict.fromkeys(holders)),
            tuple(PinReport(pin.version, pin.peer.pid, pin.peer.host) for pin in pins),
            disk[0] if disk else "",
            why,
        )


def _chosen(catalog: Catalog, version: int | str) -> tuple[Version, ...]:
    if version == "all":
        return tuple(each for each in catalog.versions if each.visible)
    return (catalog.need(version),)


def _tensors(part: int, manifest: Manifest) -> list[TensorReport]:
    found = [
        TensorReport(each.name, each.dtype, each.shape, each.box, each.nbytes, part) for each in manifest.layout.entries
    ]
    return sorted(found, key=lambda each: each.name)


def _nbytes(shard: Shard) -> int:
    return shard.replicas[0].handle.nbytes if shard.replicas else 0
