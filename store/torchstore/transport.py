"""`TensorSlice`: a part of a tensor; `Request`: a key with a value to put, or a target to fill."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.ft.state.boxes import Box, shape_of
from holdfast.store.reshard.placements import PlacedTensor, is_dtensor, place


@dataclass(frozen=True)
class TensorSlice:
    """A box of a tensor of `global_shape`: it begins at `offsets` and has `local_shape`.

    `coordinates` and `mesh_shape` say which shard of which mesh it is; () for a slice that a reader asks for.
    """

    offsets: tuple[int, ...]
    coordinates: tuple[int, ...] | None
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    mesh_shape: tuple[int, ...] | None

    def __post_init__(self) -> None:
        for name in ("offsets", "coordinates", "global_shape", "local_shape", "mesh_shape"):
            value: Any = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, tuple(int(each) for each in value))

    @property
    def box(self) -> Box:
        """The ranges of the slice. Raises `Mismatch` if they are not inside the global shape."""
        lengths = {len(self.offsets), len(self.local_shape), len(self.global_shape)}
        box = tuple((low, low + size) for low, size in zip(self.offsets, self.local_shape, strict=False))
        inside = all(0 <= low <= high <= size for (low, high), size in zip(box, self.global_shape, strict=False))
        if len(lengths) > 1 or not inside:
            raise Mismatch(
                f"a slice of shape {self.local_shape} at {self.offsets} is not inside of a tensor of shape "
                f"{self.global_shape}"
            )
        return box


@dataclass(frozen=True)
class Request:
    """A key with a tensor (the local one of a DTensor), or a slice.

    `placed` says which elements a DTensor has here; None for one that every rank has whole, as for a plain tensor.
    """

    key: str = ""
    tensor_val: torch.Tensor | None = None
    asked: TensorSlice | None = None
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
    def _from_dtensor(cls, key: str, value: Any) -> Request:
        placed = place(key, value)
        if value.device_mesh.get_coordinate() is None:
            raise Mismatch(f"{key!r} is a DTensor of a mesh that this process is not in: use it on the mesh's ranks")
        divided = value.device_mesh.size() > 1 and placed.cuts
        return cls(key, placed.local, placed=placed if divided else None)

    @property
    def tensor_slice(self) -> TensorSlice | None:
        """Which part of a tensor this is; None for a whole one. Raises `Unsupported` if it is more than one box."""
        if self.placed is None:
            return self.asked
        blocks = [block for block in self.placed.blocks if math.prod(shape_of(block.box))]
        if len(blocks) > 1:
            raise Unsupported(f"{self.key!r}: a strided shard is no single slice", "pass the DTensor itself")
        shape, local = self.placed.shape, tuple(self.placed.local.shape)
        first = (
            [low for low, _ in blocks[0].box]
            if blocks
            else [0 if n else of for n, of in zip(local, shape, strict=True)]
        )
        return TensorSlice(tuple(first), self.coordinates, shape, local, self.mesh_shape)

    @property
    def coordinates(self) -> tuple[int, ...]:
        """Where on its mesh a sharded DTensor is."""
        return tuple(self.placed.mesh.coordinate or ()) if self.placed and self.placed.mesh else ()

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The shape of the mesh of a sharded DTensor."""
        return tuple(self.placed.mesh.sizes) if self.placed and self.placed.mesh else ()
