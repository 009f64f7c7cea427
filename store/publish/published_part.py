"""What a rank publishes of a state dict: which part of how many, and its blocks or whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from holdfast.ft.state.boxes import whole
from holdfast.store.data.packing import PackedPart, PartBlock, pack, pack_plain
from holdfast.store.data.tree import FlatState
from holdfast.store.reshard.giving import given
from holdfast.store.reshard.placed_tensor import PlacedTensor, place
from holdfast.store.reshard.placements import Blocks


@dataclass(frozen=True, slots=True)
class PublishedPart:
    """Part `part` of `parts`, by the mesh of a state dict, and its `blocks`.

    Without `blocks` (None) it has all tensors, as they are. `shares` is that of `given`.
    """

    flat: FlatState
    part: int
    parts: int
    shares: bool
    blocks: tuple[PartBlock, ...] | None

    @staticmethod
    def of(flat: FlatState) -> PublishedPart:
        """The part of this rank. Raises the errors of `place` and `given`."""
        if flat.plain is not None and flat.locals is flat.tensors and not flat.ties:
            return PublishedPart(flat, 0, 1, False, None)
        placed = {name: place(name, tensor) for name, tensor in flat.published.items()}
        part, parts, blocks, shares = given(placed)
        return PublishedPart(flat, part, parts, shares, tuple(_blocks_to_pack(placed, blocks)))

    def pack(self, allocate: Callable[[int], torch.Tensor]) -> PackedPart:
        """Copy the part into memory from `allocate(nbytes)`."""
        if self.blocks is not None:
            return pack(self.blocks, self.flat.skeleton, allocate)
        assert self.flat.plain is not None
        return pack_plain(self.flat.tensors, self.flat.plain, self.flat.skeleton, allocate)


def _blocks_to_pack(placed: Mapping[str, PlacedTensor], gives: Mapping[str, Blocks]) -> Iterator[PartBlock]:
    """The blocks that this rank gives, as views of its local tensors."""
    for name, blocks in gives.items():
        each = placed[name]
        for box, local in blocks:
            if local == whole(each.local.shape):
                view = each.local
            else:
                view = each.local[tuple(slice(low, high) for low, high in local)]
            yield PartBlock(name, view, each.shape, None if box == whole(each.shape) else box)
