"""State dicts as plain data and tensors: what travels to a newcomer, without pickle.

`take_apart` walks a state dict into a description (msgpack bytes) and the tensors it mentions; `put_together` is the
way back. Decoding runs no code, so the description may come from anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from holdfast.comms.errors import CorruptData

_WORD = 1 << 63


class _Node(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class _Value(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="v"):
    value: bool | int | float | str | None


class _Bytes(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="b"):
    value: bytes


class _Big(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="i"):
    digits: str


class _Dict(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="d"):
    items: list[tuple[Node, Node]]


class _List(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="l"):
    items: list[Node]


class _Tuple(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="t"):
    items: list[Node]


class _Set(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="s"):
    items: list[Node]


class _Tensor(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="T"):
    index: int


Node = _Value | _Bytes | _Big | _Dict | _List | _Tuple | _Set | _Tensor

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Node] = msgspec.msgpack.Decoder(Node)


def take_apart(state: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The description of `state`, and its tensors in the order of the description.

    Handles dicts (keys of any kind listed here), lists, tuples, sets, tensors, numbers, strings, bytes, None. Raises
    TypeError naming where something else is.
    """
    tensors: list[torch.Tensor] = []
    return _encode(_describe(state, tensors, "state")), tensors


def put_together(description: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """What `take_apart` was given. Raises `CorruptData` for a description that is none, or of other tensors."""
    try:
        node = _decoder.decode(description)
    except msgspec.DecodeError as error:
        raise CorruptData(f"not the description of a state: {error}") from error
    return _build(node, tensors)


def _describe(value: Any, tensors: list[torch.Tensor], where: str) -> Node:
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"{where} is a {type(value).__name__}: only plain tensors can be given to a newcomer")
        if value.layout != torch.strided:
            raise TypeError(f"{where} is a {value.layout} tensor: only dense ones can be given to a newcomer")
        tensors.append(value.detach())
        return _Tensor(len(tensors) - 1)
    if value is None or isinstance(value, bool | float | str):
        return _Value(value)
    if isinstance(value, bytes):
        return _Bytes(value)
    if isinstance(value, int):
        return _Value(int(value)) if -_WORD <= value < _WORD else _Big(str(value))
    if isinstance(value, dict):
        return _Dict(
            [
                (_describe(key, tensors, f"a key of {where}"), _describe(item, tensors, f"{where}[{key!r}]"))
                for key, item in value.items()
            ]
        )
    kinds = ((list, _List), (tuple, _Tuple), (set, _Set), (frozenset, _Set))
    for kind, node in kinds:
        if isinstance(value, kind):
            return node([_describe(item, tensors, f"{where}[{i}]") for i, item in enumerate(value)])
    raise TypeError(
        f"{where} is a {type(value).__name__}: state_dict() must give dicts, lists, tuples, sets, tensors, numbers, "
        "strings, bytes and None"
    )


def _build(node: Node, tensors: Sequence[torch.Tensor]) -> Any:
    match node:
        case _Value(value) | _Bytes(value):
            return value
        case _Big(digits):
            try:
                return int(digits)
            except ValueError as error:
                raise CorruptData(f"not a number in the description of a state: {error}") from error
        case _Dict(items):
            return {_build(key, tensors): _build(value, tensors) for key, value in items}
        case _List(members):
            return [_build(item, tensors) for item in members]
        case _Tuple(members):
            return tuple(_build(item, tensors) for item in members)
        case _Set(members):
            return {_build(item, tensors) for item in members}
        case _Tensor(index):
            if not 0 <= index < len(tensors):
                raise CorruptData(f"the description of a state mentions tensor {index} of {len(tensors)}")
            return tensors[index]
