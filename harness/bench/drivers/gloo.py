"""torch's gloo, as the bench calls it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from holdfast.harness.bench.collectives.data import Array
from holdfast.harness.bench.collectives.definitions import SIZELESS, Operation
from holdfast.harness.bench.drivers.driver import TIMEOUT, BoundOp, LibraryDriver


class GlooDriver(LibraryDriver):
    """torch's ProcessGroupGloo, called directly. Its ranks meet at the file `meeting`."""

    def __init__(self, meeting: Path, rank: int, ranks: int) -> None:
        import torch
        import torch.distributed as dist

        store = dist.FileStore(str(meeting), ranks)
        self._group: Any = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=TIMEOUT))
        self.rank, self.ranks, self.detail = rank, ranks, f"torch {torch.__version__} ProcessGroupGloo"

    def bind(self, operation: Operation, source: Array, target: Array) -> BoundOp:
        import torch
        import torch.distributed as dist

        group = self._group
        if operation.name == "barrier":
            return BoundOp(lambda: group.barrier().wait())
        if operation.layout in SIZELESS or operation.kind not in ("collective", "point to point"):
            return self.refuse(operation)
        given, out = torch.from_numpy(source), torch.from_numpy(target)
        root = self.rank == 0
        match operation.name:
            case "all_reduce" | "all_reduce_async":
                tensors, sum_options = [given], dist.AllreduceOptions()
                return BoundOp(lambda: group.allreduce(tensors, sum_options).wait())
            case "reduce":
                to_root = dist.ReduceOptions()
                to_root.rootRank = 0
                return BoundOp(lambda: group.reduce([given], to_root).wait())
            case "reduce_scatter":
                return BoundOp(lambda: group._reduce_scatter_base(out, given).wait())
            case "all_gather":
                return BoundOp(lambda: group._allgather_base(out, given).wait())
            case "broadcast":
                return BoundOp(lambda: group.broadcast(given, 0).wait())
            case "all_to_all":
                return BoundOp(lambda: group.alltoall_base(out, given, [], []).wait())
            case "gather":
                gathered = [list(out.chunk(self.ranks))] if root else []
                gather_options = dist.GatherOptions()
                gather_options.rootRank = 0
                return BoundOp(lambda: group.gather(gathered, [given], gather_options).wait())
            case "scatter":
                scattered = [list(given.chunk(self.ranks))] if root else []
                scatter_options = dist.ScatterOptions()
                scatter_options.rootRank = 0
                return BoundOp(lambda: group.scatter([out], scattered, scatter_options).wait())
            case "send_recv":
                return BoundOp(self._shift([given], [out]))
            case "ping_pong":
                return BoundOp(self._ping_pong([given], [out]))
            case _:
                return self.refuse(operation)

    def _shift(self, given: list[Any], out: list[Any]) -> Callable[[], None]:
        group, to, back = self._group, self.next, self.before

        def shift() -> None:
            sending = group.send(given, to, 0)
            group.recv(out, back, 0).wait()
            sending.wait()

        return shift

    def _ping_pong(self, given: list[Any], out: list[Any]) -> Callable[[], None]:
        group, partner = self._group, self.partner

        def serve() -> None:
            group.send(given, partner, 0).wait()
            group.recv(out, partner, 0).wait()

        def give_back() -> None:
            group.recv(out, partner, 0).wait()
            group.send(out, partner, 0).wait()

        if partner is None:
            return lambda: None
        return serve if self.rank < partner else give_back

    def close(self) -> None:
        del self._group
