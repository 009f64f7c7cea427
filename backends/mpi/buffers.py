"""Tensors as MPI buffers. Adjacent tensors are one buffer; others are copied into one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from mpi4py import MPI

from holdfast.comms.tensors.packing import span

Tensor = torch.Tensor
Counts = tuple[list[int], list[int]]
"""Sizes and offsets, one of each per rank."""


def buffer_of(tensor: Tensor) -> MPI.buffer:
    """The memory of a contiguous tensor. The caller keeps the tensor."""
    return MPI.buffer.fromaddress(*span(tensor))


def counts(sizes: Sequence[int]) -> Counts:
    """Sizes, and the offset at which each begins."""
    return list(sizes), [0, *accumulate(sizes)][:-1]


def adjacent(tensors: Sequence[Tensor]) -> MPI.buffer | None:
    """The memory of tensors that lie one behind the other; None if they do not."""
    start = end = 0
    for tensor in tensors:
        if size := tensor.nbytes:
            address = tensor.data_ptr()
            if not start:
                start = end = address
            if address != end:
                return None
            end += size
    return MPI.buffer.fromaddress(start, end - start)


def gathered_buffer(tensors: Sequence[Tensor]) -> tuple[MPI.buffer, object]:
    """One buffer with the bytes of all tensors, and the object that the caller has to keep."""
    if (memory := adjacent(tensors)) is not None:
        return memory, tensors
    staged = torch.cat([_bytes(tensor) for tensor in tensors])
    return buffer_of(staged), staged


def receive_buffer(tensors: Sequence[Tensor]) -> tuple[MPI.buffer, Tensor | None]:
    """One buffer for the bytes of all tensors, and its tensor if `copy_out` must copy from it afterwards."""
    if (memory := adjacent(tensors)) is not None:
        return memory, None
    staged = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8, device="cpu")
    return buffer_of(staged), staged


def copy_out(staged: Tensor | None, tensors: Sequence[Tensor]) -> None:
    """Copy the bytes received into `receive_buffer` to their tensors."""
    if staged is None:
        return
    start = 0
    for tensor in tensors:
        _bytes(tensor).copy_(staged[start : start + tensor.nbytes])
        start += tensor.nbytes


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
