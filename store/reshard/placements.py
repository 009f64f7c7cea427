"""Computes the blocks of a tensor that a rank of a mesh has, exactly as torch cuts them.

It is arithmetic on index ranges. A `Shard` takes one range along its dimension. A `_StridedShard` takes one from each
of several chunks, so a rank may have several boxes of a tensor, one after the other in its local tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from holdfast.comms.errors import Unsupported
from holdfast.ft.state.boxes import Box, whole


class LocalBlock(NamedTuple):
    """A box of a tensor, and the box of the local tensor where it lies."""

    box: Box
    local: Box


Blocks = tuple[LocalBlock, ...]


class ShardCut(NamedTuple):
    """One division of a tensor: along `dim`, by mesh dimension `mesh_dim`, within each of `chunks` chunks."""

    mesh_dim: int
    dim: int
    chunks: int = 1


Cuts = tuple[ShardCut, ...]
"""The cuts of a tensor, in the order in which they are made."""


def cuts_of(name: str, placements: Sequence[Any], dims: int, order: Sequence[Any] | None = None) -> Cuts:
    """The cuts that torch's `placements` make in a tensor of `dims` dimensions.

    `order` is the spec's `shard_order`, if it has one. Raises `Unsupported`, with the name, for placements that do not
    say which elements a rank has.
    """
    placed = tuple(placements)
    cuts, problem, hint = _cuts_of(placed, tuple(map(type, placed)), dims, None if order is None else tuple(order))
    if problem:
        raise Unsupported(f"{name!r} is placed as {placed}: {problem}", hint)
    return cuts


@lru_cache(maxsize=1 << 12)
def _cuts_of(
    placements: tuple[Any, ...], types: tuple[type, ...], dims: int, order: tuple[Any, ...] | None
) -> tuple[Cuts, str, str]:
    """The cuts, or what is wrong with the placements, and what to do about it.

    `types` are a key of the cache: a `Shard` equals placements of its subclasses, which may cut differently.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    cuts: list[ShardCut] = []
    for mesh_dim, (placement, kind) in enumerate(zip(placements, types, strict=True)):
        if kind is Replicate:
            continue
        if placement.is_partial():
            return (), "ranks hold summands of it, no elements", "all-reduce it first: redistribute() to Replicate()"
        if kind not in (Shard, _StridedShard):
            return (), f"{kind.__name__} is not known here", "redistribute() it to Shard or Replicate"
        if not -dims <= placement.dim < dims:
            return (), f"it has {dims} dimensions", "shard along a dimension that the tensor has"
        chunks = int(placement.split_factor) if kind is _StridedShard else 1
        cuts.append(ShardCut(mesh_dim, placement.dim % dims, chunks))
    turn = [mesh_dim for entry in order or () for mesh_dim in entry.mesh_dims]
    if sorted(turn) == [cut.mesh_dim for cut in cuts]:
        cuts.sort(key=lambda cut: turn.index(cut.mesh_dim))
    return tuple(cuts), "", ""


@lru_cache(maxsize=1 << 16)
def blocks_of(shape: tuple[int, ...], cuts: Cuts, sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> Blocks:
    """The blocks at `coordinate` of a mesh of `sizes`, in the order of the local tensor.

    A tensor without elements has one empty block, everywhere, so that it is not forgotten.
    """
    if not math.prod(shape):
        empty = whole(local_shape(shape, cuts, sizes, coordinate))
        return (LocalBlock(empty, empty),)
    return tuple(
        LocalBlock(tuple(there for there, _ in pieces), tuple(here for _, here in pieces))
        for pieces in itertools.product(*map(_placed, _ranges(shape, cuts, sizes, coordinate)))
    )


@lru_cache(maxsize=1 << 16)
def local_shape(
    shape: tuple[int, ...], cuts: Cuts, sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[int, ...]:
    """The shape of the local tensor at `coordinate` of a mesh of `sizes`."""
    ranges = _ranges(shape, cuts, sizes, coordinate)
    return tuple(sum(high - low for low, high in along) for along in ranges)


def in_cutting_order(cuts: Cuts, sizes: tuple[int, ...]) -> Cuts | None:
    """The same cuts without chunks, as `fully_shard` makes them: a strided one after those that its chunks stand for.

    The result differs only for tensors that the mesh does not divide evenly. None if some chunks stand for no cut.
    """
    found: list[ShardCut] = []
    for cut in reversed(cuts):
        before, at = 1, 0
        while before < cut.chunks and at < len(found):
            before *= sizes[found[at].mesh_dim] if found[at].dim == cut.dim else 1
            at += 1
        if before != cut.chunks:
            return None
        found.insert(at, ShardCut(cut.mesh_dim, cut.dim))
    return tuple(found)


def _ranges(
    shape: tuple[int, ...], cuts: Cuts, sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> list[list[tuple[int, int]]]:
    """Along each dimension, the ranges of global indexes in the order of the local tensor."""
    found = [[(0, length)] if length else [] for length in shape]
    for cut in cuts:
        size, place = sizes[cut.mesh_dim], coordinate[cut.mesh_dim]
        length = sum(high - low for low, high in found[cut.dim])
        taken = (_chunk(*chunk, size, place) for chunk in _chunks(length, cut.chunks))
        found[cut.dim] = _select(found[cut.dim], taken)
    return found


def _chunks(length: int, count: int) -> Iterator[tuple[int, int]]:
    """The chunks of `torch.chunk`, without empty ones."""
    step = max(-(-length // count), 1)
    for low in range(0, length, step):
        yield low, min(low + step, length)


def _chunk(low: int, high: int, count: int, place: int) -> tuple[int, int]:
    """Chunk `place` of `count` of a range, perhaps empty."""
    step = -(-(high - low) // count)
    return min(low + place * step, high), min(low + (place + 1) * step, high)


def _select(ranges: list[tuple[int, int]], taken: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """What `taken`, ascending positions among the indexes of `ranges`, consists of; neighbours are joined."""
    found: list[tuple[int, int]] = []
    number = start = 0
    for low, high in taken:
        while low < high:
            begin, end = ranges[number]
            if start + end - begin <= low:
                start += end - begin
                number += 1
                continue
            first, last = begin + low - start, min(begin + high - start, end)
            if found and found[-1][1] == first:
                found[-1] = found[-1][0], last
            else:
                found.append((first, last))
            low += last - first
    return found


def _placed(ranges: list[tuple[int, int]]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Each range with the one of the local tensor where it lies."""
    found, at = [], 0
    for low, high in ranges:
        found.append(((low, high), (at, at + high - low)))
        at += high - low
    return found
