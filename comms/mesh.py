"""`mesh`: a grid of ranks, with a communicator along each of its dimensions.

with comms.mesh((2, 4), ("dp", "tp")) as grid:
    grid["tp"].all_reduce(activations)
    grid["dp"].all_reduce(gradients)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from holdfast.comms.communicator import Communicator
from holdfast.comms.connect import connect
from holdfast.comms.errors import HoldfastError
from holdfast.comms.quantities import integer_in, seconds, time_left


class Mesh:
    """This rank's place in a grid of ranks, and its communicators. Made by `mesh`; a context manager.

    Ranks fill the grid row by row, as in `torch.distributed.device_mesh`: the last dimension's are neighbours.
    """

    def __init__(
        self, whole: Communicator, shape: tuple[int, ...], along: Mapping[str, Communicator], owned: bool
    ) -> None:
        self.whole = whole
        """The communicator of all ranks."""
        self.shape = shape
        self.names = tuple(along)
        self.coordinate = _coordinate(whole.rank, shape)
        """This rank's index in each dimension: its rank in that dimension's communicator."""
        self._along = MappingProxyType(dict(along))
        self._ended_with_it = [*along.values(), *([whole] * owned)]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in zip(self.names, self.shape, strict=True))
        return f"<Mesh {sizes}: at {self.coordinate}, {self.whole.backend}, epoch {self.whole.epoch}>"

    def __getitem__(self, name: str) -> Communicator:
        """The communicator of the ranks that differ from this one in dimension `name` alone, this one included."""
        try:
            return self._along[name]
        except KeyError:
            raise KeyError(f"{name!r} is not a dimension of this mesh; it has {', '.join(self.names)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def close(self) -> None:
        """Close the communicators of all dimensions, and that of all ranks if `mesh` connected it. Idempotent."""
        failed: list[HoldfastError] = []
        for comm in self._ended_with_it:
            try:
                comm.close()
            except HoldfastError as error:
                failed.append(error)
        if failed:
            raise failed[0].again() from failed[0]

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for comm in self._ended_with_it:
            comm.__exit__(kind, error, trace)


def mesh(
    shape: Sequence[int],
    names: Sequence[str],
    comm: Communicator | None = None,
    *,
    timeout: float = 30.0,
    **connecting: Any,
) -> Mesh:
    """Arrange all ranks in a grid of `shape`, and make a communicator along each dimension; collective.

    `names` are the dimensions' names. The grid is over `comm`, which outlives it; without one, over a communicator that
    this call connects with the arguments of `connect` in `connecting`, and that the mesh closes. A dimension's
    communicator is a `split`: it ends when the whole is aborted. Raises ValueError before any rank is waited for, and
    the errors of `connect` and `split`.
    """
    sizes = tuple(integer_in(size, f"shape[{i}]", 1) for i, size in enumerate(shape))
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"names must be one string for each dimension, not {names!r}")
    if len(names) != len(sizes) or len(set(names)) != len(names) or not sizes:
        raise ValueError(f"shape {sizes} needs one name for each dimension, all different; names are {list(names)}")
    if comm is not None and connecting:
        raise ValueError(f"{', '.join(connecting)}: pass these to connect; comm is connected already")
    left = time_left(seconds(timeout))
    with contextlib.ExitStack() as made:
        whole = comm
        if whole is None:
            whole = made.enter_context(connect(timeout=timeout, **connecting))
        if math.prod(sizes) != whole.size:
            raise ValueError(f"a mesh of shape {sizes} has {math.prod(sizes)} ranks, the communicator {whole.size}")
        along = {
            name: made.enter_context(whole.split(_line(whole.rank, sizes, dimension), timeout=left()))
            for dimension, name in enumerate(names)
        }
        made.pop_all()
    return Mesh(whole, sizes, along, comm is None)


def _coordinate(rank: int, shape: Sequence[int]) -> tuple[int, ...]:
    indices: list[int] = []
    for size in reversed(shape):
        rank, index = divmod(rank, size)
        indices.insert(0, index)
    return tuple(indices)


def _line(rank: int, shape: Sequence[int], dimension: int) -> list[int]:
    """The ranks whose coordinates are those of `rank` but in `dimension`, in the order of that one."""
    stride = math.prod(shape[dimension + 1 :])
    first = rank - _coordinate(rank, shape)[dimension] * stride
    return [first + i * stride for i in range(shape[dimension])]
