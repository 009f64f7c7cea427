"""`WindowMemory`: the one-sided access to other ranks' memory that a backend implements for windows."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, final

import torch

from holdfast.comms.errors import OpTimeout, RegionGone, Unsupported
from holdfast.comms.system.cpu_wait import Wait

Tensor = torch.Tensor


class WindowMemory(ABC):
    """Reads and writes the exposed bytes of other ranks. Offsets are in bytes; the caller has checked them."""

    access: ClassVar[Literal["mapped", "messages"]] = "messages"
    """How other ranks' memory is reached: mapped into this process, or by their answers."""
    sizes: Sequence[int]
    """The size of each rank's window, in bytes."""
    leaving = False
    """True once this rank closes the window: calls in progress then raise `closed_here()` at their next check."""

    def __init__(self, ranks: int) -> None:
        self._consumed = [0] * ranks
        self._consuming = threading.Lock()

    @abstractmethod
    def write(self, rank: int, offset: int, source: Tensor, deadline: float) -> None:
        """Copy a contiguous tensor into a rank's window. Raises `RegionGone`."""

    @abstractmethod
    def read(self, rank: int, offset: int, into: Tensor, deadline: float) -> None:
        """Copy from a rank's window into a contiguous tensor. Raises `RegionGone`."""

    @abstractmethod
    def fetch_add(self, rank: int, offset: int, dtype: torch.dtype, value: int, deadline: float) -> int:
        """Add to an integer, atomically, wrapping around; return the old value."""

    @abstractmethod
    def compare_swap(
        self, rank: int, offset: int, dtype: torch.dtype, expected: int, desired: int, deadline: float
    ) -> int:
        """Set an integer to `desired` if it is `expected`, atomically; return the old value."""

    @abstractmethod
    def signal(self, rank: int, deadline: float) -> None:
        """Add one to the count of signals from this rank to `rank`."""

    @abstractmethod
    def count_signals(self, rank: int) -> int:
        """The number of signals from `rank` that have arrived until now."""

    @abstractmethod
    def check_live(self, rank: int) -> None:
        """Raise `RegionGone` if a window is closed, here or at `rank`, or that process is gone."""

    @final
    def wait_signal(self, rank: int, deadline: float) -> None:
        """Wait for, and consume, one signal from `rank`. Raises `OpTimeout`, `RegionGone`."""
        Wait().until(
            lambda: self._consume_signal(rank),
            lambda: self.check_live(rank),
            deadline,
            lambda seconds: OpTimeout("wait_signal", self._consumed[rank] + 1, seconds, (rank,)),
        )

    def _consume_signal(self, rank: int) -> bool:
        """Consume a signal from `rank`; whether there was one."""
        with self._consuming:
            if self.count_signals(rank) <= self._consumed[rank]:
                return False
            self._consumed[rank] += 1
            return True

    def map(self, rank: int) -> Tensor:
        """The bytes of a rank's window, which the tensor keeps mapped. Raises `RegionGone`. Only if "mapped"."""
        raise Unsupported(f"map of a window that is reached by {self.access}", "use get and put")

    @abstractmethod
    def flush(self, rank: int | None, deadline: float) -> None:
        """Return when everything issued to `rank` (None: to all ranks) has taken effect there."""

    @abstractmethod
    def close(self) -> None:
        """Withdraw this rank's memory: other ranks get `RegionGone`. No call of this rank is running. Idempotent."""


def closed_here() -> RegionGone:
    """The error of a call on a window that this rank has closed."""
    return RegionGone("this rank has closed the window; make another one")


def closed_there(rank: int) -> RegionGone:
    """The error of a call that accesses memory of a rank that has closed its window."""
    return RegionGone(f"rank {rank} has closed its window; make another one")
