"""Our own communicators, windows and memory planes, as the bench calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.harness.bench.collectives.data import START, Array
from holdfast.harness.bench.collectives.definitions import Operation
from holdfast.harness.bench.drivers.driver import BoundOp, LibraryDriver

if TYPE_CHECKING:
    import torch

    from holdfast.comms.communicator import Communicator


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

        comm, partner = self._comm, self.partner
        if operation.name == "send_recv":
            pair: list[Send | Recv] = [Send(given, self.next), Recv(out, self.before)]
            return BoundOp(lambda: comm.batch_send_recv(pair))
        if partner is None:
            return BoundOp(lambda: None)

        def serve() -> None:
            comm.send(given, partner)
            comm.recv(out, partner)

        def give_back() -> None:
            comm.recv(out, partner)
            comm.send(out, partner)

        return BoundOp(serve if self.rank < partner else give_back)

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
