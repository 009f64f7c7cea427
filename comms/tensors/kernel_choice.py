"""`KernelChoice`: the implementation of a kernel for memory of a device, and for calls of a size."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Implementation(Generic[T]):
    """One implementation; `load` imports it, so its package need not be installed before.

    It serves the devices of a type ("": all of them) where `package` is installed, and calls with at least `least`
    elements.
    """

    load: Callable[[], T]
    device: str = ""
    package: str = ""
    least: int = 0

    def serves(self, device: torch.device, elements: int) -> bool:
        """Whether it can take a call, and is meant for its size."""
        if self.device not in ("", device.type) or elements < self.least:
            return False
        return not self.package or importlib.util.find_spec(self.package) is not None


class KernelChoice(Generic[T]):
    """Implementations with the same interface, the preferred ones first. The last one serves all calls."""

    def __init__(self, *implementations: Implementation[T]) -> None:
        last = implementations[-1]
        if last.device or last.package or last.least:
            raise ValueError("the last implementation must serve every device and size, without another package")
        self._implementations = implementations

    def of(self, device: torch.device, elements: int = 0) -> T:
        """The first implementation that serves `device` and a call with so many elements."""
        return next(each for each in self._implementations if each.serves(device, elements)).load()
