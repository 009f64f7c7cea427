"""Sends Python objects between ranks as msgpack: unlike pickle, decoding runs no received code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from holdfast.comms.codecs.object_codec import decode_object, encode_object

if TYPE_CHECKING:
    from holdfast.comms.communicator import Communicator

T = TypeVar("T")


def broadcast(comm: Communicator, obj: T | None, src: int, timeout: float | None) -> T:
    """Return rank `src`'s object on every rank, by two broadcasts: of the length and of the bytes."""
    data = encode_object(obj) if comm.rank == src else b""
    length = torch.tensor([len(data)], device=comm.device)
    comm.broadcast(length, src, timeout=timeout)
    buffer = _tensor(data.ljust(int(length.item()), b"\0"), comm)
    comm.broadcast(buffer, src, timeout=timeout)
    decoded: T = _decode(buffer)
    return decoded


def all_gather(comm: Communicator, obj: T, timeout: float | None) -> list[T]:
    """Return every rank's object in rank order, by two all-gathers: of the lengths and of the bytes."""
    data = encode_object(obj)
    lengths = torch.zeros(comm.size, dtype=torch.int64, device=comm.device)
    comm.all_gather_single(lengths, torch.tensor([len(data)], device=comm.device), timeout=timeout)
    outputs = [_tensor(b"\0" * length, comm) for length in lengths.tolist()]
    comm.all_gather(outputs, _tensor(data, comm), timeout=timeout)
    return [_decode(output) for output in outputs]


def _decode(buffer: torch.Tensor) -> Any:
    return decode_object(buffer.cpu().numpy().tobytes())


def _tensor(data: bytes, comm: Communicator) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=comm.device)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(comm.device)
