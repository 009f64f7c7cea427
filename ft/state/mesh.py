"""The layout of an epoch's ranks and each rank's part of a tensor: arithmetic, without torch.

Mesh dimensions cut a tensor along its dimensions, one cut after the other, each as `torch.chunk` does. So a rank's part
is always a box: one range along each dimension.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache

import msgspec

from holdfast.comms.errors import Mismatch
from holdfast.ft.state.boxes import Box, count_of, whole

Cuts = tuple[tuple[int, str], ...]
"""Pairs of a tensor dimension and the mesh dimension that divides it, in the order of the cuts."""


class Mesh(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
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


def all_ranks(size: int) -> Mesh:
    """A mesh of one dimension, `ranks`."""
    return Mesh(("ranks",), (size,))


@lru_cache(maxsize=1 << 16)
def box_of(shape: tuple[int, ...], cuts: Cuts, mesh: Mesh, rank: int) -> Box:
    """The box of a tensor that `rank` has."""
    box = list(whole(shape))
    place = mesh.place_of(rank)
    for dim, name in cuts:
        low, high = box[dim]
        chunk = -(-(high - low) // mesh.size_of(name))
        box[dim] = (min(low + place[name] * chunk, high), min(low + (place[name] + 1) * chunk, high))
    return tuple(box)


@lru_cache(maxsize=1 << 12)
def holders_of_boxes(shape: tuple[int, ...], cuts: Cuts, mesh: Mesh) -> dict[Box, list[int]]:
    """The boxes, without empty ones, that a tensor is cut into, each with the ranks that have it."""
    found: defaultdict[Box, list[int]] = defaultdict(list)
    for rank in range(mesh.size):
        box = box_of(shape, cuts, mesh, rank)
        if count_of(box):
            found[box].append(rank)
    return dict(found)
