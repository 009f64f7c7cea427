"""`TensorSlice`: which part of a tensor, as torchstore names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.comms.errors import Mismatch
from holdfast.ft.state.boxes import Box


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
