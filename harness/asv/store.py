"""The weight store: publishing and getting versions in one process, over the memory plane of shm."""

from __future__ import annotations

import itertools
import os
from typing import ClassVar

from holdfast.harness.asv.common import profile

MIB = 1 << 20


class Store:
    """Seconds to publish, or get, one version of so many tensors of so many bytes in all."""

    params: ClassVar = (profile([50], [1, 50, 300]), profile([MIB], [64 << 10, MIB, 64 * MIB]))
    param_names: ClassVar = ["tensors", "size"]
    rounds = 1
    repeat = (5, 15, 2.0)
    number = 1
    timeout = 120

    def setup(self, tensors: int, size: int) -> None:
        import torch

        from holdfast.store import WeightStore

        if not hasattr(self, "store"):
            self.versions = itertools.count(1)
            self.store = WeightStore(f"memory://asv-{os.getpid()}-{tensors}-{size}", keep=2)
            each = size // tensors // 4
            self.weights = {f"layer{index}": torch.full((each,), float(index)) for index in range(tensors)}
            self.copies = {name: torch.empty_like(tensor) for name, tensor in self.weights.items()}
            self.store.publish(next(self.versions), self.weights)

    def time_publish(self, tensors: int, size: int) -> None:
        self.store.publish(next(self.versions), self.weights)

    def time_get(self, tensors: int, size: int) -> None:
        self.store.get("latest", into=self.copies)

    def peakmem_publish_and_get(self, tensors: int, size: int) -> None:
        self.store.publish(next(self.versions), self.weights)
        self.store.get("latest", into=self.copies)
