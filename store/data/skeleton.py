"""The skeleton of a state dict: its structure and all its values but the tensors, which it names.

It travels as msgpack and is decoded strictly: decoding imports nothing and runs no code of the sender.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Annotated, TypeVar

import msgspec
import xxhash

from holdfast.comms.codecs.value_codec import EncodedNode, ValueNode, decode_value
from holdfast.comms.errors import CorruptData

DEEPEST = 200
"""The most levels of dicts, lists and tuples of a state dict."""
PARAMETER, REQUIRES_GRAD = 1, 2
"""Flags of a tensor: it is an `nn.Parameter`; it is a leaf that requires grad."""

T = TypeVar("T")
Key = str | int | float | bool | None
Flags = Annotated[int, msgspec.Meta(ge=0, le=PARAMETER | REQUIRES_GRAD)]


class DictNode(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="d"):
    keys: tuple[Key, ...]
    items: tuple[StateNode, ...]


class ListNode(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="l"):
    items: tuple[StateNode, ...]


class TupleNode(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="t"):
    items: tuple[StateNode, ...]


class TensorNode(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="T"):
    """A tensor, published under its dotted name."""

    flags: Flags


class TiedNode(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="="):
    """A tensor that is the same memory as the tensor named `source`, and is not published itself."""

    source: str
    flags: Flags


class SubclassNode(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="w"):
    """A tensor subclass made of inner tensors, which are published under `name.attribute`.

    `import_name` names its class, as text only. `context` is what its `__tensor_flatten__` gave beside them.
    """

    import_name: str
    attributes: tuple[str, ...]
    items: tuple[StateNode, ...]
    context: StateNode
    size: tuple[int, ...]
    stride: tuple[int, ...]
    flags: Flags


class EnumNode(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="e"):
    """A member of an enumeration, within the context of a subclass only."""

    import_name: str
    member: str


class RecordNode(EncodedNode, frozen=True, array_like=True, forbid_unknown_fields=True, tag="r"):
    """A dataclass, within the context of a subclass only."""

    import_name: str
    fields: tuple[str, ...]
    items: tuple[StateNode, ...]


StateNode = ValueNode | DictNode | ListNode | TupleNode | TensorNode | TiedNode | SubclassNode | EnumNode | RecordNode


class _Encoded(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="state dict 1"):
    root: DictNode


encode_node = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Encoded)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A decoded skeleton, indexed by dotted name.

    `tensors` are published under these names; `ties` maps the names that are not, to those that hold their bytes. A
    tuple without tensors is one of the `values`.
    """

    root: DictNode
    tensors: Mapping[str, int] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, StateNode] = field(default_factory=dict)
    subclasses: Mapping[str, SubclassNode] = field(default_factory=dict)

    def source(self, name: str) -> str:
        """The name under which the bytes of tensor `name` are published."""
        return self.ties.get(name, name)

    @property
    def digest(self) -> bytes:
        """16 bytes that identify the state, whatever the order of its dicts."""
        return xxhash.xxh3_128_digest(encode_node(_sorted(self.root)))


def encode(root: DictNode) -> bytes:
    return msgspec.msgpack.encode(_Encoded(root))


@lru_cache(maxsize=8)
def decode(data: bytes) -> Skeleton:
    """The skeleton in `data`. Raises `CorruptData` for bytes that `encode` cannot have made."""
    try:
        return index(_decoder.decode(data).root)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptData(f"not the skeleton of a state dict: {error}") from error


def index(root: DictNode) -> Skeleton:
    """Index and check a tree. Raises `CorruptData` if no state dict has it."""
    indexed = _SkeletonIndex()
    indexed.visit_items(root, "", 1)
    indexed.check_names()
    for name, source in indexed.ties.items():
        if source not in indexed.tensors:
            raise CorruptData(f"{name[:80]!r} is tied to {source[:80]!r}, which is no tensor of the state dict")
    return Skeleton(root, indexed.tensors, indexed.ties, indexed.values, indexed.subclasses)


def children(node: DictNode | ListNode | TupleNode | SubclassNode, prefix: str) -> Iterator[tuple[str, StateNode]]:
    """The items of a container with their dotted names; `prefix` is its own name and a dot, or nothing."""
    match node:
        case DictNode(keys) | SubclassNode(_, keys):
            pass
        case _:
            keys = tuple(range(len(node.items)))
    names = [f"{prefix}{key}" for key in keys] if prefix else map(str, keys)
    return zip(names, node.items, strict=True)


