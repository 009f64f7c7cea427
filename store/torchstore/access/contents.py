"""Turns values into contents of the directory and tensors to copy, and described objects back into values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.comms.tensors.memory import plain_tensor
from holdfast.ft.state.boxes import Box
from holdfast.ft.state.codec import decode_state, encode_state
from holdfast.store.torchstore.access.request import Request
from holdfast.store.torchstore.errors import ObjectRefused
from holdfast.store.torchstore.service.records import (
    Content,
    Location,
    Piece,
    StoredBlock,
    StoredObject,
    TensorShard,
    WholeTensor,
    dtype_name,
)

INLINE_BYTES = 1024
"""Tensors of up to this many bytes travel in the directory itself."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A value to put: its tensors, and the content that they make once each has its block."""

    tensors: tuple[torch.Tensor, ...]
    make: Callable[[Sequence[StoredBlock]], Content]


def draft(key: str, value: Any) -> Draft:
    """The draft of a tensor, a DTensor or an object.

    Raises `Unsupported` for tensors without memory of their own or with placements such as `Partial`, `ObjectRefused`
    for an object that msgpack cannot hold.
    """
    if not isinstance(value, torch.Tensor):
        return _draft_object(key, value)
    request = Request.from_any(key, value)
    assert request.tensor_val is not None
    local = plain_tensor(request.tensor_val, repr(key))
    placed = request.placed
    if placed is None:
        return Draft((local,), lambda blocks: WholeTensor(blocks[0]))
    boxes = [block.box for block in placed.blocks]

    def make(blocks: Sequence[StoredBlock]) -> Content:
        pieces = tuple(Piece(box, block) for box, block in zip(boxes, blocks, strict=True))
        return TensorShard(request.coordinates, request.mesh_shape, placed.shape, pieces)

    return Draft(tuple(part(local, block.local) for block in placed.blocks), make)


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of a tensor that a box of it is."""
    return tensor[tuple(slice(low, high) for low, high in box)] if box else tensor


def inline_block(tensor: torch.Tensor) -> StoredBlock:
    """A block with the bytes of a tensor in it."""
    return StoredBlock(dtype_name(tensor.dtype), tuple(tensor.shape), bytes_of(tensor).numpy().tobytes())


def block_at(tensor: torch.Tensor, at: Location, sums: tuple[int, ...]) -> StoredBlock:
    """The block of a tensor, after its bytes were copied to a location."""
    return StoredBlock(dtype_name(tensor.dtype), tuple(tensor.shape), None, at, sums)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in row-major order, in the memory of the CPU.

    Shares the memory of the tensor if its bytes lie there like that.
    """
    here = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return here.reshape(-1).view(torch.uint8)


def tensor_of(data: bytes, block: StoredBlock) -> torch.Tensor:
    """A new tensor with the bytes of an inline block."""
    tensor = torch.empty(block.shape, dtype=block.torch_dtype, device="cpu")
    if data:
        bytes_of(tensor).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return tensor


def _draft_object(key: str, value: Any) -> Draft:
    try:
        description, tensors = encode_state(value)
    except TypeError as error:
        raise ObjectRefused(key, str(error)) from error
    words = torch.frombuffer(bytearray(description), dtype=torch.uint8)

    def make(blocks: Sequence[StoredBlock]) -> Content:
        return StoredObject(blocks[0], tuple(blocks[1:]))

    return Draft((words, *(plain_tensor(each, repr(key)) for each in tensors)), make)


def object_of(description: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Any:
    """The object of a description and its tensors. Raises `CorruptData` if they make none."""
    return decode_state(description.numpy().tobytes(), tensors)
