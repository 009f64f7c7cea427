"""One driver a library: turns an op of the bench into a call without arguments.

Each driver makes the call as the library's own users would write it, with everything that can be prepared before the
timing prepared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.harness.bench.data import START, Array
from holdfast.harness.bench.operations import SIZELESS, Operation

if TYPE_CHECKING:
    import torch

    from holdfast.comms.communicator import Communicator

HOLDFAST = "holdfast:"
"""Prefix of the names of our own contestants; the backend follows."""
MEMCPY, GLOO, OPENMPI, MPICH = "memcpy", "torch-gloo", "openmpi", "mpich"
TIMEOUT = 60.0
"""Seconds that an op may take before its library gives up."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class BoundOp:
    """An op bound to buffers. The bench times `run`, which returns when the op is done on this rank.

    `prepare` is called once the buffers are filled, before any timing; `settle` brings the result of the last `run`
    into the output buffer, for libraries that leave it elsewhere; `close` releases what binding took.
    """

    run: Callable[[], object]
    prepare: Callable[[], object] = _nothing
    settle: Callable[[], object] = _nothing
    close: Callable[[], None] = _nothing


class LibraryDriver(ABC):
    """One rank of one library."""

    rank: int
    ranks: int
    detail: str

    @abstractmethod
    def bind(self, operation: Operation, source: Array, target: Array) -> BoundOp:
        """A call that runs `operation` from `source` to `target`. Called by all ranks, for the same op.

        Raises NotImplementedError if the library has no such op.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""

    @property
    def next(self) -> int:
        return (self.rank + 1) % self.ranks

    @property
    def before(self) -> int:
        return (self.rank - 1) % self.ranks

    @property
    def partner(self) -> int | None:
        """The other rank of this rank's ping-pong; None for the last of an odd number."""
        return self.rank ^ 1 if self.rank ^ 1 < self.ranks else None

    def on_objects(
        self,
        operation: Operation,
        source: Array,
        target: Array,
        broadcast: Callable[[bytes | None, int], Any],
        all_gather: Callable[[bytes], list[Any]],
    ) -> BoundOp:
        """A call of the library's `broadcast(object, root)` or `all_gather(object)`; the object is `source`'s bytes."""
        mine, got, root = [b""], [b""], self.rank == 0

        def prepare() -> None:
            mine[0] = source.tobytes()

        def settle() -> None:
            target[:] = np.frombuffer(b"".join(got), dtype=target.dtype)

        def run_broadcast() -> None:
            got[:] = [broadcast(mine[0] if root else None, 0)]

        def run_all_gather() -> None:
            got[:] = all_gather(mine[0])

        return BoundOp(run_broadcast if operation.name == "broadcast_object" else run_all_gather, prepare, settle)

    def ping_pong(
        self, send: Callable[[Any, int], object], recv: Callable[[Any, int], object], given: Any, out: Any
    ) -> Callable[[], object]:
        """A call of the library's `send(buffer, rank)` and `recv(buffer, rank)`: the lower rank begins."""
        partner = self.partner
        if partner is None:
            return _nothing

        def serve() -> None:
            send(given, partner)
            recv(out, partner)

        def give_back() -> None:
            recv(out, partner)
            send(out, partner)

        return serve if self.rank < partner else give_back

    def refuse(self, operation: Operation) -> BoundOp:
        raise NotImplementedError(f"{operation.name} is not measured on {self.detail}")


