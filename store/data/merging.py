"""`merge`: one skeleton of the skeletons of all parts of a version."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.comms.errors import Mismatch
from holdfast.store.data.faults import FaultList
from holdfast.store.data.skeleton import (
    DictNode,
    ListNode,
    Skeleton,
    StateNode,
    SubclassNode,
    TensorNode,
    TiedNode,
    TupleNode,
    children,
    encode_node,
    index,
)

_FIXED = (ListNode, TupleNode, SubclassNode)


def merge(parts: Sequence[Skeleton]) -> Skeleton:
    """The state dict of which each part has some: dicts are united, everything else must be equal.

    A tensor is tied if it is in all parts that have it. Raises `Mismatch`, with all names, if parts disagree.
    """
    first, *rest = parts
    if all(part is first or part.root == first.root for part in rest):
        return first
    faults = FaultList()
    root: StateNode = first.root
    for position, part in enumerate(rest, 1):
        root = _merged(root, part.root, "", position, faults)
    faults.check()
    assert isinstance(root, DictNode)
    return index(root)


def _merged(one: StateNode, other: StateNode, name: str, part: int, faults: FaultList) -> StateNode:
    prefix = f"{name}." if name else ""
    if isinstance(one, DictNode) and isinstance(other, DictNode):
        items = dict(zip(one.keys, one.items, strict=True))
        for (each, item), key in zip(children(other, prefix), other.keys, strict=True):
            items[key] = _merged(items[key], item, each, part, faults) if key in items else item
        return DictNode(tuple(items), tuple(items.values()))
    if isinstance(one, _FIXED) and isinstance(other, _FIXED) and len(one.items) == len(other.items):
        pairs = zip(children(one, prefix), other.items, strict=True)
        merged = tuple(_merged(item, theirs, each, part, faults) for (each, item), theirs in pairs)
        one, other = (msgspec.structs.replace(each, items=merged) for each in (one, other))
    if isinstance(one, TensorNode | TiedNode) and isinstance(other, TensorNode | TiedNode):
        whole = type(one) is type(other)
        one, other = (each if whole else TensorNode(each.flags) for each in (one, other))
    if encode_node(one) != encode_node(other):
        text = f"{name!r} in part {part} of the version differs from that in the parts before; publish it alike"
        faults.add(Mismatch, name, text)
    return one
