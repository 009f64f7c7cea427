"""The remote calls on a rendezvous table: the bodies of requests and answers, in msgpack."""

from __future__ import annotations

import msgspec


class EpochRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    epoch: int


class PutRequest(EpochRequest, frozen=True, array_like=True, forbid_unknown_fields=True):
    items: dict[str, bytes]


class KeysRequest(EpochRequest, frozen=True, array_like=True, forbid_unknown_fields=True):
    keys: list[str]
    timeout: float = 0.0


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


class WaitAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The answer to `kv.wait` and `kv.fetch`: the values, or the keys that were not there in time."""

    values: list[bytes]
    missing: list[str]


REPEATABLE = frozenset({"kv.put", "kv.fetch", "kv.wait", "kv.check", "kv.count"})
"""The methods that can be called again when it is not known whether the first call was executed."""

encode = msgspec.msgpack.Encoder().encode
