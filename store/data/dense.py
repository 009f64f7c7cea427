"""Tensors with their bytes in memory as in a contiguous tensor."""

from __future__ import annotations

import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor are laid out as in a contiguous tensor."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def lies_in_order(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the CPU with its bytes laid out as in a contiguous tensor."""
    return tensor.device.type == "cpu" and is_dense(tensor)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, on its device."""
    return tensor.view(-1).view(torch.uint8)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """The bytes of a tensor as a flat uint8 view; None unless `lies_in_order`."""
    return flat_bytes(tensor) if lies_in_order(tensor) else None


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into one of its shape and dtype, of any strides and device.

    torch cannot copy all dtypes of one byte (`int4`, `float4_e2m1fn_x2`): their bytes are copied.
    """
    if target.itemsize == 1:
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source)
