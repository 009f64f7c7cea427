"""The rendezvous table over the network, and as the `torch.distributed.Store` that backends are built with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch.distributed as dist

from holdfast.comms.errors import CorruptData, Revoked
from holdfast.ft.control.client import RpcClient
from holdfast.ft.control.errors import KeyTimeout, RemoteError
from holdfast.ft.control.rpc import Handler
from holdfast.ft.control.table import KeyValue, Table

__all__ = ["ControlStore", "KeyValue", "RemoteTable", "Table", "handlers"]

T = TypeVar("T")


class _Form(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    epoch: int


class _Items(_Form, frozen=True, array_like=True, forbid_unknown_fields=True):
    items: dict[str, bytes]


class _Keys(_Form, frozen=True, array_like=True, forbid_unknown_fields=True):
    keys: list[str]
    timeout: float = 0.0


class _Amount(_Form, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: str
    amount: int


class _Value(_Form, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: str
    value: bytes


class _Change(_Form, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: str
    expected: bytes
    desired: bytes


class _Found(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The answer to a wait: the values asked for, or the keys that were not there in time."""

    values: list[bytes]
    missing: list[str]


F = TypeVar("F", bound=_Form)

_encode = msgspec.msgpack.Encoder().encode

REPEATABLE = frozenset({"kv.put", "kv.fetch", "kv.wait", "kv.check", "kv.count"})
"""What may be asked again when it is not known whether it was done."""


def handlers(table: KeyValue) -> dict[str, Handler]:
    """What a server of this table adds to its handlers: the methods `kv.*` that `RemoteTable` calls."""

    def serve(form: type[F], work: Callable[[F], object]) -> Handler:
        decode = msgspec.msgpack.Decoder(form).decode
        return lambda peer, body: _encode(work(decode(body)))

    async def wait(peer: str, body: bytes) -> bytes:
        ask = decode_keys(body)
        try:
            await table.wait_later(ask.epoch, ask.keys, ask.timeout)
        except KeyTimeout as error:
            return _encode(_Found([], list(error.missing)))
        return _encode(_Found([], []))

    async def fetch(peer: str, body: bytes) -> bytes:
        ask = decode_keys(body)
        try:
            return _encode(_Found(await table.fetch_later(ask.epoch, ask.keys, ask.timeout), []))
        except KeyTimeout as error:
            return _encode(_Found([], list(error.missing)))

    decode_keys = msgspec.msgpack.Decoder(_Keys).decode
    return {
        "kv.put": serve(_Items, lambda ask: table.put(ask.epoch, ask.items)),
        "kv.fetch": fetch,
        "kv.wait": wait,
        "kv.add": serve(_Amount, lambda ask: table.add(ask.epoch, ask.key, ask.amount)),
        "kv.append": serve(_Value, lambda ask: table.append(ask.epoch, ask.key, ask.value)),
        "kv.compare_set": serve(_Change, lambda ask: table.compare_set(ask.epoch, ask.key, ask.expected, ask.desired)),
        "kv.check": serve(_Keys, lambda ask: table.check(ask.epoch, ask.keys)),
        "kv.delete": serve(_Keys, lambda ask: table.delete(ask.epoch, ask.keys[0])),
        "kv.count": serve(_Form, lambda ask: table.count(ask.epoch)),
    }


