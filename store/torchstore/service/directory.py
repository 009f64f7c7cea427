"""The directory of a store: which content each key has, in which volume. Changes are pure functions of one entry.

A volume is a name that a strategy gives to a group of processes; as in torchstore, each keeps its own value of a key.
Readers of a whole tensor or an object get that of the volume that was first to put it; the shards of a DTensor are
collected from all volumes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

import msgspec

from holdfast.comms.errors import Mismatch
from holdfast.store.torchstore.errors import NoSuchKey
from holdfast.store.torchstore.service.records import (
    Content,
    StoredBlock,
    StoredObject,
    TensorShard,
    WholeTensor,
    blocks_of,
)

SEPARATOR = "."
_KINDS = {WholeTensor: "a whole tensor", TensorShard: "shards of a DTensor", StoredObject: "an object"}


class Entry(msgspec.Struct, frozen=True):
    """The contents of a key by volume, in the order in which the volumes got their first one."""

    volumes: tuple[tuple[str, tuple[Content, ...]], ...] = ()

    def contents(self) -> Iterator[Content]:
        for _, held in self.volumes:
            yield from held


def put(entry: Entry, volume: str, content: Content) -> Entry:
    """Put a content into a volume; it replaces that of the same shard, or the one before.

    Raises `Mismatch` if the key has contents of another kind, or shards of another mesh.
    """
    for other in entry.contents():
        if type(other) is not type(content):
            raise Mismatch(f"it holds {_KINDS[type(other)]}, this is {_KINDS[type(content)]}: delete the key first")
        if isinstance(content, TensorShard) and isinstance(other, TensorShard):
            _check_same_mesh(other, content)
    held = dict(entry.volumes)
    held[volume] = _replaced(held.get(volume, ()), content)
    return Entry(tuple(held.items()))


def _check_same_mesh(one: TensorShard, other: TensorShard) -> None:
    if one.mesh_shape != other.mesh_shape:
        raise Mismatch(
            f"it holds shards of a mesh of {one.mesh_shape}, this is one of a mesh of {other.mesh_shape}: delete the "
            "key first"
        )


def _replaced(held: tuple[Content, ...], content: Content) -> tuple[Content, ...]:
    if not isinstance(content, TensorShard):
        return (content,)
    shards = {each.coordinates: each for each in held if isinstance(each, TensorShard)}
    shards[content.coordinates] = content
    return tuple(shards.values())


def why_partial(entry: Entry) -> str:
    """Which shards were not put yet; "" if the value is complete."""
    shards = [each for each in entry.contents() if isinstance(each, TensorShard)]
    if not shards:
        return ""
    expected = product(*(range(size) for size in shards[0].mesh_shape))
    there = {each.coordinates for each in shards}
    if missing := [each for each in expected if each not in there]:
        named = ", ".join(map(str, missing[:4])) + (", ..." if len(missing) > 4 else "")
        return f"{len(missing)} of its shards were not put yet, at {named} of a mesh of {shards[0].mesh_shape}"
    shapes = sorted({each.global_shape for each in shards})
    dtypes = sorted({piece.block.dtype for each in shards for piece in each.pieces})
    if len(shapes) > 1 or len(dtypes) > 1:
        return f"its shards were put with different shapes or dtypes ({shapes}, {dtypes}): not all were put anew yet"
    return ""


def readable(entry: Entry) -> tuple[Content, ...]:
    """What readers get: all shards, or the content of the first volume."""
    contents = tuple(entry.contents())
    return contents if isinstance(contents[0], TensorShard) else contents[:1]


class Directory:
    """All keys of a store. A call that raises has changed nothing. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def put(self, volume: str, contents: Mapping[str, Content]) -> list[StoredBlock]:
        """Put contents under their keys, all at once; returns the blocks that are not needed any more.

        Raises `Mismatch` with everything that is wrong.
        """
        after, wrong, dropped = {}, [], []
        for key, content in contents.items():
            before = self._entries.get(key, Entry())
            try:
                after[key] = put(before, volume, content)
            except Mismatch as error:
                wrong.append(f"{key!r}: {error}")
                continue
            dropped += _blocks_only_of(before, after[key])
        if wrong:
            raise Mismatch("nothing was put: " + "; ".join(wrong))
        self._entries.update(after)
        return dropped

    def find(self, keys: Sequence[str]) -> dict[str, tuple[Content, ...]]:
        """What readers of each key get. Raises `NoSuchKey`, naming all keys that are missing or incomplete."""
        found, wrong = {}, []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                wrong.append(f"{key!r} is not in the store")
            elif why := why_partial(entry):
                wrong.append(f"{key!r} is only partially committed: {why}")
            else:
                found[key] = readable(entry)
        if wrong:
            raise NoSuchKey("; ".join(wrong))
        return found

    def has(self, key: str) -> bool:
        """Whether a key has a complete value."""
        entry = self._entries.get(key)
        return entry is not None and not why_partial(entry)

    def keys(self, prefix: str | None = None) -> list[str]:
        """All keys, or those that begin with the parts of `prefix`. Dots separate parts."""
        if prefix is None:
            return list(self._entries)
        parts = prefix.split(SEPARATOR)
        return [key for key in self._entries if key.split(SEPARATOR)[: len(parts)] == parts]

    def delete(self, keys: Iterable[str]) -> list[StoredBlock]:
        """Delete the keys that are there; returns their blocks."""
        gone = [self._entries.pop(key) for key in dict.fromkeys(keys) if key in self._entries]
        return [block for entry in gone for content in entry.contents() for block in blocks_of(content)]


def _blocks_only_of(before: Entry, after: Entry) -> list[StoredBlock]:
    kept = set(map(id, after.contents()))
    return [block for content in before.contents() if id(content) not in kept for block in blocks_of(content)]
