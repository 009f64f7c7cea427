"""A rendezvous table as the `torch.distributed.Store` that backends are built with, and its calls to the first member.

Each member sets and awaits keys in its own copy of the table. What several members may change (`CALLS`) goes to the
first member's copy, by remote calls that `handlers` serve there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from types import NoneType
from typing import Any, NamedTuple

import msgspec
import torch.distributed as dist

from holdfast.comms.errors import CorruptData, Revoked
from holdfast.ft.control.connection import Handler
from holdfast.ft.control.errors import RemoteError
from holdfast.ft.rendezvous.table import RendezvousTable

Ask = Callable[..., Any]
"""(method, epoch, *arguments): the answer of a method of `CALLS`, at the first member. Raises what that raises."""


class _Call(NamedTuple):
    """The types of a method's arguments, the epoch first, and of its answer."""

    arguments: Any
    answer: Any


CALLS: Mapping[str, _Call] = {
    "add": _Call(tuple[int, str, int], int),
    "append": _Call(tuple[int, str, bytes], NoneType),
    "compare_set": _Call(tuple[int, str, bytes, bytes], bytes),
    "check": _Call(tuple[int, list[str]], bool),
    "delete": _Call(tuple[int, str], bool),
    "count": _Call(tuple[int], int),
}
"""The methods of `RendezvousTable` that the first member answers."""

REPEATABLE = frozenset({"kv.check", "kv.count"})
"""The remote calls that can be made again when it is not known whether the first one was executed."""

FORGET = "kv.forget"
"""Goes down the tree, where the others go up: the first member has removed a key."""

encode = msgspec.msgpack.Encoder().encode
_deletion = msgspec.msgpack.Decoder(CALLS["delete"].arguments)


class RendezvousStore(dist.Store):
    """One epoch of a rendezvous table as a `torch.distributed.Store`; `PrefixStore` and every backend can use it.

    `copy` is this member's copy of the table. `ask` reaches that of the first member; by default `copy` is that one.
    The methods have the names that torch calls; `timeout` (seconds) bounds those that wait.
    """

    def __init__(self, copy: RendezvousTable, epoch: int, timeout: float = 30.0, ask: Ask | None = None) -> None:
        super().__init__()
        self._copy, self._epoch, self._ask = copy, epoch, ask or ask_here(copy)
        self.set_timeout(timedelta(seconds=timeout))

    def _seconds(self, timeout: timedelta | None = None) -> float:
        wait: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        return wait.total_seconds()

    def clone(self) -> RendezvousStore:
        return RendezvousStore(self._copy, self._epoch, self._seconds(), self._ask)

    def set(self, key: str, value: str | bytes) -> None:
        self._copy.put(self._epoch, {key: _bytes(value)})

    def get(self, key: str) -> bytes:
        return self._copy.fetch(self._epoch, [key], self._seconds())[0]

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", self._epoch, key, value))

    def check(self, keys: Sequence[str]) -> bool:
        return self._copy.check(self._epoch, keys) or bool(self._ask("check", self._epoch, keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._copy.wait(self._epoch, keys, self._seconds(timeout))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return bytes(self._ask("compare_set", self._epoch, key, _bytes(expected_value), _bytes(desired_value)))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", self._epoch, key))

    def num_keys(self) -> int:
        return int(self._ask("count", self._epoch))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", self._epoch, key, _bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._copy.fetch(self._epoch, keys, self._seconds())

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._copy.put(self._epoch, dict(zip(keys, map(_bytes, values), strict=True)))

    def has_extended_api(self) -> bool:
        return True

    deleteKey = delete_key  # noqa: N815  (torch's C++ side calls these two under their C++ names)
    getNumKeys = num_keys  # noqa: N815


def _bytes(value: str | bytes | Sequence[int]) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def ask_here(table: RendezvousTable) -> Ask:
    """Asks `table` itself, which is the first member's copy."""
    return lambda method, *arguments: getattr(table, method)(*arguments)


def ask_remotely(call: Callable[[str, bytes, float], bytes], timeout: float) -> Ask:
    """Asks by remote calls: `call(method, body, timeout)` reaches the first member, with `timeout` seconds.

    Raises what `call` raises (`ConnectionLost` at once when a process on the way dies), and `Revoked`.
    """

    def ask(method: str, epoch: int, *arguments: object) -> Any:
        try:
            body = call(f"kv.{method}", encode((epoch, *arguments)), timeout)
        except RemoteError as error:
            if error.kind == "Revoked":
                raise Revoked(epoch, "its rendezvous was dropped") from error
            raise
        try:
            return msgspec.msgpack.decode(body, type=CALLS[method].answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptData(f"the answer to kv.{method} is not one: {error}") from error

    return ask


Forward = Callable[[int, str, bytes], Awaitable[bytes | None]]
"""(epoch, method, body): passes a call on towards the first member of the epoch; None if this process is it."""

Delete = Callable[[int, str], Awaitable[bool]]
"""(epoch, key): removes a key from this copy of the table and those below it; whether it was there."""


def handlers(table: RendezvousTable, forward: Forward, delete: Delete) -> dict[str, Handler]:
    """The handlers of an RPC server for the remote calls that `ask_remotely` makes."""

    def serve(name: str) -> Handler:
        decode = msgspec.msgpack.Decoder(CALLS[name].arguments).decode
        work: Callable[..., Any] = delete if name == "delete" else getattr(table, name)

        async def handler(peer: str, body: bytes) -> bytes:
            arguments = decode(body)
            answer = await forward(arguments[0], f"kv.{name}", body)
            if answer is not None:
                return answer
            result = work(*arguments)
            return encode(await result if isinstance(result, Awaitable) else result)

        return handler

    async def forget(peer: str, body: bytes) -> bytes:
        """What the first member has removed is removed here, and below."""
        return encode(await delete(*_deletion.decode(body)))

    return {**{f"kv.{name}": serve(name) for name in CALLS}, FORGET: forget}
