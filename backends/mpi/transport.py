"""Collectives and messages over an MPI communicator of their own, and how its ops complete or end.

A loop that can be left completes every request. No blocking call of MPI is used: a large send to a stopped process
cannot be cancelled, and would block its caller for as long as the process is stopped.

Open MPI's own collectives run, by its nonblocking calls, where it has them and they are fast. The algorithms of
`MessageTransport` run the rest: what MPI lacks (16-bit floats, minima that keep NaNs), and what it does slowly (large
reductions). Every choice depends only on what all ranks know alike.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from mpi4py import MPI

from holdfast.backends.common.process_memory import permit_peers
from holdfast.backends.common.tcp_channel import TcpChannel
from holdfast.backends.common.torch_group import bytes_of
from holdfast.backends.mpi.handshake import create_group
from holdfast.backends.mpi.out_of_band import StatusMessage, mailbox
from holdfast.backends.mpi.under_way import UnderWay, abandoned
from holdfast.comms import arithmetic
from holdfast.comms._native import OpCall
from holdfast.comms.algorithms.message_passing.algorithms import segmented_all_reduce
from holdfast.comms.algorithms.message_passing.exchange import Posted
from holdfast.comms.algorithms.message_passing.messages import MessageTransport
from holdfast.comms.errors import HoldfastError, Mismatch, OpTimeout, PeerFailed, Revoked, Unsupported
from holdfast.comms.onesided.mapped import MappedWindow, try_window
from holdfast.comms.onesided.requests import RequestService
from holdfast.comms.ops import OpPlan, ReduceOp
from holdfast.comms.rendezvous import tcp
from holdfast.comms.system.waiting import POLL, yield_cpu
from holdfast.comms.tensors.packing import span
from holdfast.comms.transport.base import Context, Transport, WindowMemory
from holdfast.comms.transport.liveness import Liveness, PeerWatch

Tensor = torch.Tensor

_log = logging.getLogger("holdfast.backends")

_SPINS, _CROWDED_SPINS = 2000, 50
"""Checks before the first yield: with more ranks than cores, the others need the processor."""
_TESTS_PER_SPIN = 3
"""Compiled code tests a request this many times while Python tests it once."""
_LOOK_SECONDS = 0.001
_WAITING_SECONDS = 0.01
_PATIENT_SECONDS = 0.1
_SLEEP_SECONDS = 5e-5
_GRACE_SECONDS = 0.2
"""How long a failed call waits for the status message that explains it."""


STAGED_BYTES = 8 << 10
"""Up to this size, a persistent all_reduce on its own buffer, with two copies, is faster than a nonblocking one."""
MOST_PREPARED = 64
"""The number of persistent requests of a communicator: the first sizes, datatypes and operations that it meets."""
SEGMENTED_BYTES = 24 << 20
"""From this size on, holdfast's segmented all_reduce is faster than MPI's."""
PART_BYTES = 1 << 20
GATHERED_BYTES = 1 << 16
"""From this size on, a ring of messages is faster than MPI's nonblocking all_gather (not than its blocking one)."""
SCATTERED_BYTES = 1 << 18
"""From this size on, pairwise exchange is faster than MPI's reduce_scatter."""
MOST_COUNT = 1 << 30
"""The largest count and offset that is passed to MPI: Open MPI 5 has those of MPI 3.1, of 31 bits."""

