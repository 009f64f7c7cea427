"""Encodes state dicts as plain data and tensors, without pickle, to send them to newcomers.

`encode_state` turns a state dict into a description (msgpack bytes) and the tensors in it; `decode_state` is the
inverse. Decoding runs no code, so a description need not come from a trusted process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from holdfast.comms.errors import UNDECODABLE, CorruptData, Unsupported
from holdfast.comms.tensors.packing import plain_tensor
from holdfast.ft.state.value_codec import EncodedNode, ValueNode, decode_value, encode_value

_KEY = object()


class _Dict(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="d"):
    items: list[tuple[StateNode, StateNode]]


class _List(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="l"):
    items: list[StateNode]


class _Tuple(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="t"):
    items: list[StateNode]


class _Set(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="s"):
    items: list[StateNode]


class _FrozenSet(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="f"):
    items: list[StateNode]


class _Tensor(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="T"):
    index: int


class _Array(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="a"):
    """A numpy array, sent as tensor number `index`."""

    index: int


StateNode = ValueNode | _Dict | _List | _Tuple | _Set | _FrozenSet | _Tensor | _Array

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[StateNode] = msgspec.msgpack.Decoder(StateNode)


class EncodedState(NamedTuple):
    """An encoded state: its description, and its tensors with their paths, in the order of the description."""

    description: bytes
    tensors: list[torch.Tensor]
    paths: list[str]


def encode_state(state: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The description of `state`, and its tensors in the order of the description.

    Handles dicts (keys of any kind listed here), lists, tuples, sets, tensors, numbers (numpy's too), arrays of
    numbers, strings, bytes, None. Raises TypeError with the path of anything else.
    """
    taken = encode_sharded_state(state, shards=False)
    return taken.description, taken.tensors


def encode_sharded_state(state: Any, *, shards: bool = True) -> EncodedState:
    """Like `encode_state`, with the path of each tensor, and with DTensors allowed if `shards`.

    Call it under `torch.no_grad()`: with `shards`, tensors are not detached, because detaching a DTensor takes longer
    than copying it.
    """
    walk = _Walk(shards)
    try:
        return EncodedState(_encode(walk.describe(state, ())), walk.tensors, walk.paths)
    except RecursionError:
        raise TypeError(
            "the state is nested too deeply, or contains itself: it cannot be given to a newcomer"
        ) from None
    except UnicodeEncodeError as error:
        raise TypeError(f"the state has text that is not valid Unicode: {error}") from None


def decode_state(description: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """The state that `encode_state` was given. Raises `CorruptData` if the description is invalid or does not fit."""
    try:
        return _build(_decoder.decode(description), tensors)
    except (*UNDECODABLE, TypeError) as error:
        raise CorruptData(f"not the description of a state: {error}") from error


class _Walk:
    """One walk through a state, which collects its tensors."""

    def __init__(self, sharded: bool) -> None:
        self.tensors: list[torch.Tensor] = []
        self.paths: list[str] = []
        self._sharded = sharded

    def describe(self, value: Any, path: tuple[Any, ...]) -> StateNode:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if (plain := encode_value(value)) is not None:
            return plain
        if isinstance(value, dict):
            return _Dict([(self.describe(k, (*path, _KEY)), self.describe(v, (*path, k))) for k, v in value.items()])
        kinds = ((list, _List), (tuple, _Tuple), (set, _Set), (frozenset, _FrozenSet))
        for kind, node in kinds:
            if isinstance(value, kind):
                return node([self.describe(item, (*path, i)) for i, item in enumerate(value)])
        raise TypeError(
            f"{_where(path)} is a {type(value).__name__}: state_dict() must give dicts, lists, tuples, sets, tensors, "
            "arrays of numbers, numbers, strings, bytes and None"
        )

    def _array(self, value: np.ndarray[Any, Any], path: tuple[Any, ...]) -> StateNode:
        try:
            if type(value) is not np.ndarray:
                raise TypeError("a subclass of numpy's array")
            tensor = torch.from_numpy(np.array(value, order="C"))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{_where(path)} is a {type(value).__name__} of {value.dtype}: only plain arrays of numbers "
                f"can be given to a newcomer ({error})"
            ) from None
        node = self._tensor(tensor, path)
        assert isinstance(node, _Tensor)
        return _Array(node.index)

    def _tensor(self, value: torch.Tensor, path: tuple[Any, ...]) -> StateNode:
        if not self._sharded and _is_sharded(value):
            raise TypeError(f"{_where(path)} is a {type(value).__name__}: shards are kept by attach_sharded()")
        if not (self._sharded and _is_sharded(value)):
            try:
                value = plain_tensor(value, _where(path))
            except Unsupported as error:
                raise TypeError(f"{error}: only dense tensors can be given to a newcomer") from error
        if value.is_quantized:
            raise TypeError(f"{_where(path)} is a quantized tensor: only plain tensors can be given to a newcomer")
        self.tensors.append(value if self._sharded else value.detach())
        self.paths.append(".".join(map(str, path)))
        return _Tensor(len(self.tensors) - 1)


def _where(path: tuple[Any, ...]) -> str:
    if path and path[-1] is _KEY:
        return f"a key of {_where(path[:-1])}"
    return "state" + "".join(f"[{key!r}]" for key in path)


def _is_sharded(value: torch.Tensor) -> bool:
    """Whether it is a DTensor. There is none before its module was imported, and that takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _build(node: StateNode, tensors: Sequence[torch.Tensor]) -> Any:
    match node:
        case _Dict(items):
            return {_build(key, tensors): _build(value, tensors) for key, value in items}
        case _List(members):
            return [_build(item, tensors) for item in members]
        case _Tuple(members):
            return tuple(_build(item, tensors) for item in members)
        case _Set(members):
            return {_build(item, tensors) for item in members}
        case _FrozenSet(members):
            return frozenset(_build(item, tensors) for item in members)
        case _Tensor(index) | _Array(index):
            if not 0 <= index < len(tensors):
                raise CorruptData(f"the description of a state mentions tensor {index} of {len(tensors)}")
            return tensors[index].cpu().numpy() if isinstance(node, _Array) else tensors[index]
        case _:
            return decode_value(node)
