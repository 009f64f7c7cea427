"""The catalogue: what versions there are, and who holds which part of them. Plain data;
`holdfast.store.transitions` has every change that may be made to it, `holdfast.store.book` keeps it
where all processes see it.
"""

from __future__ import annotations

import msgspec

from holdfast.comms.errors import CorruptData
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.store.errors import NoSuchVersion

KEPT = ""
"""The publisher of a part that stays whoever dies, as long as it has a replica: its publisher closed after publishing.
"""


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """An open store that keeps replicas. One that is `leaving` still serves readers, but no longer counts."""

    id: str
    peer: Peer
    leaving: bool = False

    @property
    def pid(self) -> int:
        return self.peer.pid


class Replica(msgspec.Struct, frozen=True, array_like=True):
    """A part in the memory of a holder (its id)."""

    holder: str
    handle: Handle


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """A part of a version. `digest` stands for its bytes; the manifest starts at byte `manifest_at` of the
    region.

    `publisher` is the id of the store that brought it, `also` are those that brought the same bytes after it; `KEPT` in
    place of a publisher that has closed. `accepted` from the moment that enough processes keep it: its publish may
    have returned.
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
    """A version, visible once each of its `parts` is there in `replicas` processes. It does not change
    then.
    """

    number: int
    parts: int
    replicas: int
    fence: int | None
    visible: bool
    shards: tuple[Shard, ...]

    def shard(self, part: int) -> Shard | None:
        return next((shard for shard in self.shards if shard.part == part), None)


class Pin(msgspec.Struct, frozen=True, array_like=True):
    """A lease: the version stays until the pin is released, the store `holder` (its id) closes, or its process `peer`
    ends.
    """

    id: str
    version: int
    peer: Peer
    holder: str = ""


class Past(msgspec.Struct, frozen=True, array_like=True):
    """A version that was visible: its number, and the digests of its parts."""

    number: int
    digests: tuple[bytes, ...]


class Catalog(msgspec.Struct, frozen=True, array_like=True):
    """Everything. `fence` is the newest that a publisher showed, `latest` what readers of "latest" get,
    `keep` how many versions stay, `lost` the newest versions whose last replica died with its holder.
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
        """Raises `CorruptData` for anything that `encode` of this release cannot have written."""
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
        """A visible version, by number or as "latest". Raises `NoSuchVersion`, saying why."""
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
        """Whether a part has the replicas that it is to have."""
        return len(self.keeping(shard)) >= version.replicas

    def keeping(self, shard: Shard) -> frozenset[Peer]:
        """The processes whose replicas of a part count."""
        staying: dict[str, Peer] = {holder.id: holder.peer for holder in self.holders if not holder.leaving}
        return frozenset(staying[each.holder] for each in shard.replicas if each.holder in staying)

    def peers(self) -> frozenset[Peer]:
        """Every process that the catalogue mentions."""
        return frozenset((*(holder.peer for holder in self.holders), *(pin.peer for pin in self.pins)))


_catalogs = msgspec.msgpack.Decoder(Catalog)
