"""`Targets`: the tensors and values of a reader's state dict, checked against a version and filled from it.

`check_targets` finds everything that is wrong with the state dict, in one error; tensors in memory that this process
cannot write, too: a copy there would end the process, not raise an error. For each tensor it is arranged how it is
filled: in place or by way of a copy, and from what of a version.
"""

from __future__ import annotations

import errno
import fcntl
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch

from holdfast.comms.errors import Mismatch
from holdfast.comms.tensors.memory import PlainTensors
from holdfast.comms.tensors.overlap import span
from holdfast.ft.state.aliases import check_agreement, groups_sharing_memory
from holdfast.store.data.cuda_copies import CopiesToDevices, on_device
from holdfast.store.data.digests import copy_elements, is_dense
from holdfast.store.data.manifest import TensorEntry, quoted
from holdfast.store.data.state_dicts import FaultList, FlatState, Skeleton, build_value, cannot_change
from holdfast.store.data.state_nodes import StateNode, SubclassNode, encode_node
from holdfast.store.read.read_plan import ReadPlan, has_rows
from holdfast.store.read.version_reader import VersionReader
from holdfast.store.reshard.name_map import Layout
from holdfast.store.reshard.placements import PlacedTensor, place
from holdfast.store.reshard.plan import BoxTarget

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


Write = tuple[Any, Any, StateNode]
"""A value of a version that differs from that of a state dict: its container there, its key, and the value's node."""


