"""Collectives: time by backend, speed beside other libraries, what a call executes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

from benchmarks.common import RankTimes, need, profile
from holdfast.harness.bench.run import BenchPlan, run

KIB, MIB = 1 << 10, 1 << 20
WARM_UP = 50


class Collectives(RankTimes):
    """Seconds of an op."""

    params: ClassVar = (
        profile(["shm", "ucx"], ["shm", "gloo", "ucx", "mpi", "inproc"]),
        profile(
            ["all_reduce", "all_gather"],
            ["all_reduce", "all_reduce_reproducible", "reduce_scatter", "all_gather", "broadcast", "all_to_all",
             "gather", "scatter", "barrier", "send_recv"],
        ),
        profile([2], [2, 4]),
        profile([8, MIB], [8, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]),
    )  # fmt: skip
    param_names: ClassVar = ["backend", "op", "ranks", "size"]


class BesidePeers:
    """How many times as fast as another library, measured in turns in one run."""

    params: ClassVar = (
        profile(["torch-gloo", "openmpi"], ["torch-gloo", "openmpi", "mpich"]),
        profile(["all_reduce"], ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]),
        profile([2], [2, 4]),
        profile([8, 16 * MIB], [8, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]),
    )
    param_names: ClassVar = ["peer", "op", "ranks", "size"]
    unit = "times as fast"
    timeout = 180

    def setup(self, peer: str, op: str, ranks: int, size: int) -> None:
        need(peer)

    def track_speed_up(self, peer: str, op: str, ranks: int, size: int) -> float:
        """Raises ArithmeticError for a wrong or missing result."""
        ours = "holdfast:shm"
        plan = BenchPlan((op,), (ours, peer), (ours,), (ranks,), (size,), rounds=7, seconds=profile(0.3, 1.0))
        bench = run(plan)
        if bench.failures or bench.unmeasured or bench.wrong:
            raise ArithmeticError(f"{bench.wrong} elements wrong, {bench.failures} {bench.unmeasured}")
        return bench.ratios[0].median


class Instructions:
    """Bytecodes that one all_reduce of 8 bytes executes on one rank, from the call to the transport and back."""

    def track_bytecodes(self) -> int:
        import torch
        import torch.distributed as dist

        from holdfast import comms

        tensor = torch.ones(2)
        with comms.connect("inproc", rank=0, size=1, rendezvous=dist.HashStore(), timeout=60.0) as comm:
            return bytecodes(lambda: comm.all_reduce(tensor))

    track_bytecodes.unit = "bytecodes"  # type: ignore[attr-defined]


def bytecodes(op: Callable[[], object]) -> int:
    """Bytecode instructions that one `op` executes in this thread when it is warm, by the interpreter's own trace."""
    for _ in range(WARM_UP):
        op()
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # a collection may come in the middle, and call what waits for the end of objects
    sys.settrace(trace)
    try:
        op()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


class Memory:
    """Peak memory of a process with two threads that reduce 16 MiB."""

    def peakmem_all_reduce(self) -> None:
        import torch

        from holdfast.harness import LocalCluster

        with LocalCluster(2, "inproc", timeout=60.0) as ranks:
            ranks.run(lambda comm: comm.all_reduce(torch.ones(4 << 20)))
