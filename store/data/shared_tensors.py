"""Tensors that several parts of a version have. Their bytes must be equal; readers read them from any of the parts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast.comms.errors import Mismatch
from holdfast.ft.state.boxes import Box, whole
from holdfast.store.data.manifest import Manifest, RegionLayout, TensorEntry
from holdfast.store.reshard.plan import listed


@functools.lru_cache(maxsize=16)
def tensors_of(layouts: tuple[RegionLayout, ...]) -> Mapping[str, TensorEntry]:
    """Each tensor of a version: an entry that has all of it if there is one.

    Raises `Mismatch` if parts disagree about its shape or dtype.
    """
    found: dict[str, TensorEntry] = {}
    for layout in layouts:
        for entry in layout.entries:
            known = found.get(entry.name)
            if known is not None and (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise Mismatch(f"a part of the version has {entry}, another {known}: publish it alike on all ranks")
            if known is None or known.box is not None:
                found[entry.name] = entry
    return found


def check_shared(parts: Sequence[int], manifests: Sequence[Manifest]) -> None:
    """Check that parts with these numbers have equal bytes of each box of a tensor that several of them have.

    Raises `Mismatch`, naming the tensors and the parts.
    """
    faults: dict[str, None] = {}
    for name, (first, at), (second, there) in _shared(tuple(manifest.layout for manifest in manifests)):
        if manifests[first].sums_of(at) != manifests[second].sums_of(there):
            faults[f"{name!r} has other bytes in part {parts[second]} than in part {parts[first]}"] = None
    if faults:
        raise Mismatch(
            f"parts of the version disagree: {listed(faults)}; publish equal bytes, or each tensor in one part"
        )


class _Place(NamedTuple):
    """The position of a part's manifest, and that of an entry in its layout."""

    part: int
    entry: int


@functools.lru_cache(maxsize=16)
def _shared(layouts: tuple[RegionLayout, ...]) -> tuple[tuple[str, _Place, _Place], ...]:
    """The boxes that several parts have: the tensor's name, the first place of each, and another one."""
    first: dict[tuple[str, Box], _Place] = {}
    found = []
    for part, layout in enumerate(layouts):
        for number, entry in enumerate(layout.entries):
            here = _Place(part, number)
            known = first.setdefault((entry.name, entry.box or whole(entry.shape)), here)
            if known is not here:
                found.append((entry.name, known, here))
    return tuple(found)
