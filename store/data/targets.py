"""`check_targets`: everything that is wrong with the state dict that a version is to be read into, in one error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from holdfast.comms.errors import Mismatch
from holdfast.store.data.faults import FaultList
from holdfast.store.data.manifest import TensorEntry
from holdfast.store.data.read_only import read_only
from holdfast.store.data.rebuild import build_value
from holdfast.store.data.skeleton import Skeleton, StateNode, SubclassNode, encode_node
from holdfast.store.data.tree import FlatState

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Assignment:
    """The values of a version that differ from those of a state dict, each with its container and key there."""

    writes: tuple[tuple[Any, Any, StateNode], ...]

    def apply(self) -> None:
        """Write the values into the dicts and lists of the state dict."""
        for container, key, node in self.writes:
            container[key] = build_value(node)


def check_targets(
    skeleton: Skeleton,
    there: Mapping[str, TensorEntry],
    into: FlatState,
    *,
    strict: bool = True,
    equal: Callable[[str, str], bool] = lambda one, other: False,
    fits: Callable[[TensorEntry, torch.dtype], bool] = lambda stored, dtype: False,
    known: bool = False,
) -> Assignment:
    """Check that a version can be read into a state dict.

    Returns the assignment of the values, which follows that of the tensors. `there` are the tensors of the version by
    the name they are published under. `equal` says of two of them whether they may have equal bytes, so that both may
    be read into one target; `fits` of one whether it can be read into a target of another dtype. With `strict=False`
    the version may have more than `into`. With `known`, tensors of the same names, dtypes, shapes, memory passed this
    check against the same tensors before.

    Raises the faults of `into`, and `Mismatch` for what does not fit, as one error.
    """
    check = _Check(skeleton, there, into)
    check.tensors(fits, known)
    check.ties(equal)
    return check.finish(strict)


def check_writable(into: FlatState) -> None:
    """Raise the faults of `into`, and `Mismatch` for tensors that cannot be filled, as one error."""
    faults = FaultList()
    faults.found += into.faults
    _add_unwritable(into, faults)
    faults.check()


def _add_unwritable(into: FlatState, faults: FaultList) -> None:
    unwritable = read_only(into.locals, into.plain)
    if into.plain is not None and not unwritable:
        return
    for name, local in into.locals.items():
        if not local.is_contiguous() and _is_expanded(local):
            text = f"{name!r} of `into` is an expanded tensor, whose elements share memory; clone it"
            faults.add(Mismatch, name, text)
        elif name in unwritable:
            faults.add(Mismatch, name, f"{name!r} of `into` lies in memory that is mapped read-only; clone it")


class _Check:
    """One comparison of a version with the state dict that it is to be read into."""

    def __init__(self, skeleton: Skeleton, there: Mapping[str, TensorEntry], into: FlatState) -> None:
        self._skeleton, self._there, self._into = skeleton, there, into
        self._faults = FaultList()
        self._faults.found += into.faults
        if not all(fault.name for fault in into.faults):  # `into` is known in part only: nothing else can be said
            self._faults.check()
        self._explained = {fault.name for fault in into.faults}
        """Names that are not to be reported as missing or extra: another fault tells more."""

    def tensors(self, fits: Callable[[TensorEntry, torch.dtype], bool], known: bool) -> None:
        """Compare the tensors; if they are `known` to fit, only what they are put together to."""
        self._compare_subclasses()
        if known:
            return
        names = _DtypeNames()
        for name, target in self._into.tensors.items():
            stored = self._there.get(self._skeleton.source(name))
            if stored is None:
                self._missing(name, "tensor")
                continue
            same = stored.dtype == names[target.dtype] or fits(stored, target.dtype)
            if stored.shape != target.shape or not same:
                self._add(
                    name,
                    f"the version has {name} {stored.dtype}{list(stored.shape)}, `into` has {name} "
                    f"{names[target.dtype]}{list(target.shape)}",
                )
        _add_unwritable(self._into, self._faults)

    def ties(self, equal: Callable[[str, str], bool]) -> None:
        """Tensors of `into` that share memory may get what `equal` says."""
        for name, other in self._into.ties.items():
            sources = self._skeleton.source(other), self._skeleton.source(name)
            if sources[0] != sources[1] and all(each in self._there for each in sources) and not equal(*sources):
                self._add(
                    name,
                    f"{other!r} and {name!r} of `into` share memory, and are to be filled with different bytes; clone "
                    "one of them, or tie both sides alike",
                )

    def finish(self, strict: bool) -> Assignment:
        """Compare the values, and raise all faults, if any."""
        writes = self._values()
        if strict:
            self._report_extra()
        self._faults.check()
        return Assignment(writes)

    def _values(self) -> tuple[tuple[Any, Any, StateNode], ...]:
        writes = []
        for name, slot in self._into.values.items():
            node = self._skeleton.values.get(name)
            if node is None:
                self._missing(name, _kind(slot.node))
            elif encode_node(node) != encode_node(slot.node):
                if isinstance(slot.container, MutableMapping | list):
                    writes.append((slot.container, slot.key, node))
                else:
                    kind = type(slot.container).__name__
                    self._add(
                        name, f"{name!r} of `into` is in a {kind}, which cannot be changed; give a dict or a list"
                    )
        return tuple(writes)

    def _report_extra(self) -> None:
        wanted = self._into.tensors.keys() | self._into.values.keys() | self._explained
        ties = (name for name, source in self._skeleton.ties.items() if source in self._there)
        hint = "; give strict=False to read only some"
        for name in sorted({*self._there, *ties, *self._skeleton.values} - wanted):
            if not self._is_explained(name):
                self._add(name, f"the version also has {name!r}, which was not asked for{hint}")
                hint = ""

    def _compare_subclasses(self) -> None:
        ours, theirs = self._into.subclasses, self._skeleton.subclasses
        tensors = self._into.tensors
        for name in {**ours, **theirs}:
            mine, stored = ours.get(name), theirs.get(name)
            if mine and stored and _constitution(mine) != _constitution(stored):
                self._differs(name, _title(stored), _title(mine))
            elif mine and not stored and self._skeleton.source(name) in self._there:
                self._differs(name, "plain tensor", _title(mine))
            elif stored and not mine and name in tensors:
                self._differs(name, _title(stored), "plain tensor")

    def _missing(self, name: str, kind: str) -> None:
        skeleton = self._skeleton
        if self._is_explained(name):
            return
        if name in skeleton.values:
            self._differs(name, _kind(skeleton.values[name]), kind)
        elif name in skeleton.tensors or name in skeleton.ties:
            self._differs(name, "tensor", kind)
        else:
            self._add(name, f"the version has no {name!r}")

    def _differs(self, name: str, stored: str, mine: str) -> None:
        self._add(name, f"{name!r} is a {stored} in the version, a {mine} in `into`")
        self._explained.add(name)

    def _is_explained(self, name: str) -> bool:
        """Whether a fault of this name, or of a tensor or container that it belongs to, is known."""
        return bool(self._explained) and any(name == each or name.startswith(f"{each}.") for each in self._explained)

    def _add(self, name: str, text: str) -> None:
        self._faults.add(Mismatch, name, text)


class _DtypeNames(dict[torch.dtype, str]):
    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


def _is_expanded(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _constitution(node: SubclassNode) -> object:
    return node.import_name, node.attributes, node.size, encode_node(node.context)


def _title(node: SubclassNode) -> str:
    context = msgspec.json.encode(msgspec.to_builtins(node.context)).decode()
    return f"{node.import_name.partition(':')[2]}{list(node.size)} of {context}"


def _kind(node: StateNode) -> str:
    return type(build_value(node)).__name__
