"""The kernels for the memory of a device: compiled ones for the CPU, Triton's for CUDA."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Protocol

import torch

from holdfast.comms.errors import Unsupported
from holdfast.store.delta import native_kernels
from holdfast.store.delta.records import Delta, ElementPiece, PackedDelta


class Kernels(Protocol):
    """Diff and patch of pieces: flat uint8 tensors on one device. All kernels give equal bits."""

    def diff(
        self, base: Sequence[torch.Tensor], changed: Sequence[torch.Tensor], pieces: Sequence[ElementPiece], /
    ) -> PackedDelta:
        """The delta from `base` to `changed`."""

    def patch(self, base: Sequence[torch.Tensor], into: Sequence[torch.Tensor], delta: Delta, /) -> list[int]:
        """Make the pieces of `into`, which may be `base`; returns xxh3 (64 bits) of those that are not `WHOLE`.

        Raises `CorruptData`; `into` is then half done.
        """


def kernels_for(device: torch.device) -> Kernels:
    """The kernels for memory of a device. Raises `Unsupported` for a device without."""
    if device.type == "cpu":
        return native_kernels
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from holdfast.store.delta import triton_kernels

        return triton_kernels
    raise Unsupported(f"a delta in memory of {device}", "install triton (CUDA), or copy it to the host")
