"""The rendezvous table as members other than the first use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from holdfast.comms.errors import CorruptData, Revoked
from holdfast.ft.control.errors import RemoteError
from holdfast.ft.rendezvous.messages import (
    AddRequest,
    AppendRequest,
    CompareSetRequest,
    EpochRequest,
    KeysRequest,
    encode,
)
from holdfast.ft.rendezvous.table import RendezvousTable

T = TypeVar("T")


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
