"""The record of a store in its register: its memory and its directory, and how both change.

The directory says which keys the store has, and in which part the value of each lies. What one put brings is a part in
the store's own layout, which lies in a grant of the store's memory, or in the record if it is small. Each process
applies the changes of the record to a directory of its own; all have the same one after the same number of changes.

A volume is a name that a strategy gives to a group of processes. Each keeps its own value of a key; readers of a whole
tensor or an object get that of the volume that was first to put it. Shards are collected from all volumes.

The owner exposes slabs, each of a number of grants of one size, to which other processes write. A grant is free when no
value of the directory lies in it and no process has a claim on it: no byte changes under a reader, and what a replaced
value lay in serves the next put. A process that puts keeps a claim on memory for its next put, so a put is one change:
its values are there, and another grant is claimed, which the owner touches beside it if there is none.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from itertools import product
from typing import ClassVar, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from holdfast.comms.errors import Mismatch
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.store.catalog.client import CellClient
from holdfast.store.catalog.records import CellRecord
from holdfast.store.errors import NoSuchKey

_KINDS = {"tensor": "a whole tensor", "shard": "shards of a DTensor", "object": "an object"}


class Form(msgspec.Struct, frozen=True, array_like=True):
    """What a key holds. `shape` is that of the whole tensor; of an object the number of its tensors."""

    kind: Literal["tensor", "shard", "object"]
    shape: tuple[int, ...]
    dtype: str = ""
    coordinates: tuple[int, ...] = ()
    mesh_shape: tuple[int, ...] = ()


class KeyPart(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """What one put brings: the number of the form of each of its keys.

    `digest` and `manifest_at` are those of a part of the store; its bytes are `inline`, or lie in `grant`.
    """

    volume: str
    forms: tuple[Form, ...]
    keys: dict[str, int]
    digest: bytes
    manifest_at: int
    nbytes: int
    grant: int = 0
    inline: bytes = b""

    def form(self, key: str) -> Form:
        return self.forms[self.keys[key]]

    def slot(self, key: str) -> tuple[str, tuple[int, ...]]:
        """What a value replaces: that of its volume, or the same shard."""
        form = self.form(key)
        return ("" if form.kind == "shard" else self.volume), form.coordinates


class Deleted(msgspec.Struct, frozen=True, array_like=True, tag="delete"):
    """The end of keys. Those that are not there are ignored."""

    keys: tuple[str, ...]


class Snapshot(CellRecord, frozen=True, array_like=True):
    """A directory after `number` changes: for each key the numbers of its parts."""

    what: ClassVar[str] = "the directory of a torchstore store"
    number: int = 0
    parts: tuple[KeyPart, ...] = ()
    keys: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)


class Directory:
    """All keys of a store, after `number` changes. Not thread-safe."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.number = snapshot.number
        self._values: dict[str, dict[tuple[str, tuple[int, ...]], KeyPart]] = {}
        self._uses = Counter[int]()
        for key, numbers in snapshot.keys.items():
            for part in (snapshot.parts[number] for number in numbers):
                self._set(key, part)

    def snapshot(self) -> Snapshot:
        parts = {id(part): part for values in self._values.values() for part in values.values()}
        numbers = {each: number for number, each in enumerate(parts)}
        keys = {key: tuple(numbers[id(part)] for part in values.values()) for key, values in self._values.items()}
        return Snapshot(number=self.number, parts=tuple(parts.values()), keys=keys)

    @property
    def grants(self) -> Set[int]:
        """The memory in which values lie."""
        return self._uses.keys()

    def freed(self, change: KeyPart | Deleted) -> set[int]:
        """The memory in which no value lies any more once a change is made."""
        uses = Counter(old.grant for key in {*change.keys} for old in self._replaced(key, change))
        return {grant for grant, number in uses.items() if number == self._uses[grant]}

    def check(self, part: KeyPart) -> None:
        """Raise `Mismatch`, with everything that is wrong, if a key holds something of another kind or mesh."""
        wrong = []
        for key in part.keys.keys() & self._values.keys():
            old, new = next(iter(self._values[key].values())).form(key), part.form(key)
            if old.kind != new.kind:
                wrong.append(f"{key!r}: it holds {_KINDS[old.kind]}, this is {_KINDS[new.kind]}")
            elif old.mesh_shape != new.mesh_shape:
                meshes = f"shards of a mesh of {old.mesh_shape}, this is one of a mesh of {new.mesh_shape}"
                wrong.append(f"{key!r}: it holds {meshes}")
        if wrong:
            raise Mismatch("nothing was put: " + "; ".join(f"{each}: delete the key first" for each in sorted(wrong)))

    def apply(self, change: KeyPart | Deleted) -> None:
        """Make the next change."""
        self.number += 1
        for key in change.keys:
            for old in self._replaced(key, change):
                self._uses[old.grant] -= 1
                if not self._uses[old.grant]:
                    del self._uses[old.grant]
            if isinstance(change, KeyPart):
                self._set(key, change)
            else:
                self._values.pop(key, None)

    def find(self, keys: Iterable[str]) -> dict[str, tuple[KeyPart, ...]]:
        """What readers of each key get. Raises `NoSuchKey`, naming all keys that are missing or incomplete."""
        found, wrong = dict[str, tuple[KeyPart, ...]](), []
        for key in keys:
            parts = tuple(self._values.get(key, {}).values())
            if not parts:
                wrong.append(f"{key!r} is not in the store")
            elif why := _why_partial(key, parts):
                wrong.append(f"{key!r} is only partially committed: {why}")
            else:
                found[key] = parts if parts[0].form(key).kind == "shard" else parts[:1]
        if wrong:
            raise NoSuchKey("; ".join(wrong))
        return found

    def has(self, key: str) -> bool:
        """Whether a key has a complete value."""
        return key in self._values and not _why_partial(key, tuple(self._values[key].values()))

    def keys(self, prefix: str | None = None) -> list[str]:
        """All keys, or those that begin with the parts of `prefix`. Dots separate parts."""
        return [key for key in self._values if prefix is None or f"{key}.".startswith(f"{prefix}.")]

    def _set(self, key: str, part: KeyPart) -> None:
        self._values.setdefault(key, {})[part.slot(key)] = part
        self._uses[part.grant] += 1

    def _replaced(self, key: str, change: KeyPart | Deleted) -> Iterator[KeyPart]:
        """The values of a key that end with a change."""
        slot = change.slot(key) if isinstance(change, KeyPart) else None
        return (part for at, part in self._values.get(key, {}).items() if slot in (at, None))


