"""Sends Python objects between ranks as msgpack: unlike pickle, decoding runs no received code.

Each is one op of the communicator: the lengths, then the bytes. An object that cannot be sent takes its turn like any
other: its rank sends the reason instead, and the op raises TypeError where the object was awaited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from holdfast.comms.codecs.object_codec import decode_object, encode_object

if TYPE_CHECKING:
    from holdfast.comms.communicator import Communicator

T = TypeVar("T")


def broadcast(comm: Communicator, obj: T | None, src: int, timeout: float | None) -> T:
    """Return rank `src`'s object on every rank."""
    data, error = _encoded(obj) if comm.rank == src else (b"", None)
    received: list[bytes] = []

    def body(deadline: float) -> None:
        transport = comm.transport
        length = torch.tensor([-len(data) if error else len(data)], device=comm.device)
        transport.broadcast(length, src, deadline)
        buffer = _tensor(data.ljust(abs(int(length.item())), b"\0"), comm)
        transport.broadcast(buffer, src, deadline)
        received.append(_received(int(length.item()), buffer))

    comm.issue("broadcast_object", len(data), body, lambda: f"from {src}", timeout, src)
    if error is not None:
        raise error
    decoded: T = _decoded(received[0], src)
    return decoded


def all_gather(comm: Communicator, obj: T, timeout: float | None) -> list[T]:
    """Return every rank's object in rank order."""
    data, error = _encoded(obj)
    received: list[bytes] = []

    def body(deadline: float) -> None:
        transport = comm.transport
        lengths = torch.zeros(comm.size, dtype=torch.int64, device=comm.device)
        own = torch.tensor([-len(data) if error else len(data)], device=comm.device)
        transport.all_gather_single(lengths, own, deadline)
        sizes = lengths.tolist()
        outputs = [_tensor(bytes(abs(size)), comm) for size in sizes]
        transport.all_gather(outputs, _tensor(data, comm), deadline)
        received.extend(map(_received, sizes, outputs))

    comm.issue("all_gather_object", len(data), body, lambda: "", timeout)
    if error is not None:
        raise error
    return [_decoded(message, rank) for rank, message in enumerate(received)]


_SENT, _REFUSED = b"\0", b"\1"


def _encoded(obj: object) -> tuple[bytes, TypeError | None]:
    """The object's bytes; or the reason why it cannot be sent, as bytes and as an error."""
    try:
        return encode_object(obj), None
    except TypeError as error:
        return str(error).encode(errors="replace") or b"?", error


def _received(length: int, buffer: torch.Tensor) -> bytes:
    return (_REFUSED if length < 0 else _SENT) + buffer.cpu().numpy().tobytes()


def _decoded(message: bytes, rank: int) -> Any:
    if message[:1] == _REFUSED:
        raise TypeError(f"rank {rank} could not send its object: {message[1:].decode(errors='replace')}")
    return decode_object(message[1:])


def _tensor(data: bytes, comm: Communicator) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=comm.device)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(comm.device)
