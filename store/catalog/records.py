"""The catalogue of versions, of the processes that hold their parts, and of the readers that follow them: plain data.

`holdfast.store.catalog.transitions` has all changes to it, `holdfast.store.catalog.client` keeps it in a register.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar, Literal, Self, TypeVar

import msgspec
from msgspec.structs import replace

from holdfast.comms.errors import UNDECODABLE, CorruptData
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.store.errors import NoSuchVersion

State = Literal["preparing", "committed", "aborted"]


LONGEST_NAME = 200


def reader_name(name: str) -> str:
    """The name of a reader. Raises TypeError or ValueError for one that cannot be."""
    if not isinstance(name, str):
        raise TypeError(f"a reader's name is a string, not {name!r}")
    if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise ValueError(f"{name!r} cannot name a reader: use 1 to {LONGEST_NAME} printable characters")
    return name


class Reader(msgspec.Struct, frozen=True, array_like=True):
    """A follower of the store with id `holder`. `token` tells it from an earlier follower with the same id.

    A `switched` reader serves what switches commit, another one the latest version. `pinned` are the versions that it
    serves or copies, `ready` those of which it has the bytes, `served` the one that it serves. `must` is the serial of
    the switch that it has to carry out, `acknowledged` of the one that it has carried out; 0 if there is none.
    """

    id: str
    token: str
    holder: str
    peer: Peer
    switched: bool
    pinned: tuple[int, ...] = ()
    ready: tuple[int, ...] = ()
    served: int | None = None
    must: int = 0
    acknowledged: int = 0

    @property
    def pid(self) -> int:
        return self.peer.pid


class SwitchRecord(msgspec.Struct, frozen=True, array_like=True):
    """A proposal that `readers` serve `version`. Once committed or aborted, `state` does not change.

    It is committed once `quorum` readers are ready, or all that live if `quorum` is None. `gone` are readers of
    processes that ended meanwhile, `refused` readers that cannot take the version, with the reasons, `ready` those that
    were ready when it was decided. A process that sees it undecided for `patience` seconds of its own clock may abort
    it.
    """

    serial: int
    token: str
    version: int
    readers: tuple[str, ...]
    quorum: int | None
    patience: float
    proposer: Peer
    state: State = "preparing"
    gone: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    ready: tuple[str, ...] = ()
    reason: str = ""

    @property
    def preparing(self) -> bool:
        return self.state == "preparing"


Record = TypeVar("Record", bound="CellRecord")

LAYOUT = 3
"""The layout of the records. A release refuses catalogues of any other."""
KEPT = ""
"""The publisher of a part after its publishers have closed or died: the part stays as long as it has a replica."""

PartKey = tuple[int, int, bytes]
"""Version, part, digest."""
Spread = Literal["auto", "processes", "hosts"]
"""Where the replicas of a part must lie: in different processes, which with "hosts" are on different hosts.

With "auto" they are on as many hosts as the stores that keep replicas are.
"""


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """An open store that keeps replicas. A `leaving` holder still serves readers, but its replicas do not count.

    `limit` is the most bytes that its replicas may take. `slow` says why its copies from devices are slow, if they are.
    """

    id: str
    peer: Peer
    leaving: bool = False
    limit: int | None = None
    slow: str = ""

    @property
    def pid(self) -> int:
        return self.peer.pid


class DeviceAddress(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a CUDA device: the UUID of the GPU, its handle for CUDA IPC, its size."""

    gpu: str
    handle: bytes
    nbytes: int


class Replica(msgspec.Struct, frozen=True, array_like=True):
    """A part in the memory of the store `holder`; `device` is its copy on a device, if any."""

    holder: str
    handle: Handle
    device: DeviceAddress | None = None


class DeltaOffer(msgspec.Struct, frozen=True, array_like=True):
    """What changed in a part since that with digest `base`, in the memory of the store with id `holder`."""

    base: bytes
    holder: str
    handle: Handle


