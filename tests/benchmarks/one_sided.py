"""Windows and memory planes: time of an op, and speed beside a copy."""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import TYPE_CHECKING, ClassVar

from benchmarks.common import RankTimes, profile

if TYPE_CHECKING:
    from holdfast.comms.communicator import Communicator

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


class Atomics(RankTimes):
    """Seconds of an op that has one size."""

    params: ClassVar = (profile(["shm"], ["shm", "ucx", "inproc"]), ["fetch_add", "compare_swap", "signal"], [2])
    param_names: ClassVar = ["backend", "op", "ranks"]


class PlaneMemory:
    """Peak memory of a process that exposes 64 MiB and reads it."""

    def peakmem_read(self) -> None:
        import torch

        from holdfast import comms

        with comms.memory("shm") as plane:
            region = plane.expose(torch.ones(16 << 20))
            plane.read(region.handle, torch.empty(16 << 20)).wait()


class BesideCopy:
    """Speed of a read of 64 MiB from a waiting process, relative to a copy within one process."""

    params: ClassVar = (["shm", "ucx"], [1, 2])
    param_names: ClassVar = ["plane", "threads"]
    unit = "times as fast"
    timeout = 120

    def track_speed_up(self, plane: str, threads: int) -> float:
        from holdfast.harness import LocalCluster

        with LocalCluster(2, "shm", timeout=60.0) as ranks:
            return ranks.run(_read_and_copy, plane, threads)[0]


def _read_and_copy(comm: Communicator, plane: str, threads: int) -> float:
    """The ratio on rank 0, which reads the other rank's memory; reads and copies take turns."""
    import torch

    from holdfast import comms

    torch.set_num_threads(threads)
    with comms.memory(plane) as opened:
        given, into = opened.empty(64 * MIB), opened.empty(64 * MIB)
        given.fill_(comm.rank)
        with opened.expose(given) as region:
            handle = comms.Handle.decode(comm.all_gather_object(region.handle.encode())[1])
            ratios = []
            for _ in range(0 if comm.rank else 40):
                began = time.perf_counter()
                ctypes.memmove(into.data_ptr(), given.data_ptr(), into.nbytes)
                copied = time.perf_counter()
                opened.read(handle, into).wait()
                ratios.append((copied - began) / (time.perf_counter() - copied))
                if int(into[0]) != 1:
                    raise ArithmeticError("what was read is not what the other has")
            comm.barrier()
    return statistics.median(ratios) if ratios else 0.0