# MPI's datatypes and operations where it reduces as torch does. The 16-bit floats have no datatype, and its MIN and MAX
# of floats drop NaNs, which torch and numpy keep: holdfast's own algorithms run those over MPI's messages.
_INTEGERS = {
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}
_FLOATS = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
_SUMS = {"sum": MPI.SUM, "avg": MPI.SUM, "premul_sum": MPI.SUM, "product": MPI.PROD}
_ORDERS = {"min": MPI.MIN, "max": MPI.MAX, "band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR}
_OF_BOOL = {"sum": MPI.MAX, "product": MPI.MIN, **_ORDERS}

_NATIVE: dict[tuple[torch.dtype, str], tuple[MPI.Datatype, MPI.Op]] = {
    **{(dtype, name): (mpi, op) for dtype, mpi in _FLOATS.items() for name, op in _SUMS.items()},
    **{(dtype, name): (mpi, op) for dtype, mpi in _INTEGERS.items() for name, op in (_SUMS | _ORDERS).items()},
    **{(torch.bool, name): (MPI.UINT8_T, op) for name, op in _OF_BOOL.items()},
}


_REFUSALS = (MPI.ERR_ARG, MPI.ERR_BUFFER, MPI.ERR_COUNT, MPI.ERR_TYPE)
"""MPI refuses the arguments of a call."""


class _P2PMessage:
    """A send or receive under way, with its tensor. A receive has a request once its message is there."""

    __slots__ = ("peer", "request", "tag", "tensor")

    def __init__(self, request: MPI.Request | None, tensor: Tensor, peer: int, tag: int) -> None:
        self.request, self.tensor, self.peer, self.tag = request, tensor, peer, tag


class MpiTransport(MessageTransport):
    """An MPI communicator that can be aborted."""

    medium = "Open MPI"

    def __init__(self, context: Context) -> None:
        self._epoch = context.epoch
        self._prepared: dict[tuple[torch.dtype, str, int], OpCall] = {}
        self._requests: list[tuple[MPI.Prequest, bytearray]] = []
        self._error: HoldfastError | None = None
        self._ending = threading.RLock()  # a signal handler may abort in the middle of an abort
        here = sum(peer.host == context.peers[context.rank].host for peer in context.peers)
        self._spins = _SPINS if here <= len(os.sched_getaffinity(0)) else _CROWDED_SPINS
        self._everybody = range(context.size)
        self._collective, self._messages = UnderWay(), UnderWay()
        self._unmatched: list[_P2PMessage] = []
        """Receives whose message has not arrived, oldest first."""
        self._status = MPI.Status()
        self._arrived = [0] * context.size
        self._built: set[int] = set()
        self._closed: dict[int, int] = {}
        self._aborted = ""
        abandoned.settle()
        self._liveness = Liveness(context.peers, context.rank, context.over)
        try:
            super().__init__(context, context.link("mpi"))
            self._comm, self._token, processes = create_group(context, self._liveness)
        except BaseException:
            self._liveness.close()
            raise
        self._others = [process for rank, process in enumerate(processes) if rank != context.rank]
        self._peers = context.peers
        self._service: RequestService | None = None
        self._run = self._op_call(
            self._begin,
            lambda request, error, op, memory, start, given, limit: self._finish_late(op, request, error, limit),
        )
        """run(op, memory, start, given, deadline): complete a collective of MPI's own that `start(*given)` begins.

        `memory` is kept until then.
        """
        self._watch = PeerWatch(self._liveness, self._check_live)
        mailbox.open(self._token)
        mailbox.send(StatusMessage(self._token, self.rank, "built"), self._others)

    # -- completing and ending an op

    def _op_call(
        self, start: Callable[..., MPI.Request], finish_late: Callable[..., None], stage: bytearray | None = None
    ) -> OpCall:
        """The calls of a collective that `start` begins; the tests of its request are compiled."""
        polls = _TESTS_PER_SPIN * self._spins
        if stage is not None:  # MPI accesses that alone
            return OpCall(start, MPI.Request.Test, finish_late, polls, stage)
        return OpCall(start, MPI.Request.Test, finish_late, polls, None, self._collective.requests)

    def _begin(
        self, op: str, memory: object, start: Callable[..., MPI.Request], given: tuple[object, ...], deadline: float
    ) -> MPI.Request:
        self._op += 1
        if self._error is not None:
            raise self._error.again()
        if self._collective.requests:  # Ctrl-C came into the op before
            self._collective.abandon()
        return self._collective.begin(start, given, memory)

    def _finish_late(self, op: str, request: MPI.Request | None, error: RuntimeError | None, deadline: float) -> None:
        """Complete a collective that was begun, or raise why it failed. Without a `request` it was not begun."""
        self._rounds = 0
        if request is None:
            assert error is not None
            raise self._explain(op, self._op, error) if isinstance(error, MPI.Exception) else error
        test = request.Test
        try:
            if error is not None:
                raise error
            for _ in range(self._spins):
                if test():
                    return
            self._wait(test, op, self._op, deadline, self._everybody)
        except MPI.Exception as error:
            raise self._explain(op, self._op, error) from error

    def _wait(self, test: Callable[[], bool], op: str, seq: int, deadline: float, awaited: Sequence[int]) -> None:
        began = time.monotonic()
        next_look, said = began + _LOOK_SECONDS, False
        while True:
            for _ in range(16):
                yield_cpu()
                if test():
                    return
            now = time.monotonic()
            if self._error is not None:
                raise self._error.again()
            if now >= next_look:
                if not said and now - began > _WAITING_SECONDS:
                    mailbox.send(StatusMessage(self._token, self.rank, "waits", seq), self._others)
                    said = True
                verdict = self._look(seq, awaited)
                if verdict is not None:
                    if test():
                        return
                    raise verdict
                if said and self._journal is not None:
                    self._journal.waits(self._missing(seq, awaited), rounds=self._rounds)
                next_look = now + _LOOK_SECONDS
            if now >= deadline:
                raise OpTimeout(op, seq, now - began, self._missing(seq, awaited))
            if now - began > _PATIENT_SECONDS:
                time.sleep(_SLEEP_SECONDS)

    def _look(self, seq: int, awaited: Sequence[int]) -> HoldfastError | None:
        """Why an op that is not complete never will be; None as far as this rank can tell."""
        if dead := self._liveness.dead():
            return PeerFailed(dead, "the kernel says that the process is gone")
        closed = dict(self._closed)
        self._read_messages()
        if self._aborted:
            return Revoked(self._epoch, self._aborted)
        for rank, number in closed.items():
            if rank in awaited and (number < seq or len(awaited) < self.size):
                return Revoked(self._epoch, f"rank {rank} closed it")
        return None

    def _read_messages(self) -> None:
        """Record the status messages of the other ranks."""
        for word in mailbox.read(self._token):
            if word.kind == "built":
                self._built.add(word.rank)
            elif word.kind == "waits":
                self._arrived[word.rank] = max(self._arrived[word.rank], word.number)
            elif word.kind == "closed":
                self._closed[word.rank] = word.number
            else:
                self._aborted = self._aborted or f"rank {word.rank} aborted: {word.reason}"

    def _missing(self, seq: int, awaited: Sequence[int]) -> list[int]:
        if len(awaited) < self.size:
            return sorted(set(awaited))
        return [rank for rank in range(self.size) if rank != self.rank and self._arrived[rank] < seq]

    def _explain(self, op: str, seq: int, error: MPI.Exception) -> HoldfastError:
        """Translate an error of MPI: this rank's abort, that of another, a death, or ranks that disagree."""
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            return Mismatch(f"{op}: another rank sent more than this one takes; all must pass the same shape and dtype")
        if error.Get_error_class() in _REFUSALS:
            return HoldfastError(f"{op} failed in this process, by no peer's fault: {error.Get_error_string()}")
        cause: HoldfastError | None = None

        def explained() -> bool:
            nonlocal cause
            own = self._error
            cause = self._look(1 << 62, range(self.size)) or self._failed() if own is None else own.again()
            return cause is not None

        if POLL.reaches(explained, time.monotonic() + _GRACE_SECONDS) and cause is not None:
            return cause
        if error.Get_error_class() == MPI.ERR_REVOKED:
            return Revoked(self._epoch, "another rank aborted it")
        return PeerFailed((), f"{op} (op {seq}): {error.Get_error_string()}")

    def _failed(self) -> PeerFailed | None:
        failed = self._comm.Get_failed()
        ranks = failed.Translate_ranks(None, self._comm.Get_group()) if failed.size else []
        failed.Free()
        return PeerFailed(sorted(ranks), "MPI says that the process has failed") if ranks else None

    # -- windows

    def window(self, tensor: Tensor, deadline: float) -> WindowMemory:
        if len({peer.host for peer in self._peers}) == 1:
            permit_peers()
            window = try_window("mpi", self, self._peers, tensor, deadline, self._watch.check)
            if isinstance(window, MappedWindow):
                return window
            _log.warning("rank %d reaches windows by messages, since it cannot map them: %s", self.rank, window)
        if self._service is None:
            open_channel = partial(TcpChannel, self, tcp.address_for(self._peers), self._watch, deadline)
            self._service = RequestService(self.rank, self.size, self._watch, open_channel)
        return self._service.window(self, tensor, deadline)

    def _check_live(self) -> Sequence[int]:
        """Raise if this communicator has ended, here or on another rank."""
        if self._error is not None:
            raise self._error.again()
        self._read_messages()
        if self._aborted or self._comm.Is_revoked():
            raise self._look(0, ()) or Revoked(self._epoch, "another rank aborted it")
        return ()

    # -- the end

    def abort(self, error: HoldfastError) -> None:
        """Tell the other ranks, and revoke the communicator if all of them have built it.

        A process that is still building it would crash in a revocation (Open MPI 5.0.11, `ompi_comm_revoke_local`
        before there is anything to revoke).
        """
        with self._ending:
            if self._error is None:
                self._error = error
            reason = error.reason if isinstance(error, Revoked) else str(error)
            mailbox.send(StatusMessage(self._token, self.rank, "aborted", reason=reason[:1000]), self._others)
            self._read_messages()
            if len(self._built) == self.size - 1 and not self._comm.Is_revoked():
                self._comm.Revoke()

    def close(self) -> None:
        """Release the transport. A revoked communicator is not freed: messages under way could reach its successor."""
        self._prepared.clear()
        for request, stage in self._requests:
            abandoned.keep(request, stage)
        self._collective.abandon()
        self._messages.abandon()
        if self._service is not None:
            self._service.close()
        self.__dict__.pop("_run", None)  # it refers to this transport
        self._liveness.close()
        mailbox.close(self._token)
        if self._error is None and not self._comm.Is_revoked():
            mailbox.send(StatusMessage(self._token, self.rank, "closed", self._op), self._others)
            self._comm.Free()

    # -- reductions

    def all_reduce(self, tensor: Tensor, op: ReduceOp, deadline: float) -> None:
        large = tensor.nbytes >= SEGMENTED_BYTES
        call = None if large else self._all_reduce_call(tensor.dtype, op, tensor.nbytes)
        if call is None and not large:
            super().all_reduce(tensor, op, deadline)
            return
        scaled = arithmetic.prescale(tensor, op)
        if scaled is not tensor:
            tensor.copy_(scaled)
        if call is not None:
            call(tensor, deadline)
        elif self.size > 1:
            segmented_all_reduce(self._exchange("all_reduce", deadline), tensor.view(-1), op, PART_BYTES)
        arithmetic.postscale(tensor, op, self.size)

    def _all_reduce_call(self, dtype: torch.dtype, op: ReduceOp, nbytes: int) -> OpCall | None:
        """The calls of MPI's all_reduce of `nbytes` bytes; None if MPI does not reduce this as torch does.

        Small ones are persistent requests of MPI, the others begin a new request each. MPI requires all ranks to make
        the same persistent ones in the same order. They do: each is made by the first such op, on the fast path or the
        slow one.
        """
        form, kind, stage = (dtype, op.name, nbytes), _NATIVE.get((dtype, op.name)), None
        if kind is None or form in self._prepared:
            return self._prepared.get(form)
        mpi, reduce = kind

        def begin(tensor: Tensor, deadline: float) -> MPI.Request:
            given = MPI.IN_PLACE, [buffer_of(tensor), mpi], reduce
            return self._begin("all_reduce", tensor, self._comm.Iallreduce, given, deadline)

        def start(tensor: Tensor, deadline: float) -> MPI.Request:
            self._op += 1
            if self._error is not None:
                raise self._error.again()
            persistent.Start()
            return persistent

        def finish_late(
            request: MPI.Request | None, error: RuntimeError | None, tensor: Tensor, deadline: float
        ) -> None:
            self._finish_late("all_reduce", request, error, deadline)

        if not 0 < nbytes <= STAGED_BYTES or len(self._prepared) == MOST_PREPARED:
            return self._op_call(begin, finish_late)
        stage = bytearray(nbytes)
        try:
            persistent = self._comm.Allreduce_init(MPI.IN_PLACE, [stage, mpi], reduce)
        except MPI.Exception as error:
            raise self._explain("all_reduce", self._op, error) from error
        self._requests.append((persistent, stage))
        self._prepared[form] = self._op_call(start, finish_late, stage)
        return self._prepared[form]

    def reduce(self, tensor: Tensor, dst: int, op: ReduceOp, deadline: float) -> None:
        kind = _NATIVE.get((tensor.dtype, op.name))
        if kind is None:
            super().reduce(tensor, dst, op, deadline)
            return
        mpi, reduce = kind
        here, contribution = self.rank == dst, arithmetic.prescale(tensor, op)
        if here and contribution is not tensor:
            tensor.copy_(contribution)
        flat = (tensor if here else contribution).view(-1)
        for start in range(0, max(flat.numel(), 1), MOST_COUNT):
            piece = flat[start : start + MOST_COUNT]
            memory = [buffer_of(piece), piece.numel(), mpi]
            given = (MPI.IN_PLACE, memory, reduce, dst) if here else (memory, None, reduce, dst)
            self._run("reduce", piece, self._comm.Ireduce, given, deadline)
        if here:
            arithmetic.postscale(tensor, op, self.size)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, deadline: float) -> None:
        kind = _NATIVE.get((output.dtype, op.name))
        if kind is None or sum(tensor.nbytes for tensor in inputs) >= SCATTERED_BYTES:
            super().reduce_scatter(output, inputs, op, deadline)
            return
        mpi, reduce = kind
        contributions = [arithmetic.prescale(tensor, op) for tensor in inputs]
        memory, kept = gathered_buffer(contributions)
        sizes = [tensor.numel() for tensor in inputs]
        source, target = [memory, sum(sizes), mpi], [buffer_of(output), output.numel(), mpi]
        kept = kept, contributions, output
        self._run("reduce_scatter", kept, self._comm.Ireduce_scatter, (source, target, sizes, reduce), deadline)
        arithmetic.postscale(output, op, self.size)

    # -- moves

    def broadcast(self, tensor: Tensor, src: int, deadline: float) -> None:
        self._run("broadcast", tensor, self._comm.Ibcast, (memory_of(tensor), src), deadline)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, deadline: float) -> None:
        if sum(output.nbytes for output in outputs) >= GATHERED_BYTES:
            super().all_gather(outputs, tensor, deadline)
            return
        memory, staged = receive_buffer(outputs)
        sizes = [output.nbytes for output in outputs]
        source = memory_of(tensor)
        kept = outputs, staged, tensor
        if len(set(sizes)) == 1:
            target = [memory, sizes[0], MPI.BYTE]
            self._run("all_gather", kept, self._comm.Iallgather, (source, target), deadline)
        else:
            uneven = [memory, *counts("all_gather", sizes)]
            self._run("all_gather", kept, self._comm.Iallgatherv, (source, uneven), deadline)
        copy_out(staged, outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, deadline: float) -> None:
        if output.nbytes >= GATHERED_BYTES:
            super().all_gather_single(output, tensor, deadline)
            return
        given = memory_of(tensor), [buffer_of(output), tensor.nbytes, MPI.BYTE]
        self._run("all_gather", (output, tensor), self._comm.Iallgather, given, deadline)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], deadline: float) -> None:
        given = counts("all_to_all", [tensor.nbytes for tensor in inputs])
        taken = counts("all_to_all", [tensor.nbytes for tensor in outputs])
        memory, kept = gathered_buffer(inputs)
        into, staged = receive_buffer(outputs)
        source, target = [memory, *given], [into, *taken]
        self._run("all_to_all", (kept, staged, outputs), self._comm.Ialltoallv, (source, target), deadline)
        copy_out(staged, outputs)

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, deadline: float) -> None:
        source = memory_of(tensor)
        if outputs is None:
            self._run("gather", tensor, self._comm.Igatherv, (source, None, dst), deadline)
            return
        taken = counts("gather", [output.nbytes for output in outputs])
        memory, staged = receive_buffer(outputs)
        target = [memory, *taken]
        self._run("gather", (tensor, staged, outputs), self._comm.Igatherv, (source, target, dst), deadline)
        copy_out(staged, outputs)

    def scatter(self, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int, deadline: float) -> None:
        target = memory_of(tensor)
        if inputs is None:
            self._run("scatter", tensor, self._comm.Iscatterv, (None, target, src), deadline)
            return
        given = counts("scatter", [part.nbytes for part in inputs])
        memory, kept = gathered_buffer(inputs)
        source = [memory, *given]
        self._run("scatter", (tensor, kept, inputs), self._comm.Iscatterv, (source, target, src), deadline)

    def barrier(self, deadline: float) -> None:
        self._run("barrier", None, self._comm.Ibarrier, (), deadline)

    # -- prepared functions for usual ops

    def function(self, plan: OpPlan) -> Callable[..., None]:
        reduction, dtype = plan.reduction, plan.dtype
        if plan.op != "all_reduce" or plan.nbytes >= SEGMENTED_BYTES or reduction is None or dtype is None:
            return Transport.function(self, plan)
        call = None
        if reduction.name not in arithmetic.SCALED:
            call = self._all_reduce_call(dtype, reduction, plan.nbytes)
        return super().function(plan) if call is None else call

    # -- messages, for the algorithms

    def _post_send(self, tensor: Tensor, dst: int, tag: int) -> Posted:
        if self._error is not None:
            raise self._error.again()
        try:
            request = self._messages.begin(self._comm.Isend, (memory_of(tensor), dst, tag), tensor)
        except MPI.Exception as error:
            raise self._explain("send", self._op, error) from error
        return _P2PMessage(request, tensor, dst, tag)

    def _post_recv(self, tensor: Tensor, src: int, tag: int) -> Posted:
        if self._error is not None:
            raise self._error.again()
        message = _P2PMessage(None, tensor, src, tag)
        self._unmatched.append(message)
        return message

    def _match(self, op: str) -> None:
        """Begin to receive the messages that have arrived, in the order of their receives; raises `Mismatch`.

        Open MPI 5 copies a large message whole, past the end of a shorter receive (its RGET protocol). So the length is
        looked at before there is a receive.
        """
        improbe, status = self._comm.Improbe, self._status
        late: list[tuple[int, int]] = []
        for message in tuple(self._unmatched):
            way = (message.peer, message.tag)
            if way in late:
                continue
            if (arrived := improbe(message.peer, message.tag, status)) is None:
                late.append(way)
                continue
            self._unmatched.remove(message)
            if (count := status.Get_elements(MPI.BYTE)) != message.tensor.nbytes:
                scratch = torch.empty(count, dtype=torch.uint8, device="cpu")
                self._messages.begin(arrived.Irecv, (memory_of(scratch),), scratch)
                raise Mismatch(
                    f"{op}: rank {message.peer} sent {count} bytes, rank {self.rank} takes {message.tensor.nbytes}; "
                    "both must pass the same shape and dtype"
                )
            message.request = self._messages.begin(arrived.Irecv, (memory_of(message.tensor),), message.tensor)

    def _complete(self, posted: Sequence[Posted], deadline: float, op: str, seq: int) -> None:
        self._rounds += 1
        for number, message in enumerate(posted):
            assert isinstance(message, _P2PMessage)
            try:
                self._complete_one(message, deadline, op, seq)
            except BaseException as error:
                for left in posted[number:]:
                    assert isinstance(left, _P2PMessage)
                    if left in self._unmatched:
                        self._unmatched.remove(left)
                if isinstance(error, MPI.Exception):
                    raise self._explain(op, seq, error) from error
                raise
        self._messages.forget_completed()

    def _complete_one(self, message: _P2PMessage, deadline: float, op: str, seq: int) -> None:
        test = partial(self._is_complete, message, op)
        for _ in range(self._spins):
            if test():
                return
        self._wait(test, op, seq, deadline, (message.peer,))

    def _is_complete(self, message: _P2PMessage, op: str) -> bool:
        if self._unmatched:  # also while a send is waited for: its receiver may wait for a send of ours in turn
            self._match(op)
        request = message.request
        return request is not None and request.Test()