class CopyDriver(LibraryDriver):
    """No library: each rank copies memory on its own, which shows what the machine can do."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.detail = rank, ranks, f"numpy {np.__version__} copyto"

    def bind(self, operation: Operation, source: Array, target: Array) -> BoundOp:
        if operation.name != "copy":
            return self.refuse(operation)
        return BoundOp(lambda: np.copyto(target, source))

    def close(self) -> None:
        pass


# torch's gloo ---------------------------------------------------------------------------------------------------------


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


# Ours -----------------------------------------------------------------------------------------------------------------


class HoldfastDriver(LibraryDriver):
    """A holdfast communicator, on whatever backend it has."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.rank, self.ranks, self.detail = comm.rank, comm.size, f"holdfast {comm.backend}"

    def bind(self, operation: Operation, source: Array, target: Array) -> BoundOp:
        import torch

        if operation.layout == "none":
            return self._without_data(operation)
        given, out = torch.from_numpy(source), torch.from_numpy(target)
        match operation.kind:
            case "collective":
                return self._collective(operation, given, out)
            case "point to point":
                return self._point_to_point(operation, given, out)
            case "object":
                comm = self._comm
                return self.on_objects(operation, source, target, comm.broadcast_object, comm.all_gather_object)
            case "window":
                return self._window(operation, given, target)
            case "memory plane":
                return self._memory(operation, given, out)
            case _:
                return self.refuse(operation)

    def _without_data(self, operation: Operation) -> BoundOp:
        import torch

        comm, everyone = self._comm, range(self.ranks)
        match operation.name:
            case "barrier":
                return BoundOp(comm.barrier)
            case "split":
                return BoundOp(lambda: comm.split(everyone).close())
            case "signal":
                window, to, back = comm.window(torch.zeros(1)), self.next, self.before

                def pass_on() -> None:
                    window.signal(to)
                    window.wait_signal(back)

                return BoundOp(pass_on, close=window.close)
            case _:
                return self.refuse(operation)

    def _collective(self, operation: Operation, given: torch.Tensor, out: torch.Tensor) -> BoundOp:
        comm, root = self._comm, self.rank == 0
        match operation.name:
            case "all_reduce":
                return BoundOp(lambda: comm.all_reduce(given))
            case "all_reduce_async":
                return BoundOp(lambda: comm.all_reduce(given, async_op=True).wait())
            case "all_reduce_reproducible":
                return BoundOp(lambda: comm.all_reduce(given, reproducible=True))
            case "reduce":
                return BoundOp(lambda: comm.reduce(given, 0))
            case "reduce_scatter":
                return BoundOp(lambda: comm.reduce_scatter_single(out, given))
            case "all_gather":
                return BoundOp(lambda: comm.all_gather_single(out, given))
            case "broadcast":
                return BoundOp(lambda: comm.broadcast(given, 0))
            case "all_to_all":
                return BoundOp(lambda: comm.all_to_all_single(out, given))
            case "gather":
                gathered = list(out.chunk(self.ranks)) if root else None
                return BoundOp(lambda: comm.gather(given, gathered, 0))
            case "scatter":
                scattered = list(given.chunk(self.ranks)) if root else None
                return BoundOp(lambda: comm.scatter(out, scattered, 0))
            case _:
                return self.refuse(operation)

    def _point_to_point(self, operation: Operation, given: torch.Tensor, out: torch.Tensor) -> BoundOp:
        from holdfast.comms import Recv, Send

        comm = self._comm
        if operation.name == "ping_pong":
            return BoundOp(self.ping_pong(comm.send, comm.recv, given, out))
        pair: list[Send | Recv] = [Send(given, self.next), Recv(out, self.before)]
        return BoundOp(lambda: comm.batch_send_recv(pair))

    def _window(self, operation: Operation, given: torch.Tensor, target: Array) -> BoundOp:
        import torch

        to, back = self.next, self.before
        out = torch.from_numpy(target)
        if operation.name == "get":
            shared = given.clone()
            window = self._comm.window(shared)
            return BoundOp(lambda: window.get(out, back), lambda: shared.copy_(given), close=window.close)
        shared = out.clone()
        window = self._comm.window(shared)

        def put() -> None:
            window.put(given, to)
            window.flush(to)

        run = {
            "put": put,
            "fetch_add": lambda: window.fetch_add(to, 0, 1),
            "compare_swap": lambda: window.compare_swap(to, 0, START, START + 1),
        }[operation.name]
        return BoundOp(run, lambda: shared.copy_(out), lambda: out.copy_(shared), window.close)

    def _memory(self, operation: Operation, given: torch.Tensor, out: torch.Tensor) -> BoundOp:
        from holdfast import comms

        plane = comms.memory(self._comm.backend)
        exposed = plane.empty(given.nbytes).view(given.dtype)
        region = plane.expose(exposed, writable=operation.name == "memory_write")
        handles = [comms.Handle.decode(data) for data in self._comm.all_gather_object(region.handle.encode())]
        if operation.name == "memory_read":
            handle = handles[self.before]
            return BoundOp(lambda: plane.read(handle, out).wait(), lambda: exposed.copy_(given), close=plane.close)
        handle = handles[self.next]
        return BoundOp(
            lambda: plane.write(handle, given).wait(),
            lambda: exposed.copy_(out),
            lambda: out.copy_(exposed),
            plane.close,
        )

    def close(self) -> None:
        self._comm.close()


# mpi4py ---------------------------------------------------------------------------------------------------------------


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
                return self.ping_pong(comm.Send, comm.Recv, given, out)
            case _:
                self.refuse(operation)
                return lambda: None

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
