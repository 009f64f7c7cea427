"""`WeightStore`: the public interface of the store."""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, Protocol

import torch

from holdfast.comms.errors import Mismatch, RegionGone
from holdfast.comms.memory_plane import MemoryPlane, memory
from holdfast.comms.quantities import integer_in, seconds, seconds_or
from holdfast.comms.system import forks
from holdfast.comms.transport.liveness import this_process
from holdfast.store import transitions
from holdfast.store.book import Book
from holdfast.store.catalog import Catalog, Holder, Version
from holdfast.store.errors import StoreTimeout
from holdfast.store.keeper import Keeper, Observe
from holdfast.store.layout import Manifest, flatten, pack
from holdfast.store.publisher import Publication, Terms
from holdfast.store.reader import PartReader, check_fit, fill, fill_shared

CACHED_MANIFESTS = 8
PAUSE_SECONDS = 0.05
"""Seconds that a reader without a live replica waits for a change before it tries again."""


class HasUrl(Protocol):
    """An object with the URL of a register, such as a session."""

    @property
    def url(self) -> str: ...


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


class WeightStore:
    """Versioned weights, in the memory of the processes that have this store open.

    `url` names a job's register (`memory://name` for one process, `sqlite:///path` for a host), or is an object with a
    `url`. Each version is kept in `replicas` different processes (2; 1 for `memory://`): publishers, and processes that
    opened the store with `hold=True`. `hold=False` is for processes that only read, or publish what others keep. The
    newest `keep` versions stay, and pinned ones. `plane` is the name of the memory plane that moves the bytes.
    `timeout` is the limit, in seconds, of calls without one of their own. `observe` is called for each event, with its
    name and fields.

    Every call raises `RegisterAway` while the register cannot be reached. Safe to use from several threads; not in a
    process forked from the one that opened it.
    """

    def __init__(
        self,
        url: str | HasUrl = "memory://",
        *,
        replicas: int | None = None,
        hold: bool = True,
        keep: int = 2,
        plane: str = "auto",
        timeout: float = 30.0,
        observe: Observe | None = None,
    ) -> None:
        self.url = url if isinstance(url, str) else url.url
        local = self.url.startswith("memory://")
        self._replicas = integer_in((1 if local else 2) if replicas is None else replicas, "replicas", 1)
        if local and self._replicas > 1:
            raise ValueError(f"{self.url} is one process, which cannot keep {replicas} replicas: use sqlite://")
        self._keep, self._timeout, self._hold = integer_in(keep, "keep", 1), seconds(timeout), hold
        self._observe: Observe = observe or _nobody
        self._manifests: dict[bytes, Manifest] = {}
        with ExitStack() as undo:
            holder = Holder(secrets.token_hex(6), this_process(), leaving=not hold)
            self._book = Book(self.url, partial(_tell_ended, self._observe, holder.id))
            undo.callback(self._book.close)
            self._plane = memory("inproc" if local and plane == "auto" else plane)
            undo.callback(self._plane.close)
            self._keeper = Keeper(self._book, self._plane, holder, self._observe)
            if hold:
                self._keeper.start()
            undo.pop_all()
        self._ending = weakref.finalize(self, _end, self._keeper, self._book, self._plane)
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
        part: int = 0,
        parts: int = 1,
        fence: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Publish part `part` of `parts` of version `version`: a flat or nested mapping of names to plain tensors.

        Returns once `replicas` processes keep this part; the version is visible once that holds for all its parts. The
        tensors are copied, and may be changed afterwards. Publishing the same bytes again does nothing.

        `fence` is the publisher's epoch. Raises `StaleEpoch` if a publisher of a later epoch has published, `Mismatch`
        with the difference if the version exists with other bytes or parts, `StoreTimeout` if the replicas do not exist
        after `timeout` seconds: the part is withdrawn then.

        A published part outlives its store, even if the version is not visible yet: until its last replica is gone, a
        later version supersedes it or a later `fence` begins anew. A publisher that dies before its version is visible
        leaves nothing behind: another one may publish other bytes.
        """
        self._check_usable()
        version, part, parts = _number(version, "version"), _number(part, "part"), _number(parts, "parts")
        fence = None if fence is None else _number(fence, "fence")
        if not part < parts:
            raise ValueError(f"part {part} of {parts} parts: parts are numbered from 0")
        tensors = flatten(state_dict)
        _, catalog = self._book.read()
        transitions.check_fence(catalog, fence)
        terms = Terms(version, part, parts, self._replicas, self._keep, fence)
        packed = pack(tensors, self._keeper.allocate)

        def observe(kind: str) -> None:
            self._observe(kind, {"version": version, "part": part, "bytes": packed.nbytes})

        observe("copied")
        if not self._hold:
            self._book.change(lambda now: transitions.join(now, self._keeper.holder))
        publication = Publication(self._book, self._keeper, self._plane, terms, packed, observe)
        publication.run(seconds_or(timeout, self._timeout))

    # -- reading

    def get(
        self,
        version: int | Literal["latest"],
        into: Mapping[str, Any],
        *,
        timeout: float | None = None,
        strict: bool = True,
    ) -> int:
        """Fill the tensors of `into` with those of a version; returns the version's number.

        Names, shapes and dtypes must agree, and tensors that share memory (tied weights, views of one buffer) must get
        the same bytes there (`Mismatch`, before anything is changed). With `strict=False` the version may have more
        tensors than `into`. Bytes come straight from the memory of holders, each piece verified; if a holder dies or
        has wrong bytes, the next one is read. "latest" moves on to a newer version if the one being read is dropped
        meanwhile. After an error other than `Mismatch` and `NoSuchVersion` the tensors hold an unusable mixture.

        Raises `NoSuchVersion`, `CorruptData` if no replica has the right bytes, `StoreTimeout`.
        """
        self._check_usable()
        number = _wanted(version)
        began = time.monotonic()
        deadline = began + seconds_or(timeout, self._timeout)
        wanted = flatten(into)
        at, catalog = self._book.read()
        while True:
            found = catalog.need(number)
            try:
                self._fill(catalog, found, wanted, deadline, strict)
                return found.number
            except RegionGone as error:
                why = error
            self._book.bury_dead()
            left = deadline - time.monotonic()
            if left <= 0:
                raise StoreTimeout("get", found.number, time.monotonic() - began, str(why)) from why
            at, catalog = self._book.wait(at, min(left, PAUSE_SECONDS)) or self._book.read()

    def _fill(
        self,
        catalog: Catalog,
        version: Version,
        wanted: Mapping[str, torch.Tensor],
        deadline: float,
        strict: bool,
    ) -> None:
        readers = [
            PartReader(self._plane, catalog, version, shard, deadline, self._keeper.condemn) for shard in version.shards
        ]
        manifests = [self._manifest(reader) for reader in readers]
        check_fit(manifests, wanted, strict)
        with torch.no_grad():
            parts = list(zip(readers, manifests, strict=True))
            filled = fill_shared(parts, wanted)
            left = {name: tensor for name, tensor in wanted.items() if name not in filled}
            for reader, manifest in parts:
                fill(reader, manifest, left)

    def _manifest(self, reader: PartReader) -> Manifest:
        known = self._manifests.get(reader.shard.digest)
        if known is None:
            known = reader.manifest()
            for old in list(self._manifests)[: -CACHED_MANIFESTS + 1]:
                self._manifests.pop(old, None)
            self._manifests[reader.shard.digest] = known
        return known

    # -- the catalogue

    def latest(self) -> int | None:
        """The version that readers of "latest" get; None if there is none."""
        return self._read().latest

    def versions(self) -> list[int]:
        """The visible versions, oldest first."""
        return list(self._read().visible())

    def holders(self, version: int | Literal["latest"] = "latest") -> tuple[Holder, ...]:
        """The holders of a version (of any part of it), publishers first; each has `pid` and `peer`."""
        catalog = self._read()
        ids = [each.holder for shard in catalog.need(_wanted(version)).shards for each in shard.replicas]
        found = (catalog.holder(each) for each in dict.fromkeys(ids))
        return tuple(holder for holder in found if holder is not None)

    def wait(self, version: int, timeout: float | None = None) -> int:
        """Wait until `version` or a newer one is visible; returns the newest visible one. Raises `StoreTimeout`."""
        self._check_usable()
        version = _number(version, "version")
        began = time.monotonic()
        deadline = began + seconds_or(timeout, self._timeout)
        at, catalog = self._book.read()
        while not (there := catalog.visible()) or there[-1] < version:
            found = self._book.wait(at, deadline - time.monotonic())
            if found is None:
                newest = f"the newest is {there[-1]}" if there else "none is visible"
                raise StoreTimeout("wait", version, time.monotonic() - began, newest)
            at, catalog = found
        return there[-1]

    def pin(self, version: int | Literal["latest"]) -> Lease:
        """Keep a version until the lease is released, or this store closes. Raises `NoSuchVersion`."""
        self._check_usable()
        wanted = _wanted(version)
        lease, me = secrets.token_hex(6), self._keeper.holder
        _, catalog = self._book.change(lambda now: transitions.pin(now, wanted, lease, me))
        number = next(each.version for each in catalog.pins if each.id == lease)
        return Lease(number, lambda: self._unpin(lease))

    def _unpin(self, lease: str) -> None:
        if self._ending.alive:
            self._change(lambda now: transitions.unpin(now, lease))

    def rollback(self, version: int) -> None:
        """Make `version` the latest. Newer ones can be read by number until they are superseded or deleted.

        Raises `NoSuchVersion`.
        """
        number = _number(version, "version")
        self._change(lambda now: transitions.rollback(now, number))

    def delete(self, version: int) -> None:
        """Delete a version; its number may be published again. Raises `NoSuchVersion`, `Mismatch` if it is pinned."""
        number = _number(version, "version")
        self._change(lambda now: transitions.delete(now, number))

    # -- the end

    def close(self) -> None:
        """Wait for other holders, if any, to copy what only this process holds, and leave. Idempotent."""
        if self._ending.detach() is not None:
            _end(self._keeper, self._book, self._plane, self._timeout)

    def __enter__(self) -> WeightStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> Catalog:
        self._check_usable()
        return self._book.read()[1]

    def _change(self, transition: Callable[[Catalog], Catalog]) -> None:
        self._check_usable()
        self._book.change(transition)

    def _check_usable(self) -> None:
        if not self._ending.alive:
            raise Mismatch(f"this store ({self.url}) is closed; open another")


def _end(keeper: Keeper, book: Book, plane: MemoryPlane, patience: float = 0.0) -> None:
    keeper.close(patience)
    plane.close()
    keeper.join()
    book.close()


def _number(value: int, what: str) -> int:
    return integer_in(value, what, 0, (1 << 63) - 1)


def _wanted(version: int | str) -> int | str:
    if isinstance(version, str):
        if version != "latest":
            raise ValueError(f"a version is a number or 'latest', not {version!r}")
        return version
    return _number(version, "version")


def _tell_ended(observe: Observe, holder_id: str, before: Catalog, after: Catalog) -> None:
    for kind, number in transitions.ended(before, after, holder_id):
        observe(kind, {"version": number})


def _nobody(kind: str, fields: dict[str, object]) -> None:
    """The default `observe`: does nothing."""
