"""The plan of a read: which boxes of which sources are copied to which boxes of the local tensors."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.comms.errors import Mismatch
from holdfast.ft.state.boxes import Box, common, count_of, cover, moved, within

SPELT_OUT = 20
"""How many faults an error names."""
FEW = 8
"""With more sources of a tensor than this, arrays find the overlapping ones faster than a loop."""


class BoxTarget(NamedTuple):
    """A wanted `box` of the tensor `name` of the sources; it goes to box `local` of the local tensor `into`."""

    into: str
    name: str
    box: Box
    local: Box


class PartBox(NamedTuple):
    """A part that has `box` of a tensor."""

    part: int
    box: Box


class BoxCopy(NamedTuple):
    """One copy: box `take` of tensor `name` in part `part`, to box `put` of local tensor `into`.

    `source` is the box of the tensor that the part has; `take` is counted from its first corner.
    """

    into: str
    name: str
    part: int
    source: Box
    take: Box
    put: Box


def plan(wanted: Iterable[BoxTarget], sources: Mapping[str, Sequence[PartBox]], reader: int = 0) -> tuple[BoxCopy, ...]:
    """Plan the copies that fill each target exactly once, from as few boxes as possible, spread over the parts.

    Of equal loads, readers with different numbers choose different parts. Raises `Mismatch` with all names that the
    sources do not have and all boxes that none of them has.
    """
    planner = _Planner(sources, reader)
    copies = [copy for target in wanted for copy in planner.copies(target)]
    if planner.faults:
        raise Mismatch(f"the sources do not have all that is wanted: {listed(planner.faults)}")
    return tuple(copies)


class _Planner:
    def __init__(self, sources: Mapping[str, Sequence[PartBox]], reader: int) -> None:
        self.faults: dict[str, None] = {}
        self._sources = sources
        self._indexes: dict[tuple[PartBox, ...], _BoxIndex] = {}
        self._of_name: dict[str, _BoxIndex] = {}
        self._loads: defaultdict[int, int] = defaultdict(int)
        self._parts = 1 + max((each.part for found in sources.values() for each in found), default=0)
        self._reader = reader

    def copies(self, target: BoxTarget) -> list[BoxCopy]:
        index = self._index(target)
        if index is None or not count_of(target.box):
            return []
        overlaps, nowhere = index.overlaps(target.box)
        if nowhere:
            self._fault(f"no part has {', '.join(map(spelt, nowhere))} of {target.name!r}")
        found = []
        for overlap in overlaps:
            part = overlap.parts[0] if len(overlap.parts) == 1 else self._least_loaded(overlap.parts)
            self._loads[part] += overlap.elements
            put = moved(overlap.box, target.box, target.local)
            found.append(BoxCopy(target.into, target.name, part, overlap.source, overlap.take, put))
        return found

    def _index(self, target: BoxTarget) -> _BoxIndex | None:
        found = self._of_name.get(target.name)
        if found is None:
            sources = tuple(self._sources.get(target.name, ()))
            if not sources:
                self._fault(f"there is no {target.name!r}")
                return None
            if sources not in self._indexes:  # the tensors of all layers lie alike
                self._indexes[sources] = _BoxIndex(sources)
            found = self._of_name[target.name] = self._indexes[sources]
        if found.dims != {len(target.box)}:
            dims = ", ".join(map(str, sorted(found.dims)))
            self._fault(f"{target.name!r} has {dims} dimensions, not {len(target.box)}")
            return None
        return found

    def _fault(self, said: str) -> None:
        self.faults[said] = None

    def _least_loaded(self, parts: Sequence[int]) -> int:
        return min(parts, key=lambda part: (self._loads[part], (part - self._reader) % self._parts))


class _Overlap(NamedTuple):
    """A box of a tensor that is read from `source`, the box of one of `parts`.

    `take` is counted from the corner of `source`.
    """

    box: Box
    source: Box
    take: Box
    parts: tuple[int, ...]
    elements: int


class _BoxIndex:
    """The sources of one tensor, or of several that lie alike: boxes, ascending, each with the parts that have it."""

    def __init__(self, sources: Sequence[PartBox]) -> None:
        parts: defaultdict[Box, list[int]] = defaultdict(list)
        for part, box in sources:
            parts[box].append(part)
        self.dims = {len(box) for box in parts}
        self._parts = {box: tuple(dict.fromkeys(found)) for box, found in parts.items()}
        self._boxes = sorted(parts)
        self._edges: npt.NDArray[np.int64] | None = None
        self._known: dict[Box, tuple[list[_Overlap], list[Box]]] = {}

    def overlaps(self, wanted: Box) -> tuple[list[_Overlap], list[Box]]:
        """What a box is read from, and what of it lies in no source."""
        if wanted not in self._known:
            boxes = self._overlapping(wanted)
            taken, nowhere = cover(wanted, boxes)
            overlaps = [
                _Overlap(box, boxes[at], within(box, boxes[at]), self._parts[boxes[at]], count_of(box))
                for at, box in taken
            ]
            self._known[wanted] = overlaps, nowhere
        return self._known[wanted]

    def _overlapping(self, wanted: Box) -> list[Box]:
        """The boxes that overlap with `wanted`; only one, the smallest, if it is in any box as a whole."""
        if wanted in self._parts:
            return [wanted]
        if len(self._boxes) <= FEW or not wanted:
            found = [box for box in self._boxes if common(box, wanted) is not None]
        else:
            if self._edges is None:
                self._edges = np.array(self._boxes, np.int64)
            asked = np.array(wanted, np.int64)
            lows, highs = np.maximum(self._edges[..., 0], asked[:, 0]), np.minimum(self._edges[..., 1], asked[:, 1])
            found = [self._boxes[position] for position in np.flatnonzero((lows < highs).all(axis=1)).tolist()]
        around = [box for box in found if common(box, wanted) == wanted]
        return [min(around, key=count_of)] if around else found


def listed(faults: Collection[str]) -> str:
    """Faults in one sentence; of very many, the first."""
    more = len(faults) - SPELT_OUT
    return "; ".join(itertools.islice(faults, SPELT_OUT)) + f"; and {more} more" * (more > 0)


def spelt(box: Box) -> str:
    """A box in words: its ranges, as slices."""
    return f"[{', '.join(f'{low}:{high}' for low, high in box)}]"
