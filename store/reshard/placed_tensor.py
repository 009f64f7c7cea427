"""A DTensor or plain tensor of a state dict, with the blocks of it that lie on this rank."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.ft.state.boxes import whole
from holdfast.store.reshard.placements import (
    Blocks,
    Cuts,
    LocalBlock,
    blocks_of,
    cuts_of,
    in_cutting_order,
    local_shape,
)
from holdfast.store.reshard.submesh import Submesh, submesh_of


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
    return PlacedTensor(shape, tensor.dtype, local, _blocks(name, shape, local, mesh, cuts), mesh, cuts)


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


def _blocks(name: str, shape: tuple[int, ...], local: torch.Tensor, mesh: Submesh, cuts: Cuts) -> Blocks:
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
