"""Makes the next version of a part from the one before and a delta, and verifies it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.store.delta.kernels import kernels_for
from holdfast.store.delta.records import Delta


def apply(
    delta: Delta, base: Sequence[torch.Tensor], into: Sequence[torch.Tensor], checksums: Sequence[int]
) -> tuple[int, ...]:
    """Write the delta's pieces, made from those of `base`, to `into`; returns the positions of those to read whole.

    `base` and `into` are the bytes of the pieces, flat uint8 tensors on one device; each of `into` is that of `base`
    itself, or beside it. All pieces but the returned ones have the `checksums` of the new version. The returned ones
    are `WHOLE` in the delta, or have another checksum: their base was not the delta's base, or the delta is damaged.

    Raises `CorruptData` for a delta with records that cannot be those of its pieces; the bytes of `into` are then
    unknown.
    """
    for piece, before, after in zip(delta.pieces, base, into, strict=True):
        if before.device != after.device or before.nbytes != piece.nbytes or after.nbytes != piece.nbytes:
            raise ValueError(
                f"{piece} lies in {before.nbytes} bytes on {before.device}, {after.nbytes} on {after.device}"
            )
    if not delta.pieces:
        return ()
    found = kernels_for(base[0].device).patch(base, into, delta)
    made = [at for at, record in enumerate(delta.records) if record is not None]
    right = {at for at, checksum in zip(made, found, strict=True) if checksum == checksums[at]}
    return tuple(at for at in range(len(delta.pieces)) if at not in right)