def _why_partial(key: str, parts: tuple[KeyPart, ...]) -> str:
    """Which shards were not put yet; "" if the value is complete."""
    forms = [part.form(key) for part in parts]
    if forms[0].kind != "shard":
        return ""
    there = {form.coordinates for form in forms}
    if missing := [each for each in product(*map(range, forms[0].mesh_shape)) if each not in there]:
        named = ", ".join(map(str, missing[:4])) + (", ..." if len(missing) > 4 else "")
        return f"{len(missing)} of its shards were not put yet, at {named} of a mesh of {forms[0].mesh_shape}"
    shapes, dtypes = sorted({form.shape for form in forms}), sorted({form.dtype for form in forms})
    if len(shapes) > 1 or len(dtypes) > 1:
        return f"its shards were put with different shapes or dtypes ({shapes}, {dtypes}): not all were put anew yet"
    return ""


T = TypeVar("T")

ROUNDING = 4 << 10
SLAB_BYTES = 4 << 20
"""Small grants come in slabs of about this many bytes, and of at most `MOST_GRANTS`."""
MOST_GRANTS = 64
SPARE_BYTES = 64 << 20
"""Free slabs up to this, or up to what is in use, stay for the next puts."""
MOST_KEYS = 64
"""Once the changes since the last snapshot name so many keys, the next one makes a snapshot."""


class Slab(msgspec.Struct, frozen=True, array_like=True):
    """Memory of the owner: `count` grants of `size` bytes, numbered from `first` on."""

    first: int
    handle: Handle
    size: int
    count: int

    @property
    def grants(self) -> range:
        return range(self.first, self.first + self.count)

    def fits(self, nbytes: int) -> bool:
        return fits(self.size, nbytes)


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """A process that reads `grants`, or fills one. While it has none, it waits for one of `nbytes`.

    `ahead` is a claim for a put to come: the owner ends it where the machine has little memory left.
    """

    id: int
    peer: Peer
    nbytes: int
    grants: tuple[int, ...] = ()
    ahead: bool = False


class StoreRecord(CellRecord, frozen=True, array_like=True):
    """The owner of a store, its memory, and the changes of its directory after the first `base` ones.

    `strategy` is the module and the name of a class; `volumes` is None if any name will do.
    """

    what: ClassVar[str] = "the record of a torchstore store"
    owner: Peer = Peer("", 0, 0)
    strategy: tuple[str, str] = "", ""
    transport: str = ""
    volumes: tuple[str, ...] | None = None
    slabs: tuple[Slab, ...] = ()
    claims: tuple[Claim, ...] = ()
    ended: bool = False
    base: int = 0
    changes: tuple[KeyPart | Deleted, ...] = ()

    def slab_of(self, grant: int) -> Slab:
        return next(each for each in self.slabs if grant in each.grants)

    def claim_of(self, id_: int) -> Claim | None:
        return next((each for each in self.claims if each.id == id_), None)

    def suits(self, claim: Claim, nbytes: int) -> bool:
        """Whether the memory that a claim has, or waits for, is of the right size for so many bytes."""
        return fits(self.slab_of(claim.grants[0]).size if claim.grants else sizes(claim.nbytes)[0], nbytes)

    def free(self, slab: Slab, used: Collection[int]) -> Iterator[int]:
        """The grants of a slab that nothing needs; `used` are those of the directory."""
        claimed = {grant for claim in self.claims for grant in claim.grants}
        return (each for each in slab.grants if each not in used and each not in claimed)


EMPTY = StoreRecord()


