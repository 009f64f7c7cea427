"""The directory of a store: which keys it has, and in which part the value of each lies.

What one put brings is a part in the store's own layout, which lies in a grant of `memory`, or here if it is small. A
register has the last changes, and a snapshot of what was before: so a change costs little however many keys there are.
Each process applies the changes to a directory of its own; all have the same one after the same number of changes.

A volume is a name that a strategy gives to a group of processes. Each keeps its own value of a key; readers of a whole
tensor or an object get that of the volume that was first to put it. Shards are collected from all volumes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import product
from typing import Literal, Self, TypeVar

import msgspec

from holdfast.comms.errors import CorruptData, Mismatch
from holdfast.store.catalog.cell_client import CellClient
from holdfast.store.torchstore.errors import NoSuchKey

T = TypeVar("T")

MOST_KEYS = 64
"""Once the changes since the last snapshot name so many keys, the next one makes a snapshot."""
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


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A value of a register cell."""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The record in `data`. Raises `CorruptData`."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptData(f"no {cls.__name__} of a torchstore store: {error}") from error


class Changes(Record, frozen=True, array_like=True):
    """The changes after the first `base` ones."""

    base: int = 0
    changes: tuple[KeyPart | Deleted, ...] = ()


class Snapshot(Record, frozen=True, array_like=True):
    """A directory after `number` changes: for each key the numbers of its parts."""

    number: int = 0
    parts: tuple[KeyPart, ...] = ()
    keys: dict[str, tuple[int, ...]] = {}


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
        return Snapshot(self.number, tuple(parts.values()), keys)

    @property
    def grants(self) -> Collection[int]:
        """The memory in which values lie."""
        return self._uses.keys()

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
            if isinstance(change, KeyPart):
                self._set(key, change)
            else:
                for part in self._values.pop(key, {}).values():
                    self._let_go(part.grant)

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
        values, slot = self._values.setdefault(key, {}), part.slot(key)
        if (old := values.get(slot)) is not None:
            self._let_go(old.grant)
        values[slot] = part
        self._uses[part.grant] += 1

    def _let_go(self, grant: int) -> None:
        self._uses[grant] -= 1
        if not self._uses[grant]:
            del self._uses[grant]


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


class DirectoryClient:
    """The directory of the store with a register at `url`. Thread-safe, but for what `read` yields."""

    def __init__(self, url: str) -> None:
        self._changes = CellClient(url, "torchstore/changes", Changes(), Changes.decode)
        self._snapshot = CellClient(url, "torchstore/snapshot", Snapshot(), Snapshot.decode)
        self._lock = threading.RLock()
        self._directory = Directory(Snapshot())

    def read(self, question: Callable[[Directory], T]) -> T:
        """The answer of the newest directory."""
        _, log = self._changes.read()
        with self._lock:
            return question(self._after(log))

    def change(self, change: KeyPart | Deleted, check: Callable[[Directory], object]) -> None:
        """Make a change, unless `check` raises an error."""

        def changed(log: Changes) -> Changes:
            with self._lock:
                now = self._after(log)
                check(now)
                if sum(len(each.keys) for each in log.changes) < MOST_KEYS:
                    return Changes(log.base, (*log.changes, change))
                snapshot = now.snapshot()
            self._snapshot.change(lambda there: snapshot if snapshot.number > there.number else there)
            return Changes(snapshot.number, (change,))

        self._changes.change(changed)

    def close(self) -> None:
        """Close the register. Idempotent."""
        self._changes.close()
        self._snapshot.close()

    def _after(self, log: Changes) -> Directory:
        """The directory after all changes of a log, or more."""
        if self._directory.number < log.base:
            self._directory = Directory(self._snapshot.read()[1])
        for change in log.changes[max(0, self._directory.number - log.base) :]:
            self._directory.apply(change)
        return self._directory
