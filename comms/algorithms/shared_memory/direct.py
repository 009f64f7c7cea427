"""Collectives for ranks that share memory: in every op, a rank publishes, waits for the others, and takes its part.

A rank publishes the sizes of its inputs (and small inputs themselves, in its slot) and raises its flag. Once the flags
of the others are up, it takes what it needs from them. Larger inputs go block by block through the stage (see
`staging`). No rank writes into the tensors of another, so a rank that was stopped and wakes up late harms none.

Cost for n ranks: one synchronisation, and two copies of all that the op makes a rank move.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from holdfast.comms import _native, arithmetic
from holdfast.comms._native import copy, pieces
from holdfast.comms.algorithms.shared_memory.board import ABORTED, CLOSED, NOTE_BYTES, REPLACED, Board
from holdfast.comms.algorithms.shared_memory.channels import Channels
from holdfast.comms.algorithms.shared_memory.publication import STARTED, Publications, Spans
from holdfast.comms.algorithms.shared_memory.staging import Staging
from holdfast.comms.errors import HoldfastError, Revoked
from holdfast.comms.journal import Journal
from holdfast.comms.ops import ReduceOp
from holdfast.comms.tensors.packing import span, unpack
from holdfast.comms.transport.base import FastPath, Observed, Transport


class DirectTransport(Transport):
    """A transport over a `Board` and a way to read a peer's memory, which a backend supplies."""

    medium = "shared memory"

    def __init__(self, board: Board, backend: str) -> None:
        """`backend` is what errors call it."""
        self.rank, self.size = board.rank, board.size
        self._board = board
        self._ops = Publications(board)
        self._channels = Channels(board, self._read_memory)
        self._staging = Staging(board, backend)

    def start(self, deadline: float, connect_payload: Sequence[int] = ()) -> None:
        """Run `enter` and `wait_for_ranks`. Releases everything on failure."""
        try:
            self.enter(connect_payload)
            self.wait_for_ranks(deadline)
        except BaseException:
            self.close()
            raise

    def enter(self, connect_payload: Sequence[int]) -> None:
        """Make this rank's row of the board ready, with up to four numbers for the others."""
        self._board.enter(STARTED, connect_payload)

    def wait_for_ranks(self, deadline: float) -> None:
        """Wait until every rank has entered. May be called again after `OpTimeout`."""
        self._board.wait_entered(deadline)
        self.connect_payloads = [self._board.connect_payload(rank) for rank in range(self.size)]

    @abstractmethod
    def _read_memory(self, rank: int, address: int, into: int, nbytes: int) -> None:
        """Copy `nbytes` bytes at `address` of rank's process to `into` of this one. Raises PeerFailed."""

    @abstractmethod
    def _release(self) -> None:
        """Release what the backend holds beside the board."""

    # -- reductions

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, deadline: float) -> None:
        ops, target = self._ops, span(tensor)
        given = arithmetic.prescale(tensor, op) if op.name in arithmetic.SCALED else tensor
        source = target if given is tensor else span(given)
        if not ops.reduce("all_reduce", source, 0, op, target, deadline, tensor.dtype, alike=True):
            if self.size == 1:
                copy(target[0], *source)
            else:
                self._staging.all_reduce(given, tensor, op, deadline, ops.number)
            ops.finish()
        if op.name in arithmetic.SCALED:
            arithmetic.postscale(tensor, op, self.size)

    def reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp, deadline: float) -> None:
        ops, given, here = self._ops, arithmetic.prescale(tensor, op), self.rank == dst
        source, target = span(given), span(tensor)
        copied = ops.publish(
            "reduce", source, deadline, dtype=tensor.dtype, root=dst, reduction=op.name, count=tensor.numel()
        )
        if here or not copied:
            ops.wait_all_published("reduce", deadline)
        else:
            ops.wait_published(dst, "reduce", deadline)
        kind = arithmetic.kind(tensor.dtype, op)
        if copied:
            if here:
                ops.combine(0, kind, *target)
        elif self.size == 1:
            copy(target[0], *source)
        else:
            give, into = (0, 0) * dst + source, target if here else (0, 0)
            self._staging.reduce("reduce", _padded(give, self.size), into, kind, target[1], deadline, ops.number)
        ops.finish()
        if here:
            arithmetic.postscale(tensor, op, self.size)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, deadline: float
    ) -> None:
        given = [arithmetic.prescale(tensor, op) for tensor in inputs]
        self._reduce_scatter(output, _spans(given), op, deadline)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, deadline: float) -> None:
        given = arithmetic.prescale(tensor, op)
        self._reduce_scatter(output, pieces(given.data_ptr(), output.nbytes, self.size), op, deadline)

    def _reduce_scatter(self, output: torch.Tensor, given: Spans, op: ReduceOp, deadline: float) -> None:
        ops, target = self._ops, span(output)
        if not ops.reduce("reduce_scatter", given, self.rank, op, target, deadline, output.dtype):
            if self.size == 1:
                copy(target[0], *given)
            else:
                for rank in ops.other_ranks():
                    ops.expect(rank, self.rank, target[1])
                result = torch.empty_like(output) if self._overlaps_others(target, given) else output
                into, longest, kind = span(result), max(given[1::2]), arithmetic.kind(output.dtype, op)
                self._staging.reduce("reduce_scatter", given, into, kind, longest, deadline, ops.number)
                unpack(result, output)
            ops.finish()
        arithmetic.postscale(output, op, self.size)

    # -- moves

    def broadcast(self, tensor: torch.Tensor, src: int, deadline: float) -> None:
        ops, here, target = self._ops, self.rank == src, span(tensor)
        given = target if here else ()
        copied = ops.publish("broadcast", given, deadline, dtype=tensor.dtype, root=src, count=tensor.numel())
        if not here:
            ops.wait_published(src, "broadcast", deadline)
            copied = ops.copied(src)
        if not copied and self.size > 1:
            ops.wait_all_published("broadcast", deadline)
            into = () if here else (0, 0) * src + target
            self._staging.share("broadcast", given, into, target[1], deadline, ops.number)
        elif not here:
            ops.take(src, 0, *target)
        ops.finish()

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, deadline: float) -> None:
        self._all_gather(_spans(outputs), tensor, deadline)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, deadline: float) -> None:
        self._all_gather(pieces(output.data_ptr(), tensor.nbytes, self.size), tensor, deadline)

    def _all_gather(self, into: Spans, tensor: torch.Tensor, deadline: float) -> None:
        ops, given = self._ops, span(tensor)
        if not ops.exchange("all_gather", given, into, 0, given[0], deadline, tensor.dtype):
            if self.size > 1:
                self._staging.share("all_gather", given, into, max(into[1::2]), deadline, ops.number)
            ops.finish()

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], deadline: float) -> None:
        given, own = _spans(inputs), 2 * self.rank
        others = (*given[: own + 1], 0, *given[own + 2 :])
        self._all_to_all(_spans(outputs), others, given[own], inputs[self.rank].dtype, deadline)

    def all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor, deadline: float) -> None:
        start, total = span(tensor)
        nbytes = total // self.size
        into, given = pieces(output.data_ptr(), nbytes, self.size), pieces(start, nbytes, self.size, self.rank)
        self._all_to_all(into, given, start + self.rank * nbytes, tensor.dtype, deadline)

    def _all_to_all(self, into: Spans, given: Spans, own: int, dtype: torch.dtype, deadline: float) -> None:
        """Run an all_to_all; `given` is without what this rank keeps, which lies at `own`."""
        ops = self._ops
        if not ops.exchange("all_to_all", given, into, self.rank, own, deadline, dtype):
            if self.size > 1:
                ranks = range(self.size)
                longest = max(ops.nbytes(src, dst) for src in ranks for dst in ranks if src != dst)
                self._staging.move("all_to_all", given, into, longest, deadline, ops.number)
            ops.finish()

    def gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor] | None, dst: int, deadline: float) -> None:
        ops, given, into = self._ops, span(tensor), _spans(outputs or ())
        ops.publish("gather", given, deadline, dtype=tensor.dtype, root=dst)
        if into:
            copy(into[2 * dst], *given)
        ops.wait_all_published("gather", deadline)
        if not ops.collect(0, into) and self.size > 1:
            longest = max(ops.nbytes(rank, 0) for rank in range(self.size) if rank != dst)
            self._staging.move("gather", (0, 0) * dst + given, into, longest, deadline, ops.number)
        ops.finish()

    def scatter(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int, deadline: float) -> None:
        ops, given, target = self._ops, _spans(inputs or ()), span(tensor)
        copied = ops.publish("scatter", given, deadline, dtype=tensor.dtype, root=src)
        if given:
            copy(target[0], given[2 * src], target[1])
        else:
            ops.wait_published(src, "scatter", deadline)
            copied = ops.copied(src)
            if copied:
                ops.take(src, self.rank, *target)
            else:
                ops.expect(src, self.rank, target[1])
        if not copied and self.size > 1:
            ops.wait_all_published("scatter", deadline)
            into = () if given else (0, 0) * src + target
            longest = max(ops.nbytes(src, rank) for rank in range(self.size) if rank != src)
            self._staging.move("scatter", given, into, longest, deadline, ops.number)
        ops.finish()

    def _overlaps_others(self, target: tuple[int, int], given: Spans) -> bool:
        """Whether a result would overwrite inputs that are still to be given to others."""
        start, stop = target[0], sum(target)
        pieces = zip(given[::2], given[1::2], strict=True)
        return any(start < at + n and at < stop for rank, (at, n) in enumerate(pieces) if rank != self.rank)

    def barrier(self, deadline: float) -> None:
        self._ops.exchange("barrier", (), (), 0, 0, deadline)

    def fast_path(self, order: _native.Order, observers: Observed, journal: Journal | None) -> FastPath:
        return _native.BoardPath(self._board.native, order, self._ops.plan, observers, journal)

    # -- point to point

    def send(self, tensor: torch.Tensor, dst: int, tag: int, deadline: float) -> None:
        self._channels.run([(tensor, dst, tag)], [], deadline, "send")

    def recv(self, tensor: torch.Tensor, src: int, tag: int, deadline: float) -> None:
        self._channels.run([], [(tensor, src, tag)], deadline, "recv")

    def batch_send_recv(
        self,
        sends: Sequence[tuple[torch.Tensor, int, int]],
        recvs: Sequence[tuple[torch.Tensor, int, int]],
        deadline: float,
    ) -> None:
        self._channels.run(sends, recvs, deadline, "batch_send_recv")

    # -- the end

    def abort(self, error: HoldfastError) -> None:
        self._board.leave(ABORTED, (error.reason if isinstance(error, Revoked) else str(error)).encode())
        self._board.fail(error)  # after the note: the caller of a failed op may reuse memory that others read

    def rest(self) -> None:
        self._board.stop_spinning()

    def announce(self, word: bytes) -> bool:
        return len(word) <= NOTE_BYTES and self._board.leave(REPLACED, word)

    @property
    def announced(self) -> bytes | None:
        return self._board.announced()

    def close(self) -> None:
        self._board.leave(CLOSED, b"closed")
        self._board.release()
        self._release()


def _spans(tensors: Sequence[torch.Tensor]) -> Spans:
    return tuple(number for tensor in tensors for number in span(tensor))


def _padded(spans: Spans, count: int) -> Spans:
    return spans + (0, 0) * (count - len(spans) // 2)
