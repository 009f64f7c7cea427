"""Which rank publishes which blocks: each element once, the bytes spread evenly over ranks that hold the same."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.comms.errors import Mismatch
from holdfast.ft.state.boxes import count_of, whole
from holdfast.store.reshard.placements import Blocks, Cuts, MeshStep, PlacedTensor, Submesh, local_shape

Axes = tuple[MeshStep, ...]
"""Dimensions of the root mesh of which all dimensions of all meshes consist, largest strides first."""


class Given(NamedTuple):
    """What this rank publishes: part `part` of `parts`, with `blocks` of tensors by name.

    `shares` says whether other ranks may give the same blocks.
    """

    part: int
    parts: int
    blocks: dict[str, Blocks]
    shares: bool = False


class _TensorKind(NamedTuple):
    """What decides which rank gives a tensor: the same on every rank that holds it."""

    shape: tuple[int, ...]
    itemsize: int
    mesh: Submesh | None
    cuts: Cuts


def given(placed: Mapping[str, PlacedTensor]) -> Given:
    """The part of this rank among all ranks of the root mesh, and the blocks that it gives.

    Plain tensors count as replicated over the meshes of the DTensors. Ranks that differ along a dimension of the root
    which no tensor's mesh has, such as the stages of a pipeline, do not know of each other: each gives all that it has.
    Without DTensors, the only part has everything. Raises `Mismatch` if the DTensors lie on meshes without a common
    root.
    """
    held = {name: placed[name] for name in sorted(placed)}
    first = _common_mesh(held)
    if first is None:
        return Given(0, 1, {name: each.blocks for name, each in held.items()})
    assert first.position is not None
    kinds = tuple(_TensorKind(each.shape, each.dtype.itemsize, each.mesh, each.cuts) for each in held.values())
    mine = _mine(kinds, first.position)
    blocks = {
        name: each.blocks for (name, each), gives in zip(held.items(), mine, strict=True) if gives and each.blocks
    }
    axes = _axes({kind.mesh for kind in kinds if kind.mesh is not None}) or ()
    return Given(first.position, len(first.root), blocks, math.prod(axis.size for axis in axes) < len(first.root))


def _common_mesh(held: Mapping[str, PlacedTensor]) -> Submesh | None:
    """The mesh of one DTensor, if all have a common root mesh with this rank; None without DTensors."""
    meshes: dict[Submesh, str] = {}
    for name, each in held.items():
        if each.mesh is not None:
            meshes.setdefault(each.mesh, name)
    for mesh, name in meshes.items():
        if mesh.position is None:
            raise Mismatch(f"{name!r} lies on a {mesh} without this rank; publish on the ranks of its mesh")
    for (one, name), (other, second) in itertools.combinations(meshes.items(), 2):
        if one.root != other.root or _axes((one, other)) is None:
            raise Mismatch(
                f"{name!r} lies on a {one}, {second!r} on a {other}, and they do not have dimensions of one root mesh; "
                "slice both from one, or publish the tensors in two stores"
            )
    return next(iter(meshes), None)


def _axes(meshes: Iterable[Submesh]) -> Axes | None:
    """The axes of several meshes of one root; None if their dimensions do not nest."""
    steps = {step for mesh in meshes for along in mesh.steps for step in along}
    ends = sorted({step.stride for step in steps} | {step.stride * step.size for step in steps})
    if any(high % low for low, high in itertools.pairwise(ends)):
        return None
    axes = [
        MeshStep(low, high // low) for low, high in itertools.pairwise(ends) if any(_has(s, low, high) for s in steps)
    ]
    return tuple(reversed(axes))


def _has(step: MeshStep, low: int, high: int) -> bool:
    return step.stride <= low and high <= step.stride * step.size


@lru_cache(maxsize=8)
def _mine(kinds: tuple[_TensorKind, ...], position: int) -> tuple[bool, ...]:
    """Which tensors the rank at `position` gives: the largest first, each from the replicas with the fewest bytes."""
    axes = _axes({kind.mesh for kind in kinds if kind.mesh is not None})
    assert axes is not None
    place = [position // axis.stride % axis.size for axis in axes]
    loads = np.zeros([axis.size for axis in axes], np.int64)
    weights = [_weights(kind, axes) for kind in kinds]
    mine = [True] * len(kinds)
    for number in sorted(range(len(kinds)), key=lambda number: (-weights[number].largest, number)):
        weight, divided, free, _ = weights[number]
        if not free:
            loads += weight
            continue
        worst = (loads + weight).max(axis=divided)
        chosen = dict(zip(free, map(int, np.unravel_index(worst.argmin(), worst.shape)), strict=True))
        loads[tuple(chosen.get(axis, slice(None)) for axis in range(len(axes)))] += weight.squeeze(free)
        mine[number] = all(place[axis] == at for axis, at in chosen.items())
    return tuple(mine)


class _Weights(NamedTuple):
    """The bytes of a tensor on each rank, over the axes.

    `nbytes` has size 1 along the `free` axes, where the tensor is replicated.
    """

    nbytes: npt.NDArray[np.int64]
    divided: tuple[int, ...]
    free: tuple[int, ...]
    largest: int


@lru_cache(maxsize=1 << 12)
def _weights(kind: _TensorKind, axes: Axes) -> _Weights:
    elements = count_of(whole(kind.shape))
    nbytes: npt.NDArray[np.int64] = np.full([1] * len(axes), kind.itemsize * elements, np.int64)
    divided: list[int] = []
    if kind.mesh is not None and elements:  # a tensor without elements is given once, however it is cut
        cut = {each.mesh_dim for each in kind.cuts}
        sizes = kind.mesh.sizes
        found = np.empty([size if dim in cut else 1 for dim, size in enumerate(sizes)], np.int64)
        for place in itertools.product(*map(range, found.shape)):
            found[place] = kind.itemsize * count_of(whole(local_shape(kind.shape, kind.cuts, sizes, place)))
        for dim in sorted(cut):
            divided += [number for step in kind.mesh.steps[dim] for number in _within(step, axes)]
        order = sorted(range(len(divided)), key=divided.__getitem__)
        apart = found.reshape([axes[number].size for number in divided]).transpose(order)
        divided.sort()
        nbytes = apart.reshape([axis.size if number in divided else 1 for number, axis in enumerate(axes)])
    free = tuple(number for number in range(len(axes)) if number not in divided)
    return _Weights(nbytes, tuple(divided), free, int(nbytes.max()))


def _within(step: MeshStep, axes: Axes) -> list[int]:
    """The axes that a step consists of, largest strides first."""
    return [number for number, axis in enumerate(axes) if _has(step, axis.stride, axis.stride * axis.size)]
