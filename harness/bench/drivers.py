"""How the bench calls each library: one driver a library, which turns an op into a call without arguments.

Each driver makes the call as the library's own users would write it, with everything that can be prepared
before the timing prepared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.harness.bench.data import Array
from holdfast.harness.bench.definitions import Operation

if TYPE_CHECKING:
    from holdfast.comms.communicator import Communicator

Call = Callable[[], object]

TIMEOUT = 60.0
"""Seconds that an op may take before its library gives up."""


class Driver(ABC):
    """One rank of one library."""

    rank: int
    ranks: int
    detail: str

    @abstractmethod
    def bind(self, operation: Operation, source: Array, target: Array) -> Call:
        """A call that runs `operation` once from `source` to `target`, and returns when it is done here."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""

    def refuse(self, operation: Operation) -> Call:
        raise NotImplementedError(f"{operation.name} is not measured on {self.detail}")


class CopyDriver(Driver):
    """No library: each rank copies memory on its own. What the machine itself can do."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.detail = rank, ranks, f"numpy {np.__version__} copyto"

    def bind(self, operation: Operation, source: Array, target: Array) -> Call:
        if operation.name != "copy":
            return self.refuse(operation)
        return lambda: np.copyto(target, source)

    def close(self) -> None:
        pass


class HoldfastDriver(Driver):
    """A holdfast communicator, on whatever backend it has."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.rank, self.ranks, self.detail = comm.rank, comm.size, f"holdfast {comm.backend}"

    def bind(self, operation: Operation, source: Array, target: Array) -> Call:
        import torch

        from holdfast.comms import Recv, Send

        comm = self._comm
        if operation.name == "barrier":
            return comm.barrier
        given, out = torch.from_numpy(source), torch.from_numpy(target)
        match operation.name:
            case "all_reduce":
                return lambda: comm.all_reduce(given)
            case "reduce_scatter":
                return lambda: comm.reduce_scatter_single(out, given)
            case "all_gather":
                return lambda: comm.all_gather_single(out, given)
            case "broadcast":
                return lambda: comm.broadcast(given, 0)
            case "all_to_all":
                return lambda: comm.all_to_all_single(out, given)
            case "send_recv":
                to, back = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
                pair: list[Send | Recv] = [Send(given, to), Recv(out, back)]
                return lambda: comm.batch_send_recv(pair)
            case _:
                return self.refuse(operation)

    def close(self) -> None:
        self._comm.close()


class GlooDriver(Driver):
    """torch's ProcessGroupGloo, called directly. Its ranks meet at the file `meeting`."""

    def __init__(self, meeting: Path, rank: int, ranks: int) -> None:
        import torch
        import torch.distributed as dist

        store = dist.FileStore(str(meeting), ranks)
        self._group: Any = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=TIMEOUT))
        self.rank, self.ranks, self.detail = rank, ranks, f"torch {torch.__version__} ProcessGroupGloo"

    def bind(self, operation: Operation, source: Array, target: Array) -> Call:
        import torch
        import torch.distributed as dist

        group = self._group
        if operation.name == "barrier":
            return lambda: group.barrier().wait()
        given, out = torch.from_numpy(source), torch.from_numpy(target)
        match operation.name:
            case "all_reduce":
                tensors, sum_options = [given], dist.AllreduceOptions()
                return lambda: group.allreduce(tensors, sum_options).wait()
            case "reduce_scatter":
                return lambda: group._reduce_scatter_base(out, given).wait()
            case "all_gather":
                return lambda: group._allgather_base(out, given).wait()
            case "broadcast":
                return lambda: group.broadcast(given, 0).wait()
            case "all_to_all":
                return lambda: group.alltoall_base(out, given, [], []).wait()
            case "send_recv":
                to, back = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
                sent, received = [given], [out]

                def shift() -> None:
                    sending = group.send(sent, to, 0)
                    group.recv(received, back, 0).wait()
                    sending.wait()

                return shift
            case _:
                return self.refuse(operation)

    def close(self) -> None:
        del self._group


class MpiDriver(Driver):
    """mpi4py over the MPI that mpirun started us under, on its world communicator."""

    def __init__(self) -> None:
        import mpi4py
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.rank, self.ranks = self._comm.Get_rank(), self._comm.Get_size()
        library = MPI.Get_library_version().split(",")[0].strip("\x00 \n")
        self.detail = f"mpi4py {mpi4py.__version__}, {library}"

    def bind(self, operation: Operation, source: Array, target: Array) -> Call:
        comm, in_place = self._comm, self._mpi.IN_PLACE
        if operation.name == "barrier":
            return comm.Barrier
        kind = self._mpi._typedict[source.dtype.char]
        given, out = [source, source.size, kind], [target, target.size, kind]
        match operation.name:
            case "all_reduce":
                return lambda: comm.Allreduce(in_place, given)
            case "reduce_scatter":
                return lambda: comm.Reduce_scatter_block([source, target.size, kind], out)
            case "all_gather":
                gathered = [target, source.size, kind]
                return lambda: comm.Allgather(given, gathered)
            case "broadcast":
                return lambda: comm.Bcast(given, 0)
            case "all_to_all":
                each = source.size // self.ranks
                sent, received = [source, each, kind], [target, each, kind]
                return lambda: comm.Alltoall(sent, received)
            case "send_recv":
                to, back = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
                return lambda: comm.Sendrecv(given, to, 0, out, back, 0)
            case _:
                return self.refuse(operation)

    def close(self) -> None:
        self._mpi.Finalize()
