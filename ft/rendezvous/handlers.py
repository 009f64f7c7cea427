"""Serve the first member's rendezvous table to the others: what several members may change, and questions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from holdfast.ft.control.rpc import Handler
from holdfast.ft.rendezvous.messages import (
    FORGET,
    AddRequest,
    AppendRequest,
    CompareSetRequest,
    EpochRequest,
    KeysRequest,
    encode,
)
from holdfast.ft.rendezvous.table import RendezvousTable

F = TypeVar("F", bound=EpochRequest)

Forward = Callable[[int, str, bytes], Awaitable[bytes | None]]
"""(epoch, method, body): passes a call on towards the first member of the epoch; None if this process is it."""


Delete = Callable[[int, str], Awaitable[bool]]
"""(epoch, key): removes a key from this copy of the table and those below it; whether it was there."""


def handlers(table: RendezvousTable, forward: Forward, delete: Delete) -> dict[str, Handler]:
    """The handlers of an RPC server for the methods `kv.*`, which `RendezvousClient` calls."""

    def serve(method: str, form: type[F], work: Callable[[F], object]) -> tuple[str, Handler]:
        decode = msgspec.msgpack.Decoder(form).decode

        async def handler(peer: str, body: bytes) -> bytes:
            ask = decode(body)
            answer = await forward(ask.epoch, method, body)
            if answer is not None:
                return answer
            result = work(ask)
            return encode(await result if isinstance(result, Awaitable) else result)

        return method, handler

    async def forget(peer: str, body: bytes) -> bytes:
        """What the first member has removed is removed here, and below."""
        ask = msgspec.msgpack.decode(body, type=KeysRequest)
        return encode(await delete(ask.epoch, ask.keys[0]))

    return dict(
        [
            serve("kv.add", AddRequest, lambda ask: table.add(ask.epoch, ask.key, ask.amount)),
            serve("kv.append", AppendRequest, lambda ask: table.append(ask.epoch, ask.key, ask.value)),
            serve(
                "kv.compare_set",
                CompareSetRequest,
                lambda ask: table.compare_set(ask.epoch, ask.key, ask.expected, ask.desired),
            ),
            serve("kv.check", KeysRequest, lambda ask: table.check(ask.epoch, ask.keys)),
            serve("kv.delete", KeysRequest, lambda ask: delete(ask.epoch, ask.keys[0])),
            serve("kv.count", EpochRequest, lambda ask: table.count(ask.epoch)),
            (FORGET, forget),
        ]
    )
