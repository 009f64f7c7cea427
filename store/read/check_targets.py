"""`check_targets`: everything that is wrong with the state dict that a version is to be read into, in one error.

It finds tensors in memory that this process cannot write, too: a copy there would end the process, not raise an error.
"""

from __future__ import annotations

import errno
import fcntl
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from holdfast.comms.errors import Mismatch
from holdfast.comms.tensors.memory import PlainTensors
from holdfast.comms.tensors.overlap import span
from holdfast.store.data.manifest import TensorEntry
from holdfast.store.data.skeleton import Skeleton, StateNode, SubclassNode, build_value, encode_node
from holdfast.store.data.tree import FaultList, FlatState

Span = tuple[int, int]
MAPS = Path("/proc/self/maps")
MOST_KNOWN = 1 << 17
_NOT_WRITABLE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) .[^w]", re.MULTILINE)

_QUERY = struct.Struct("9Q4I2Q")
"""`struct procmap_query` of linux/fs.h: size, flags, an address; first byte, end and flags of a mapping; ..."""
_PROCMAP_QUERY = 3 << 30 | _QUERY.size << 16 | ord("f") << 8 | 17  # since Linux 6.11
_WRITABLE, _COVERING_OR_NEXT = 0x02, 0x10

_writable: dict[int, int] = {0: 0}
"""Addresses, and how many bytes from there were writable when they were looked up. The memory map of a process takes a
millisecond to read, and readers fill the same tensors again and again."""


def read_only(tensors: Mapping[str, torch.Tensor], plain: PlainTensors | None = None) -> set[str]:
    """The names of tensors on the CPU with memory that is mapped without the right to write.

    `plain` describes them, if all are plain.
    """
    known = _writable.get
    spans = _spans(tensors) if plain is None else plain.located
    fresh = {name: (first, first + nbytes) for name, first, nbytes in spans if known(first, -1) < nbytes}
    if not fresh:
        return set()
    ranges = _asked(fresh.values())
    if ranges is None:
        ranges = read_only_ranges()
    starts = [start for start, _ in ranges]
    found = {name for name, where in fresh.items() if _meets(where, starts, ranges)}
    if len(_writable) + len(fresh) > MOST_KNOWN:
        _writable.clear()
    _writable.update((first, end - first) for name, (first, end) in fresh.items() if name not in found)
    return found


def _spans(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, int, int]]:
    """Name, address and size of each tensor on the CPU."""
    for name, tensor in tensors.items():
        if tensor.is_cpu:
            first = tensor.data_ptr()
            yield name, first, tensor.numel() * tensor.itemsize if tensor.is_contiguous() else span(tensor)[1] - first


def read_only_ranges() -> list[Span]:
    """The addresses that are mapped without the right to write, ascending."""
    return [(int(start, 16), int(end, 16)) for start, end in _NOT_WRITABLE.findall(MAPS.read_bytes())]


def _asked(spans: Iterable[Span]) -> list[Span] | None:
    """Those of `read_only_ranges` that spans lie in, ascending; None if the kernel answers no questions about them."""
    found: list[Span] = []
    at = 0
    with MAPS.open("rb", buffering=0) as maps:
        for first, end in sorted(spans):
            at = max(at, first)
            while at < end:
                answer = bytearray(_QUERY.pack(_QUERY.size, _COVERING_OR_NEXT, at, *[0] * 12))
                try:
                    fcntl.ioctl(maps, _PROCMAP_QUERY, answer)
                except OSError as error:
                    if error.errno != errno.ENOENT:
                        return None
                    return found  # nothing is mapped from there on
                start, stop, flags = _QUERY.unpack(answer)[3:6]
                if not flags & _WRITABLE and start < end:
                    found.append((start, stop))
                at = stop
    return found


def _meets(where: Span, starts: list[int], ranges: list[Span]) -> bool:
    at = bisect_right(starts, where[1] - 1) - 1
    return at >= 0 and ranges[at][1] > where[0]


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
