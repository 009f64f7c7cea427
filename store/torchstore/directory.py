"""The directory of a store: which keys it has, and in which part the value of each lies.

What one put brings is a part in the store's own layout, which lies in a grant of the store's memory (`record`), or here
if it is small. Each process applies the changes of the record to a directory of its own; all have the same one after
the same number of changes.

A volume is a name that a strategy gives to a group of processes. Each keeps its own value of a key; readers of a whole
tensor or an object get that of the volume that was first to put it. Shards are collected from all volumes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from itertools import product
from typing import ClassVar, Literal

import msgspec

from holdfast.comms.errors import Mismatch
from holdfast.store.catalog.records import CellRecord
from holdfast.store.torchstore.errors import NoSuchKey

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
