"""Plans the copies of a read: from the pieces of a stored tensor into a new or given tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.comms.errors import CorruptData, Mismatch
from holdfast.comms.tensors.memory import plain_tensor
from holdfast.ft.state.boxes import Box, common, shape_of, whole
from holdfast.store.torchstore.access.contents import object_of, part
from holdfast.store.torchstore.access.request import Request
from holdfast.store.torchstore.errors import NoSuchSlice
from holdfast.store.torchstore.service.records import (
    Content,
    Piece,
    StoredBlock,
    StoredObject,
    TensorShard,
    WholeTensor,
)


@dataclass(frozen=True, slots=True)
class PieceCopy:
    """A box of a block (counted from its own start) to copy into a view of the target."""

    block: StoredBlock
    box: Box
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class ValueReadPlan:
    """Copies, and what gives the value once they are made."""

    copies: tuple[PieceCopy, ...]
    finish: Callable[[], Any]


def plan(request: Request, inplace: torch.Tensor | None, contents: Sequence[Content]) -> ValueReadPlan:
    """The plan to read a key into `inplace` (returned then), or into a new tensor.

    Raises `NoSuchSlice` if the stored tensor does not cover what is asked for, `Mismatch` for a target of another
    shape, or if an object is to be read into a tensor. Nothing is copied yet.
    """
    first = contents[0]
    if isinstance(first, StoredObject):
        if inplace is not None:
            raise Mismatch(f"{request.key!r} holds an object, which cannot be read into a tensor")
        return _plan_object(first)
    shape, pieces = _stored(contents)
    wanted, local_shape = _wanted(request, shape)
    if request.tensor_val is not None and tuple(request.tensor_val.shape) != local_shape:
        raise Mismatch(
            f"{request.key!r}: a target of shape {tuple(request.tensor_val.shape)} for elements of shape {local_shape}"
        )
    dtype = pieces[0].block.torch_dtype
    given = None if request.tensor_val is None else plain_tensor(request.tensor_val, repr(request.key))
    direct = given is not None and given.dtype == dtype and given.device.type == "cpu"
    target = given if given is not None and direct else torch.empty(local_shape, dtype=dtype, device="cpu")
    copies = tuple(_copies(wanted, pieces, target))
    needed = sum(math.prod(shape_of(box)) for box, _ in wanted)
    found = sum(math.prod(shape_of(copy.box)) for copy in copies)
    if found != needed:
        raise NoSuchSlice(f"{request.key!r}: what is stored has {found} of the {needed} elements that are asked for")

    def finish() -> Any:
        if given is not None and not direct:
            given.copy_(target)
        return target if inplace is None else inplace

    return ValueReadPlan(copies, finish)


def _plan_object(content: StoredObject) -> ValueReadPlan:
    targets = [
        torch.empty(block.shape, dtype=block.torch_dtype, device="cpu")
        for block in (content.description, *content.tensors)
    ]
    blocks = (content.description, *content.tensors)
    copies = tuple(PieceCopy(block, whole(block.shape), to) for block, to in zip(blocks, targets, strict=True))
    return ValueReadPlan(copies, lambda: object_of(targets[0], targets[1:]))


def _stored(contents: Sequence[Content]) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """The shape of a stored tensor, and its pieces, each box once."""
    first = contents[0]
    if isinstance(first, WholeTensor):
        return first.block.shape, (Piece(whole(first.block.shape), first.block),)
    shards = [each for each in contents if isinstance(each, TensorShard)]
    pieces = {piece.box: piece for shard in shards for piece in shard.pieces}
    if not pieces:
        raise CorruptData("the store holds a tensor without a piece of it")
    return shards[0].global_shape, tuple(pieces.values())


def _wanted(request: Request, shape: tuple[int, ...]) -> tuple[list[tuple[Box, Box]], tuple[int, ...]]:
    """The boxes that a request asks for, each with its place in the local tensor, and the shape of that."""
    if request.placed is not None:
        if request.placed.shape != shape:
            raise NoSuchSlice(f"{request.key!r} has shape {shape}, the DTensor to fill {request.placed.shape}")
        return [(block.box, block.local) for block in request.placed.blocks], tuple(request.placed.local.shape)
    if request.asked is not None:
        if request.asked.global_shape != shape:
            raise NoSuchSlice(f"{request.key!r} has shape {shape}, the slice is of {request.asked.global_shape}")
        local = request.asked.local_shape
        return [(request.asked.box, whole(local))], local
    return [(whole(shape), whole(shape))], shape


def _copies(wanted: list[tuple[Box, Box]], pieces: tuple[Piece, ...], target: torch.Tensor) -> Iterator[PieceCopy]:
    for box, local in wanted:
        for piece in pieces:
            shared = common(box, piece.box)
            if shared is not None:
                yield PieceCopy(piece.block, _within(shared, piece.box), part(target, _moved(shared, box, local)))


def _within(box: Box, outer: Box) -> Box:
    return tuple((low - start, high - start) for (low, high), (start, _) in zip(box, outer, strict=True))


def _moved(box: Box, outer: Box, place: Box) -> Box:
    ranges = zip(box, outer, place, strict=True)
    return tuple((low - start + to, high - start + to) for (low, high), (start, _), (to, _) in ranges)
