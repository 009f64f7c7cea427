"""State dicts: `flatten` takes one apart into tensors by dotted name and a skeleton; `rebuild` puts one together.

The skeleton is the structure and all values but the tensors, which it names. It travels as msgpack and is decoded
strictly: decoding imports nothing and runs no code of the sender. `merge` unites those of a version's parts.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
import xxhash
from torch import nn

from holdfast.comms._native import plain
from holdfast.comms.errors import UNDECODABLE, CorruptData, Mismatch, Unsupported
from holdfast.comms.tensors.memory import PlainTensors
from holdfast.comms.tensors.packing import dlpack_device, plain_tensor
from holdfast.ft.state.aliases import alias_key
from holdfast.ft.state.value_codec import Plain, decode_value, encode_value
from holdfast.store.data.state_nodes import (
    DEEPEST,
    PARAMETER,
    REQUIRES_GRAD,
    DictNode,
    EnumNode,
    Key,
    ListNode,
    RecordNode,
    StateNode,
    SubclassNode,
    Tensor,
    TensorNode,
    TiedNode,
    TupleNode,
    build_subclass,
    check_context,
    check_keys,
    children,
    encode_context,
    encode_node,
    import_name,
    inner_tensors,
)
from holdfast.store.reshard.placements import is_dtensor, local_of

T = TypeVar("T")
SHOWN = 8
"""The most faults that a message spells out."""
_KINDS: tuple[type[Exception], ...] = (TypeError, ValueError, Unsupported, Mismatch)


class Fault(NamedTuple):
    """One thing that is wrong: the error it would be alone, the name it concerns, and a sentence."""

    kind: type[Exception]
    name: str
    text: str


class FaultList:
    """The faults of one argument, in the order found.

    The error of several faults has the first kind of: TypeError, ValueError, `Unsupported`, `Mismatch`.
    """

    def __init__(self) -> None:
        self.found: list[Fault] = []

    def add(self, kind: type[Exception], name: str, text: str) -> None:
        self.found.append(Fault(kind, name, text))

    def check(self) -> None:
        """Raise the faults, if any, as one error that spells out the first ones and counts the rest."""
        if not (faults := self.found):
            return
        kinds = {fault.kind for fault in faults}
        kind = next(each for each in _KINDS if each in kinds)
        words = "; ".join(fault.text for fault in faults[:SHOWN])
        if len(faults) > SHOWN:
            words += f"; and {len(faults) - SHOWN} more"
        raise kind(f"{len(faults)} faults: {words}" if len(faults) > 1 else words)


class _Encoded(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="state dict 1"):
    root: DictNode


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
    except UNDECODABLE as error:
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
            check_keys(node.keys if isinstance(node, DictNode) else node.attributes, node.items)
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
        check_context(node.context, depth + 1)
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


_WORD = 1 << 63
_NO_KEY = object()
_ORDINARY = (Tensor, nn.Parameter)
_TENSORS = [TensorNode(flags) for flags in range((PARAMETER | REQUIRES_GRAD) + 1)]


def find_ties(
    tensors: Mapping[str, Tensor], locals_: Mapping[str, Tensor], plain: PlainTensors | None
) -> dict[str, str]:
    """Map each name of a tied tensor, but the first in the order of text, to that first one.

    The order does not depend on the state dict's, so that a state has the same names however it was put together.
    `locals_` is what lies here of each tensor, and `plain` its description.
    """
    addresses = [each.data_ptr() for each in locals_.values()] if plain is None else plain.addresses.tolist()
    if len(set(addresses)) == len(addresses):
        return {}
    at: defaultdict[int, list[str]] = defaultdict(list)
    for name, address in zip(tensors, addresses, strict=True):
        at[address].append(name)
    groups: defaultdict[object, list[str]] = defaultdict(list)
    for names in at.values():
        if len(names) > 1:
            for name in names:
                groups[_key(tensors[name])].append(name)
    return {name: min(names) for names in groups.values() for name in names if name != min(names)}


def _plain_on_device(tensor: Tensor) -> bool:
    return tensor.is_cuda and (place := dlpack_device(tensor.device)) is not None and plain(tensor, *place)


def locals_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What lies here of each tensor, outside of autograd; `tensors` itself if none is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # importing it is slow
    if module is None or not any(isinstance(tensor, module.DTensor) for tensor in tensors.values()):
        return tensors
    return {name: local_of(tensor) for name, tensor in tensors.items()}


def _key(tensor: Any) -> object:
    """A key that is equal for tied tensors. An empty tensor has no address; its storage identifies it.

    So a rank with empty shards finds the same ties as the other ranks.
    """
    local = local_of(tensor)
    whole = (tensor.shape, tensor._spec) if local is not tensor else ()
    if local.numel():
        return whole, alias_key(local)
    storage = local.untyped_storage()._cdata
    return whole, local.device, storage, local.storage_offset(), local.dtype, local.shape, local.stride()


class ValueSlot(NamedTuple):
    """Where a value of a state dict is: `container[key]`; `node` encodes it."""

    container: Any
    key: Any
    node: StateNode

    @property
    def can_change(self) -> bool:
        """Whether another value can be put there."""
        return isinstance(self.container, MutableMapping | list)


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state dict taken apart.

    `tensors` are its tensors by dotted name, as they lie in memory, outside of autograd: plain ones, and DTensors
    untouched. With `ties`, only one name of each tied tensor is among the tensors of `skeleton`. `originals` are the
    tensors of the state dict that do not share their version counter with `tensors`. `locals` is what lies here of each
    tensor: the shards of DTensors, else the tensors; `plain` describes them, None if one of them is not plain.
    """

    tensors: Mapping[str, Tensor]
    locals: Mapping[str, Tensor]
    plain: PlainTensors | None
    ties: Mapping[str, str]
    skeleton: bytes
    values: Mapping[str, ValueSlot]
    subclasses: Mapping[str, SubclassNode]
    originals: tuple[Tensor, ...]
    faults: tuple[Fault, ...] = ()

    @property
    def published(self) -> dict[str, Tensor]:
        """The tensors with one name for each tied one: those that the skeleton asks for."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in self.ties}

    def bump_versions(self) -> None:
        """Tell autograd that the tensors are written to: backward of what used them before raises an error then."""
        shards = self.locals.values() if self.locals is not self.tensors else ()
        written = [*self.tensors.values(), *shards, *self.originals]
        torch.autograd.graph.increment_version([each for each in written if not each.is_inference()])


def flatten(state: Mapping[str, Any], where: str = "the state dict") -> FlatState:
    """Take a state dict apart. The same state gives the same bytes in every process.

    It may hold tensors, dicts, lists, tuples, numbers (numpy's too), strings, bytes, None, `torch.dtype` and
    `torch.Size`; keys are strings, and in nested dicts also int, float, bool and None. Every mapping comes back as a
    dict, a tensor subclass without `__tensor_flatten__` as a plain tensor. Tensors are taken without their grad.

    Raises one error with all faults: TypeError for anything else, ValueError for a name that occurs twice or is not
    valid text, `Unsupported` for tensors without plain memory of their own.
    """
    flat = flatten_targets(state, where)
    faults = FaultList()
    faults.found += flat.faults
    faults.check()
    return flat


def flatten_targets(into: Mapping[str, Any], where: str = "`into`") -> FlatState:
    """Like `flatten`, with the faults in the result: `check_targets` raises them with its own."""
    walk = _TreeWalk(where)
    root = DictNode((), ())
    try:
        root = walk.root(into)
    except _TooDeepError:
        pass
    except RecursionError:
        walk.faults.add(TypeError, "", f"{where} is nested too deeply for the stack that is left")
    locals_ = locals_of(walk.tensors)
    plain_locals = PlainTensors.of(locals_)
    ties = find_ties(walk.tensors, locals_, plain_locals)
    skeleton = b""
    if not walk.faults.found:
        try:
            skeleton = encode(_tied(root, "", ties) if ties else root)
        except UnicodeEncodeError:
            walk.add_bad_text(root, "")
        except RecursionError:
            walk.faults.add(TypeError, "", f"{where} is nested too deeply for the stack that is left")
    return FlatState(
        walk.tensors,
        locals_,
        plain_locals,
        ties,
        skeleton,
        walk.values,
        walk.subclasses,
        tuple(walk.originals),
        tuple(walk.faults.found),
    )


class _TooDeepError(Exception):
    """The state dict is nested too deeply, or contains itself."""


class _TreeWalk:
    """One walk through a state dict."""

    def __init__(self, where: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.values: dict[str, ValueSlot] = {}
        self.subclasses: dict[str, SubclassNode] = {}
        self.originals: list[Tensor] = []
        self.faults = FaultList()
        self._where = where

    def root(self, state: object) -> DictNode:
        if isinstance(state, Mapping):
            return self._mapping(state, "", 1)
        self.faults.add(TypeError, "", f"{self._where} maps names to tensors; this is a {type(state).__name__}")
        return DictNode((), ())

    def _mapping(self, state: Mapping[Any, Any], prefix: str, depth: int) -> DictNode:
        self._check_depth(prefix, depth)
        keys: list[Key] = []
        items: list[StateNode] = []
        tensors, ordinary = self.tensors, _TENSORS[0]
        for key, value in state.items():
            known: Any = key if type(key) is str else self._key(key, prefix, depth)
            if known is _NO_KEY:
                continue
            name = f"{prefix}{known}"
            if type(value) is Tensor and name not in tensors and (plain(value) or _plain_on_device(value)):
                tensors[name] = value
                node: StateNode | None = ordinary
            else:
                node = self._visit(value, name, depth, state, key)
            if node is not None:
                keys.append(known)
                items.append(node)
        if depth == 1 and self.values and (twice := tensors.keys() & self.values.keys()):
            self._twice(min(twice))
        return DictNode(tuple(keys), tuple(items))

    def _visit(self, value: Any, name: str, depth: int, container: Any, key: Any) -> StateNode | None:
        if isinstance(value, Tensor):
            return self._tensor(value, name, depth)
        if isinstance(value, Mapping):
            return self._mapping(value, f"{name}.", depth + 1)
        if type(value) in (list, tuple):
            return self._sequence(value, name, depth, container, key)
        node = encode_value(value)
        if node is None:
            self.faults.add(TypeError, name, f"{name!r} is a {type(value).__name__}: {_advice(value)}")
        elif name in self.values:
            self._twice(name)
        else:
            self.values[name] = ValueSlot(container, key, node)
        return node

    def _sequence(self, value: Any, name: str, depth: int, container: Any, key: Any) -> StateNode:
        self._check_depth(f"{name}.", depth + 1)
        tensors, values = len(self.tensors), len(self.values)
        found = [self._visit(item, f"{name}.{i}", depth + 1, value, i) for i, item in enumerate(value)]
        items = tuple(node for node in found if node is not None)
        if type(value) is list:
            return ListNode(items)
        node = TupleNode(items)
        if len(self.tensors) == tensors and len(items) == len(value):
            while len(self.values) > values:
                self.values.popitem()
            self.values[name] = ValueSlot(container, key, node)
        return node

    def _tensor(self, value: Tensor, name: str, depth: int) -> StateNode | None:
        with torch._C.DisableTorchFunctionSubclass():
            return self._known_tensor(value, name, depth)

    def _known_tensor(self, value: Tensor, name: str, depth: int) -> StateNode | None:
        node = _TENSORS[_flags(value)]
        if type(value) in _ORDINARY and (alias := _plain_alias(value)) is not None:
            self._add(name, alias)
            return node
        if is_dtensor(value):
            self._add(name, value)
            return node
        try:
            if value.layout is torch.strided and not value.is_nested and (inner := inner_tensors(value)):
                return self._subclass(value, name, depth, *inner)
            self._add(name, self._plain(value, name))
        except (TypeError, Unsupported) as error:
            self.faults.add(type(error), name, str(error).removeprefix("unsupported: "))
            return None
        return node

    def _subclass(
        self, value: Tensor, name: str, depth: int, inner: Mapping[str, Tensor], context: object
    ) -> StateNode | None:
        self._check_depth(f"{name}.", depth + 1)
        kind = type(value)
        items = [self._tensor(each, f"{name}.{attribute}", depth + 1) for attribute, each in inner.items()]
        try:
            encoded = encode_context(context, kind)
        except TypeError as error:
            hint = "its __tensor_flatten__ may give numbers, text, dtypes, enumerations and its package's dataclasses"
            self.faults.add(
                TypeError, name, f"{name!r} is a {kind.__name__} whose context cannot travel: {error}; {hint}"
            )
            return None
        nodes = tuple(node for node in items if node is not None)
        if len(nodes) < len(items):
            return None
        size, stride = tuple(value.size()), tuple(value.stride())
        node = SubclassNode(import_name(kind), tuple(inner), nodes, encoded, size, stride, _flags(value))
        self.subclasses[name] = node
        self.originals.append(value)
        return node

    def _plain(self, value: Tensor, name: str) -> Tensor:
        tensor = plain_tensor(value, repr(name))
        if tensor.is_quantized:
            raise Unsupported(
                f"{name!r} is a quantized tensor", "give its int_repr(), scale and zero point, or dequantize()"
            )
        if tensor is not value:
            self.originals.append(value)
        return tensor.detach()

    def _add(self, name: str, tensor: Tensor) -> None:
        if name in self.tensors:
            self._twice(name)
        self.tensors[name] = tensor

    def _key(self, key: Any, prefix: str, depth: int) -> object:
        """The key as a plain Python value.

        Adds a fault and returns `_NO_KEY` if a dict in the state dict cannot have it.
        """
        if not isinstance(key, Enum) and isinstance(key, str):
            return str.__str__(key)
        if not isinstance(key, Enum) and depth > 1 and isinstance(key, int | float | None):
            found = key if key is None or isinstance(key, bool) else float(key) if isinstance(key, float) else int(key)
            if type(found) is not int or -_WORD <= found < _WORD:
                return found
            self.faults.add(ValueError, prefix, f"{prefix}{key:x}: a key of {self._where} has more than 64 bits")
            return _NO_KEY
        kinds = "strings" if depth == 1 else "strings, int, float, bool or None"
        text = f"{prefix}{key!r}: names in {self._where} are {kinds}, not {type(key).__name__}"
        self.faults.add(TypeError, f"{prefix}{key!r}", text)
        return _NO_KEY

    def _check_depth(self, prefix: str, depth: int) -> None:
        if depth > DEEPEST:
            text = f"{prefix[:80]}...: {self._where} is nested at most {DEEPEST} levels deep"
            self.faults.add(TypeError, "", text)  # without a name: the rest of the state dict is not known
            raise _TooDeepError

    def _twice(self, name: str) -> None:
        self.faults.add(ValueError, name, f"{name!r} is in {self._where} twice")

    def add_bad_text(self, node: StateNode, prefix: str) -> None:
        """Find the names and values that are not valid Unicode."""
        match node:
            case DictNode() | ListNode() | TupleNode() | SubclassNode():
                for name, item in children(node, prefix):
                    if not _is_text(name.removeprefix(prefix)):
                        text = f"{name!r}, a name in {self._where}, is not valid Unicode text"
                        self.faults.add(ValueError, name, text)
                    self.add_bad_text(item, f"{name}.")
            case Plain(str(value)) if not _is_text(value):
                name = prefix.removesuffix(".")
                self.faults.add(ValueError, name, f"{name!r} holds text that is not valid Unicode")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain_alias(value: Tensor) -> Tensor | None:
    """The tensor outside of autograd, if that is plain memory; None for others, such as those of torch.func."""
    try:
        alias = value.detach()
    except RuntimeError:
        return None
    return alias if plain(alias) else None


def _flags(value: Tensor) -> int:
    kind = type(value)
    flags = PARAMETER if kind is nn.Parameter or (kind is not Tensor and isinstance(value, nn.Parameter)) else 0
    return flags | REQUIRES_GRAD if value.requires_grad and value.is_leaf else flags


def _advice(value: object) -> str:
    match value:
        case Enum():
            return "give its name or value"
        case np.ndarray():
            return "give torch.from_numpy() of it"
        case tuple():
            return "give a plain tuple or a dict"
    return "a state dict holds tensors, dicts, lists, tuples, numbers, text, bytes, None, dtypes and sizes"


def _tied(node: StateNode, name: str, ties: Mapping[str, str]) -> Any:
    """The tree in which the tensors of `ties` refer to those that hold their bytes."""
    prefix = f"{name}." if name else ""
    match node:
        case TensorNode(flags) if name in ties:
            return TiedNode(ties[name], flags)
        case DictNode(keys):
            return DictNode(keys, tuple(_tied(item, each, ties) for each, item in children(node, prefix)))
        case ListNode():
            return ListNode(tuple(_tied(item, each, ties) for each, item in children(node, prefix)))
        case TupleNode():
            return TupleNode(tuple(_tied(item, each, ties) for each, item in children(node, prefix)))
        case SubclassNode():
            items = tuple(_tied(item, each, ties) for each, item in children(node, prefix))
            return msgspec.structs.replace(node, items=items)
    return node


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


def cannot_change(name: str, container: object) -> str:
    """Why a value that differs is not replaced."""
    return f"{name!r} of `into` is in a {type(container).__name__}, which cannot be changed; give a dict or a list"


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
