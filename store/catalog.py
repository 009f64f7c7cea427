"""The catalogue of versions and of the processes that hold their parts: plain data.

`holdfast.store.transitions` has all changes to it, `holdfast.store.book` keeps it in a register.
"""

from __future__ import annotations

import msgspec

from holdfast.comms.errors import CorruptData
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.store.errors import NoSuchVersion

KEPT = ""
"""The publisher of a part whose publisher closed after publishing: the part stays as long as it has a replica."""


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """An open store that keeps replicas. A `leaving` holder still serves readers, but its replicas do not count."""

    id: str
    peer: Peer
    leaving: bool = False

    @property
    def pid(self) -> int:
        return self.peer.pid


class Replica(msgspec.Struct, frozen=True, array_like=True):
    """A part in the memory of the store with id `holder`."""

    holder: str
    handle: Handle


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """A part of a version. `digest` identifies its bytes; the manifest starts at byte `manifest_at` of the region.

    `publisher` is the id of the store that published it, `also` are stores that published the same bytes later; `KEPT`
    replaces a publisher that has closed. `accepted` is True once enough processes keep the part: its `publish` may have
    returned.
    """

    part: int
    digest: bytes
    manifest_at: int
    publisher: str
    replicas: tuple[Replica, ...]
    also: tuple[str, ...] = ()
    accepted: bool = False

    @property
    def publishers(self) -> tuple[str, ...]:
        return (self.publisher, *self.also)


class Version(msgspec.Struct, frozen=True, array_like=True):
    """A version. It is visible once `replicas` processes hold each of its `parts`, and does not change then."""

    number: int
    parts: int
    replicas: int
    fence: int | None
    visible: bool
    shards: tuple[Shard, ...]

    def shard(self, part: int) -> Shard | None:
        return next((shard for shard in self.shards if shard.part == part), None)


class Pin(msgspec.Struct, frozen=True, array_like=True):
    """A lease on a version: until it is released, the store with id `holder` closes, or its process `peer` ends."""

    id: str
    version: int
    peer: Peer
    holder: str = ""


class Past(msgspec.Struct, frozen=True, array_like=True):
    """A version that was visible: its number, and the digests of its parts."""

    number: int
    digests: tuple[bytes, ...]


class Catalog(msgspec.Struct, frozen=True, array_like=True):
    """The whole catalogue. `fence` is the newest fence of any publisher, `latest` the version that "latest" names.

    `keep` is the number of versions that stay, `lost` the newest versions whose last replica died with its holder.
    """

    layout: int = 1
    fence: int | None = None
    latest: int | None = None
    keep: int = 2
    holders: tuple[Holder, ...] = ()
    versions: tuple[Version, ...] = ()
    pins: tuple[Pin, ...] = ()
    past: tuple[Past, ...] = ()
    lost: tuple[int, ...] = ()

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> Catalog:
        """The catalogue in `data`. Raises `CorruptData` if `encode` of this release cannot have written it."""
        try:
            catalog = _catalogs.decode(data)
        except msgspec.DecodeError as error:
            raise CorruptData(f"not a catalogue of weights: {error}") from error
        if catalog.layout != 1:
            raise CorruptData(f"a catalogue of layout {catalog.layout}; this release knows layout 1")
        return catalog

    def version(self, number: int) -> Version | None:
        return next((version for version in self.versions if version.number == number), None)

    def shard(self, number: int, part: int) -> Shard | None:
        version = self.version(number)
        return None if version is None else version.shard(part)

    def visible(self) -> tuple[int, ...]:
        """The numbers of visible versions, oldest first."""
        return tuple(version.number for version in self.versions if version.visible)

    def need(self, wanted: int | str) -> Version:
        """A visible version, by number or as "latest". Raises `NoSuchVersion` with the reason."""
        number = self.latest if wanted == "latest" else wanted
        version = next((each for each in self.versions if each.number == number), None)
        if version is not None and version.visible:
            return version
        if version is not None:
            why = f"{len(version.shards)} of {version.parts} parts are there, or replicas are missing"
        elif wanted == "latest":
            why = "nothing is published"
        elif wanted in self.lost:
            why = "all its holders are gone"
        elif any(past.number == wanted for past in self.past):
            why = "it was superseded and let go"
        else:
            why = "nobody published it"
        raise NoSuchVersion(wanted, why, self.visible())

    def holder(self, holder_id: str) -> Holder | None:
        return next((holder for holder in self.holders if holder.id == holder_id), None)

    def safe(self, version: Version, shard: Shard) -> bool:
        """Whether a part has at least the version's number of replicas."""
        return len(self.keeping(shard)) >= version.replicas

    def keeping(self, shard: Shard) -> frozenset[Peer]:
        """The processes that hold a replica of a part and are not leaving."""
        staying: dict[str, Peer] = {holder.id: holder.peer for holder in self.holders if not holder.leaving}
        return frozenset(staying[each.holder] for each in shard.replicas if each.holder in staying)

    def peers(self) -> frozenset[Peer]:
        """Every process that the catalogue mentions."""
        return frozenset((*(holder.peer for holder in self.holders), *(pin.peer for pin in self.pins)))


_catalogs = msgspec.msgpack.Decoder(Catalog)
