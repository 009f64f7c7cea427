"""Recovery: from the SIGKILL of a rank inside an all_reduce to the survivors' next correct one."""

from __future__ import annotations

from typing import ClassVar

from benchmarks.common import profile
from holdfast.harness.bench.command import RecoveryPlan
from holdfast.harness.bench.recovery import RecoveryBench, run

KILLS = profile(5, 30)
Benches = dict[tuple[str, int, int], RecoveryBench]


class Recovery:
    """Milliseconds, the median of several kills; ranks are forked from one process that has torch imported."""

    params: ClassVar = (profile(["shm"], ["shm", "gloo", "ucx"]), profile([4], [2, 4]), profile([0], [0, 2]))
    param_names: ClassVar = ["backend", "ranks", "spares"]
    unit = "ms"
    timeout = 300

    def setup_cache(self) -> Benches:
        """Do all kills once; the figures below are taken from them."""
        backends, ranks, spares = self.params
        return {(b, n, s): run(RecoveryPlan(b, n, KILLS, s)) for b in backends for n in ranks for s in spares}

    setup_cache.timeout = 600  # type: ignore[attr-defined]

    def track_whole(self, cache: Benches, backend: str, ranks: int, spares: int) -> float:
        return cache[backend, ranks, spares].total.median

    def track_detection(self, cache: Benches, backend: str, ranks: int, spares: int) -> float:
        return cache[backend, ranks, spares].detect.median

    def track_worst(self, cache: Benches, backend: str, ranks: int, spares: int) -> float:
        return cache[backend, ranks, spares].total.max
