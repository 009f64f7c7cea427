"""The nodes of a skeleton, as they travel, and tensor subclasses that are made of inner tensors.

Such subclasses, as torchao's quantized ones, say themselves what they are made of (`__tensor_flatten__`,
`__tensor_unflatten__`). A class travels as its import name, which is only ever looked up among the modules that this
process has imported already.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from types import ModuleType
from typing import Annotated, Any

import msgspec
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast.comms.errors import CorruptData, Mismatch, Unsupported
from holdfast.ft.state.value_codec import EncodedNode, ValueNode, decode_value, encode_value

DEEPEST = 200
"""The most levels of dicts, lists and tuples of a state dict."""
PARAMETER, REQUIRES_GRAD = 1, 2
"""Flags of a tensor: it is an `nn.Parameter`; it is a leaf that requires grad."""
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
encode_node = msgspec.msgpack.Encoder().encode


def children(node: DictNode | ListNode | TupleNode | SubclassNode, prefix: str) -> Iterator[tuple[str, StateNode]]:
    """The items of a container with their dotted names; `prefix` is its own name and a dot, or nothing."""
    match node:
        case DictNode(keys) | SubclassNode(_, keys):
            pass
        case _:
            keys = tuple(range(len(node.items)))
    names = [f"{prefix}{key}" for key in keys] if prefix else map(str, keys)
    return zip(names, node.items, strict=True)


def check_keys(keys: tuple[Key, ...], items: tuple[StateNode, ...]) -> None:
    if len(keys) != len(items) or len(set(keys)) != len(keys):
        raise CorruptData("the skeleton of a state dict whose keys and values do not fit together")


def check_context(node: StateNode, depth: int) -> None:
    if depth > DEEPEST:
        raise CorruptData(f"the context of a subclass that is nested more than {DEEPEST} levels deep")
    match node:
        case DictNode(keys, items) | RecordNode(_, keys, items):
            check_keys(keys, items)
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
        check_context(item, depth + 1)


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
