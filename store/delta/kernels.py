"""The kernels for the memory of a device: compiled ones for the CPU, Triton's for CUDA, else torch's ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from holdfast.comms.tensors.kernel_choice import Implementation, KernelChoice
from holdfast.store.delta import native_kernels, torch_kernels
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


def _triton() -> Kernels:
    from holdfast.store.delta import triton_kernels

    return triton_kernels


CHOICE = KernelChoice[Kernels](
    Implementation(lambda: native_kernels, "cpu"),
    Implementation(_triton, "cuda", "triton"),
    Implementation(lambda: torch_kernels),
)


def kernels_for(device: torch.device) -> Kernels:
    """The fastest kernels for memory of a device."""
    return CHOICE.of(device)
