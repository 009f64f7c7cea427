"""The tensors of a sharded state, and the piece of each that belongs to each part.

A state is cut into as many parts as there are ranks. Sharded tensors (DTensors) are cut by dimensions of the mesh, one
cut after the other, each as `torch.chunk` does; all other tensors are whole in every part. So a part of a tensor is
always a box, the layout of a part follows from the leaves and the mesh alone, and every rank can compute where the
bytes of any part lie.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import msgspec
import torch

from holdfast.comms.errors import CorruptData, Mismatch
from holdfast.ft.state.boxes import Box, count_of, shape_of, whole
from holdfast.ft.state.codec import EncodedState, encode_sharded_state

Cuts = tuple[tuple[int, str], ...]
"""Pairs of a tensor dimension and the mesh dimension that divides it, in the order of the cuts."""


class RankMesh(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Named dimensions over ranks 0, 1, ..., the last dimension fastest, as in `init_device_mesh`."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def size_of(self, name: str) -> int:
        """The size of dimension `name`. Raises `Mismatch` if this mesh does not have it."""
        if name not in self.names:
            raise Mismatch(
                f"a tensor was sharded over a dimension {name!r} of a mesh; this job's has {', '.join(self.names)}"
            )
        return self.sizes[self.names.index(name)]

    def place_of(self, rank: int) -> dict[str, int]:
        """A rank's coordinate along each dimension, by name."""
        found = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            rank, found[name] = divmod(rank, size)
        return found


def all_ranks(size: int) -> RankMesh:
    """A mesh of one dimension, `ranks`."""
    return RankMesh(("ranks",), (size,))