class _SkeletonIndex:
    def __init__(self) -> None:
        self.tensors: dict[str, int] = {}
        self.ties: dict[str, str] = {}
        self.values: dict[str, StateNode] = {}
        self.subclasses: dict[str, SubclassNode] = {}

    def visit_items(self, node: DictNode | ListNode | TupleNode | SubclassNode, prefix: str, depth: int) -> None:
        if depth > DEEPEST:
            raise CorruptData(f"the skeleton of a state dict that is nested more than {DEEPEST} levels deep")
        if isinstance(node, DictNode | SubclassNode):
            _check_keys(node.keys if isinstance(node, DictNode) else node.attributes, node.items)
        tensors = self.tensors
        for name, item in children(node, prefix):
            if type(item) is not TensorNode:
                self._visit(item, name, depth)
            elif name in tensors:
                raise _twice(name)
            else:
                tensors[name] = item.flags

    def check_names(self) -> None:
        """Raise `CorruptData` for a name of several tensors or values."""
        count = len(self.tensors) + len(self.ties) + len(self.values) + len(self.subclasses)
        if len({*self.tensors, *self.ties, *self.values, *self.subclasses}) < count:
            raise CorruptData("the skeleton of a state dict that has a name twice")

    def _visit(self, item: StateNode, name: str, depth: int) -> None:
        match item:
            case TiedNode(source, _):
                _add(self.ties, name, source)
            case SubclassNode():
                self._visit_subclass(item, name, depth)
            case DictNode() | ListNode():
                self.visit_items(item, f"{name}.", depth + 1)
            case TupleNode():
                self._visit_tuple(item, name, depth)
            case EnumNode() | RecordNode():
                raise CorruptData("an enumeration or a dataclass in a state dict, outside of a subclass")
            case _:
                decode_value(item)  # type: ignore[arg-type]
                _add(self.values, name, item)

    def _visit_subclass(self, node: SubclassNode, name: str, depth: int) -> None:
        if any(not isinstance(item, TensorNode | TiedNode | SubclassNode) for item in node.items):
            raise CorruptData(f"{name[:80]!r} is a subclass with an inner value that is no tensor")
        if len(node.size) != len(node.stride) or min((*node.size, *node.stride), default=0) < 0:
            raise CorruptData(f"{name[:80]!r} is a subclass of an impossible shape")
        _check_context(node.context, depth + 1)
        _add(self.subclasses, name, node)
        self.visit_items(node, f"{name}.", depth + 1)

    def _visit_tuple(self, node: TupleNode, name: str, depth: int) -> None:
        """Index a tuple as a single value, unless there are tensors in it."""
        before, values = (len(self.tensors), len(self.ties)), len(self.values)
        self.visit_items(node, f"{name}.", depth + 1)
        if (len(self.tensors), len(self.ties)) == before:
            while len(self.values) > values:
                self.values.popitem()
            _add(self.values, name, node)


def _add(to: dict[str, T], name: str, what: T) -> None:
    if name in to:
        raise _twice(name)
    to[name] = what


def _twice(name: str) -> CorruptData:
    return CorruptData(f"the skeleton of a state dict that has {name[:80]!r} twice")


def _check_keys(keys: tuple[Key, ...], items: tuple[StateNode, ...]) -> None:
    if len(keys) != len(items) or len(set(keys)) != len(keys):
        raise CorruptData("the skeleton of a state dict whose keys and values do not fit together")


def _check_context(node: StateNode, depth: int) -> None:
    if depth > DEEPEST:
        raise CorruptData(f"the context of a subclass that is nested more than {DEEPEST} levels deep")
    match node:
        case DictNode(keys, items) | RecordNode(_, keys, items):
            _check_keys(keys, items)
        case ListNode(items) | TupleNode(items):
            pass
        case EnumNode():
            return
        case TensorNode() | TiedNode() | SubclassNode():
            raise CorruptData("a tensor in the context of a subclass")
        case _:
            decode_value(node)
            return
    for item in items:
        _check_context(item, depth + 1)


def _sorted(node: StateNode) -> StateNode:
    """The same tree with all dicts in the order of their encoded keys."""
    match node:
        case DictNode(keys, items):
            below = [each if type(each) is TensorNode else _sorted(each) for each in items]
            pairs = sorted(zip(map(encode_node, keys), keys, below, strict=True), key=itemgetter(0))
            return DictNode(tuple(key for _, key, _ in pairs), tuple(item for _, _, item in pairs))
        case ListNode(items):
            return ListNode(tuple(map(_sorted, items)))
        case TupleNode(items):
            return TupleNode(tuple(map(_sorted, items)))
    return node
