"""The mesh of a DTensor as arithmetic: where its ranks stand among all ranks of its root mesh.

Submeshes that were sliced, flattened, concatenated or unflattened from one root are all described in steps over the
root's ranks, so that those of one state dict can be compared.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.comms.errors import Unsupported

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
    return Submesh(tuple(ranks.shape), steps, coordinate, position, _shared(tuple(root.tolist())))


@lru_cache(maxsize=16)
def _shared(ranks: tuple[int, ...]) -> tuple[int, ...]:
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