@lru_cache(maxsize=1 << 16)
def box_of(shape: tuple[int, ...], cuts: Cuts, mesh: RankMesh, rank: int) -> Box:
    """The box of a tensor that `rank` has."""
    box = list(whole(shape))
    place = mesh.place_of(rank)
    for dim, name in cuts:
        low, high = box[dim]
        chunk = -(-(high - low) // mesh.size_of(name))
        box[dim] = (min(low + place[name] * chunk, high), min(low + (place[name] + 1) * chunk, high))
    return tuple(box)


@lru_cache(maxsize=1 << 12)
def holders_of_boxes(shape: tuple[int, ...], cuts: Cuts, mesh: RankMesh) -> dict[Box, list[int]]:
    """The boxes, without empty ones, that a tensor is cut into, each with the ranks that have it."""
    found: defaultdict[Box, list[int]] = defaultdict(list)
    for rank in range(mesh.size):
        box = box_of(shape, cuts, mesh, rank)
        if count_of(box):
            found[box].append(rank)
    return dict(found)


ALIGNMENT = 64


class Leaf(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of a state; `shape` is that of the whole tensor.

    `on` are the mesh dimensions that the tensor is placed on (none for an ordinary tensor), `cuts` those that divide
    it.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    on: tuple[str, ...] = ()
    cuts: Cuts = ()

    def box(self, mesh: RankMesh, part: int) -> Box:
        """The box of the tensor that part `part` has."""
        return box_of(self.shape, self.cuts, mesh, part)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CorruptData(f"no tensor is {self.dtype}")
        return dtype


class PartLayout(msgspec.Struct, frozen=True, dict=True):
    """The byte layout of part `part`: where its tensors lie, for ranks laid out as `mesh`."""

    leaves: tuple[Leaf, ...]
    mesh: RankMesh
    part: int

    @property
    def size(self) -> int:
        """The number of parts."""
        return self.mesh.size

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        return tuple(leaf.box(self.mesh, self.part) for leaf in self.leaves)

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(shape_of, self.boxes))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The byte offset of each leaf, then the end of the last one."""
        at, found = 0, []
        for leaf, shape in zip(self.leaves, self.shapes, strict=True):
            found.append(at)
            at += -(-math.prod(shape) * leaf.torch_dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return (*found, at)

    @property
    def nbytes(self) -> int:
        return max(self.offsets[-1], ALIGNMENT)

    @cached_property
    def share(self) -> tuple[int, int]:
        """The number of this part among the parts that differ, and how many differ.

        Two parts are equal (replicas) if no mesh dimension in which their ranks differ divides a tensor.
        """
        dividing = {name for leaf in self.leaves for _, name in leaf.cuts}
        place, number, count = self.mesh.place_of(self.part), 0, 1
        for name, size in zip(self.mesh.names, self.mesh.sizes, strict=True):
            if name in dividing:
                number, count = number * size + place[name], count * size
        return number, count

    def view(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """The tensor of leaf `index` in `buffer`, the bytes of a part."""
        leaf, shape, begin = self.leaves[index], self.shapes[index], self.offsets[index]
        count = math.prod(shape) * leaf.torch_dtype.itemsize
        return buffer[begin : begin + count].view(leaf.torch_dtype).view(shape)


def encode_local_shards(
    state: Any, mesh: RankMesh, rank: int, known: Mapping[str, Leaf]
) -> tuple[EncodedState, tuple[Leaf, ...], list[torch.Tensor]]:
    """The encoded `state`, its leaves, and this rank's part of each leaf.

    `known` are the leaves of an earlier state, by path: their cuts decide where a mesh dimension of size 1 leaves the
    cut open. Raises TypeError for state that cannot be sent, ValueError for tensors sharded in a way that cannot be
    copied.
    """
    taken = encode_sharded_state(state)
    leaves, mine = [], []
    meshes: dict[int, tuple[str, ...]] = {}
    for path, tensor in zip(taken.paths, taken.tensors, strict=True):
        on, cuts, local = _placed(path, tensor, mesh, rank, meshes, known.get(path))
        leaf = Leaf(path, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), on, cuts)
        if tuple(local.shape) != shape_of(leaf.box(mesh, rank)):
            raise ValueError(f"{path}: rank {rank} has {tuple(local.shape)} of {leaf.shape}, not its even share")
        leaves.append(leaf)
        mine.append(local)
    names = [leaf.path for leaf in leaves]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two tensors of the state are called {twice!r}; rename what is attached")
    return taken, tuple(leaves), mine


def place(leaf: Leaf, local: torch.Tensor, mesh: RankMesh, devices: Any) -> torch.Tensor:
    """The whole tensor of `leaf`, with `local` as this rank's part; `devices` is the DeviceMesh that `mesh` describes.

    Raises `Mismatch` for a leaf placed on dimensions that the mesh does not have.
    """
    from torch.distributed.tensor import DTensor

    if not leaf.on:
        return local
    for name in leaf.on:
        mesh.size_of(name)
    stride = torch.empty(leaf.shape, device="meta").stride()
    whole: torch.Tensor = DTensor.from_local(
        local,
        devices if leaf.on == mesh.names else devices[leaf.on],
        _placements(leaf.on, leaf.cuts, mesh),
        run_check=False,
        shape=torch.Size(leaf.shape),
        stride=stride,
    )
    return whole


def _placed(
    path: str, tensor: torch.Tensor, mesh: RankMesh, rank: int, meshes: dict[int, tuple[str, ...]], known: Leaf | None
) -> tuple[tuple[str, ...], Cuts, torch.Tensor]:
    """The mesh dimensions that a tensor is placed on, how they cut it, and this rank's part of it.

    `meshes` caches the dimensions of DeviceMeshes by id.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return (), (), tensor
    devices = tensor.device_mesh
    on = meshes.get(id(devices))
    if on is None:
        on = meshes[id(devices)] = _dimensions(path, devices, mesh, rank)
    placements = tuple(tensor.placements)
    if known is not None and known.on == on and _placements(on, known.cuts, mesh) == placements:
        return on, known.cuts, tensor.to_local()
    return on, _cuts(path, placements, on, mesh, max(tensor.dim(), 1)), tensor.to_local()


def _dimensions(path: str, devices: Any, mesh: RankMesh, rank: int) -> tuple[str, ...]:
    """The dimensions of `mesh` that a DeviceMesh consists of. Raises ValueError if it is another mesh."""
    names: tuple[str, ...] = tuple(devices.mesh_dim_names or ())
    place = mesh.place_of(rank)
    alike = (
        names == tuple(name for name in mesh.names if name in names)
        and names
        and tuple(devices.shape) == tuple(map(mesh.size_of, names))
        and list(devices.get_coordinate() or ()) == [place[name] for name in names]
    )
    if not alike:
        raise ValueError(
            f"{path} lies on a mesh of {tuple(devices.shape)}: use the mesh that build() is given, or dimensions of it "
            "as in mesh['shard']; attach_sharded(mesh=...) says how the ranks are laid out"
        )
    return names


def _cuts(path: str, placements: Sequence[Any], on: tuple[str, ...], mesh: RankMesh, dims: int) -> Cuts:
    """The cuts of a tensor with these placements, in order.

    A `_StridedShard` is cut after those dimensions to its right that give its split factor as the product of their
    sizes, a `Shard` before all of them.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    found: list[tuple[int, str]] = []
    for name, placement in reversed(list(zip(on, placements, strict=True))):
        if isinstance(placement, Replicate):
            continue
        if type(placement) not in (Shard, _StridedShard):
            raise ValueError(f"{path} is placed as {placement}: copies are kept of Shard and Replicate")
        dim, before, cut = int(placement.dim) % dims, 1, 0
        wanted = placement.split_factor if type(placement) is _StridedShard else 1
        while before < wanted and cut < len(found):
            before *= mesh.size_of(found[cut][1]) if found[cut][0] == dim else 1
            cut += 1
        if before != wanted:
            raise ValueError(f"{path} is placed as {placement}, which no dimensions to its right account for")
        found.insert(cut, (dim, name))
    return tuple(found)


@lru_cache(maxsize=1 << 12)
def _placements(on: tuple[str, ...], cuts: Cuts, mesh: RankMesh) -> tuple[Any, ...]:
    """torch's placements of a tensor with these cuts: the inverse of `_cuts`."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    found: list[Any] = []
    for name in on:
        at = next((number for number, (_, by) in enumerate(cuts) if by == name), None)
        if at is None:
            found.append(Replicate())
            continue
        dim = cuts[at][0]
        before = [by for other, by in cuts[:at] if other == dim and on.index(by) > on.index(name)]
        factor = math.prod(map(mesh.size_of, before))
        found.append(_StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim))
    return tuple(found)
