"""`WeightStore`: the public interface of the store."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch

from holdfast.comms.errors import CorruptData, HoldfastError, Mismatch, RegionGone, Unsupported
from holdfast.comms.memory_plane import MemoryPlane, memory
from holdfast.comms.quantities import integer_in, seconds, seconds_or
from holdfast.comms.system import forks
from holdfast.comms.transport.liveness import this_process
from holdfast.ft.registers import RegisterAway
from holdfast.store.casts.cast_reader import CastVersionReader
from holdfast.store.casts.wire_cast import CastName, WireCast, wire_cast
from holdfast.store.catalog import transitions
from holdfast.store.catalog.client import DEFAULT, CatalogClient, until
from holdfast.store.catalog.fleet import Digests, digests_of
from holdfast.store.catalog.records import Catalog, Holder, Reader, Replica, Shard, Spread, Version, reader_name
from holdfast.store.data.cuda_copies import digests, registrations
from holdfast.store.data.manifest import TensorEntry
from holdfast.store.data.state_dicts import FlatState, flatten, flatten_targets, rebuild
from holdfast.store.errors import CallCancelled, NoSuchVersion, StoreTimeout, with_mixture
from holdfast.store.follow.follower import Follower
from holdfast.store.follow.staging import CopiedStaging, MappedStaging, Staging
from holdfast.store.follow.switch import SwitchProposer, SwitchResult
from holdfast.store.holding.host_copies import HostCopies
from holdfast.store.holding.memory_pool import MemoryPool
from holdfast.store.holding.replica_holder import Observe, ReplicaHolder
from holdfast.store.inspection import StoreInspector
from holdfast.store.publication import Publication, PublishedPart
from holdfast.store.read import device_copies
from holdfast.store.read.delta import FilledTargets
from holdfast.store.read.device_copies import DeviceReadCounts, DeviceReads
from holdfast.store.read.targets import Targets, arrangements, check_writable
from holdfast.store.read.version_reader import (
    ReadTerms,
    Slice,
    VersionReader,
    chosen,
    copied,
    mapped,
    mapped_state,
)
from holdfast.store.reshard.name_map import Layout


class Lease:
    """A version that stays until `release`, or until its store closes or this process ends; a context manager."""

    def __init__(self, version: int, release: Callable[[], None]) -> None:
        self.version = version
        self._release: Callable[[], None] | None = release
        forks.refuse_in_children(self, f"a lease on version {version}", ("version",))

    def release(self) -> None:
        """End the lease. Idempotent. If the register cannot be reached, raises `RegisterAway`; the version stays."""
        if self._release is not None:
            self._release()
            self._release = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


Result = TypeVar("Result")

PAUSE_SECONDS = 0.05
"""Seconds that a reader without a live replica waits for a change before it tries again."""


TENSORS, ELEMENTS = 256, 16
"""So many small tensors take the memory of the interpreter that a usual state dict takes."""
SECONDS = 1.0
MANIFEST_BYTES = 64 << 10
"""The names and shapes of some hundred tensors."""
_ID = "warm-up"
_log = logging.getLogger("holdfast.store")
_done: set[tuple[str, int]] = set()
"""The planes for which this was done, by process."""


def warm_up(plane: MemoryPlane) -> None:
    """Publish a small state dict into memory of `plane`, and get it from there: once in each process.

    An error is logged: the first real call reports it better.
    """
    key = plane.name, os.getpid()
    if key in _done:
        return
    _done.add(key)
    try:
        _publish_and_get(plane)
    except HoldfastError as error:
        _log.debug("the store is not warmed up: %s", error)


def _publish_and_get(plane: MemoryPlane) -> None:
    state = {str(number): torch.zeros(ELEMENTS, device="cpu") for number in range(TENSORS)}
    packed = PublishedPart.of(flatten(state)).pack(lambda nbytes: plane.empty(nbytes, mappable=True))
    with plane.expose(packed.memory[: packed.nbytes]) as region:
        replicas = (Replica(_ID, region.handle),)
        version = Version(1, 1, 1, None, True, (Shard(0, packed.digest, packed.manifest_at, _ID, replicas),))
        catalog = Catalog(holders=(Holder(_ID, this_process()),), versions=(version,))
        catalog = Catalog.decode(catalog.encode())
        deadline = time.monotonic() + SECONDS
        terms = ReadTerms(plane, catalog, version, deadline, lambda *_: None, FilledTargets())
        Targets(flatten_targets(state), False, arrangements()).fill(VersionReader(terms), True, None)


def whole_number(value: int, what: str) -> int:
    return integer_in(value, what, 0, (1 << 63) - 1)


def check_mappable(cast: str | None, layout: Layout | None = None) -> None:
    """What is mapped is not copied, so it stays as it was published."""
    if cast is not None or layout is not None:
        other = f"cast={cast!r}" if cast is not None else "the layout"
        raise ValueError(f"what is mapped is not copied, so it cannot be made into something else: leave out {other}")


def wanted_version(version: int | str) -> int | str:
    if isinstance(version, str):
        if version != "latest":
            raise ValueError(f"a version is a number or 'latest', not {version!r}")
        return version
    return whole_number(version, "version")


class WeightStore:
    """Versioned weights, in the memory of the processes that have this store open.

    `url` names a job's register (`memory://name` for one process, `sqlite:///path` for a host); `name` distinguishes
    the stores of one register. Each version is kept in `replicas` different processes (2; 1 for `memory://`):
    publishers, and processes that opened the store with `hold=True`. With `spread="auto"` they are on different hosts
    as far as there are that many; with "hosts" they must be, with "processes" they need not. `hold=False` is for
    processes that only read, or publish what others keep. The newest `keep` versions stay, and pinned ones. `plane` is
    the name of the memory plane that moves the bytes. `timeout` is the limit, in seconds, of calls without one of their
    own. `observe` is called for each event, with its name and fields.

    `limit` bounds the bytes of memory that parts, and deltas beside them, may take: a publish lets deltas go, waits for
    room, then fails.

    Fresh memory is slow to write to, so a thread touches that of the next two versions as soon as the size of one is
    known. `expect` tells that size, the bytes of a part's tensors, before the first publish.

    With `device_copies`, readers of the same host and GPU copy CUDA tensors within the GPU, from a copy that the
    publisher keeps there: that takes as much memory of the GPU as `keep + 1` times the part, beside torch's. Publishers
    and readers ask for it, each for itself; `Unsupported` if it cannot be had in this process. A copy that cannot be
    read (its publisher died, CUDA refuses, wrong bytes) is counted in `device_reads`, emitted as "device_copy_unused",
    and the replica in memory of the host is read. A reader has a copy open as long as its publisher lives.

    A register that is away is waited for: a call raises `RegisterAway` if that takes longer than `timeout`, or than the
    call may take. Safe to use from several threads; not in a
    process forked from the one that opened it.
    """

    def __init__(
        self,
        url: str = "memory://",
        *,
        name: str = DEFAULT,
        replicas: int | None = None,
        spread: Spread = "auto",
        hold: bool = True,
        keep: int = 2,
        plane: str = "auto",
        timeout: float = 30.0,
        limit: int | None = None,
        expect: int = 0,
        observe: Observe | None = None,
        device_copies: bool = False,
    ) -> None:
        self.url, self.name = url, name
        local = self.url.startswith("memory://")
        self._replicas = integer_in((1 if local else 2) if replicas is None else replicas, "replicas", 1)
        if local and self._replicas > 1:
            raise ValueError(f"{self.url} is one process, which cannot keep {replicas} replicas: use sqlite://")
        if spread not in get_args(Spread):
            raise ValueError(f"spread={spread!r} is unknown: give one of {', '.join(map(repr, get_args(Spread)))}")
        self._spread = spread
        self._keep, self._timeout, self._hold = integer_in(keep, "keep", 1), seconds(timeout), hold
        self._observe: Observe = observe or (lambda kind, fields: None)
        self._filled = FilledTargets()
        self._arrangements = arrangements()
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._device_reads = self._open_device_reads() if device_copies else None
        self._slow = ""
        with ExitStack() as undo:
            limit = None if limit is None else integer_in(limit, "limit", 1)
            holder = Holder(secrets.token_hex(6), this_process(), not hold, limit)
            self._catalog_client = CatalogClient(
                self.url, partial(_tell_ended, self._observe, holder.id), name, self._timeout
            )
            undo.callback(self._catalog_client.close)
            self._plane = memory("inproc" if local and plane == "auto" else plane)
            undo.callback(self._plane.close)
            warm_up(self._plane)
            pool = MemoryPool(self._plane, limit, self._keep + 1 if hold else 2)  # the newest one, and the next
            self._replica_holder = ReplicaHolder(self._catalog_client, self._plane, pool, holder, self._observe)
            report = self._replica_holder.report_corrupt
            self._host_copies = HostCopies(self._catalog_client, self._plane, pool, holder, report)
            parts = self._replica_holder, self._host_copies, self._catalog_client, self._plane
            undo.pop_all()
            undo.callback(_end, *parts, None)
            if expect:
                pool.touch_ahead(integer_in(expect, "expect", 1) + expect // 64 + MANIFEST_BYTES)
            if hold:
                self._replica_holder.start()
            undo.pop_all()
        self._ending = weakref.finalize(self, _end, *parts)
        forks.reset_in_children(self)
        forks.refuse_in_children(self, f"the store {self.url}", ("url",))

    def reset_in_child(self) -> None:
        self._ending.detach()

    # -- publishing

    def publish(
        self,
        version: int,
        state_dict: Mapping[str, Any],
        *,
        part: int | None = None,
        parts: int | None = None,
        fence: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Publish the tensors of a state dict as version `version`, or this process's part of them.

        Every rank of a mesh calls this with its own shards (DTensors); `part` and `parts` follow from the mesh, and
        ranks that hold the same box of a tensor give it once. Without DTensors, `part` of `parts` is 0 of 1 unless
        given. Parts may have the same tensor, if its bytes are equal in all of them.

        Returns once this part has its replicas; the version is visible once that was so for each of its parts. The
        tensors are copied, and may be changed afterwards. Publishing the same bytes again does nothing.

        `fence` is the publisher's epoch. Raises `StaleEpoch` if a publisher of a later epoch has published, `Mismatch`
        with the difference if the version exists with other bytes or parts, or another part has other bytes of a tensor
        of this one, `StoreTimeout` if the replicas do not exist after `timeout` seconds: the part is withdrawn then;
        `StoreFull`, a `StoreTimeout`, if `limit` leaves no room.

        Once `publish` has returned, the part outlives its store and its process, even if the version is not visible
        yet: until its last replica is gone, a later version supersedes it or a later `fence` begins anew. A publisher
        that dies earlier leaves nothing behind: another one may publish other bytes.
        """
        self._check_usable()
        version = whole_number(version, "version")
        fence = None if fence is None else whole_number(fence, "fence")
        if (part is None) != (parts is None):
            raise ValueError("give both part and parts, or neither")
        deadline = time.monotonic() + seconds_or(timeout, self._timeout)
        flat = flatten(state_dict)
        mine = PublishedPart.of(flat)
        shares = mine.shares or part is not None
        part = mine.part if part is None else whole_number(part, "part")
        parts = mine.parts if parts is None else whole_number(parts, "parts")
        if not part < parts:
            raise ValueError(f"part {part} of {parts} parts: parts are numbered from 0")
        with until(deadline):
            _, catalog = self._catalog_client.read()
            transitions.check_fence(catalog, fence)
            holder = self._replica_holder
            with holder.pool.allocating(deadline, version) as allocate, ExitStack() as undo:
                packed = mine.pack(allocate)
                device = None
                if self._device_reads is not None:
                    device = holder.device_copies.copy(packed, mine.sources())
                    if device is not None:
                        undo.callback(holder.device_copies.give_back, device)

                def observe(kind: str) -> None:
                    self._observe(kind, {"version": version, "part": part, "bytes": packed.nbytes})

                observe("copied")
                if not self._hold:
                    self._catalog_client.change(lambda now: transitions.join(now, holder.holder))
                self._note_slow()
                replica = holder.keep((version, part, packed.digest), packed.memory, packed.nbytes, device)
                undo.pop_all()
            shard = Shard(part, packed.digest, packed.manifest_at, holder.holder.id, (replica,))
            draft = Version(version, parts, self._replicas, fence, False, (shard,), self._spread)
            publication = Publication(
                self._catalog_client, holder, self._plane, draft, packed, self._keep, shares, observe
            )
            publication.run(max(deadline - time.monotonic(), 0.0))

    def _open_device_reads(self) -> DeviceReads:
        """Raises `Unsupported` if this process cannot share memory of devices."""
        device_copies.ipc.check()
        if importlib.util.find_spec("triton") is None:
            raise Unsupported("copies of weights on a device without triton", "pip install triton")
        try:
            digests.compile(torch.device("cuda", torch.cuda.current_device()))
        except Exception as error:  # of Triton, or of the compilers that it calls
            hint = "leave out device_copies=True"
            raise Unsupported(f"copies of weights on a device, whose kernel cannot be used: {error}", hint) from error
        observe = self._observe

        def tell(version: int, part: int, holder: str, why: str) -> None:
            observe("device_copy_unused", {"version": version, "part": part, "holder": holder, "why": why})

        return DeviceReads(tell)

    def _note_slow(self) -> None:
        """Tell the catalogue, once, why copies from devices are slow here, if they are."""
        if self._slow == (why := registrations.refused or digests.refused):
            return
        self._slow, me = why, self._replica_holder.holder.id
        self._catalog_client.change(lambda now: transitions.note_slow(now, me, why))

    # -- reading

    def get(
        self,
        version: int | Literal["latest"],
        into: Mapping[str, Any],
        *,
        timeout: float | None = None,
        strict: bool = True,
        atomic: bool = False,
        layout: Layout | None = None,
        cast: CastName | None = None,
    ) -> int:
        """Fill the tensors of `into` with those of a version, and replace its values; returns the version's number.

        DTensors of any mesh and placements get their own shards. Names, shapes and dtypes must agree, and tensors that
        share memory (tied weights, views of one buffer) must get the same bytes there (`Mismatch`, before anything is
        changed). With `strict=False` the version may have more tensors than `into`. A `layout` says how tensors of
        other names, fused ones such as vLLM's, are made of the version's; values stay as they are then.

        Bytes come straight from the memory of holders, each piece verified; if a holder dies or has wrong bytes, the
        next one is read. "latest" moves on to a newer version if the one being read is dropped meanwhile. With `atomic`
        a get that fails changes nothing, at the price of a copy; else the error says in `mixed` which tensors hold an
        unusable mixture.

        With a `cast` fewer bytes are moved: holders pack wider floating-point tensors as "bf16" (float32: half the
        bytes; each number within 1/256 of itself) or "fp8" (a quarter; within 1/16 of itself, or 2**-17 of the largest
        in its block of up to 128 in a row), and keep that with the version; the targets stay what they are. What a cast
        does not shrink, and each tensor with an element that it cannot carry (an infinity in fp8), arrives as it is. A
        part that no holder packs in time is read whole and cast here, to the same bits, which the log says.

        Raises `NoSuchVersion`, `CorruptVersion` if no replica has the right bytes, `StoreTimeout`.
        """
        targets = Targets(flatten_targets(into), atomic, self._arrangements)

        def read(reader: VersionReader) -> int:
            targets.fill(reader, strict, layout)
            return reader.number

        try:
            return self._read_version(version, read, timeout, cast)
        except (StoreTimeout, NoSuchVersion, CorruptData, CallCancelled) as error:
            raise error if not targets.mixed else with_mixture(error, targets.mixed) from error

    def load(
        self,
        version: int | Literal["latest"] = "latest",
        names: str | Iterable[str] | Mapping[str, Slice] | None = None,
        *,
        map: bool = False,  # noqa: A002
        timeout: float | None = None,
        cast: CastName | None = None,
    ) -> dict[str, Any]:
        """Load a version as a new state dict, or only tensors of it, by name.

        `names` is a list of names, a prefix of names, or slices by name. With `map=True` tensors are not copied: they
        lie in the memory of the holders of this host, and all readers share its pages. They stay as they are for as
        long as they exist, whatever happens to the holders. What is written into them stays in this process. Raises
        `Unsupported` if that cannot be had, and the errors of `get`; a `Mismatch` lists all names that the version does
        not have. `cast` is that of `get`.
        """
        if map:
            check_mappable(cast)

        def read(reader: VersionReader) -> dict[str, Any]:
            boxes = chosen(reader, names)
            found = mapped(reader, boxes) if map else copied(reader, boxes)
            return rebuild(reader.skeleton, found) if names is None else found

        return self._read_version(version, read, timeout, cast)

    def _read_version(
        self, version: int | str, read: Callable[[VersionReader], Result], timeout: float | None, cast: CastName | None
    ) -> Result:
        """Call `read` with a version, again while its holders die and others come. Raises the errors of `get`."""
        self._check_usable()
        number, wanted = wanted_version(version), None if cast is None else wire_cast(cast)
        began = time.monotonic()
        deadline = began + seconds_or(timeout, self._timeout)
        with until(deadline):
            at, catalog = self._catalog_client.read()
            while True:
                found = catalog.need(number)
                try:
                    reader = self._reader(catalog, found, deadline, wanted)
                    with torch.no_grad():
                        result = read(reader)
                    if not reader.is_mapped:
                        self._note_far_read(found.number)
                    return result
                except RegionGone as error:
                    why = error
                self._catalog_client.remove_dead_holders()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StoreTimeout("get", found.number, time.monotonic() - began, str(why)) from why
                at, catalog = self._catalog_client.wait(at, min(left, PAUSE_SECONDS)) or self._catalog_client.read()

    def _note_far_read(self, version: int) -> None:
        """Note that this process has read a version without mapping it, unless the register is away."""
        newest = self._catalog_client.newest()[1]
        if transitions.note_far_read(newest, version) is newest:
            return
        try:
            self._catalog_client.change(lambda now: transitions.note_far_read(now, version))
        except RegisterAway as error:
            _log.info("publishers are not told to make deltas: %s", error)

    def _reader(self, catalog: Catalog, version: Version, deadline: float, cast: WireCast | None) -> VersionReader:
        report = self._replica_holder.report_corrupt
        terms = ReadTerms(self._plane, catalog, version, deadline, report, self._filled, self._device_reads)
        if cast is None:
            share = catalog.readers or self._host_copies.kept
            return VersionReader(terms, self._host_copies.nearest if share else None)
        return CastVersionReader(terms, self._catalog_client, cast)

    @property
    def device_reads(self) -> DeviceReadCounts:
        """How many parts this store read from copies on the GPU, and how often a copy could not be used."""
        return DeviceReadCounts() if self._device_reads is None else self._device_reads.counts

    # -- the catalogue

    def latest(self) -> int | None:
        """The version that readers of "latest" get; None if there is none."""
        return self._read().latest

    def versions(self) -> list[int]:
        """The visible versions, oldest first."""
        return list(self._read().visible())

    def digests(self, version: int) -> Digests:
        """The digests of a version's parts; () if it is not there.

        They tell its bytes from those of a version that had this number before, and was deleted or lost.
        """
        return digests_of(self._read(), whole_number(version, "version"))

    def holders(self, version: int | Literal["latest"] = "latest") -> tuple[Holder, ...]:
        """The holders of a version (of any part of it), publishers first; each has `pid` and `peer`."""
        catalog = self._read()
        ids = [each.holder for shard in catalog.need(wanted_version(version)).shards for each in shard.replicas]
        found = (catalog.holder(each) for each in dict.fromkeys(ids))
        return tuple(holder for holder in found if holder is not None)

    def wait(self, version: int, timeout: float | None = None) -> int:
        """Wait until `version` or a newer one is visible; returns the newest visible one. Raises `StoreTimeout`."""
        self._check_usable()
        version = whole_number(version, "version")
        began = time.monotonic()
        deadline = began + seconds_or(timeout, self._timeout)
        try:
            with until(deadline):
                at, catalog = self._catalog_client.read()
        except RegisterAway as error:
            if self._catalog_client.gave_up:
                raise
            raise StoreTimeout("wait", version, time.monotonic() - began, str(error)) from error
        while not (there := catalog.visible()) or there[-1] < version:
            found = self._catalog_client.wait(at, deadline - time.monotonic())
            if found is None:
                newest = f"the newest is {there[-1]}" if there else "none is visible"
                raise StoreTimeout("wait", version, time.monotonic() - began, newest)
            at, catalog = found
        return there[-1]

    def pin(self, version: int | Literal["latest"]) -> Lease:
        """Keep a version until the lease is released, or this store closes. Raises `NoSuchVersion`."""
        self._check_usable()
        wanted = wanted_version(version)
        lease, me = secrets.token_hex(6), self._replica_holder.holder
        _, catalog = self._catalog_client.change(lambda now: transitions.pin(now, wanted, lease, me))
        number = next(each.version for each in catalog.pins if each.id == lease)
        return Lease(number, lambda: self._unpin(lease))

    def _unpin(self, lease: str) -> None:
        if self._ending.alive:
            self._change(lambda now: transitions.unpin(now, lease))

    def rollback(self, version: int) -> None:
        """Make `version` the latest. Newer ones can be read by number until they are superseded or deleted.

        Raises `NoSuchVersion`.
        """
        number = whole_number(version, "version")
        self._change(lambda now: transitions.rollback(now, number))

    def delete(self, version: int) -> None:
        """Delete a version; its number may be published again. Raises `NoSuchVersion`, `Mismatch` if it is pinned."""
        number = whole_number(version, "version")
        self._change(lambda now: transitions.delete(now, number))

    def inspect(self, timeout: float | None = None) -> StoreInspector:
        """Look into this store: its versions, holders and tensors, and whether replicas are right; changes nothing."""
        self._check_usable()
        return StoreInspector(self._catalog_client, self._plane, seconds_or(timeout, self._timeout))

    def open_catalog(self) -> CatalogClient:
        """The store's catalogue through a connection of its own, for a thread that waits for its changes."""
        self._check_usable()
        ended = partial(_tell_ended, self._observe, self._replica_holder.holder.id)
        return CatalogClient(self.url, ended, self.name, self._timeout)

    # -- fleets

    def follow(
        self,
        into: Mapping[str, Any],
        *,
        on_version: Callable[[int], object] | None = None,
        reader: str | None = None,
        strict: bool = True,
        layout: Layout | None = None,
        cast: CastName | None = None,
        map: bool = False,  # noqa: A002
        timeout: float | None = None,
    ) -> Follower:
        """Keep the state dict `into` at the newest version: read it in the background, swap it in between two batches.

        With a name, `reader`, it gets the versions that `switch` commits, and no others; the name is unique in the
        store. `on_version` is called with the number of each version swapped in, in the thread that serves. `strict`,
        `layout` and `cast` are those of `get`, `timeout` is the limit of the follower's calls without one of their own.

        With `map=True` nothing is copied, so a swap takes no time: it exchanges the items of the dict `into` for those
        of the version, with tensors in the memory of the holders of this host (see `load`). Take them from there after
        each swap, for instance by `model.load_state_dict(into, assign=True)`; tensors that were taken before stay as
        they are. An `into` without tensors takes whatever the version has.

        Raises the errors of a bad `into`, and `Mismatch` if another process of this host follows as `reader`.
        """
        self._check_usable()
        if cast is not None:
            wire_cast(cast)
        flat, holder = flatten(into, "`into`"), self._replica_holder.holder
        staging = self._mapped_staging(into, flat, strict) if map else None
        if map:
            check_mappable(cast, layout)
        else:
            check_writable(flat)
        name = f"{holder.id}.{secrets.token_hex(3)}" if reader is None else reader_name(reader)
        record = Reader(name, secrets.token_hex(6), holder.id, holder.peer, switched=reader is not None)

        get = partial(self.get, strict=strict, layout=layout, cast=cast)
        client = self.open_catalog()
        try:
            staging = staging or CopiedStaging(flat, get)
            follower = Follower(client, record, staging, on_version, seconds_or(timeout, self._timeout))
        except BaseException:
            client.close()
            raise
        self._followers.add(follower)
        return follower

    def _mapped_staging(self, into: Mapping[str, Any], flat: FlatState, strict: bool) -> Staging:
        if not isinstance(into, MutableMapping):
            raise TypeError(
                f"the items of `into` are exchanged with map=True: give a dict, not a {type(into).__name__}"
            )
        if flat.locals is not flat.tensors or any(not each.is_cpu for each in flat.tensors.values()):
            raise Unsupported("mapping a version into DTensors, or tensors on a device", "leave out map=True")
        like = {
            name: TensorEntry(name, str(each.dtype).removeprefix("torch."), tuple(each.shape), 0)
            for name, each in flat.tensors.items()
        }

        def load(version: int) -> dict[str, Any]:
            return self._read_version(version, lambda reader: mapped_state(reader, like, strict), None, None)

        return MappedStaging(into, load)

    def switch(
        self,
        version: int,
        readers: Sequence[str] | None = None,
        quorum: int | None = None,
        *,
        timeout: float | None = None,
    ) -> SwitchResult:
        """Make readers (all that follow with a name, if None) serve a version, all of them or none.

        Returns once they all have its bytes: then each swaps it in before its next batch; or once that failed: then
        none does. Readers that die do not count; those that are named and not there are waited for. With a `quorum`, so
        many readers are enough; those that were late must catch up before they serve again. After `timeout` seconds the
        switch is aborted. If this process dies meanwhile, the readers settle it.

        Raises `NoSuchVersion`, `Mismatch` if there are no such readers, `StoreTimeout` if another switch took all the
        time, `RegisterAway` if the register let no change through in time: the readers then settle what was proposed.
        """
        self._check_usable()
        if isinstance(readers, str):
            raise TypeError(f"readers is a list of names, not one name: [{readers!r}]")
        names = None if readers is None else [reader_name(each) for each in readers]
        wanted = whole_number(version, "version")
        proposer = SwitchProposer(
            self._catalog_client, this_process(), lambda kind: self._observe(kind, {"version": wanted})
        )
        least = None if quorum is None else integer_in(quorum, "quorum", 1)
        seconds = seconds_or(timeout, self._timeout)
        with until(time.monotonic() + seconds):
            return proposer.run(wanted, names, least, seconds)

    def readers(self) -> tuple[Reader, ...]:
        """The followers of this store in all processes, with the version that each serves and those it is ready for."""
        return self._read().readers

    # -- the end

    def close(self) -> None:
        """Close its followers, wait for other holders to copy what only this process holds, and leave. Idempotent."""
        for follower in list(self._followers):
            follower.close()
        if self._device_reads is not None:
            self._device_reads.close()
        if self._ending.detach() is not None:
            _end(self._replica_holder, self._host_copies, self._catalog_client, self._plane, self._timeout)

    def __enter__(self) -> WeightStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> Catalog:
        self._check_usable()
        return self._catalog_client.read()[1]

    def _change(self, transition: Callable[[Catalog], Catalog]) -> None:
        self._check_usable()
        self._catalog_client.change(transition)

    def _check_usable(self) -> None:
        if not self._ending.alive:
            raise Mismatch(f"this store ({self.url}) is closed; open another")


def _end(
    holder: ReplicaHolder, copies: HostCopies, client: CatalogClient, plane: MemoryPlane, patience: float | None = 0.0
) -> None:
    """Close the parts of a store. `patience` is that of `ReplicaHolder.close`; None if it never entered."""
    if patience is None:
        holder.stop()
    else:
        holder.close(patience)
    copies.close()
    plane.close()
    holder.join()
    client.close()


def _tell_ended(observe: Observe, holder_id: str, before: Catalog, after: Catalog) -> None:
    for kind, number in transitions.ended(before, after, holder_id):
        observe(kind, {"version": number})
    for kind, host in transitions.moved(before, after):
        observe(kind, {"host": host, "hosts": len(after.hosts())})
