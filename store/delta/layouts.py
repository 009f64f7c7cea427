"""The pieces of a part as a delta sees them."""

from __future__ import annotations

import functools

from holdfast.store.data.manifest import RegionLayout
from holdfast.store.delta.records import ElementPiece


@functools.lru_cache(maxsize=16)
def element_pieces(layout: RegionLayout) -> tuple[ElementPiece, ...]:
    """The pieces of a layout, with the size of their elements: 1 where tensors of different sizes share a piece."""
    found = []
    for piece in layout.pieces:
        sizes = {min(layout.entries[entry].torch_dtype.itemsize, 8) for entry in piece.entries}
        itemsize = sizes.pop() if len(sizes) == 1 else 1
        found.append(ElementPiece(piece.offset, piece.nbytes, 1 if piece.nbytes % itemsize else itemsize))
    return tuple(found)
