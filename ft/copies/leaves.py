"""What a sharded state consists of, whoever holds it: its tensors, and which rows of each belong to which part.

A state is cut into as many parts as there are ranks. Tensors that are sharded (DTensors) are cut along one dimension as
`torch.chunk` does it; all others are whole in every part. So the layout of any part follows from the leaves alone, and
every rank can work out where the bytes of any part lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
import torch

from holdfast.comms.errors import CorruptData
from holdfast.ft.skeleton import Taken, take_apart_sharded

ALIGNMENT = 64
PLAIN, WHOLE = -2, -1
"""Dimensions that are none: an ordinary tensor; a DTensor of which every rank has all."""


class Leaf(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of a state. `shape` is that of the whole tensor, `dim` the dimension along which parts share it."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    dim: int

    def rows(self, size: int, part: int) -> tuple[int, int]:
        """The first row of part `part` of `size`, and the one after its last; of a leaf with `dim` >= 0."""
        length = self.shape[self.dim]
        chunk = -(-length // size)
        return min(part * chunk, length), min((part + 1) * chunk, length)

    def shape_of(self, size: int, part: int) -> tuple[int, ...]:
        """The shape of what part `part` of `size` has of it."""
        if self.dim < 0:
            return self.shape
        low, high = self.rows(size, part)
        return (*self.shape[: self.dim], high - low, *self.shape[self.dim + 1 :])

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CorruptData(f"no tensor is {self.dtype}")
        return dtype


class Layout(msgspec.Struct, frozen=True, dict=True):
    """Where the tensors of part `part` of `size` lie in its bytes."""

    leaves: tuple[Leaf, ...]
    size: int
    part: int

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(leaf.shape_of(self.size, self.part) for leaf in self.leaves)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each leaf begins, in bytes, and where the last ends."""
        at, found = 0, []
        for leaf, shape in zip(self.leaves, self.shapes, strict=True):
            found.append(at)
            at += -(-math.prod(shape) * leaf.torch_dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return (*found, at)

    @property
    def nbytes(self) -> int:
        return max(self.offsets[-1], ALIGNMENT)

    def view(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """Leaf number `index` of a part whose bytes are `buffer`."""
        leaf, shape, begin = self.leaves[index], self.shapes[index], self.offsets[index]
        count = math.prod(shape) * leaf.torch_dtype.itemsize
        return buffer[begin : begin + count].view(leaf.torch_dtype).view(shape)


def take_shards(state: Any, size: int, rank: int) -> tuple[Taken, tuple[Leaf, ...], list[torch.Tensor]]:
    """`state` taken apart, its leaves, and this rank's part of each.

    Raises TypeError for what cannot travel, ValueError for tensors that are sharded in a way that has no copies.
    """
    taken = take_apart_sharded(state)
    leaves, mine = [], []
    meshes: set[int] = set()
    for path, tensor in zip(taken.paths, taken.tensors, strict=True):
        dim, local = _shard(path, tensor, size, rank, meshes)
        leaf = Leaf(path, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), dim)
        if tuple(local.shape) != leaf.shape_of(size, rank):
            raise ValueError(f"{path}: rank {rank} has {tuple(local.shape)} of {leaf.shape}, not its even share")
        leaves.append(leaf)
        mine.append(local)
    names = [leaf.path for leaf in leaves]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two tensors of the state are called {twice!r}; rename what is attached")
    return taken, tuple(leaves), mine


def _shard(path: str, tensor: torch.Tensor, size: int, rank: int, meshes: set[int]) -> tuple[int, torch.Tensor]:
    """Along which dimension a tensor is cut, and this rank's part. `meshes` are those found to be of all ranks."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(tensor, DTensor):
        return PLAIN, tensor
    placements: Sequence[Any] = tensor.placements
    mesh = tensor.device_mesh
    if id(mesh) not in meshes and (mesh.ndim != 1 or mesh.size() != size or mesh.get_local_rank() != rank):
        raise ValueError(
            f"{path} lies on a mesh of {tuple(mesh.shape)}: use the mesh that build() is given, of all ranks"
        )
    meshes.add(id(mesh))
    placement = placements[0]
    if isinstance(placement, Replicate):
        return WHOLE, tensor.to_local()
    if type(placement) is not Shard:
        raise ValueError(f"{path} is placed as {placement}: copies are kept of Shard and Replicate")
    return int(placement.dim) % max(tensor.dim(), 1), tensor.to_local()


def place(leaf: Leaf, local: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The tensor of a state whose part on this rank is `local`, on the mesh of all ranks."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if leaf.dim == PLAIN:
        return local
    placement = Replicate() if leaf.dim == WHOLE else Shard(leaf.dim)
    stride = torch.empty(leaf.shape, device="meta").stride()
    whole: torch.Tensor = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=torch.Size(leaf.shape), stride=stride
    )
    return whole
