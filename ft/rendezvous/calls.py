"""The remote calls on a rendezvous table: `RendezvousClient` makes them, `handlers` serve those at the first member."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from holdfast.comms.errors import CorruptData, Revoked
from holdfast.ft.control.connection import Handler
from holdfast.ft.control.errors import RemoteError
from holdfast.ft.rendezvous.table import RendezvousTable

T = TypeVar("T")


class EpochRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    epoch: int


class KeysRequest(EpochRequest, frozen=True, array_like=True, forbid_unknown_fields=True):
    keys: list[str]


class AddRequest(EpochRequest, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: str
    amount: int


class AppendRequest(EpochRequest, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: str
    value: bytes


class CompareSetRequest(EpochRequest, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: str
    expected: bytes
    desired: bytes


REPEATABLE = frozenset({"kv.check", "kv.count"})
"""The methods that can be called again when it is not known whether the first call was executed."""

FORGET = "kv.forget"
"""Goes down the tree, where the others go up: the first member has removed a key."""

encode = msgspec.msgpack.Encoder().encode


class RendezvousClient:
    """The methods of `RendezvousTable` for all members but the first.

    They use this member's copy, or call the first member.

    `call(method, body, timeout)` is a remote call that reaches the first member, with `timeout` seconds. A method that
    calls raises what `call` raises (`ConnectionLost` at once when a process on the way dies) beside what
    `RendezvousTable` raises.
    """

    def __init__(self, call: Callable[[str, bytes, float], bytes], copy: RendezvousTable, timeout: float) -> None:
        self._call, self._copy, self._timeout = call, copy, timeout

    def put(self, epoch: int, items: Mapping[str, bytes]) -> None:
        self._copy.put(epoch, items)

    def fetch(self, epoch: int, keys: Sequence[str], timeout: float) -> list[bytes]:
        return self._copy.fetch(epoch, keys, timeout)

    def wait(self, epoch: int, keys: Sequence[str], timeout: float) -> None:
        self._copy.wait(epoch, keys, timeout)

    def add(self, epoch: int, key: str, amount: int) -> int:
        return self._ask("kv.add", AddRequest(epoch, key, amount), int)

    def append(self, epoch: int, key: str, value: bytes) -> None:
        self._ask("kv.append", AppendRequest(epoch, key, value), type(None))

    def compare_set(self, epoch: int, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._ask("kv.compare_set", CompareSetRequest(epoch, key, expected, desired), bytes)

    def check(self, epoch: int, keys: Sequence[str]) -> bool:
        return self._copy.check(epoch, keys) or self._ask("kv.check", KeysRequest(epoch, list(keys)), bool)

    def delete(self, epoch: int, key: str) -> bool:
        return self._ask("kv.delete", KeysRequest(epoch, [key]), bool)

    def count(self, epoch: int) -> int:
        return self._ask("kv.count", EpochRequest(epoch), int)

    def _ask(self, method: str, request: EpochRequest, answer: type[T]) -> T:
        try:
            body = self._call(method, encode(request), self._timeout)
        except RemoteError as error:
            if error.kind == "Revoked":
                raise Revoked(request.epoch, "its rendezvous was dropped") from error
            raise
        try:
            return msgspec.msgpack.decode(body, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptData(f"the answer to {method} is not one: {error}") from error


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
