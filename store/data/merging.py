"""What the parts of a version make up: one skeleton, and one entry for each tensor.

Tensors that several parts have must have equal bytes; readers read them from any of the parts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast.comms.errors import Mismatch
from holdfast.ft.state.boxes import Box, whole
from holdfast.store.data.manifest import Manifest, RegionLayout, TensorEntry
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
from holdfast.store.data.tree import FaultList
from holdfast.store.reshard.plan import listed

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


@functools.lru_cache(maxsize=16)
def tensors_of(layouts: tuple[RegionLayout, ...]) -> Mapping[str, TensorEntry]:
    """Each tensor of a version: an entry that has all of it if there is one.

    Raises `Mismatch` if parts disagree about its shape or dtype.
    """
    found: dict[str, TensorEntry] = {}
    for layout in layouts:
        for entry in layout.entries:
            known = found.get(entry.name)
            if known is not None and (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise Mismatch(f"a part of the version has {entry}, another {known}: publish it alike on all ranks")
            if known is None or known.box is not None:
                found[entry.name] = entry
    return found


def check_shared(parts: Sequence[int], manifests: Sequence[Manifest]) -> None:
    """Check that parts with these numbers have equal bytes of each box of a tensor that several of them have.

    Raises `Mismatch`, naming the tensors and the parts.
    """
    faults: dict[str, None] = {}
    for name, (first, at), (second, there) in _shared(tuple(manifest.layout for manifest in manifests)):
        if manifests[first].sums_of(at) != manifests[second].sums_of(there):
            faults[f"{name!r} has other bytes in part {parts[second]} than in part {parts[first]}"] = None
    if faults:
        raise Mismatch(
            f"parts of the version disagree: {listed(faults)}; publish equal bytes, or each tensor in one part"
        )


class _Place(NamedTuple):
    """The position of a part's manifest, and that of an entry in its layout."""

    part: int
    entry: int


@functools.lru_cache(maxsize=16)
def _shared(layouts: tuple[RegionLayout, ...]) -> tuple[tuple[str, _Place, _Place], ...]:
    """The boxes that several parts have: the tensor's name, the first place of each, and another one."""
    first: dict[tuple[str, Box], _Place] = {}
    found = []
    for part, layout in enumerate(layouts):
        for number, entry in enumerate(layout.entries):
            here = _Place(part, number)
            known = first.setdefault((entry.name, entry.box or whole(entry.shape)), here)
            if known is not here:
                found.append((entry.name, known, here))
    return tuple(found)
