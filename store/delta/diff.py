"""Finds what differs between two versions of a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.store.delta.kernels import kernels_for
from holdfast.store.delta.records import ElementPiece, PackedDelta


def diff(base: torch.Tensor, new: torch.Tensor, pieces: Sequence[ElementPiece]) -> PackedDelta:
    """The elements of `new` that differ from those of `base` by their bits.

    Both are flat uint8 tensors on one device; bytes outside of `pieces` are not looked at. Pieces that changed too much
    are left to be read whole.
    """
    if base.device != new.device:
        raise ValueError(f"a base on {base.device} and a new version on {new.device}: they have to be on one device")
    kernels = kernels_for(base.device)
    return kernels.diff([piece.of(base) for piece in pieces], [piece.of(new) for piece in pieces], pieces)