class RemoteTable:
    """The table of another process. `call(method, body, timeout)` is a remote call there, as `RpcClient.call`
    is.

    Each method raises what `call` raises (`ConnectionLost` at once when that process dies) beside what
    `Table` says. `timeout` bounds the methods that have none of their own.
    """

    def __init__(self, call: Callable[[str, bytes, float], bytes], timeout: float = 30.0) -> None:
        self._call, self._timeout = call, timeout

    def put(self, epoch: int, items: Mapping[str, bytes]) -> None:
        self._ask("kv.put", _Items(epoch, dict(items)), type(None))

    def fetch(self, epoch: int, keys: Sequence[str], timeout: float) -> list[bytes]:
        values = self._wait("kv.fetch", epoch, keys, timeout)
        if len(values) != len(keys):
            raise CorruptData(f"kv.fetch of {len(keys)} keys brought {len(values)} values")
        return values

    def wait(self, epoch: int, keys: Sequence[str], timeout: float) -> None:
        self._wait("kv.wait", epoch, keys, timeout)

    def _wait(self, method: str, epoch: int, keys: Sequence[str], timeout: float) -> list[bytes]:
        found = self._ask(method, _Keys(epoch, list(keys), timeout), _Found, timeout + _GRACE)
        if found.missing:
            raise KeyTimeout(found.missing, timeout)
        return found.values

    def add(self, epoch: int, key: str, amount: int) -> int:
        return self._ask("kv.add", _Amount(epoch, key, amount), int)

    def append(self, epoch: int, key: str, value: bytes) -> None:
        self._ask("kv.append", _Value(epoch, key, value), type(None))

    def compare_set(self, epoch: int, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._ask("kv.compare_set", _Change(epoch, key, expected, desired), bytes)

    def check(self, epoch: int, keys: Sequence[str]) -> bool:
        return self._ask("kv.check", _Keys(epoch, list(keys)), bool)

    def delete(self, epoch: int, key: str) -> bool:
        return self._ask("kv.delete", _Keys(epoch, [key]), bool)

    def count(self, epoch: int) -> int:
        return self._ask("kv.count", _Form(epoch), int)

    def _ask(self, method: str, form: _Form, answer: type[T], timeout: float | None = None) -> T:
        try:
            body = self._call(method, _encode(form), self._timeout if timeout is None else timeout)
        except RemoteError as error:
            if error.kind == "Revoked":
                raise Revoked(form.epoch, "its rendezvous was dropped") from error
            raise
        try:
            return msgspec.msgpack.decode(body, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptData(f"the answer to {method} is not one: {error}") from error


_GRACE = 0.5  # seconds that a server has to say which keys are missing when time is up, before the client gives up


class ControlStore(dist.Store):
    """One epoch's part of the table as a `torch.distributed.Store`; works under `PrefixStore` and in any
    backend.

    `table` is the `KeyValue` itself in the process that serves it, and an `RpcClient` to that process in the
    others. The methods are those that torch calls, under its names; `timeout` (seconds) is for those that
    wait.
    """

    def __init__(self, table: Table | RpcClient, epoch: int, timeout: float = 30.0) -> None:
        super().__init__()
        self._table: Table = RemoteTable(table.call, timeout) if isinstance(table, RpcClient) else table
        self._epoch = epoch
        self.set_timeout(timedelta(seconds=timeout))

    def _seconds(self, timeout: timedelta | None = None) -> float:
        wait: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        return wait.total_seconds()

    def clone(self) -> ControlStore:
        return ControlStore(self._table, self._epoch, self._seconds())

    def set(self, key: str, value: str | bytes) -> None:
        self._table.put(self._epoch, {key: _bytes(value)})

    def get(self, key: str) -> bytes:
        return self._table.fetch(self._epoch, [key], self._seconds())[0]

    def add(self, key: str, value: int) -> int:
        return self._table.add(self._epoch, key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._table.check(self._epoch, keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._table.wait(self._epoch, keys, self._seconds(timeout))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._table.compare_set(self._epoch, key, _bytes(expected_value), _bytes(desired_value))

    def delete_key(self, key: str) -> bool:
        return self._table.delete(self._epoch, key)

    def num_keys(self) -> int:
        return self._table.count(self._epoch)

    def append(self, key: str, value: str | bytes) -> None:
        self._table.append(self._epoch, key, _bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._table.fetch(self._epoch, keys, self._seconds())

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._table.put(self._epoch, dict(zip(keys, map(_bytes, values), strict=True)))

    def has_extended_api(self) -> bool:
        return True

    deleteKey = delete_key  # noqa: N815  (torch's C++ side calls these two under their C++ names)
    getNumKeys = num_keys  # noqa: N815


def _bytes(value: str | bytes | Sequence[int]) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
