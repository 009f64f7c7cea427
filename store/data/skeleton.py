"""The skeleton of a state dict: its structure and all its values but the tensors, which it names.

It travels as msgpack and is decoded strictly: decoding imports nothing and runs no code of the sender. `rebuild` puts a
new state dict together from a skeleton and tensors.

Tensor subclasses that are made of inner tensors, such as torchao's quantized ones, say themselves what they are made of
(`__tensor_flatten__`, `__tensor_unflatten__`). A class travels as its import name, which is only ever looked up among
the modules that this process has imported already.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from operator import itemgetter
from types import ModuleType
from typing import Annotated, Any, TypeVar

import msgspec
import torch
import xxhash
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast.comms.codecs.value_codec import EncodedNode, ValueNode, decode_value, encode_value
from holdfast.comms.errors import CorruptData, Mismatch, Unsupported

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


Tensor = torch.Tensor
KEYS = (str, int, float, bool, type(None))


def inner_tensors(tensor: Any) -> tuple[dict[str, Tensor], object] | None:
    """The inner tensors of a subclass by attribute, and its context.

    None for a tensor that is not made of others.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return None
    attributes, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in attributes}, context


def import_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def encode_context(context: object, kind: type, depth: int = 0) -> StateNode:
    """The node of what `__tensor_flatten__` of class `kind` gave beside the tensors.

    Beside the values of state dicts, it may have enumerations, and dataclasses of the package of `kind`. Raises
    TypeError for anything else.
    """
    if depth > DEEPEST:
        raise TypeError(f"it is nested more than {DEEPEST} levels deep")
    if (value := encode_value(context)) is not None:
        return value
    if type(context) in (list, tuple):
        items = tuple(encode_context(each, kind, depth + 1) for each in context)  # type: ignore[attr-defined]
        return ListNode(items) if type(context) is list else TupleNode(items)
    if type(context) is dict and all(type(key) in KEYS for key in context):
        return DictNode(tuple(context), tuple(encode_context(each, kind, depth + 1) for each in context.values()))
    if isinstance(context, Enum) and _find(import_name(type(context))) is type(context):
        return EnumNode(import_name(type(context)), context.name)
    if _is_record_of(type(context), kind):
        fields = _fields(type(context))
        items = tuple(encode_context(getattr(context, name), kind, depth + 1) for name in fields)
        return RecordNode(import_name(type(context)), fields, items)
    raise TypeError(f"it has a {type(context).__name__}")


def build_subclass(node: SubclassNode, inner: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor of the subclass that `node` names, around `inner`.

    Raises `Unsupported` if this process has not imported it, `Mismatch` if its class here cannot be made of these.
    """
    kind = _find(node.import_name)
    if not (isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise Unsupported(
            f"{name!r} is a {node.import_name}, which this process has not imported as a tensor subclass",
            f"import {node.import_name.partition(':')[0]} before reading it",
        )
    context = _decode_context(node.context, kind, name)
    try:
        built = kind.__tensor_unflatten__(dict(inner), context, torch.Size(node.size), node.stride)
    except Exception as error:
        raise Mismatch(f"{node.import_name} here cannot be made of the inner tensors of {name!r}: {error}") from error
    if not isinstance(built, kind):
        raise Mismatch(f"{node.import_name}.__tensor_unflatten__ made a {type(built).__name__} of {name!r}")
    return built


def _decode_context(node: StateNode, kind: type, name: str) -> Any:
    match node:
        case DictNode(keys, items):
            return {key: _decode_context(item, kind, name) for key, item in zip(keys, items, strict=True)}
        case ListNode(items):
            return [_decode_context(item, kind, name) for item in items]
        case TupleNode(items):
            return tuple(_decode_context(item, kind, name) for item in items)
        case EnumNode(type_name, member):
            found = _find(type_name)
            if not (isinstance(found, type) and issubclass(found, Enum) and member in found.__members__):
                raise Unsupported(f"{name!r} needs {type_name}.{member}, which this process has not imported")
            return found[member]
        case RecordNode(type_name, fields, items):
            found = _find(type_name)
            if not (isinstance(found, type) and _is_record_of(found, kind) and fields == _fields(found)):
                raise Unsupported(f"{name!r} needs a dataclass {type_name}{list(fields)}, which this process lacks")
            record: Any = object.__new__(found)
            for attribute, item in zip(fields, items, strict=True):
                object.__setattr__(record, attribute, _decode_context(item, kind, name))
            return record
    return decode_value(node)  # type: ignore[arg-type]


def _is_record_of(found: type, kind: type) -> bool:
    """Whether this is a dataclass of the package of the subclass: no other class is made from received names."""
    package = kind.__module__.partition(".")[0]
    return (
        dataclasses.is_dataclass(found)
        and found.__module__.partition(".")[0] == package
        and _find(import_name(found)) is found
    )


def _fields(found: Any) -> tuple[str, ...]:
    return tuple(each.name for each in dataclasses.fields(found))


def _find(name: str) -> object:
    """What an import name stands for in the modules that are imported already; None if nothing.

    It reads dictionaries only: getattr on a module may import another one.
    """
    module, _, path = name.partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        if not isinstance(found, ModuleType | type):
            return None
        found = vars(found).get(part)
    return found


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
