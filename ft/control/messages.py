"""The messages of a remote-call connection. Both sides may send requests, and answer them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from holdfast.ft.control.errors import BadFrame

Number = Annotated[int, msgspec.Meta(ge=0)]


class RpcRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0):
    """A call; `id` is the caller's own count and comes back with the answer."""

    id: Number
    method: str
    body: bytes


class Reply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """The answer to a call."""

    id: Number
    body: bytes


class Failure(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """The reply to a call if its handler raised: the name of the error's type, and its message."""

    id: Number
    kind: str
    message: str


class Cancel(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """The caller no longer waits for this call."""

    id: Number


class Notice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """A call without an answer."""

    method: str
    body: bytes


Message = RpcRequest | Reply | Failure | Cancel | Notice

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def decode(payload: bytes) -> Message:
    """Raises `BadFrame` for anything that is not exactly one message."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFrame(f"not a remote-call message: {error}") from error
