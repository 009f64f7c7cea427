"""Finds which boxes of which tensors make up a wanted tensor, by the rules of a layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from holdfast.ft.state.boxes import Box, whole
from holdfast.store.reshard.name_patterns import fill, match
from holdfast.store.reshard.name_rules import Component, NameRule

Shape = tuple[int, ...]


class NameRegion(NamedTuple):
    """A box of a wanted tensor, and the box of the source `name` that goes there."""

    wanted: Box
    name: str
    source: Box


class _Slot(NamedTuple):
    """Where a component lies: from `start` on, for `length`, along the dimension of its rule, in the source `name`."""

    name: str
    start: int
    length: int


def both_ways(tied: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The other name of each tied one."""
    return {name: other for pair in tied for name, other in (pair, pair[::-1])}


class Resolver:
    """Finds the regions of wanted tensors among those `there`; `faults` says what is wrong, in words."""

    def __init__(
        self,
        rules: Sequence[NameRule],
        tied: Iterable[tuple[str, str]],
        rank: int,
        size: int,
        wanted: Mapping[str, Shape],
        there: Mapping[str, Shape],
    ) -> None:
        self.faults: list[str] = []
        self._rules, self._tied, self._rank, self._size = rules, both_ways(tied), rank, size
        self._wanted, self._there = wanted, there

    def regions(self, name: str) -> list[NameRegion]:
        """The regions that make up a wanted tensor; none, and a fault, if that is not possible."""
        missing: dict[str, None] = {}
        for rule in self._rules:
            words = match(rule.joined, name)
            if words is None:
                continue
            names = [fill(component.name, words) for component in rule.components]
            found = [source for each in names if (source := self._source(each)) is not None]
            if len(found) == len(names):
                return self._join(name, rule, [self._all_of(each, rule.dim) for each in found])
            fused = self._source(name)
            if fused is not None and rule.sliced and self._size > 1:
                return self._join(name, rule, self._slots(rule, names, fused))
            missing |= {each: None for each in names if self._source(each) is None}
        for rule in self._rules:
            for number, component in enumerate(rule.components):
                words = match(component.name, name)
                fused = None if words is None else self._source(fill(rule.joined, words))
                if words is not None and fused is not None:
                    slots = self._slots(rule, [fill(each.name, words) for each in rule.components], fused)
                    return self._put(name, rule.dim, slots[number : number + 1])
        source = self._source(name)
        if source is not None:
            return self._put(name, 0, [self._all_of(source, 0)])
        made = f", nor {', '.join(map(repr, missing))} to make it of" * bool(missing)
        return self._fault(f"there is no {name!r}{made}")

    def _source(self, name: str) -> str | None:
        """The name of a tensor that is there, or of one that is tied to it."""
        other = self._tied.get(name)
        return name if name in self._there else other if other in self._there else None

    def _all_of(self, source: str, dim: int) -> _Slot:
        shape = self._there[source]
        return _Slot(source, 0, shape[dim] if dim < len(shape) else 1)

    def _slots(self, rule: NameRule, names: Sequence[str], fused: str) -> list[_Slot]:
        """Where the components called `names` lie in a joined tensor; none, and a fault, if that is not known."""
        total = self._all_of(fused, rule.dim).length
        lengths = [
            self._length(component, name, rule.dim) for component, name in zip(rule.components, names, strict=True)
        ]
        unknown = [name for name, length in zip(names, lengths, strict=True) if length is None]
        known = sum(length for length in lengths if length is not None)
        if len(unknown) > 1:
            self._fault(
                f"nothing says how long {' and '.join(map(repr, unknown))} are in {fused!r}: give their lengths"
            )
            return []
        lasts = [total - known if length is None else length for length in lengths]
        if min(lasts) < 0 or (sum(lasts) > total if rule.padded else sum(lasts) != total):
            self._fault(f"{fused!r} is {total} long along dimension {rule.dim}, its components are {lasts}")
            return []
        ends = list(itertools.accumulate(lasts, initial=0))
        return [_Slot(fused, start, length) for start, length in zip(ends, lasts, strict=False)]

    def _length(self, component: Component, name: str, dim: int) -> int | None:
        shape = self._wanted.get(name, ())
        return component.length if component.length is not None else shape[dim] if dim < len(shape) else None

    def _join(self, name: str, rule: NameRule, slots: Sequence[_Slot]) -> list[NameRegion]:
        """The regions of a wanted tensor that consists of these slots, or of this rank's slice of each."""
        if not slots:
            return []
        if rule.padded:
            return self._pad(name, rule, slots[0])
        for component, slot in zip(rule.components, slots, strict=True):
            if component.length not in (None, slot.length):
                return self._fault(f"{slot.name!r} is {slot.length} long, the layout says {component.length}")
        if not rule.sliced or self._size == 1:
            return self._put(name, rule.dim, slots)
        mine = []
        for component, slot in zip(rule.components, slots, strict=True):
            slices = self._size // component.copies
            if slot.length % slices:
                return self._fault(f"{slot.name!r}, {slot.length} long along {rule.dim}, is not divided by {slices}")
            length = slot.length // slices
            mine.append(_Slot(slot.name, slot.start + self._rank // component.copies * length, length))
        return self._put(name, rule.dim, mine)

    def _pad(self, name: str, rule: NameRule, slot: _Slot) -> list[NameRegion]:
        """The region of a wanted tensor that, over all ranks, is as long as its only component or longer."""
        length = slot.length if rule.components[0].length is None else rule.components[0].length
        room = self._wanted[name][rule.dim] if rule.dim < len(self._wanted[name]) else 1
        ranks, rank = (self._size, self._rank) if rule.sliced else (1, 0)
        if not length <= min(slot.length, room * ranks):
            return self._fault(
                f"{name!r} has room for {room * ranks} along dimension {rule.dim}, in the version {slot.name!r} has "
                f"{slot.length}; the layout says {length}"
            )
        begin, end = min(rank * room, length), min((rank + 1) * room, length)
        return self._put(name, rule.dim, [_Slot(slot.name, begin, end - begin)], padded=True)

    def _put(self, name: str, dim: int, slots: Sequence[_Slot], *, padded: bool = False) -> list[NameRegion]:
        """The regions of a wanted tensor that is filled by slots, one after the other along `dim`."""
        shape, at, regions = self._wanted[name], 0, []
        for source, start, length in slots:
            there = self._there[source]
            if _except(there, dim) != _except(shape, dim):
                return self._fault(f"{name!r} has shape {shape} here, in the version {source!r} has {tuple(there)}")
            regions.append(NameRegion(_range(shape, dim, at, length), source, _range(there, dim, start, length)))
            at += length
        if slots and shape[dim : dim + 1] != (at,) and shape and not padded:
            have = ", ".join(dict.fromkeys(f"{source!r} has {tuple(self._there[source])}" for source, _, _ in slots))
            return self._fault(f"{name!r} has shape {shape} here, in the version {have}")
        return regions

    def _fault(self, said: str) -> list[NameRegion]:
        self.faults.append(said)
        return []


def _except(shape: Shape, dim: int) -> tuple[int, Shape]:
    """The number of dimensions, and the sizes of all but one."""
    return len(shape), (*shape[:dim], *shape[dim + 1 :])


def _range(shape: Shape, dim: int, start: int, length: int) -> Box:
    """The box of all but one dimension, and of a range along that one."""
    box = whole(shape)
    return (*box[:dim], (start, start + length), *box[dim + 1 :]) if box else box
