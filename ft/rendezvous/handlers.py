"""Serve a rendezvous table to other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from holdfast.ft.control.errors import KeyTimeout
from holdfast.ft.control.rpc import Handler
from holdfast.ft.rendezvous.messages import (
    AddRequest,
    AppendRequest,
    CompareSetRequest,
    EpochRequest,
    KeysRequest,
    PutRequest,
    WaitAnswer,
    encode,
)
from holdfast.ft.rendezvous.table import RendezvousTable

F = TypeVar("F", bound=EpochRequest)


def handlers(table: RendezvousTable) -> dict[str, Handler]:
    """The handlers of an RPC server for the methods `kv.*`, which `RendezvousClient` calls."""

    def serve(form: type[F], work: Callable[[F], object]) -> Handler:
        decode = msgspec.msgpack.Decoder(form).decode
        return lambda peer, body: encode(work(decode(body)))

    async def wait(peer: str, body: bytes) -> bytes:
        ask = decode_keys(body)
        try:
            await table.wait_later(ask.epoch, ask.keys, ask.timeout)
        except KeyTimeout as error:
            return encode(WaitAnswer([], list(error.missing)))
        return encode(WaitAnswer([], []))

    async def fetch(peer: str, body: bytes) -> bytes:
        ask = decode_keys(body)
        try:
            return encode(WaitAnswer(await table.fetch_later(ask.epoch, ask.keys, ask.timeout), []))
        except KeyTimeout as error:
            return encode(WaitAnswer([], list(error.missing)))

    decode_keys = msgspec.msgpack.Decoder(KeysRequest).decode
    return {
        "kv.put": serve(PutRequest, lambda ask: table.put(ask.epoch, ask.items)),
        "kv.fetch": fetch,
        "kv.wait": wait,
        "kv.add": serve(AddRequest, lambda ask: table.add(ask.epoch, ask.key, ask.amount)),
        "kv.append": serve(AppendRequest, lambda ask: table.append(ask.epoch, ask.key, ask.value)),
        "kv.compare_set": serve(
            CompareSetRequest, lambda ask: table.compare_set(ask.epoch, ask.key, ask.expected, ask.desired)
        ),
        "kv.check": serve(KeysRequest, lambda ask: table.check(ask.epoch, ask.keys)),
        "kv.delete": serve(KeysRequest, lambda ask: table.delete(ask.epoch, ask.keys[0])),
        "kv.count": serve(EpochRequest, lambda ask: table.count(ask.epoch)),
    }
