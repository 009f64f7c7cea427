"""Collectives: time by backend, speed beside other libraries, what the algorithms send, what a call executes."""

from __future__ import annotations

from typing import ClassVar

from holdfast.harness.asv.common import RankTimes, SpeedUp, need, profile

KIB, MIB = 1 << 10, 1 << 20


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


class BesidePeers(SpeedUp):
    """How many times as fast as another library, measured in turns in one run."""

    params: ClassVar = (
        profile(["torch-gloo", "openmpi"], ["torch-gloo", "openmpi", "mpich"]),
        profile(["all_reduce"], ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]),
        profile([2], [2, 4]),
        profile([8, 16 * MIB], [8, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]),
    )
    param_names: ClassVar = ["peer", "op", "ranks", "size"]

    def setup(self, peer: str, op: str, ranks: int, size: int) -> None:
        need(peer)

    def track_speed_up(self, peer: str, op: str, ranks: int, size: int) -> float:
        return self.speed_up("shm", peer, op, ranks, size)


class Messages:
    """Messages and bytes in one op of the rank that sends most, over a transport that only passes messages."""

    params: ClassVar = (
        profile(["all_reduce", "all_to_all"], ["all_reduce", "all_gather", "broadcast", "all_to_all"]),
        profile([8], [2, 3, 4, 8, 16]),
        profile([8, MIB], [8, 64 * KIB, MIB]),
    )
    param_names: ClassVar = ["op", "ranks", "size"]

    def track_messages(self, op: str, ranks: int, size: int) -> int:
        from holdfast.harness.bench.collectives.counting import count_traffic

        return max(each.messages for each in count_traffic(op, ranks, size))

    def track_bytes(self, op: str, ranks: int, size: int) -> int:
        from holdfast.harness.bench.collectives.counting import count_traffic

        return max(each.nbytes for each in count_traffic(op, ranks, size))

    track_messages.unit = "messages"  # type: ignore[attr-defined]
    track_bytes.unit = "bytes"  # type: ignore[attr-defined]


class Instructions:
    """Bytecodes that one all_reduce of 8 bytes executes on one rank, from the call to the transport and back."""

    def track_bytecodes(self) -> int:
        import torch

        from holdfast.harness.asv.counters import bytecodes, one_rank

        tensor = torch.ones(2)
        with one_rank() as comm:
            return bytecodes(lambda: comm.all_reduce(tensor))

    track_bytecodes.unit = "bytecodes"  # type: ignore[attr-defined]


class ProcessorInstructions:
    """The same in processor instructions; skipped where the machine does not count them."""

    unit = "instructions"

    def setup(self) -> None:
        from holdfast.harness.asv.counters import CountersUnavailable, instructions

        try:
            instructions(lambda: None)
        except CountersUnavailable as error:
            raise NotImplementedError(str(error)) from error

    def track_instructions(self) -> int:
        import torch

        from holdfast.harness.asv.counters import instructions, one_rank

        tensor = torch.ones(2)
        with one_rank() as comm:
            return instructions(lambda: comm.all_reduce(tensor))


class Memory:
    """Peak memory of a process with two threads that reduce 16 MiB."""

    def peakmem_all_reduce(self) -> None:
        import torch

        from holdfast.harness import LocalCluster

        with LocalCluster(2, "inproc", timeout=60.0) as ranks:
            ranks.run(lambda comm: comm.all_reduce(torch.ones(4 << 20)))
