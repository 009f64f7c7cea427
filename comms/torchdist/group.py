# mypy: disable-error-code="override, assignment"
"""`HoldfastProcessGroup`: torch's process group over a `Communicator`.

Ops that torch waits for run in the calling thread; asynchronous ones on the communicator's worker. Threads (autograd's
among them) take turns: the order of ops is that in which they entered.

Types of overridden methods are looser than those in torch's stubs, which name one overload each: hence the first line.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import HoldfastError, Revoked
from holdfast.comms.ops import ReduceOp
from holdfast.comms.torchdist.monitored import MonitoredBarrier
from holdfast.comms.torchdist.options import Options
from holdfast.comms.torchdist.p2p_channels import P2PChannels
from holdfast.comms.torchdist.reconfigure import asked_for, check, connect_changed, handle
from holdfast.comms.torchdist.sparse import all_reduce_sparse
from holdfast.comms.torchdist.words import is_async, reduction, seconds
from holdfast.comms.torchdist.works import ReceivedFrom, TorchWork
from holdfast.comms.work import DONE, Work

Tensor = torch.Tensor
Tensors = Sequence[Tensor]
Issue = Callable[[bool, float], Work]
"""Issues one op on the communicator, given async_op and the timeout in seconds."""

_RECORDS = hasattr(c10d, "_maybe_attach_flight_recorder")
"""From 2.15 on torch attaches a recorder to a new group that has devices, which takes a backend of torch's own kind."""

_numbers = itertools.count()
_ABORTED = "the process group was aborted"