class CastForm(msgspec.Struct, frozen=True, array_like=True):
    """A part in a cast that readers asked for, in the memory of the holder `maker`.

    The maker packs it on request. `handle` is None until it is packed; `digest` and `manifest_at` are those of the
    form. `maker` is "" if there is no holder that stays. See `holdfast.store.catalog.part_casts`.
    """

    cast: str
    maker: str = ""
    digest: bytes = b""
    manifest_at: int = 0
    handle: Handle | None = None


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """A part of a version. `digest` identifies its bytes; the manifest starts at byte `manifest_at` of the region.

    `publisher` is the id of the store that published it, `also` are stores that published the same bytes later; `KEPT`
    replaces publishers that have closed or died. `accepted` is True once the part was safe: its `publish` may have
    returned. `delta` lies beside one of the replicas, and goes with it, as do the forms in `casts`.
    """

    part: int
    digest: bytes
    manifest_at: int
    publisher: str
    replicas: tuple[Replica, ...]
    also: tuple[str, ...] = ()
    accepted: bool = False
    delta: DeltaOffer | None = None
    casts: tuple[CastForm, ...] = ()

    @property
    def publishers(self) -> tuple[str, ...]:
        return (self.publisher, *self.also)

    def cast(self, name: str) -> CastForm | None:
        return next((each for each in self.casts if each.cast == name), None)


class Version(msgspec.Struct, frozen=True, array_like=True):
    """A version. It is visible once each of its `parts` is accepted, and does not change then.

    A part needs `replicas` replicas, which lie as `spread` says.
    """

    number: int
    parts: int
    replicas: int
    fence: int | None
    visible: bool
    shards: tuple[Shard, ...]
    spread: Spread = "auto"

    def shard(self, part: int) -> Shard | None:
        return next((shard for shard in self.shards if shard.part == part), None)

    def with_shard(self, shard: Shard) -> Version:
        """The version with this part in place of the one of its number. A delta goes with its holder's replica."""
        delta = shard.delta
        if delta is not None and all(each.holder != delta.holder for each in shard.replicas):
            shard = replace(shard, delta=None)
        return replace(self, shards=tuple(shard if each.part == shard.part else each for each in self.shards))


class Pin(msgspec.Struct, frozen=True, array_like=True):
    """A lease on a version: until it is released, the store with id `holder` closes, or its process `peer` ends."""

    id: str
    version: int
    peer: Peer
    holder: str = ""


class Retainer(msgspec.Struct, frozen=True, array_like=True):
    """A process that copies versions to disk, one whenever `every` numbers have passed since the last."""

    id: str
    peer: Peer
    every: int


class DiskCopy(msgspec.Struct, frozen=True, array_like=True):
    """A version that goes to disk, or is there (`done`). The retainer with id `retainer` writes it; "" if none does."""

    version: int
    retainer: str = ""
    done: bool = False


class Past(msgspec.Struct, frozen=True, array_like=True):
    """A version that was visible: its number, and the digests of its parts."""

    number: int
    digests: tuple[bytes, ...]


class CellRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a register cell of the store holds."""

    what: ClassVar[str]
    layout: int = LAYOUT

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The record in `data`. Raises `CorruptData` if `encode` of this release cannot have written it."""
        try:
            record: Self = _decoder(cls).decode(data)
        except UNDECODABLE as error:
            raise CorruptData(f"not {cls.what}: {error}") from error
        if record.layout != LAYOUT:
            raise CorruptData(
                f"{cls.what} of layout {record.layout}, this release knows layout {LAYOUT}: another release of "
                "holdfast has this store open; run one release in all processes, or open a store of another name"
            )
        return record


@cache
def _decoder(kind: type[Record]) -> msgspec.msgpack.Decoder[Record]:
    return msgspec.msgpack.Decoder(kind)


