"""The client of a rendezvous table that another process serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from holdfast.comms.errors import CorruptData, Revoked
from holdfast.ft.control.errors import KeyTimeout, RemoteError
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

T = TypeVar("T")

_GRACE = 0.5  # seconds beyond `timeout` for the answer that names the missing keys


class RendezvousClient:
    """The methods of `RendezvousTable`, as calls to the process that serves it.

    `call(method, body, timeout)` is a remote call to that process, such as `RpcClient.call`. Each method raises what
    `call` raises (`ConnectionLost` at once when that process dies) beside what `RendezvousTable` raises. `timeout`
    bounds the methods that have none of their own. With `copy`, to which that process pushes all changes, `fetch` and
    `wait` read the copy and make no call.
    """

    def __init__(
        self,
        call: Callable[[str, bytes, float], bytes],
        timeout: float = 30.0,
        copy: RendezvousTable | None = None,
    ) -> None:
        self._call, self._timeout, self._copy = call, timeout, copy

    def put(self, epoch: int, items: Mapping[str, bytes]) -> None:
        self._ask("kv.put", PutRequest(epoch, dict(items)), type(None))

    def fetch(self, epoch: int, keys: Sequence[str], timeout: float) -> list[bytes]:
        if self._copy is not None:
            return self._copy.fetch(epoch, keys, timeout)
        values = self._wait("kv.fetch", epoch, keys, timeout)
        if len(values) != len(keys):
            raise CorruptData(f"kv.fetch of {len(keys)} keys brought {len(values)} values")
        return values

    def wait(self, epoch: int, keys: Sequence[str], timeout: float) -> None:
        if self._copy is not None:
            self._copy.wait(epoch, keys, timeout)
        else:
            self._wait("kv.wait", epoch, keys, timeout)

    def _wait(self, method: str, epoch: int, keys: Sequence[str], timeout: float) -> list[bytes]:
        found = self._ask(method, KeysRequest(epoch, list(keys), timeout), WaitAnswer, timeout + _GRACE)
        if found.missing:
            raise KeyTimeout(found.missing, timeout)
        return found.values

    def add(self, epoch: int, key: str, amount: int) -> int:
        return self._ask("kv.add", AddRequest(epoch, key, amount), int)

    def append(self, epoch: int, key: str, value: bytes) -> None:
        self._ask("kv.append", AppendRequest(epoch, key, value), type(None))

    def compare_set(self, epoch: int, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._ask("kv.compare_set", CompareSetRequest(epoch, key, expected, desired), bytes)

    def check(self, epoch: int, keys: Sequence[str]) -> bool:
        return self._ask("kv.check", KeysRequest(epoch, list(keys)), bool)

    def delete(self, epoch: int, key: str) -> bool:
        return self._ask("kv.delete", KeysRequest(epoch, [key]), bool)

    def count(self, epoch: int) -> int:
        return self._ask("kv.count", EpochRequest(epoch), int)

    def _ask(self, method: str, request: EpochRequest, answer: type[T], timeout: float | None = None) -> T:
        try:
            body = self._call(method, encode(request), self._timeout if timeout is None else timeout)
        except RemoteError as error:
            if error.kind == "Revoked":
                raise Revoked(request.epoch, "its rendezvous was dropped") from error
            raise
        try:
            return msgspec.msgpack.decode(body, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptData(f"the answer to {method} is not one: {error}") from error
