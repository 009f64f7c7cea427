"""Memory behind tensors: registered with a backend, exposed to other processes, or described at once.

Other processes have the address of exposed memory, not the tensor. So the memory is kept while it is exposed, and torch
is told not to resize it (`resize_` raises RuntimeError, as for memory that numpy shares). If the tensor gets other
memory nevertheless (`t.data = ...`), its address or size differs at the owner's next call; other processes would read
stale data.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from holdfast.comms._native import describe
from holdfast.comms.errors import RegionGone

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


class ExposedMemory:
    """The memory that `tensor` has now: `nbytes` at `address`. `held` keeps it alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        with torch._C.DisableTorchFunctionSubclass():
            self.held = tensor.detach()
            self.address, self.nbytes = tensor.data_ptr(), tensor.nbytes
            refuse_resize(tensor)

    @property
    def moved(self) -> bool:
        """Whether the tensor has other memory now, or another size."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.tensor.data_ptr() != self.address or self.tensor.nbytes != self.nbytes

    def vacate(self) -> torch.Tensor:
        """Copy the tensor to other memory, unless it has other memory already. Return a tensor that keeps the old."""
        held, self.held = self.held, torch.empty(0, device="cpu")
        if self.tensor.untyped_storage().data_ptr() == held.untyped_storage().data_ptr():
            self.tensor.data = self.tensor.data.clone()
        return held


def refuse_resize(tensor: torch.Tensor) -> None:
    """Make torch refuse to resize the tensor's storage from now on."""
    storage = tensor.untyped_storage()
    if storage.resizable():
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()


def moved_error(what: str) -> RegionGone:
    """The error that the owner gets after its tensor left the exposed memory."""
    return RegionGone(
        f"the tensor of {what} has other memory than when that was made (t.data = ..., set_ or resize_): it is closed; "
        "copy into the tensor in place (copy_), or expose it again"
    )


@dataclass(frozen=True, slots=True)
class PlainTensors:
    """Tensors by name.

    Equal `forms` of equal `names` have equal dtypes and shapes. `spans` has address and size in bytes of each (64 bits
    each).
    """

    names: tuple[str, ...]
    forms: bytes
    spans: bytes

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor]) -> PlainTensors | None:
        """The description of tensors; None unless all are dense memory of the CPU, in row-major order."""
        found = describe(list(tensors.values()))
        return None if found is None else PlainTensors(tuple(tensors), found[1], found[0])

    @property
    def addresses(self) -> npt.NDArray[np.uint64]:
        return self._table()[:, 0]

    @property
    def sizes(self) -> npt.NDArray[np.uint64]:
        """The bytes of each tensor."""
        return self._table()[:, 1]

    @property
    def located(self) -> Iterator[tuple[str, int, int]]:
        """Name, address and size of each tensor."""
        return zip(self.names, self.addresses.tolist(), self.sizes.tolist(), strict=True)

    @property
    def share_memory(self) -> bool:
        """Whether two tensors have bytes in common."""
        table = self._table()
        table = table[table[:, 1] > 0]
        table = table[np.argsort(table[:, 0])]
        return bool((table[:-1].sum(axis=1, dtype=np.uint64) > table[1:, 0]).any())

    def _table(self) -> npt.NDArray[np.uint64]:
        return np.frombuffer(self.spans, np.uint64).reshape(-1, 2)