class Catalog(CellRecord, frozen=True, array_like=True):
    """The whole catalogue. `fence` is the newest fence of any publisher, `latest` the version that "latest" names.

    `keep` is the number of versions that stay, `lost` the newest versions that lost their last replica.
    `switches` are in the order of their serials. `away` are hosts that no longer beat: their replicas do not count.
    `far_read` is a version that a process has read of late without mapping it.
    """

    what: ClassVar[str] = "a catalogue of weights"
    fence: int | None = None
    latest: int | None = None
    keep: int = 2
    holders: tuple[Holder, ...] = ()
    versions: tuple[Version, ...] = ()
    pins: tuple[Pin, ...] = ()
    past: tuple[Past, ...] = ()
    lost: tuple[int, ...] = ()
    readers: tuple[Reader, ...] = ()
    switches: tuple[SwitchRecord, ...] = ()
    retainers: tuple[Retainer, ...] = ()
    disk: tuple[DiskCopy, ...] = ()
    away: tuple[str, ...] = ()
    far_read: int | None = None

    def version(self, number: int) -> Version | None:
        return next((version for version in self.versions if version.number == number), None)

    def shard(self, number: int, part: int) -> Shard | None:
        version = self.version(number)
        return None if version is None else version.shard(part)

    def find(self, number: int, part: int, digest: bytes | None = None) -> tuple[Version, Shard] | None:
        """A part and its version; None if it is not there, or has other bytes than those of `digest`."""
        version, shard = self.version(number), self.shard(number, part)
        if version is None or shard is None or digest not in (None, shard.digest):
            return None
        return version, shard

    def with_version(self, version: Version) -> Catalog:
        """The catalogue with this version in place of the one of its number."""
        others = [each for each in self.versions if each.number != version.number]
        return replace(self, versions=tuple(sorted((*others, version), key=lambda each: each.number)))

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
            accepted = sum(shard.accepted for shard in version.shards)
            why = f"{accepted} of {version.parts} parts are published"
            if len(version.shards) > accepted:
                why += f", {len(version.shards) - accepted} more lack replicas"
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
        """Whether a part has all the replicas that its version asks for, where it asks for them."""
        return self.lacking(version, shard) == (0, 0)

    def lacking(self, version: Version, shard: Shard) -> tuple[int, int]:
        """How many replicas a part lacks, and how many of them must be on hosts that have none."""
        keeping = self.keeping(shard)
        hosts = 0
        if version.spread != "processes":
            there = version.replicas if version.spread == "hosts" else len(self.hosts())
            hosts = max(0, min(version.replicas, there) - len({peer.host for peer in keeping}))
        return max(version.replicas - len(keeping), hosts), hosts

    def stays(self, holder: Holder) -> bool:
        """Whether the replicas of a holder count: it is not leaving, and its host is not away."""
        return not holder.leaving and holder.peer.host not in self.away

    def is_away(self, holder_id: str) -> bool:
        """Whether the host of a listed holder is away."""
        holder = self.holder(holder_id)
        return holder is not None and holder.peer.host in self.away

    def hosts(self) -> frozenset[str]:
        """The hosts of the stores that keep replicas and stay."""
        return frozenset(holder.peer.host for holder in self.holders if self.stays(holder))

    def keeping(self, shard: Shard) -> frozenset[Peer]:
        """The processes that hold a replica of a part and stay."""
        staying: dict[str, Peer] = {holder.id: holder.peer for holder in self.holders if self.stays(holder)}
        return frozenset(staying[each.holder] for each in shard.replicas if each.holder in staying)

    def peers(self) -> frozenset[Peer]:
        """Every process that the catalogue mentions."""
        found = {each.proposer for each in self.switches if each.preparing}
        found.update(holder.peer for holder in self.holders)
        found.update(pin.peer for pin in self.pins)
        found.update(reader.peer for reader in self.readers)
        found.update(retainer.peer for retainer in self.retainers)
        return frozenset(found)
