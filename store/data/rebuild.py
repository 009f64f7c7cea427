"""`rebuild`: puts a new state dict together from a skeleton and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from holdfast.comms.codecs.value_codec import decode_value
from holdfast.comms.errors import CorruptData
from holdfast.store.data.skeleton import (
    PARAMETER,
    REQUIRES_GRAD,
    DictNode,
    ListNode,
    Skeleton,
    StateNode,
    SubclassNode,
    TensorNode,
    TiedNode,
    TupleNode,
    children,
    decode,
)
from holdfast.store.data.subclasses import build_subclass

Tensor = torch.Tensor


def rebuild(skeleton: Skeleton | bytes, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """A new state dict around `tensors`, which has each tensor of the skeleton by name.

    Dicts keep their order. Parameters come back as Parameters, leaves with their requires_grad. Tied tensors are one
    object again, or one memory where only one of them is a Parameter.

    Raises `CorruptData` if the tensors are not those of the skeleton, `Unsupported` if a tensor subclass in it is not
    imported here, `Mismatch` if it is another one here.
    """
    known = decode(skeleton) if isinstance(skeleton, bytes) else skeleton
    if missing := known.tensors.keys() - tensors.keys():
        raise CorruptData(f"the skeleton of a state dict with tensor {min(missing)!r}, which is not there")
    built: dict[str, Any] = _Builder(known, tensors).build(known.root, "")
    return built


def build_value(node: StateNode) -> Any:
    """A value of a skeleton, anew; it has no tensors."""
    return _Builder(Skeleton(DictNode((), ())), {}).build(node, "")


class _Builder:
    def __init__(self, skeleton: Skeleton, tensors: Mapping[str, Tensor]) -> None:
        self._skeleton, self._tensors = skeleton, tensors
        self._shared: dict[tuple[str, int], Tensor] = {}
        self._tied = {*skeleton.ties.values()}

    def build(self, node: StateNode, name: str) -> Any:
        prefix = f"{name}." if name else ""
        match node:
            case TensorNode(flags):
                return self._tensor(name, flags)
            case TiedNode(source, flags):
                return self._tensor(source, flags)
            case DictNode(keys):
                return dict(zip(keys, self._items(node, prefix), strict=True))
            case ListNode():
                return self._items(node, prefix)
            case TupleNode():
                return tuple(self._items(node, prefix))
            case SubclassNode(attributes=attributes, flags=flags):
                inner = dict(zip(attributes, self._items(node, prefix), strict=True))
                return _flagged(build_subclass(node, inner, name), flags, name)
        return decode_value(node)  # type: ignore[arg-type]

    def _items(self, node: DictNode | ListNode | TupleNode | SubclassNode, prefix: str) -> list[Any]:
        return [
            self._tensor(name, item.flags) if type(item) is TensorNode else self.build(item, name)
            for name, item in children(node, prefix)
        ]

    def _tensor(self, source: str, flags: int) -> Tensor:
        if not flags and source not in self._tied:
            return self._tensors[source]
        if (source, flags) not in self._shared:
            self._shared[source, flags] = _flagged(self._tensors[source], flags, source)
        return self._shared[source, flags]


def _flagged(tensor: Tensor, flags: int, name: str) -> Tensor:
    requires_grad = bool(flags & REQUIRES_GRAD)
    if requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
        raise CorruptData(f"the skeleton of a state dict in which {name!r} of {tensor.dtype} requires grad")
    if flags & PARAMETER:
        return nn.Parameter(tensor, requires_grad)
    return tensor.detach().requires_grad_() if requires_grad else tensor
