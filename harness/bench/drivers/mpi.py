"""mpi4py over the MPI that started this process, as the bench calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from holdfast.harness.bench.collectives.data import START, Array
from holdfast.harness.bench.collectives.definitions import Operation
from holdfast.harness.bench.drivers.driver import BoundOp, LibraryDriver


class MpiDriver(LibraryDriver):
    """The world communicator of the MPI that mpirun started us under.

    Windows are `Win.Allocate`d, which both MPIs map between the processes of a host, and locked for all ranks once.
    """

    def __init__(self) -> None:
        import mpi4py
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.rank, self.ranks = self._comm.Get_rank(), self._comm.Get_size()
        library = MPI.Get_library_version().split(",")[0].split("\n")[0]
        self.detail = f"mpi4py {mpi4py.__version__}, {' '.join(library.split()).strip(chr(0))}"

    def bind(self, operation: Operation, source: Array, target: Array) -> BoundOp:
        comm = self._comm
        if operation.name == "barrier":
            return BoundOp(comm.Barrier)
        if operation.name == "split":
            return BoundOp(lambda: comm.Split(0, self.rank).Free())
        if operation.layout == "none":
            return self.refuse(operation)
        if operation.kind == "window":
            return self._window(operation, source, target)
        if operation.kind == "object":
            return self.on_objects(operation, source, target, comm.bcast, comm.allgather)
        return BoundOp(self._call(operation, source, target))

    def _call(self, operation: Operation, source: Array, target: Array) -> Callable[[], Any]:
        comm, in_place, root = self._comm, self._mpi.IN_PLACE, self.rank == 0
        kind = self._mpi._typedict[source.dtype.char]
        given, out = [source, source.size, kind], [target, target.size, kind]
        match operation.name:
            case "all_reduce":
                return lambda: comm.Allreduce(in_place, given)
            case "all_reduce_async":
                return lambda: comm.Iallreduce(in_place, given).Wait()
            case "reduce":
                return lambda: comm.Reduce(in_place if root else given, given if root else None, root=0)
            case "reduce_scatter":
                return lambda: comm.Reduce_scatter_block([source, target.size, kind], out)
            case "all_gather":
                return lambda: comm.Allgather(given, [target, source.size, kind])
            case "broadcast":
                return lambda: comm.Bcast(given, 0)
            case "all_to_all":
                each = source.size // self.ranks
                return lambda: comm.Alltoall([source, each, kind], [target, each, kind])
            case "gather":
                gathered = [target, source.size, kind] if root else None
                return lambda: comm.Gather(given, gathered, 0)
            case "scatter":
                scattered = [source, target.size, kind] if root else None
                return lambda: comm.Scatter(scattered, out, 0)
            case "send_recv":
                return lambda: comm.Sendrecv(given, self.next, 0, out, self.before, 0)
            case "ping_pong":
                return self._ping_pong(given, out)
            case _:
                self.refuse(operation)
                return lambda: None

    def _ping_pong(self, given: list[Any], out: list[Any]) -> Callable[[], None]:
        comm, partner = self._comm, self.partner
        if partner is None:
            return lambda: None

        def serve() -> None:
            comm.Send(given, partner)
            comm.Recv(out, partner)

        def give_back() -> None:
            comm.Recv(out, partner)
            comm.Send(out, partner)

        return serve if self.rank < partner else give_back

    def _window(self, operation: Operation, source: Array, target: Array) -> BoundOp:
        kind, to, back = self._mpi._typedict[source.dtype.char], self.next, self.before
        window = self._mpi.Win.Allocate(target.nbytes, target.itemsize, comm=self._comm)
        shared: Array = np.asarray(window.tomemory()).view(target.dtype)
        window.Lock_all()
        given, out = [source, source.size, kind], [target, target.size, kind]
        one, expected, old = (np.full(1, value, target.dtype) for value in (1, START, 0))
        desired = expected + one

        def put() -> None:
            window.Put(given, to)
            window.Flush(to)

        def get() -> None:
            window.Get(out, back)
            window.Flush(back)

        def fetch_add() -> None:
            window.Fetch_and_op(one, old, to, 0, self._mpi.SUM)
            window.Flush(to)

        def compare_swap() -> None:
            window.Compare_and_swap(desired, expected, old, to, 0)
            window.Flush(to)

        def prepare() -> None:
            shared[:] = source if operation.name == "get" else target
            window.Sync()

        def settle() -> None:
            window.Sync()
            if operation.name != "get":
                target[:] = shared

        def close() -> None:
            window.Unlock_all()
            window.Free()

        runs = {"put": put, "get": get, "fetch_add": fetch_add, "compare_swap": compare_swap}
        return BoundOp(runs[operation.name], prepare, settle, close)

    def close(self) -> None:
        self._mpi.Finalize()
