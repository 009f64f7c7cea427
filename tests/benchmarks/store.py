"""The weight store: publishing and getting versions in one process, and from process to process."""

from __future__ import annotations

import atexit
import itertools
import os
from typing import ClassVar

from benchmarks.common import RankTimed, profile

MIB = 1 << 20
FIRST_TURNS = 3
"""Turns that are not measured: a store that keeps two versions takes new memory in three of them."""


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


class Handover(RankTimed):
    """Seconds to publish a model, or to get it in another process; every tensor is compared by its digest.

    The workers measure: the timer of this process returns what they say.
    """

    params: ClassVar = profile([32 * MIB], [32 * MIB, 512 * MIB])
    param_names: ClassVar = ["size"]
    repeat = (5, 15, 4.0)
    timeout = 300

    def setup(self, size: int) -> None:
        from holdfast.harness.bench.store.data import model_shapes
        from holdfast.harness.bench.store.drivers import HOLDFAST
        from holdfast.harness.bench.store.workloads import Team, TeamPlan

        if not hasattr(self, "team"):
            self.versions = itertools.count(1)
            self.team = Team(HOLDFAST, TeamPlan(model_shapes(size, "bfloat16"), os.cpu_count() or 1))
            atexit.register(self.team.close)
            self.team.prepare()
            for _ in range(FIRST_TURNS):
                self._measure("get")

    def _measure(self, figure: str) -> None:
        """Hand over one version, and let the clock tell what that took. Raises ArithmeticError for wrong tensors."""
        from holdfast.harness.bench.store.workloads import exchange

        turn = exchange(self.team, next(self.versions))
        if turn.wrong:
            raise ArithmeticError(f"{turn.wrong} tensors came out wrong")
        self.timer.advance(turn.seconds[figure][0])

    def time_publish(self, size: int) -> None:
        self._measure("publish")

    def time_get(self, size: int) -> None:
        self._measure("get")
