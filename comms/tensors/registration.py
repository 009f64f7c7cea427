"""Memory that a backend is told of: `Registration`, which `Communicator.register` returns, and `empty`."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

HUGE_PAGE = 2 << 20
"""The kernel finds the memory of another process page by page: with pages of 4 KiB that takes as long as the copy."""


class Registration:
    """A tensor that a communicator knows. `info` says what its backend has done with the memory, or that it gains none.

    Ops on the tensor are the same with and without. `close`, or the end of a `with` block, ends it.
    """

    def __init__(self, tensor: torch.Tensor, info: str) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.info = info

    def __repr__(self) -> str:
        return f"<Registration: {self.info if self.tensor is not None else 'closed'}>"

    def close(self) -> None:
        """End the registration, and let go of the tensor. Idempotent."""
        self.tensor = None

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def empty(shape: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A CPU tensor on huge pages, where the kernel gives them.

    Its first use, and its ops over shared memory, are faster. Its numbers are zero. From 2 MiB on; smaller tensors are
    torch's own.
    """
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = math.prod(size) * dtype.itemsize
    if nbytes < HUGE_PAGE:
        return torch.zeros(size, dtype=dtype, device="cpu")
    room = (nbytes // HUGE_PAGE + 2) * HUGE_PAGE  # the kernel may place it anywhere: it begins on a huge page
    memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    line = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -line.data_ptr() % HUGE_PAGE
    return line[begin : begin + nbytes].view(dtype).view(size)