class HoldfastProcessGroup(dist.ProcessGroup):
    """One rank of a group. Made by `init_process_group("holdfast")` and `new_group`, not by hand.

    `communicator` is what it runs over. Ops take torch's arguments and raise holdfast's errors (all RuntimeErrors).
    """

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_reconfigure = True
    supports_time_estimate = False

    def __init__(self, store: dist.Store, communicator: Communicator, options: Options, timeout: float) -> None:
        super().__init__(communicator.rank, communicator.size)  # type: ignore[call-arg]  # the form for subclasses
        self.communicator = communicator
        self.options = options
        self._store = store
        self._timeout = timeout
        self._turn = threading.RLock()
        self._together: list[TorchWork] | None = None
        self._p2p = P2PChannels(communicator, dist.PrefixStore("point-to-point", store))
        self._monitored = MonitoredBarrier(store, communicator.rank, communicator.size)
        self._name, self._description = "", "undefined"
        self._issued = 0
        self._number = next(_numbers)
        self._root = communicator.name
        self._used: set[int] = set()

    # -- who it is

    def rank(self) -> int:
        return self.communicator.rank

    def size(self) -> int:
        return self.communicator.size

    getRank, getSize = rank, size  # noqa: N815  # torch's names

    def name(self) -> str:
        return "holdfast"

    getBackendName = _get_backend_name = name  # noqa: N815  # torch's names

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        if _RECORDS and self not in c10d._world.pg_map:
            return []
        return [torch.device(self.communicator.device.type)]

    def _get_backend(self, device: torch.device) -> HoldfastProcessGroup:
        """torch asks a group for the backend of a device: it is its own."""
        if torch.device(device).type != self.communicator.device.type:
            raise RuntimeError(f"this group takes tensors on {self.communicator.device}, not on {device}")
        return self

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def timeout(self) -> float:
        """Seconds that an op may take which does not bring a timeout."""
        return self._timeout

    def _set_sequence_number_for_group(self) -> None:
        """Ops are numbered from the start."""

    def _get_sequence_number_for_group(self) -> int:
        return self._issued

    def set_timeout(self, timeout: timedelta) -> None:
        """The timeout of ops that do not bring one."""
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # -- reductions

    def allreduce(
        self, tensors: Tensors | Tensor, opts: Any = None, op: Any = None, timeout: timedelta | None = None
    ) -> TorchWork:
        given = _listed(tensors)
        opts, op = _options(opts, op, dist.AllreduceOptions, "reduceOp")
        if given[0].layout != torch.strided:
            return self._together_at_once(given, op, opts)
        return self._run([self._all_reduce(tensor, op) for tensor in given], given, opts, timeout)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._run([self._all_reduce(tensor, op) for tensor in tensors], tensors, opts)

    def _all_reduce(self, tensor: Tensor, op: Any) -> Issue:
        ours = reduction(op, tensor)
        return lambda later, limit: self.communicator.all_reduce(tensor, ours, later, limit)

    def _together_at_once(self, tensors: Tensors, op: Any, opts: Any) -> TorchWork:
        """Sparse tensors take several ops, each sized by the one before: they are complete when this returns."""
        with self._turn:
            for tensor in tensors:
                limit = seconds(getattr(opts, "timeout", None)) or self._timeout
                all_reduce_sparse(self.communicator, tensor, reduction(op, tensor), limit)
        return TorchWork([DONE], tensors)

    def reduce(
        self, tensors: Tensors | Tensor, opts: Any = None, op: Any = None, timeout: timedelta | None = None
    ) -> TorchWork:
        (tensor,) = given = _listed(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        ours = reduction(op if isinstance(opts, int) else opts.reduceOp, tensor) if op or opts else ReduceOp.SUM
        return self._run(
            [lambda later, limit: self.communicator.reduce(tensor, root, ours, later, limit)], given, opts, timeout
        )

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> TorchWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        issues = [self._reduce_scatter(output, given, op) for output, given in zip(outputs, inputs, strict=True)]
        return self._run(issues, outputs, opts)

    def _reduce_scatter(self, output: Tensor, given: Tensors, op: Any) -> Issue:
        ours = reduction(op, output)
        return lambda later, limit: self.communicator.reduce_scatter(output, given, ours, later, limit)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> TorchWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def issue(output: Tensor, tensor: Tensor) -> Issue:
            ours = reduction(op, tensor)
            return lambda later, limit: self.communicator.reduce_scatter_single(output, tensor, ours, later, limit)

        return self._run([issue(o, t) for o, t in zip(outputs, inputs, strict=True)], outputs, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- moves

    def broadcast(self, tensors: Tensors | Tensor, opts: Any = None, timeout: timedelta | None = None) -> TorchWork:
        given = _listed(tensors)
        root = opts if isinstance(opts, int) else 0 if opts is None else opts.rootRank

        def issue(tensor: Tensor) -> Issue:
            return lambda later, limit: self.communicator.broadcast(tensor, root, later, limit)

        return self._run([issue(tensor) for tensor in given], given, opts, timeout)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        issues = [self._all_gather(outs, tensor) for outs, tensor in zip(outputs, inputs, strict=True)]
        return self._run(issues, [tensor for outs in outputs for tensor in outs], opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        """`outputs[rank][i]` takes that rank's `inputs[i]`."""
        issues = [self._all_gather([of_rank[i] for of_rank in outputs], tensor) for i, tensor in enumerate(inputs)]
        return self._run(issues, [tensor for of_rank in outputs for tensor in of_rank], opts)

    def _all_gather(self, outputs: Tensors, tensor: Tensor) -> Issue:
        return lambda later, limit: self.communicator.all_gather(outputs, tensor, later, limit)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> TorchWork:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        def issue(output: Tensor, tensor: Tensor) -> Issue:
            return lambda later, limit: self.communicator.all_gather_single(output, tensor, later, limit)

        return self._run([issue(o, t) for o, t in zip(outputs, inputs, strict=True)], outputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> TorchWork:
        root, taken = opts.rootRank, outputs[0] if outputs else None
        return self._run(
            [lambda later, limit: self.communicator.gather(inputs[0], taken, root, later, limit)], taken or [], opts
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> TorchWork:
        root, given = opts.rootRank, inputs[0] if inputs else None
        return self._run(
            [lambda later, limit: self.communicator.scatter(outputs[0], given, root, later, limit)], outputs, opts
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        return self._run(
            [lambda later, limit: self.communicator.all_to_all(outputs, inputs, later, limit)], outputs, opts
        )

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> TorchWork:
        rows_out, rows_in = output_split_sizes or None, input_split_sizes or None
        return self._run(
            [lambda later, limit: self.communicator.all_to_all_single(output, tensor, rows_out, rows_in, later, limit)],
            [output],
            opts,
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> TorchWork:
        return self._run([lambda later, limit: self.communicator.barrier(later, limit)], [], opts, timeout)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """Return once all ranks have come; else raise on all, naming those that did not. See `MonitoredBarrier`."""
        with self._turn:
            limit = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
            self._monitored.pass_through(self._timeout if limit is None else limit, wait_all_ranks)

    # -- point to point: beside the collectives, not in order with them

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> TorchWork:  # noqa: N803  # torch's name
        (tensor,) = tensors
        return self._joined(TorchWork([self._p2p.send(tensor, dstRank, tag, self._timeout)], tensors))

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> TorchWork:  # noqa: N803  # torch's name
        (tensor,) = tensors
        work = self._p2p.recv(tensor, srcRank, tag, self._timeout)
        return self._joined(ReceivedFrom(work, tensors, work.source))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> TorchWork:
        (tensor,) = tensors
        work = self._p2p.recv(tensor, None, tag, self._timeout)
        return self._joined(ReceivedFrom(work, tensors, work.source))

    # -- several ops as one

    def _start_coalescing(self, device: torch.device) -> None:
        with self._turn:
            if self._together is not None:
                raise HoldfastError("ops of this group are being coalesced already; end that first")
            self._together = []

    def _end_coalescing(self, device: torch.device) -> TorchWork:
        with self._turn:
            together, self._together = self._together or [], None
        return TorchWork(
            [part for work in together for part in work.parts], [t for work in together for t in work.result()]
        )

    def _joined(self, work: TorchWork) -> TorchWork:
        if self._together is not None:
            self._together.append(work)
        return work

    def _run(self, issues: Sequence[Issue], tensors: Tensors, opts: Any, timeout: timedelta | None = None) -> TorchWork:
        limit = seconds(timeout) or seconds(getattr(opts, "timeout", None)) or self._timeout
        with self._turn:
            later = is_async(opts) or self._together is not None
            self._issued += len(issues)
            return self._joined(TorchWork([issue(later, limit) for issue in issues], tensors))

    # -- other members, in the same object

    def get_reconfigure_handle(self) -> str:
        """The name of this member, for `reconfigure` on those that are to be in a group with it."""
        return handle(self.options.backend, self.communicator.device, self._number)

    def reconfigure(
        self, given: Any, handles: Sequence[str] | None = None, timeout: timedelta | float | None = None
    ) -> TorchWork:
        """Go on as the group of the members in `handles`, in rank order; collective over these alone.

        Takes torch 2.14's `ReconfigureOptions`, or `(uuid, handles, timeout)`. What is pending ends with `Revoked`, or
        `PeerFailed` if another member left first; an op that others have still to finish, they finish. Rank and size
        are new when this returns. Works after an abort, and after the death of members that are left out. Raises
        ValueError (bad handles) and RuntimeError (the uuid was used before), which change nothing; else what
        `connect` raises, after which another `reconfigure` may follow.
        """
        change = asked_for(given, handles, timeout)
        with self._turn:
            if change.uuid in self._used:
                raise HoldfastError(f"reconfigure: uuid {change.uuid} was already used; take a new one")
            check(change, self.get_reconfigure_handle())
            self._used.add(change.uuid)
            device = self.communicator.device
            self.shutdown()
            mine = self.get_reconfigure_handle()
            self.communicator = connect_changed(change, mine, self._store, self._root, device, self._timeout)
            store = dist.PrefixStore(f"reconfigured/{change.uuid}", self._store)
            self._p2p = P2PChannels(self.communicator, dist.PrefixStore("point-to-point", store))
            self._monitored = MonitoredBarrier(store, self.communicator.rank, self.communicator.size)
        return TorchWork([DONE], [])

    def get_error(self) -> Any:
        """torch's `ErrorType`: what has ended the communicator, if anything did but an abort by this rank."""
        from torch._C._distributed_c10d import ErrorType

        over = self.communicator._executor.over
        if over is None or (isinstance(over, Revoked) and over.reason in (_ABORTED, "closed")):
            return ErrorType.SUCCESS
        return ErrorType.TIMEOUT if "timed out" in str(over) else ErrorType.COMM_ERROR

    # -- the end

    def abort(self) -> None:
        """End all ops here, and those of the peers that wait for this rank, and release everything."""
        over = Revoked(self.communicator.epoch, _ABORTED)
        self.communicator.abort(over)
        self._p2p.abort(over)
        self.shutdown()

    def shutdown(self) -> None:
        """Release everything; what is pending ends with `Revoked`. Idempotent."""
        self._p2p.close()
        self.communicator.close()


def _listed(tensors: Tensors | Tensor) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _options(opts: Any, op: Any, kind: Any, field: str) -> tuple[Any, Any]:
    """torch's two ways to say how to reduce: an options object, or the reduction itself."""
    if opts is None:
        return None, dist.ReduceOp.SUM if op is None else op
    if isinstance(opts, kind):
        return opts, getattr(opts, field)
    return None, opts
