"""Windows and memory planes: time of an op, and speed beside UCX's own benchmark."""

from __future__ import annotations

from typing import ClassVar

from holdfast.harness.asv.common import CLOCK, RANKS, RankTimes, need, profile

KIB, MIB = 1 << 10, 1 << 20


class OneSided(RankTimes):
    """Seconds of an op, all ranks at once."""

    params: ClassVar = (
        profile(["shm"], ["shm", "ucx", "inproc"]),
        ["put", "get", "memory_read", "memory_write"],
        [2],
        profile([8, 16 * MIB], [8, 64 * KIB, MIB, 16 * MIB, 64 * MIB]),
    )
    param_names: ClassVar = ["backend", "op", "ranks", "size"]

    def setup(self, backend: str, op: str, ranks: int, size: int) -> None:
        self.times = self.ready(f"holdfast:{backend}", op, ranks, size)

    def time_op(self, backend: str, op: str, ranks: int, size: int) -> None:
        CLOCK.advance(RANKS.seconds(f"holdfast:{backend}", op, ranks, size, self.times))


class Atomics(RankTimes):
    """Seconds of an op that has one size."""

    params: ClassVar = (profile(["shm"], ["shm", "ucx", "inproc"]), ["fetch_add", "compare_swap", "signal"], [2])
    param_names: ClassVar = ["backend", "op", "ranks"]

    def setup(self, backend: str, op: str, ranks: int) -> None:
        self.times = self.ready(f"holdfast:{backend}", op, ranks, 0)

    def time_op(self, backend: str, op: str, ranks: int) -> None:
        CLOCK.advance(RANKS.seconds(f"holdfast:{backend}", op, ranks, 0, self.times))


class BesideUcx:
    """How many times as fast as ucx_perftest over the same transports, in turns in one run."""

    params: ClassVar = (profile(["get"], ["get", "put"]), profile([8], [8, 64 * MIB]))
    param_names: ClassVar = ["op", "size"]
    unit = "times as fast"
    timeout = 180

    def setup(self, op: str, size: int) -> None:
        need("ucx_perftest", "holdfast:ucx")

    def track_speed_up(self, op: str, size: int) -> float:
        from holdfast.harness.bench.rounds import Plan, run

        peer, ours = "ucx_perftest", "holdfast:ucx"
        bench = run(Plan((op,), (ours, peer), (ours,), (2,), (size,), rounds=5, seconds=profile(0.2, 1.0)))
        if bench.failures or bench.wrong:
            raise ArithmeticError(f"{bench.wrong} elements wrong, {bench.failures}")
        return bench.ratios[0].median


class Memory:
    """The most memory that a process takes which exposes 64 MiB and reads it."""

    def peakmem_read(self) -> None:
        import torch

        from holdfast import comms

        with comms.memory("shm") as plane:
            region = plane.expose(torch.ones(16 << 20))
            plane.read(region.handle, torch.empty(16 << 20)).wait()
