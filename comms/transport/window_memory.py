"""What a backend implements for windows: the bytes of the other ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from holdfast.comms.errors import RegionGone

Tensor = torch.Tensor


class WindowMemory(ABC):
    """What a backend supplies: bytes of the other ranks. Offsets are in bytes and were checked."""

    sizes: Sequence[int]
    """The size of each rank's window, in bytes."""
    leaving = False
    """This rank closes the window: a call that is under way ends with `closed_here()` when it next looks."""

    @abstractmethod
    def write(self, rank: int, offset: int, source: Tensor, deadline: float) -> None:
        """Copy a contiguous tensor into a rank's window. Raises `RegionGone`."""

    @abstractmethod
    def read(self, rank: int, offset: int, into: Tensor, deadline: float) -> None:
        """Copy from a rank's window into a contiguous tensor. Raises `RegionGone`."""

    @abstractmethod
    def fetch_add(self, rank: int, offset: int, dtype: torch.dtype, value: int, deadline: float) -> int:
        """Add to an integer, atomically, wrapping around; what it was before."""

    @abstractmethod
    def compare_swap(
        self, rank: int, offset: int, dtype: torch.dtype, expected: int, desired: int, deadline: float
    ) -> int:
        """Set an integer to `desired` if it is `expected`, atomically; what it was before."""

    @abstractmethod
    def signal(self, rank: int, deadline: float) -> None:
        """Count one more signal from this rank to `rank`."""

    @abstractmethod
    def wait_signal(self, rank: int, deadline: float) -> None:
        """Return when `rank` has signalled once more than was waited for. Raises `OpTimeout`, `RegionGone`."""

    @abstractmethod
    def flush(self, rank: int | None, deadline: float) -> None:
        """Return when everything issued to `rank` (to all, for None) has taken effect there."""

    @abstractmethod
    def close(self) -> None:
        """From here on the others get `RegionGone`. No call of this rank is under way. Idempotent."""


def closed_here() -> RegionGone:
    """What a call gets whose own rank has closed the window."""
    return RegionGone("this rank has closed the window; make another one")


def closed_there(rank: int) -> RegionGone:
    """What a call gets that reaches for the window of a rank that has closed it."""
    return RegionGone(f"rank {rank} has closed its window; make another one")
