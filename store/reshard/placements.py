"""Computes the blocks of a tensor that a rank of a mesh has, exactly as torch cuts them.

It is arithmetic on index ranges. A `Shard` takes one range along its dimension. A `_StridedShard` takes one from each
of several chunks, so a rank may have several boxes of a tensor, one after the other in its local tensor. Submeshes that
were sliced, flattened, concatenated or unflattened from one root are all described in steps over the root's ranks, so
that those of one state dict can be compared.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from holdfast.comms.errors import Mismatch, Unsupported
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


Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MeshStep:
    """One level of a mesh dimension: `size` ranks, each `stride` positions after the other."""

    stride: int
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class Submesh:
    """A mesh in its root mesh. `coordinate` and `position` (in the root) are this rank's; None if it is not in it.

    `steps` has, for each dimension, the steps that it makes over the root's ranks, largest first.
    """

    sizes: tuple[int, ...]
    steps: tuple[tuple[MeshStep, ...], ...]
    coordinate: tuple[int, ...] | None
    position: int | None
    root: tuple[int, ...]

    def __str__(self) -> str:
        return f"mesh of {'x'.join(map(str, self.sizes))} ranks out of {len(self.root)}"


_known: weakref.WeakKeyDictionary[Any, Submesh] = weakref.WeakKeyDictionary()
_guard = threading.Lock()


def submesh_of(mesh: Any) -> Submesh:
    """The description of a DeviceMesh. Raises `Unsupported` for one that is not cut regularly from its root."""
    place = mesh.get_coordinate()
    coordinate = None if place is None else tuple(map(int, place))
    with _guard:
        found = _known.get(mesh)
        if found is None or found.coordinate != coordinate:  # meshes are equal whatever this process's rank was
            found = _known[mesh] = _describe(mesh, coordinate)
    return found


def _describe(mesh: Any, coordinate: tuple[int, ...] | None) -> Submesh:
    root = _ranks(_root_of(mesh)).reshape(-1)
    ranks = _ranks(mesh)
    positions = {rank: position for position, rank in enumerate(root.tolist())}
    places = np.vectorize(positions.__getitem__, otypes=[np.int64])(ranks)
    steps = _steps(places)
    base = int(places.min(initial=len(root)))
    if steps is None or any(base // step.stride % step.size for along in steps for step in along):
        raise Unsupported(f"a mesh of ranks {ranks.tolist()} in one of {root.tolist()}", "slice or flatten the root")
    position = None if coordinate is None else int(places[coordinate])
    return Submesh(tuple(ranks.shape), steps, coordinate, position, _interned(tuple(root.tolist())))


@lru_cache(maxsize=16)
def _interned(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """One tuple for equal ones, so that comparing them is cheap."""
    return ranks


def _ranks(mesh: Any) -> Ints:
    return mesh.mesh.cpu().numpy().astype(np.int64)  # type: ignore[no-any-return]


def _root_of(mesh: Any) -> Any:
    try:
        return mesh._get_root_mesh()
    except AttributeError:  # before torch 2.9
        from torch.distributed.device_mesh import _mesh_resources

        return _mesh_resources.get_root_mesh(mesh)


def _steps(places: Ints) -> tuple[tuple[MeshStep, ...], ...] | None:
    """The steps along each dimension; None unless every place is the sum of the steps to it."""
    found = []
    total = places[(0,) * places.ndim]
    for dim in range(places.ndim):
        line = places[(0,) * dim + (slice(None),) + (0,) * (places.ndim - dim - 1)]
        steps = _levels(line)
        if steps is None:
            return None
        found.append(steps)
        total = total + (line - line[0]).reshape((-1,) + (1,) * (places.ndim - dim - 1))
    return tuple(found) if np.array_equal(total, places) else None


def _levels(line: Ints) -> tuple[MeshStep, ...] | None:
    """The steps that make up a line of places, largest first."""
    found: list[MeshStep] = []
    while len(line) > 1:
        stride = int(line[1] - line[0])
        size = 1
        while size < len(line) and line[size] == line[0] + size * stride:
            size += 1
        rows = line.reshape(-1, size) if len(line) % size == 0 else None
        if stride <= 0 or rows is None or not np.array_equal(rows, rows[:, :1] + np.arange(size) * stride):
            return None
        found.insert(0, MeshStep(stride, size))
        line = rows[:, 0]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor of global `shape`: `blocks` of it lie in `local`, on this rank.

    `mesh` and `cuts` say how its mesh divides it; a plain tensor has no mesh, and one block, the whole.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    local: torch.Tensor
    blocks: Blocks
    mesh: Submesh | None = None
    cuts: Cuts = ()


def place(name: str, tensor: torch.Tensor) -> PlacedTensor:
    """Find the blocks of a tensor that lie on this rank.

    Raises `Unsupported` for placements that do not say which elements a rank has, such as `Partial`, `Mismatch` if the
    local tensor does not have the shape that they say.
    """
    shape = tuple(tensor.shape)
    if not is_dtensor(tensor):
        box = whole(shape)
        return PlacedTensor(shape, tensor.dtype, tensor, (LocalBlock(box, box),))
    spec: Any = tensor._spec  # type: ignore[attr-defined]
    mesh = submesh_of(spec.mesh)
    cuts = cuts_of(name, spec.placements, len(shape), getattr(spec, "shard_order", None))
    local = local_of(tensor)
    if mesh.coordinate is None:
        return PlacedTensor(shape, tensor.dtype, local, (), mesh, cuts)
    return PlacedTensor(shape, tensor.dtype, local, _local_blocks(name, shape, local, mesh, cuts), mesh, cuts)


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is a DTensor; without importing the module of DTensors, which is slow."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Any) -> torch.Tensor:
    """The tensor itself, or the shard of a DTensor that is here, outside of autograd; waits for a collective."""
    if not is_dtensor(tensor):
        return tensor  # type: ignore[no-any-return]
    local = tensor._local_tensor
    wait = getattr(local, "wait", None)  # of an AsyncCollectiveTensor
    return local if wait is None else wait()  # type: ignore[no-any-return]


def _local_blocks(name: str, shape: tuple[int, ...], local: torch.Tensor, mesh: Submesh, cuts: Cuts) -> Blocks:
    """The blocks of a local tensor.

    `fully_shard` cuts a tensor of a tensor-parallel model the other way round than its placements say, which makes a
    difference if the mesh does not divide it evenly: the shape of the local tensor then tells which of the two it was.
    """
    assert mesh.coordinate is not None
    orders = {blocks_of(shape, cuts, mesh.sizes, mesh.coordinate): cuts}
    if any(cut.chunks > 1 for cut in cuts) and (other := in_cutting_order(cuts, mesh.sizes)):
        orders.setdefault(blocks_of(shape, other, mesh.sizes, mesh.coordinate), other)
    shapes = {blocks: local_shape(shape, order, mesh.sizes, mesh.coordinate) for blocks, order in orders.items()}
    fit = [blocks for blocks, expected in shapes.items() if expected == tuple(local.shape)]
    if len(fit) == 1:
        return fit[0]
    if fit:
        raise Unsupported(
            f"{name!r}, of shape {shape}, which {mesh} does not divide evenly: `fully_shard` and `distribute_tensor` "
            "would give this rank other elements",
            "pad it to a multiple of the mesh's size, or redistribute() it to Shard",
        )
    expected = " or ".join(str(each) for each in dict.fromkeys(shapes.values()))
    raise Mismatch(
        f"{name!r}: its placements on a {mesh} give this rank {expected} of {shape}, its local tensor has "
        f"{tuple(local.shape)}; give the global shape to DTensor.from_local()"
    )
