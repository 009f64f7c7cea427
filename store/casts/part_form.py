"""The form of a part for readers that ask for a cast: what the cast shrinks, in fewer bytes.

A form is a region like that of a part, with a manifest of its own. Its tensors are named by the positions that those of
the part have in the part's layout. What the cast does not shrink or carry is not in it: readers
read that from the part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from holdfast.comms.errors import CorruptData
from holdfast.store.casts.wire_cast import EncodedTensor, WireCast
from holdfast.store.data.manifest import LARGE_BYTES, Manifest, RegionLayout, TensorEntry, aligned
from holdfast.store.data.packing import PackedPart, digest_pieces, region_bytes, seal


def values_name(number: int) -> str:
    """The name, in a form, of the elements of the part's entry at a position."""
    return str(number)


def exponents_name(number: int) -> str:
    """The name, in a form, of the exponents of the part's entry at a position."""
    return f"{number}/exponents"


@functools.lru_cache(maxsize=64)
def form_layout(layout: RegionLayout, cast: WireCast, whole: frozenset[int] = frozenset()) -> RegionLayout:
    """The layout of the form of a part: the same for all that compute it.

    `whole` are the positions of entries that the cast would shrink, and cannot carry.
    """
    found: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
    for number, entry in enumerate(layout.entries):
        if number not in whole and cast.shrinks(entry.torch_dtype, entry.extent):
            found.append((values_name(number), cast.dtype, entry.extent))
            if (shape := cast.exponents(entry.extent)) is not None:
                found.append((exponents_name(number), torch.int16, shape))
    drafts = [TensorEntry(name, str(dtype).removeprefix("torch."), shape, 0) for name, dtype, shape in found]
    drafts.sort(key=lambda each: each.nbytes >= LARGE_BYTES)  # small ones share pieces
    entries, offset = [], 0
    for draft in drafts:
        entries.append(TensorEntry(draft.name, draft.dtype, draft.shape, offset))
        offset += aligned(draft.nbytes)
    return RegionLayout(tuple(entries))


def is_cast(layout: RegionLayout, number: int, cast: WireCast) -> bool:
    """Whether the entry at a position is in the form of its part, unless the cast cannot carry its elements."""
    return values_name(number) in form_layout(layout, cast).by_name


def carried_whole(layout: RegionLayout, form: RegionLayout, cast: WireCast) -> frozenset[int]:
    """The positions of a part's entries that the cast would shrink, and that its form does not have."""
    names = form_layout(layout, cast).by_name
    found = (number for number in range(len(layout.entries)) if values_name(number) in names)
    return frozenset(number for number in found if values_name(number) not in form.by_name)


def pack_form(
    manifest: Manifest,
    region: torch.Tensor,
    cast: WireCast,
    allocate: Callable[[int], torch.Tensor],
    check: Callable[[], object] = lambda: None,
) -> PackedPart:
    """Pack the form of the part in `region` into memory from `allocate`; `check` is called between tensors.

    Raises `CorruptData` if the part's bytes were not right all the time.
    """
    whole = set[int]()
    for number, entry in enumerate(manifest.layout.entries):
        if is_cast(manifest.layout, number, cast):
            check()
            if not cast.carries(entry.of(region)):
                whole.add(number)
    layout = form_layout(manifest.layout, cast, frozenset(whole))
    memory = allocate(region_bytes(layout))
    for entry in layout.entries:
        memory[entry.offset + entry.nbytes : aligned(entry.offset + entry.nbytes)].fill_(0)
    for number, entry in enumerate(manifest.layout.entries):
        if (values := layout.by_name.get(values_name(number))) is None:
            continue
        check()
        exponents = layout.by_name.get(exponents_name(number))
        into = EncodedTensor(values[0].of(memory), None if exponents is None else exponents[0].of(memory))
        cast.encode(entry.of(region), into)
    if (digest_pieces(manifest.layout, region) != manifest.sums).any():
        raise CorruptData("a part with wrong bytes cannot be cast")
    return seal(layout, memory, b"", digest_pieces(layout, memory))
