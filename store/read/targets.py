"""`Targets`: the tensors and values of a reader's state dict, checked against a version and filled from it.

For each tensor it is arranged how: in place or by way of a copy, and from what of a version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.comms.errors import Mismatch
from holdfast.comms.tensors.overlap import check_agreement, groups_sharing_memory
from holdfast.ft.state.boxes import whole
from holdfast.store.data.cuda_copies import CopiesToDevices, on_device
from holdfast.store.data.digests import copy_elements, is_dense
from holdfast.store.data.manifest import quoted
from holdfast.store.data.skeleton import Skeleton
from holdfast.store.data.tree import FlatState
from holdfast.store.read.check_targets import Assignment, check_targets, check_writable
from holdfast.store.read.read_plan import has_rows
from holdfast.store.read.version_reader import VersionReader
from holdfast.store.recent import Recent
from holdfast.store.reshard.name_map import Layout
from holdfast.store.reshard.placements import PlacedTensor, place
from holdfast.store.reshard.plan import BoxTarget


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """How targets are filled; made once for targets of the same names and memory. Compared by identity.

    The tensors named in `direct` are filled in place, those in `staged` by way of a copy. Those of each group in
    `doubtful` share memory: they must turn out to get the same bytes there. `targets` are the boxes to read, `names`
    all tensors that are filled. If each of these is dense and gets a whole tensor, those are `sources`, in this order.
    """

    direct: tuple[str, ...]
    staged: tuple[str, ...]
    doubtful: tuple[tuple[str, ...], ...]
    targets: Mapping[str, tuple[BoxTarget, ...]]
    names: tuple[str, ...]
    sources: tuple[str, ...] | None = None


def placed_tensors(flat: FlatState) -> dict[str, PlacedTensor]:
    """The blocks of each tensor that lie here. Raises the errors of `place`."""
    return {name: place(name, tensor) for name, tensor in flat.tensors.items()}


def arrange(
    flat: FlatState,
    placed: Mapping[str, PlacedTensor],
    wanted: Sequence[BoxTarget],
    same: frozenset[str],
    fills_devices: bool,
) -> Arrangement:
    """Arrange to fill tensors with `wanted`. `same` are names of tied tensors that get the same bytes as their ties.

    `fills_devices` says whether dense tensors on devices are filled in place.
    """
    names = tuple(name for name in placed if name not in same)
    doubtful: tuple[tuple[str, ...], ...] = ()
    staged: list[str] = []
    if flat.plain is None or flat.plain.share_memory:
        locals_ = {name: flat.locals[name] for name in names}
        doubtful = tuple(map(tuple, groups_sharing_memory(locals_)))
        in_doubt = {name for group in doubtful for name in group}
        direct = {
            name
            for name, each in locals_.items()
            if (fills_devices and is_dense(each) if on_device(each) else has_rows(each))
        }
        staged = [name for name in names if name in in_doubt or name not in direct]
    indirect = set(staged)
    targets: dict[str, list[BoxTarget]] = {name: [] for name in names}
    for target in wanted:
        if target.into in targets:
            targets[target.into].append(target)
    return Arrangement(
        tuple(name for name in names if name not in indirect),
        tuple(staged),
        doubtful,
        {name: tuple(each) for name, each in targets.items()},
        names,
    )


def arrange_whole(flat: FlatState, skeleton: Skeleton) -> Arrangement | None:
    """Arrange to fill dense tensors of the same names and shapes as in the version.

    The usual case, without a loop. None if there are others, or they share memory.
    """
    if flat.plain is None or flat.locals is not flat.tensors or flat.ties or flat.plain.share_memory:
        return None
    names = flat.plain.names
    sources = tuple(map(skeleton.source, names)) if skeleton.ties else names
    shapes = {name: tensor.shape for name, tensor in flat.tensors.items()}
    return Arrangement(names, (), (), _WholeTargets(shapes, skeleton), names, sources)


class _WholeTargets(Mapping[str, tuple[BoxTarget, ...]]):
    """The targets of whole tensors, made when they are asked for."""

    def __init__(self, shapes: Mapping[str, torch.Size], skeleton: Skeleton) -> None:
        self._shapes, self._skeleton = shapes, skeleton

    def __getitem__(self, name: str) -> tuple[BoxTarget, ...]:
        box = whole(self._shapes[name])
        return (BoxTarget(name, self._skeleton.source(name), box, box),)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def plain_targets(placed: Mapping[str, PlacedTensor], skeleton: Skeleton) -> list[BoxTarget]:
    """The boxes of tensors that have the same names in the version."""
    source = skeleton.source
    return [BoxTarget(name, source(name), *block) for name, each in placed.items() for block in each.blocks]


def memory_key(flat: FlatState) -> tuple[object, ...] | None:
    """A key that is equal for state dicts of equal names, placements and memory. None for some DTensors."""
    sharded = flat.locals is not flat.tensors
    if flat.plain is not None:
        placed = placed_tensors(flat) if sharded else {}
        return flat.plain, *((each.shape, each.blocks) for each in placed.values())
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
NO_VALUES = Assignment(())


class Targets:
    """Fills a reader's tensors from a version.

    It fills them in place, or fills copies and puts those in their places at the end. `mixed` are the names of tensors
    that hold a mixture if `fill` fails.
    """

    def __init__(self, flat: FlatState, atomic: bool, cache: Recent[Arrangement]) -> None:
        self._flat, self._atomic, self._cache = flat, atomic, cache
        self.mixed: tuple[str, ...] = ()

    def fill(self, reader: VersionReader, strict: bool, layout: Layout | None) -> None:
        """Fill all tensors, then replace the values.

        Raises, before anything is changed, the faults of the state dict, `Mismatch` for what does not fit, or if two
        tensors that share memory get different bytes there.
        """
        skeleton = reader.skeleton
        key = self._key(reader, skeleton, strict, layout)
        known = None if key is None else self._cache.get(key)
        if layout is None:
            values = check_targets(
                skeleton,
                reader.tensors,
                self._flat,
                strict=strict,
                equal=reader.may_be_equal,
                fits=reader.fits,
                known=known is not None,
            )
        else:
            check_writable(self._flat)
            values = NO_VALUES
        arrangement = known or self._arrange(reader, skeleton, strict, layout)
        if key is not None and known is None:
            self._cache.put(key, arrangement)
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
        values.apply()
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
        whole = len(names) == len(arrangement.names) and not self._atomic and not arrangement.staged
        if whole and arrangement.sources is not None and reader.fill_whole(arrangement.sources, into, arrangement):
            return
        reader.fill(
            [target for name in names for target in arrangement.targets[name]],
            {name: into[name] for name in names},
            arrangement if whole else None,
        )

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
        if layout is None and (usual := arrange_whole(self._flat, skeleton)) is not None:
            return usual
        placed = placed_tensors(self._flat)
        wanted = plain_targets(placed, skeleton) if layout is None else _mapped(placed, reader, strict, layout)
        return arrange(self._flat, placed, wanted, self._same(reader, layout), reader.fills_devices)


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