def buffer_of(tensor: Tensor) -> MPI.buffer:
    """The memory of a contiguous tensor. The caller keeps the tensor."""
    return MPI.buffer.fromaddress(*span(tensor))


def memory_of(tensor: Tensor) -> list[Any]:
    """The memory of a contiguous tensor as bytes, in MPI's form. The caller keeps the tensor."""
    if tensor.nbytes <= MOST_COUNT:
        return [buffer_of(tensor), MPI.BYTE]
    return [buffer_of(tensor), 1, _type_of(tensor.nbytes, MOST_COUNT)]


@cache
def _type_of(nbytes: int, most: int) -> MPI.Datatype:
    """So many bytes as one item of MPI, of pieces of `most` bytes."""
    whole, rest = divmod(nbytes, most)
    piece = MPI.BYTE.Create_contiguous(most)
    return MPI.Datatype.Create_struct([whole, rest], [0, whole * most], [piece, MPI.BYTE]).Commit()


def counts(op: str, sizes: Sequence[int]) -> tuple[tuple[list[int], list[int]], MPI.Datatype]:
    """Sizes, the offset at which each begins, and of which datatype they are: each rank may have one of its own."""
    total, unit, mpi = sum(sizes), 1, MPI.BYTE
    if total > MOST_COUNT:
        unit = min(size & -size for size in sizes if size)
        if total > unit * MOST_COUNT:
            raise Unsupported(
                f"{op} over 'mpi' of {total} bytes on one rank, in parts that are multiples of {unit} bytes only",
                "pad them to multiples of a larger power of two",
            )
        mpi = _unit_of(unit)
    units = [size // unit for size in sizes]
    return (units, [0, *accumulate(units)][:-1]), mpi


@cache
def _unit_of(nbytes: int) -> MPI.Datatype:
    return MPI.BYTE.Create_contiguous(nbytes).Commit()


def adjacent(tensors: Sequence[Tensor]) -> MPI.buffer | None:
    """The memory of tensors that lie one behind the other; None if they do not."""
    start = end = 0
    for tensor in tensors:
        if size := tensor.nbytes:
            address = tensor.data_ptr()
            if not start:
                start = end = address
            if address != end:
                return None
            end += size
    return MPI.buffer.fromaddress(start, end - start)


def gathered_buffer(tensors: Sequence[Tensor]) -> tuple[MPI.buffer, object]:
    """One buffer with the bytes of all tensors, and the object that the caller has to keep."""
    if (memory := adjacent(tensors)) is not None:
        return memory, tensors
    staged = torch.cat([bytes_of(tensor) for tensor in tensors])
    return buffer_of(staged), staged


def receive_buffer(tensors: Sequence[Tensor]) -> tuple[MPI.buffer, Tensor | None]:
    """One buffer for the bytes of all tensors, and its tensor if `copy_out` must copy from it afterwards."""
    if (memory := adjacent(tensors)) is not None:
        return memory, None
    staged = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8, device="cpu")
    return buffer_of(staged), staged


def copy_out(staged: Tensor | None, tensors: Sequence[Tensor]) -> None:
    """Copy the bytes received into `receive_buffer` to their tensors."""
    if staged is None:
        return
    start = 0
    for tensor in tensors:
        bytes_of(tensor).copy_(staged[start : start + tensor.nbytes])
        start += tensor.nbytes