def check_targets(
    skeleton: Skeleton,
    there: Mapping[str, TensorEntry],
    into: FlatState,
    *,
    strict: bool = True,
    equal: Callable[[str, str], bool] = lambda one, other: False,
    fits: Callable[[TensorEntry, torch.dtype], bool] = lambda stored, dtype: False,
    known: bool = False,
) -> list[Write]:
    """Check that a version can be read into a state dict.

    Returns the values to assign after the tensors. `there` are the tensors of the version by
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


def assign(values: Sequence[Write]) -> None:
    """Write values of a version into the dicts and lists of a state dict."""
    for container, key, node in values:
        container[key] = build_value(node)


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

    def finish(self, strict: bool) -> list[Write]:
        """Compare the values, and raise all faults, if any."""
        writes = self._values()
        if strict:
            self._report_extra()
        self._faults.check()
        return writes

    def _values(self) -> list[Write]:
        writes: list[Write] = []
        for name, slot in self._into.values.items():
            node = self._skeleton.values.get(name)
            if node is None:
                self._missing(name, _kind(slot.node))
            elif encode_node(node) != encode_node(slot.node):
                if slot.can_change:
                    writes.append((slot.container, slot.key, node))
                else:
                    self._add(name, cannot_change(name, slot.container))
        return writes

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


@dataclass(slots=True, eq=False)
class Arrangement:
    """How targets are filled; made once for targets of the same names and memory.

    The tensors named in `direct` are filled in place, those in `staged` by way of a copy. Those of each group in
    `doubtful` share memory: they must turn out to get the same bytes there. `targets` are the boxes to read, `names`
    all tensors that are filled. If all are filled in place, `plan` is that of the last read. If it is `whole`, that
    plan fills dense tensors with whole ones, copies of the targets too, and there are no boxes.
    """

    direct: tuple[str, ...]
    staged: tuple[str, ...]
    doubtful: tuple[tuple[str, ...], ...]
    targets: Mapping[str, tuple[BoxTarget, ...]]
    names: tuple[str, ...]
    plan: ReadPlan | None = None
    whole: bool = False


def memory_key(flat: FlatState) -> tuple[object, ...] | None:
    """A key that is equal for state dicts of equal names, placements and memory. None for some DTensors."""
    sharded = flat.locals is not flat.tensors
    if flat.plain is not None:
        placed = [place(name, tensor) for name, tensor in flat.tensors.items()] if sharded else []
        return flat.plain, *((each.shape, each.blocks) for each in placed)
    if sharded:
        return None
    found: list[object] = []
    for name, tensor in flat.tensors.items():
        found += (
            name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_conj(),
            tensor.is_neg(),
        )  # fmt: skip
    return tuple(found)


CACHED_ARRANGEMENTS = 8


Arrangements = Callable[[Hashable], list[Arrangement]]
"""A list with the arrangement for targets with this key, once that is made."""


def arrangements() -> Arrangements:
    """The last arrangements of a store, by key."""
    return lru_cache(CACHED_ARRANGEMENTS)(lambda key: [])


class Targets:
    """Fills a reader's tensors from a version.

    It fills them in place, or fills copies and puts those in their places at the end. `mixed` are the names of tensors
    that hold a mixture if `fill` fails.
    """

    def __init__(self, flat: FlatState, atomic: bool, cache: Arrangements) -> None:
        self._flat, self._atomic, self._cache = flat, atomic, cache
        self.mixed: tuple[str, ...] = ()

    def fill(self, reader: VersionReader, strict: bool, layout: Layout | None) -> None:
        """Fill all tensors, then replace the values.

        Raises, before anything is changed, the faults of the state dict, `Mismatch` for what does not fit, or if two
        tensors that share memory get different bytes there.
        """
        skeleton = reader.skeleton
        key = self._key(reader, skeleton, strict, layout)
        made: list[Arrangement] = [] if key is None else self._cache(key)
        if layout is None:
            values = check_targets(
                skeleton,
                reader.tensors,
                self._flat,
                strict=strict,
                equal=reader.may_be_equal,
                fits=reader.fits,
                known=bool(made),
            )
        else:
            check_writable(self._flat)
            values = []
        if not made:
            made.append(self._arrange(reader, skeleton, strict, layout))
        arrangement = made[0]
        locals_ = self._flat.locals
        copied = arrangement.staged if not self._atomic else arrangement.names
        into = {name: locals_[name] for name in arrangement.names} | {name: _copy_of(locals_[name]) for name in copied}
        reader.prepare(arrangement.targets)
        self._check_doubtful(reader, arrangement, locals_, into)
        self.mixed = tuple(dict.fromkeys((*self.mixed, *(() if self._atomic else arrangement.direct))))
        done = {name for group in arrangement.doubtful for name in group}
        if not self._atomic:
            self._flat.bump_versions()  # also if the read fails half-way
        self._read(reader, arrangement, into, [name for name in into if name not in done])
        if copied:
            self.mixed = tuple(dict.fromkeys((*self.mixed, *copied)))
            _put([(into[name], locals_[name]) for name in copied])
        if self._atomic:
            self._flat.bump_versions()
        assign(values)
        self.mixed = ()

    def _check_doubtful(
        self,
        reader: VersionReader,
        arrangement: Arrangement,
        locals_: Mapping[str, torch.Tensor],
        into: Mapping[str, torch.Tensor],
    ) -> None:
        """Read the tensors that share memory into copies, and check that they agree."""
        if not arrangement.doubtful:
            return
        self._read(reader, arrangement, into, [name for group in arrangement.doubtful for name in group])
        for group in arrangement.doubtful:
            check_agreement({name: locals_[name] for name in group}, {name: into[name] for name in group}, "`into`")

    def _read(
        self, reader: VersionReader, arrangement: Arrangement, into: Mapping[str, torch.Tensor], names: Sequence[str]
    ) -> None:
        in_place = arrangement.whole or not (self._atomic or arrangement.staged)
        if in_place and arrangement.plan is not None:
            reader.carry_out(arrangement.plan, into, away=self._flat.plain is None)
            return
        wanted = [target for name in names for target in arrangement.targets[name]]
        plan = reader.fill(wanted, {name: into[name] for name in names})
        if in_place:
            arrangement.plan = plan

    def _key(
        self, reader: VersionReader, skeleton: Skeleton, strict: bool, layout: Layout | None
    ) -> tuple[object, ...] | None:
        """A key of the arrangement: targets that have one, by this key, fit the version."""
        memory = memory_key(self._flat)
        if memory is None:
            return None
        same = self._same(reader, layout)
        return memory, tuple(skeleton.ties.items()), same, strict, layout, reader.layouts, type(reader)

    def _same(self, reader: VersionReader, layout: Layout | None) -> frozenset[str]:
        """The names of tied tensors that get the same bytes as their ties."""
        ties = self._flat.ties if layout is None else {}
        return frozenset(name for name, other in ties.items() if reader.are_equal(name, other))

    def _arrange(self, reader: VersionReader, skeleton: Skeleton, strict: bool, layout: Layout | None) -> Arrangement:
        flat, plain, source = self._flat, self._flat.plain, skeleton.source
        apart = plain is not None and flat.locals is flat.tensors and not flat.ties and not plain.share_memory
        if layout is None and plain is not None and apart:
            sources = tuple(map(source, plain.names)) if skeleton.ties else plain.names
            if (plan := reader.plan_whole(sources)) is not None:  # the usual case, without a loop
                return Arrangement(plain.names, (), (), {}, plain.names, plan, whole=True)
        placed = {name: place(name, tensor) for name, tensor in flat.tensors.items()}
        same = self._same(reader, layout)
        targets: dict[str, list[BoxTarget]] = {name: [] for name in placed if name not in same}
        if layout is None:
            for name, boxes in targets.items():
                boxes += [BoxTarget(name, source(name), *block) for block in placed[name].blocks]
        else:
            for target in _mapped(placed, reader, strict, layout):
                targets[target.into].append(target)
        doubtful, indirect = self._find_indirect(list(targets), reader.fills_devices)
        return Arrangement(
            tuple(name for name in targets if name not in indirect),
            tuple(name for name in targets if name in indirect),
            doubtful,
            {name: tuple(each) for name, each in targets.items()},
            tuple(targets),
        )

    def _find_indirect(
        self, names: Sequence[str], fills_devices: bool
    ) -> tuple[tuple[tuple[str, ...], ...], frozenset[str]]:
        """The groups of names that share memory, and the names that are filled by way of a copy.

        `fills_devices` says whether dense tensors on devices are filled in place.
        """
        if self._flat.plain is not None and not self._flat.plain.share_memory:
            return (), frozenset()
        locals_ = {name: self._flat.locals[name] for name in names}
        doubtful = tuple(map(tuple, groups_sharing_memory(locals_)))
        found = {name for group in doubtful for name in group}
        for name, each in locals_.items():
            if not (fills_devices and is_dense(each) if on_device(each) else has_rows(each)):
                found.add(name)
        return doubtful, frozenset(found)


def _mapped(placed: Mapping[str, PlacedTensor], reader: VersionReader, strict: bool, layout: Layout) -> list[BoxTarget]:
    """The boxes that a layout maps to the targets. Raises `Mismatch`, listing all faults."""
    shapes = {name: entry.shape for name, entry in reader.tensors.items()}
    wanted = layout.targets(placed, shapes)
    if strict:
        layout.check({name: each.shape for name, each in placed.items()}, shapes)
    other = [each.into for each in wanted if not reader.fits(reader.tensors[each.name], placed[each.into].dtype)]
    if other:
        raise Mismatch(f"the version has other dtypes than `into` for {quoted(sorted(set(other)))}")
    return wanted


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor on the CPU of the shape and dtype of another, with any elements.

    It is pinned for one on a CUDA device: what is read goes from there to the device without another copy.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _put(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each first tensor, on the CPU, into the second."""
    CopiesToDevices([pair for pair in pairs if on_device(pair[1])]).wait()
    for source, target in pairs:
        if not on_device(target):
            with torch.inference_mode(target.is_inference()):
                copy_elements(target, source)