def claim(
    now: StoreRecord, id_: int, peer: Peer, nbytes: int, used: Collection[int], ahead: bool = False
) -> StoreRecord:
    """Claim memory for a put in place of what `id_` has: a free grant that fits, or a new one."""
    now = release(now, {id_})
    found = next((grant for slab in now.slabs if slab.fits(nbytes) for grant in now.free(slab, used)), None)
    mine = Claim(id_, peer, nbytes, () if found is None else (found,), ahead)
    return replace(now, claims=(*now.claims, mine))


def lease(now: StoreRecord, id_: int, peer: Peer, grants: Iterable[int]) -> StoreRecord:
    """Claim memory to read; nothing changes if there is none."""
    wanted = tuple(grants)
    return replace(now, claims=(*now.claims, Claim(id_, peer, 0, wanted))) if wanted else now


def fits(size: int, nbytes: int) -> bool:
    """Whether a grant is large enough for so many bytes, and not much larger."""
    return nbytes <= size <= 2 * nbytes + ROUNDING


def sizes(nbytes: int) -> tuple[int, int]:
    """The size and the number of the grants of a new slab for a put of so many bytes."""
    size = -(-nbytes // ROUNDING) * ROUNDING
    return size, max(1, min(MOST_GRANTS, SLAB_BYTES // size))


def add(now: StoreRecord, slab: Slab) -> StoreRecord:
    """Add a slab, and give its memory to claims that wait for it."""
    now = replace(now, slabs=(*now.slabs, slab))
    for waiting in [each for each in now.claims if not each.grants and slab.fits(each.nbytes)]:
        if (found := next(now.free(slab, ()), None)) is not None:
            given = replace(waiting, grants=(found,))
            now = replace(now, claims=tuple(given if each is waiting else each for each in now.claims))
    return now


def release(now: StoreRecord, ids: Collection[int]) -> StoreRecord:
    """End claims."""
    return replace(now, claims=tuple(each for each in now.claims if each.id not in ids))


def without_surplus(now: StoreRecord, used: Collection[int]) -> StoreRecord:
    """Drop the free slabs beyond what stays for the next puts."""
    free = [each for each in now.slabs if sum(1 for _ in now.free(each, used)) == each.count]
    spare, gone = sum(each.handle.nbytes for each in free), set[int]()
    most = max(sum(each.handle.nbytes for each in now.slabs) - spare, SPARE_BYTES)
    for each in free:
        if spare > most:
            gone.add(each.first)
            spare -= each.handle.nbytes
    return replace(now, slabs=tuple(each for each in now.slabs if each.first not in gone))


def end(now: StoreRecord) -> StoreRecord:
    """End the store."""
    return replace(now, ended=True)


class RecordClient:
    """The record of the store with a register at `url`, and its directory. Thread-safe, but for what `read` yields.

    The record has the last changes of the directory, a second cell a snapshot of what was before: so a change costs
    little however many keys there are.
    """

    def __init__(self, url: str) -> None:
        self.cell = CellClient(url, "torchstore", EMPTY)
        self._snapshot = CellClient(url, "torchstore/snapshot", Snapshot())
        self._lock = threading.RLock()
        self._directory = Directory(Snapshot())

    def read(self, question: Callable[[Directory], T]) -> T:
        """The answer of the newest directory."""
        now = self.cell.read()[1]
        with self._lock:
            return question(self._after(now))

    def update(self, transition: Callable[[StoreRecord, Directory], StoreRecord]) -> tuple[int, StoreRecord]:
        """Change the record, by what it and its directory say; returns its version and itself."""

        def changed(now: StoreRecord) -> StoreRecord:
            with self._lock:
                return transition(now, self._after(now))

        return self.cell.change(changed)

    def commit(
        self,
        change: KeyPart | Deleted,
        check: Callable[[Directory], object],
        after: Callable[[StoreRecord, Set[int]], StoreRecord] = lambda now, used: now,
    ) -> None:
        """Change the directory, unless `check` raises an error, and the memory: `after` knows what is used then."""

        def changed(now: StoreRecord, directory: Directory) -> StoreRecord:
            check(directory)
            filled = {change.grant} if isinstance(change, KeyPart) else set[int]()
            used = (directory.grants - directory.freed(change)) | filled
            if sum(len(each.keys) for each in now.changes) < MOST_KEYS:
                return after(replace(now, changes=(*now.changes, change)), used)
            snapshot = directory.snapshot()
            self._snapshot.change(lambda there: snapshot if snapshot.number > there.number else there)
            return after(replace(now, base=snapshot.number, changes=(change,)), used)

        self.update(changed)

    def close(self) -> None:
        """Close the register. Idempotent."""
        self.cell.close()
        self._snapshot.close()

    def _after(self, now: StoreRecord) -> Directory:
        """The directory after all changes of a record, or more."""
        if self._directory.number < now.base:
            self._directory = Directory(self._snapshot.read()[1])
        for change in now.changes[max(0, self._directory.number - now.base) :]:
            self._directory.apply(change)
        return self._directory
