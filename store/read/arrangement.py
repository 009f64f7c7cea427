"""Decides how the tensors of a reader are filled.

For each tensor: in place or by way of a copy, and from what of a version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.comms.tensors.shared import groups_sharing_memory
from holdfast.ft.state.boxes import whole
from holdfast.store.data.dense import is_dense
from holdfast.store.data.device_copy import on_device
from holdfast.store.data.skeleton import Skeleton
from holdfast.store.data.tree import FlatState
from holdfast.store.read.read_plan import has_rows
from holdfast.store.reshard.placements import PlacedTensor, place
from holdfast.store.reshard.plan import BoxTarget


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """How targets are filled; made once for targets of the same names and memory. Compared by identity.

    The tensors named in `direct` are filled in place, those in `staged` by way of a copy. Those of each group in
    `doubtful` share memory: they must turn out to get the same bytes there. `targets` are the boxes to read, `names`
    all tensors that are filled. If each of these is dense and gets a whole tensor, those are `sources`, in this order.
    """

    direct: tuple[str, ...]
    staged: tuple[str, ...]
    doubtful: tuple[tuple[str, ...], ...]
    targets: Mapping[str, tuple[BoxTarget, ...]]
    names: tuple[str, ...]
    sources: tuple[str, ...] | None = None


def placed_tensors(flat: FlatState) -> dict[str, PlacedTensor]:
    """The blocks of each tensor that lie here. Raises the errors of `place`."""
    return {name: place(name, tensor) for name, tensor in flat.tensors.items()}


def arrange(
    flat: FlatState,
    placed: Mapping[str, PlacedTensor],
    wanted: Sequence[BoxTarget],
    same: frozenset[str],
    fills_devices: bool,
) -> Arrangement:
    """Arrange to fill tensors with `wanted`. `same` are names of tied tensors that get the same bytes as their ties.

    `fills_devices` says whether dense tensors on devices are filled in place.
    """
    names = tuple(name for name in placed if name not in same)
    doubtful: tuple[tuple[str, ...], ...] = ()
    staged: list[str] = []
    if flat.plain is None or flat.plain.share_memory:
        locals_ = {name: flat.locals[name] for name in names}
        doubtful = tuple(map(tuple, groups_sharing_memory(locals_)))
        in_doubt = {name for group in doubtful for name in group}
        direct = {
            name
            for name, each in locals_.items()
            if (fills_devices and is_dense(each) if on_device(each) else has_rows(each))
        }
        staged = [name for name in names if name in in_doubt or name not in direct]
    indirect = set(staged)
    targets: dict[str, list[BoxTarget]] = {name: [] for name in names}
    for target in wanted:
        if target.into in targets:
            targets[target.into].append(target)
    return Arrangement(
        tuple(name for name in names if name not in indirect),
        tuple(staged),
        doubtful,
        {name: tuple(each) for name, each in targets.items()},
        names,
    )


def arrange_whole(flat: FlatState, skeleton: Skeleton) -> Arrangement | None:
    """Arrange to fill dense tensors of the same names and shapes as in the version.

    The usual case, without a loop. None if there are others, or they share memory.
    """
    if flat.plain is None or flat.locals is not flat.tensors or flat.ties or flat.plain.share_memory:
        return None
    names = flat.plain.names
    sources = tuple(map(skeleton.source, names)) if skeleton.ties else names
    shapes = {name: tensor.shape for name, tensor in flat.tensors.items()}
    return Arrangement(names, (), (), _WholeTargets(shapes, skeleton), names, sources)


class _WholeTargets(Mapping[str, tuple[BoxTarget, ...]]):
    """The targets of whole tensors, made when they are asked for."""

    def __init__(self, shapes: Mapping[str, torch.Size], skeleton: Skeleton) -> None:
        self._shapes, self._skeleton = shapes, skeleton

    def __getitem__(self, name: str) -> tuple[BoxTarget, ...]:
        box = whole(self._shapes[name])
        return (BoxTarget(name, self._skeleton.source(name), box, box),)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def plain_targets(placed: Mapping[str, PlacedTensor], skeleton: Skeleton) -> list[BoxTarget]:
    """The boxes of tensors that have the same names in the version."""
    source = skeleton.source
    return [BoxTarget(name, source(name), *block) for name, each in placed.items() for block in each.blocks]


def memory_key(flat: FlatState) -> tuple[object, ...] | None:
    """A key that is equal for state dicts of equal names, placements and memory. None for some DTensors."""
    sharded = flat.locals is not flat.tensors
    if flat.plain is not None:
        placed = placed_tensors(flat) if sharded else {}
        return flat.plain, *((each.shape, each.blocks) for each in placed.values())
    if sharded:
        return None
    found: list[object] = []
    for name, tensor in flat.tensors.items():
        found += (
            name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_conj(),
            tensor.is_neg(),
        )  # fmt: skip
    return tuple(found)
