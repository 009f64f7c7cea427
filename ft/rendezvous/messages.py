"""The remote calls on a rendezvous table: the bodies of requests and answers, in msgpack."""

from __future__ import annotations

import msgspec


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
