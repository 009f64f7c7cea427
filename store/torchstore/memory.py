"""The memory of a store: one record in a register cell, and its changes as pure functions.

The owner exposes slabs, each of a number of grants of one size, to which other processes write. A grant is free when no
value of the directory lies in it and no process has a claim on it: no byte changes under a reader, and what a replaced
value lay in serves the next put. A process that looks for free memory reads this record before the directory; a reader
claims memory, and then looks whether the directory still has what lies there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec
from msgspec.structs import replace

from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.store.torchstore.directory import Record

ROUNDING = 4 << 10
SLAB_BYTES = 4 << 20
"""Small grants come in slabs of about this many bytes, and of at most `MOST_GRANTS`."""
MOST_GRANTS = 64
SPARE_BYTES = 64 << 20
"""Free slabs up to this, or up to what is in use, stay for the next puts."""


class Slab(msgspec.Struct, frozen=True, array_like=True):
    """Memory of the owner: `count` grants of `size` bytes, whose numbers begin with `first`."""

    first: int
    handle: Handle
    size: int
    count: int

    @property
    def grants(self) -> range:
        return range(self.first, self.first + self.count)

    def fits(self, nbytes: int) -> bool:
        """Whether its grants are large enough for so many bytes, and not much larger."""
        return nbytes <= self.size <= 2 * nbytes + ROUNDING


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """A process that reads `grants`, or fills one. While it has none, it waits for one of `nbytes`."""

    id: int
    peer: Peer
    nbytes: int
    grants: tuple[int, ...] = ()


class SlabTable(Record, frozen=True, array_like=True):
    """The owner of a store and its memory.

    `strategy` is the module and the name of a class; `volumes` is None if any name will do.
    """

    owner: Peer
    strategy: tuple[str, str]
    transport: str
    volumes: tuple[str, ...] | None
    slabs: tuple[Slab, ...] = ()
    claims: tuple[Claim, ...] = ()
    ended: bool = False

    def slab_of(self, grant: int) -> Slab:
        return next(each for each in self.slabs if grant in each.grants)

    def granted(self, claim: int) -> int | None:
        """The grant that a claim fills; None while it waits."""
        return next((each.grants[0] for each in self.claims if each.id == claim and each.grants), None)

    def free(self, slab: Slab, used: Collection[int]) -> Iterator[int]:
        """The grants of a slab that nothing needs; `used` are those of the directory."""
        claimed = {grant for claim in self.claims for grant in claim.grants}
        return (each for each in slab.grants if each not in used and each not in claimed)


def claim(now: SlabTable, id_: int, peer: Peer, nbytes: int, used: Collection[int]) -> SlabTable:
    """Claim memory to fill: a free grant of about this size, or one that the owner adds."""
    found = next((grant for slab in now.slabs if slab.fits(nbytes) for grant in now.free(slab, used)), None)
    mine = Claim(id_, peer, nbytes, () if found is None else (found,))
    return replace(now, claims=(*release(now, {id_}).claims, mine))


def lease(now: SlabTable, id_: int, peer: Peer, grants: Collection[int]) -> SlabTable:
    """Claim memory to read."""
    return replace(now, claims=(*release(now, {id_}).claims, Claim(id_, peer, 0, tuple(grants))))


def sizes(nbytes: int) -> tuple[int, int]:
    """The size and the number of the grants of a new slab for a put of so many bytes."""
    size = -(-nbytes // ROUNDING) * ROUNDING
    return size, max(1, min(MOST_GRANTS, SLAB_BYTES // size))


def add(now: SlabTable, slab: Slab) -> SlabTable:
    """Add a slab, and give its memory to claims that wait for it."""
    now = replace(now, slabs=(*now.slabs, slab))
    for waiting in [each for each in now.claims if not each.grants and slab.fits(each.nbytes)]:
        if (found := next(now.free(slab, ()), None)) is not None:
            given = replace(waiting, grants=(found,))
            now = replace(now, claims=tuple(given if each is waiting else each for each in now.claims))
    return now


def release(now: SlabTable, ids: Collection[int]) -> SlabTable:
    """End claims."""
    return replace(now, claims=tuple(each for each in now.claims if each.id not in ids))


def without_surplus(now: SlabTable, used: Collection[int]) -> SlabTable:
    """Drop the free slabs beyond what stays for the next puts."""
    free = [each for each in now.slabs if sum(1 for _ in now.free(each, used)) == each.count]
    spare, gone = sum(each.handle.nbytes for each in free), set[int]()
    most = max(sum(each.handle.nbytes for each in now.slabs) - spare, SPARE_BYTES)
    for each in free:
        if spare > most:
            gone.add(each.first)
            spare -= each.handle.nbytes
    return replace(now, slabs=tuple(each for each in now.slabs if each.first not in gone))


def end(now: SlabTable) -> SlabTable:
    """End the store."""
    return replace(now, ended=True)
