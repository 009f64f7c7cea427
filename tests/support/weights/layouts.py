"""Layouts of tensors in tests: hypothesis strategies for meshes and placements, and torch's own cuts as a reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.ft.state.boxes import Box

Sizes = tuple[int, ...]
Shape = tuple[int, ...]

meshes: st.SearchStrategy[Sizes] = (
    st.lists(st.integers(1, 8), min_size=1, max_size=3).map(tuple).filter(lambda sizes: math.prod(sizes) <= 8)
)
shapes: st.SearchStrategy[Shape] = st.lists(st.integers(0, 13), max_size=3).map(tuple)


def placements(sizes: Sizes, dims: int) -> st.SearchStrategy[tuple[Any, ...]]:
    """Placements on a mesh of `sizes` for a tensor of `dims` dimensions; those in `sizes` may be anywhere in it."""
    one: st.SearchStrategy[Any] = st.just(Replicate())
    if dims:
        dim = st.integers(0, dims - 1)
        strided = st.builds(lambda at, chunks: _StridedShard(at, split_factor=chunks), dim, st.integers(1, 6))
        one = st.one_of(one, dim.map(Shard), strided)
    return st.tuples(*[one] * len(sizes))


def at(box: Box) -> tuple[slice, ...]:
    """The index of a box."""
    return tuple(slice(low, high) for low, high in box)


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[at(box)]


def coordinates(sizes: Sizes) -> list[tuple[int, ...]]:
    """All coordinates of a mesh, in the order of its ranks."""
    return list(itertools.product(*map(range, sizes)))


def torchs_local(tensor: torch.Tensor, placed: tuple[Any, ...], sizes: Sizes, place: tuple[int, ...]) -> torch.Tensor:
    """What torch gives the rank at `place`: its own splits, from left to right."""
    for placement, size, at in zip(placed, sizes, place, strict=True):
        if not isinstance(placement, Replicate):
            tensor = placement._split_tensor(tensor, size, with_padding=False)[0][at]
    return tensor


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Be a rank of a process group in which no other rank exists and every collective returns at once."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
