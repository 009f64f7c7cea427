"""`Request`: a key with a value to put, or with the target that a reader fills."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.ft.state.boxes import shape_of
from holdfast.store.sharding.placed_tensor import PlacedTensor, is_dtensor, place
from holdfast.store.torchstore.tensor_slice import TensorSlice


@dataclass(frozen=True)
class Request:
    """A key with a tensor (the local one of a DTensor), a slice, or an object.

    `placed` says which elements a DTensor has here; None for one that every rank has whole, as for a plain tensor.
    """

    key: str = ""
    tensor_val: torch.Tensor | None = None
    asked: TensorSlice | None = None
    objects: Any = None
    is_object: bool = False
    placed: PlacedTensor | None = None

    @classmethod
    def from_any(cls, key: str, value: torch.Tensor | None, tensor_slice: TensorSlice | None = None) -> Request:
        """A request for a tensor, a DTensor, or None.

        Raises ValueError for a slice of a DTensor or of another shape than the tensor, TypeError for other values,
        `Unsupported` for placements such as `Partial`.
        """
        if value is None:
            return cls(key, asked=tensor_slice)
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{key!r}: expected a tensor, a DTensor or None, not {type(value).__name__}")
        if is_dtensor(value):
            if tensor_slice is not None:
                raise ValueError(f"{key!r}: a DTensor says itself which slice it is: pass it without tensor_slice_spec")
            return cls._from_dtensor(key, value)
        if tensor_slice is not None and tensor_slice.local_shape != tuple(value.shape):
            raise ValueError(
                f"{key!r}: a slice of shape {tensor_slice.local_shape} does not fit a tensor of {tuple(value.shape)}"
            )
        return cls(key, value, tensor_slice)

    @classmethod
    def from_objects(cls, key: str, objects: Any) -> Request:
        """A request to put an object that is no tensor."""
        return cls(key, objects=objects, is_object=True)

    @classmethod
    def _from_dtensor(cls, key: str, value: Any) -> Request:
        placed = place(key, value)
        if value.device_mesh.get_coordinate() is None:
            raise Mismatch(f"{key!r} is a DTensor of a mesh that this process is not in: use it on the mesh's ranks")
        if value.device_mesh.size() == 1 or not placed.cuts:
            return cls(key, placed.local)
        return cls(key, placed.local, placed=placed)

    @property
    def tensor_slice(self) -> TensorSlice | None:
        """Which part of a tensor this is; None for a whole one. Raises `Unsupported` if it is more than one box."""
        if self.placed is None:
            return self.asked
        blocks = [block for block in self.placed.blocks if math.prod(shape_of(block.box))]
        if len(blocks) > 1:
            raise Unsupported(f"{self.key!r}: a strided shard is no single slice", "pass the DTensor itself")
        shape = self.placed.shape
        local = tuple(self.placed.local.shape)
        there = (
            tuple(low for low, _ in blocks[0].box)
            if blocks
            else tuple(0 if size else whole for size, whole in zip(local, shape, strict=True))
        )
        return TensorSlice(there, self.coordinates, shape, local, self.mesh_shape)

    @property
    def coordinates(self) -> tuple[int, ...]:
        """Where on its mesh a sharded DTensor is."""
        mesh = self._mesh()
        return tuple(mesh.coordinate or ())

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The shape of the mesh of a sharded DTensor."""
        return tuple(self._mesh().sizes)

    def _mesh(self) -> Any:
        assert self.placed is not None and self.placed.mesh is not None
        return self.placed.mesh
