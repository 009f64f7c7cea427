"""Casts of floating-point tensors for readers, and the form of a part in a cast.

`bf16` halves float32 and quarters float64: rounded to nearest even, |y - x| <= |x| / 256, for denormals of bf16
|y - x| <= 2**-134. Zeros keep their sign, infinities and NaNs stay what they are (a NaN with other bits). `fp8` takes a
byte for each element of any wider floating-point dtype, and two for each block of up to 128 elements of a row:
`holdfast.comms.codecs.float8_blocks` states its bound. All other dtypes travel as they are, and so does each tensor
with an element that a cast would turn into something else: an infinity, for `fp8`; a number from 3.3961e38 on, for
`bf16`.

A form is a region like that of a part, with a manifest of its own. Its tensors are named by the positions that those of
the part have in the part's layout. One that the cast cannot carry is in it as it is; what it does not shrink is not in
it: readers read that from the part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch

from holdfast.comms.codecs import float8_blocks as fp8
from holdfast.comms.errors import CorruptData
from holdfast.store.data.manifest import LARGE_BYTES, Manifest, RegionLayout, TensorEntry, aligned
from holdfast.store.data.packing import PackedPart, digest_pieces, region_bytes, seal

CastName = Literal["bf16", "fp8"]

_AT_ONCE = 1 << 20
"""About so many elements are looked at together: so they stay in a processor's cache."""


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A tensor as it travels. `values` have its shape, in fewer bytes; fp8 has exponents too, one a block of a row."""

    values: torch.Tensor
    exponents: torch.Tensor | None = None


class WireCast(Enum):
    """A cast on the way to a reader, by name."""

    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of elements on the wire."""
        return torch.bfloat16 if self is WireCast.BF16 else torch.float8_e4m3fn

    def exponents(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """The shape of the exponents of a tensor; None if there are none."""
        if self is WireCast.BF16:
            return None
        return (*shape[:-1], fp8.blocks_of(shape[-1])) if shape else (1,)

    def shrinks(self, dtype: torch.dtype, shape: Sequence[int]) -> bool:
        """Whether a tensor takes fewer bytes so: one of wider floating-point elements. Others travel as they are."""
        if not dtype.is_floating_point:
            return False
        elements = math.prod(shape)
        extra = 2 * math.prod(self.exponents(shape) or (0,))
        return elements * self.dtype.itemsize + extra < elements * dtype.itemsize

    def carries(self, source: torch.Tensor) -> bool:
        """Whether finite elements stay finite in this cast, and infinite ones infinite: else the tensor is not cast."""
        own = torch.finfo(source.dtype).max
        most = min(own, torch.finfo(torch.bfloat16).max) if self is WireCast.BF16 else own
        for part in torch.split(source.reshape(-1), _AT_ONCE):
            low, high = map(float, part.aminmax()) if len(part) else (0.0, 0.0)
            if not (-most <= low and high <= most) and not self._carries_exactly(part):
                return False
        return True

    def _carries_exactly(self, part: torch.Tensor) -> bool:
        """As `carries`, for elements of which one is a NaN, infinite or very large."""
        if self is WireCast.FP8:
            return not bool(part.isinf().any())
        return torch.equal(part.isinf(), part.to(torch.bfloat16).isinf())

    def encode(self, source: torch.Tensor, into: EncodedTensor) -> None:
        """Write a contiguous tensor in its encoded form, which is contiguous too."""
        if into.exponents is None:
            into.values.copy_(source)
        elif source.numel():
            fp8.encode(*(_rows(each) for each in (source, into.values, into.exponents)))

    def decode(self, found: EncodedTensor, into: torch.Tensor, first: int = 0, row: int | None = None) -> None:
        """Fill a floating-point tensor with the elements of a box of an encoded one.

        The box begins at element `first` of a block of the last dimension, and has the exponents of all blocks that it
        touches. `row` is the size of that dimension, if the box has less of it.
        """
        if found.exponents is None:
            into.copy_(found.values)
        elif into.numel():
            block = min(fp8.BLOCK, found.values.shape[-1] if row is None else row) if found.values.dim() else 1
            whole = into.view(-1) if not into.dim() else into
            try:
                rows = whole.view(-1, whole.shape[-1])
            except RuntimeError:  # its strides have no rows
                rows = torch.empty(whole.shape, dtype=into.dtype, device="cpu").view(-1, whole.shape[-1])
            fp8.decode(_rows(found.values), _rows(found.exponents), rows, first, block)
            if rows.data_ptr() != into.data_ptr():
                into.copy_(rows.view(into.shape))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, tensor.shape[-1]) if tensor.dim() else tensor.view(1, 1)


def wire_cast(name: str) -> WireCast:
    """The cast with a name. Raises ValueError for a name that no cast has."""
    try:
        return WireCast(name)
    except ValueError:
        known = ", ".join(repr(cast.value) for cast in WireCast)
        raise ValueError(f"a cast on the wire is one of {known}, not {name!r}") from None


def values_name(number: int) -> str:
    """The name, in a form, of the elements of the part's entry at a position."""
    return str(number)


def exponents_name(number: int) -> str:
    """The name, in a form, of the exponents of the part's entry at a position."""
    return f"{number}/exponents"


@functools.lru_cache(maxsize=64)
def form_layout(layout: RegionLayout, cast: WireCast, whole: frozenset[int] = frozenset()) -> RegionLayout:
    """The layout of the form of a part: the same for all that compute it.

    `whole` are the positions of entries that the cast would shrink, and cannot carry: they are in it as they are.
    """
    found: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
    for number, entry in enumerate(layout.entries):
        if cast.shrinks(entry.torch_dtype, entry.extent):
            dtype = entry.torch_dtype if number in whole else cast.dtype
            found.append((values_name(number), dtype, entry.extent))
            if number not in whole and (shape := cast.exponents(entry.extent)) is not None:
                found.append((exponents_name(number), torch.int16, shape))
    drafts = [TensorEntry(name, str(dtype).removeprefix("torch."), shape, 0) for name, dtype, shape in found]
    drafts.sort(key=lambda each: each.nbytes >= LARGE_BYTES)  # small ones share pieces
    entries, offset = [], 0
    for draft in drafts:
        entries.append(TensorEntry(draft.name, draft.dtype, draft.shape, offset))
        offset += aligned(draft.nbytes)
    return RegionLayout(tuple(entries))


def is_cast(layout: RegionLayout, number: int, cast: WireCast) -> bool:
    """Whether the entry at a position is in the form of its part."""
    return values_name(number) in form_layout(layout, cast).by_name


def carried_whole(layout: RegionLayout, form: RegionLayout) -> frozenset[int]:
    """The positions of a part's entries that its form has as they are."""
    found = ((number, form.by_name.get(values_name(number))) for number in range(len(layout.entries)))
    return frozenset(number for number, there in found if there and there[0].dtype == layout.entries[number].dtype)


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
