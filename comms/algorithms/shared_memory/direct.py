"""Collectives for ranks that share memory: every op publishes, waits for the others, and takes its part.

Each op is a *plan* (its signature and reduction, made once) with the addresses of this rank's inputs and outputs.
Compiled code runs it (`comms/native/board/run_op.c`) and returns if a peer is late. Python then waits, looking at the
deadline and at the peers, and resumes it.

Each op has a number k and two phases: 4k+1 "my inputs are published" and 4k+3 "I have taken all I need". Small inputs
are copied into the rank's slot of the board, tiny ones into a line. Slots have two parities, so op k+2 waits until all
have finished op k before it writes; lines go round after sixteen ops. Larger inputs go block by block through the
stage, or are read in place (`pipeline.c`). No rank writes into the tensors of another, so a rank that was stopped and
wakes up late harms none. docs/internals/shared-memory.md has the costs and the papers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NoReturn

import torch

from holdfast.comms import arithmetic
from holdfast.comms.algorithms.shared_memory.board import ABORTED, CLOSED, NOTE_BYTES, REPLACED, Board
from holdfast.comms.algorithms.shared_memory.channels import Channels
from holdfast.comms.errors import HoldfastError, Mismatch, Revoked
from holdfast.comms.ops import OpPlan, ReduceOp, describe
from holdfast.comms.system.local_causes import unreadable_memory
from holdfast.comms.tensors.packing import span
from holdfast.comms.transport.base import Transport

Spans = tuple[int, ...]
"""Memory of this process: the address and size in bytes of each piece, flat."""

_STARTED = 3
"""The phase of a rank after op 0, which connects."""

_WAITS, _UNREADABLE, _OTHER_OP = 1, 2, 3
"""Why an op has halted: see run_op.c."""


class DirectTransport(Transport):
    """A transport over a `Board` and a way to read a peer's memory, which a backend supplies."""

    medium = "shared memory"

    def __init__(self, board: Board, backend: str) -> None:
        """`backend` is what errors call it."""
        self.rank, self.size = board.rank, board.size
        self._board, self.board = board, board.native
        self._backend = backend
        self._plans: dict[tuple[object, ...], OpPlan] = {}
        self._channels = Channels(board, self._read_memory)

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
        self._board.enter(_STARTED, connect_payload)

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

    # -- ops: the plan of each, and this rank's inputs and outputs, are run by compiled code

    def _run(
        self,
        op: str,
        give: Spans,
        take: Spans,
        deadline: float,
        dtype: torch.dtype | None = None,
        *,
        root: int = 0,
        reduction: ReduceOp | None = None,
        nbytes: int = 0,
    ) -> None:
        """Run an op. `dtype`, `root`, `reduction` and `nbytes`, as far as they are given, must agree on all ranks."""
        board = self._board
        if board.error is not None:
            board.check()
        key = op, dtype, nbytes, root, "" if reduction is None else reduction.name
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = OpPlan.make(op, dtype, nbytes, root, reduction)
        signed, kind = plan.signature, plan.kind
        while (halted := board.native.run(signed, kind, give, take)) is not None:
            board.check()
            self._resume(op, deadline, *halted)

    def _resume(self, op: str, deadline: float, why: int, rank: int, value: int, flag: int) -> None:
        """Wait for what an op halted for, or raise why it cannot go on."""
        board, number = self._board, self._board.native.number + 1
        if why == _WAITS:
            board.wait_flag(rank, value, deadline, op, number, flag)
        elif why == _UNREADABLE:
            board.check_peers(lambda: [rank])
            raise unreadable_memory(self._backend, rank, value)
        elif why == _OTHER_OP:
            self._refuse_op(rank, number)
        else:
            raise Mismatch(
                f"rank {rank} gives {value} bytes to rank {self.rank} in op {number}, which expects {flag}; "
                "the sizes that both sides pass must agree"
            )

    def _refuse_op(self, rank: int, number: int) -> NoReturn:
        board, before = self._board, self._board.native.roots_before
        theirs, mine = (describe(board.words[board.table(each, number)], before) for each in (rank, self.rank))
        rule = "every rank must issue the same ops, in the same order, with the same roots, shapes and dtypes"
        if theirs == mine:
            raise Mismatch(
                f"rank {rank} and rank {self.rank} named different roots in an op before {mine}, op {number}, so "
                f"that they have different results; {rule}"
            )
        raise Mismatch(f"rank {rank} called {theirs} as op {number}, rank {self.rank} {mine}; {rule}")

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, deadline: float) -> None:
        given = arithmetic.prescale(tensor, op)
        self._run("all_reduce", span(given), span(tensor), deadline, tensor.dtype, reduction=op, nbytes=tensor.nbytes)
        arithmetic.postscale(tensor, op, self.size)

    def reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp, deadline: float) -> None:
        given, here, nbytes = arithmetic.prescale(tensor, op), self.rank == dst, tensor.nbytes
        take = span(tensor) if here else ()
        self._run("reduce", span(given), take, deadline, tensor.dtype, root=dst, reduction=op, nbytes=nbytes)
        if here:
            arithmetic.postscale(tensor, op, self.size)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, deadline: float
    ) -> None:
        given = [arithmetic.prescale(tensor, op) for tensor in inputs]
        self._run("reduce_scatter", _spans(given), span(output), deadline, output.dtype, reduction=op)
        arithmetic.postscale(output, op, self.size)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, deadline: float) -> None:
        given = arithmetic.prescale(tensor, op)
        give = _pieces(given.data_ptr(), output.nbytes, self.size)
        self._run("reduce_scatter", give, span(output), deadline, output.dtype, reduction=op)
        arithmetic.postscale(output, op, self.size)

    def broadcast(self, tensor: torch.Tensor, src: int, deadline: float) -> None:
        give, take = (span(tensor), ()) if self.rank == src else ((), span(tensor))
        self._run("broadcast", give, take, deadline, tensor.dtype, root=src, nbytes=tensor.nbytes)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, deadline: float) -> None:
        self._run("all_gather", span(tensor), _spans(outputs), deadline, tensor.dtype)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, deadline: float) -> None:
        take = _pieces(output.data_ptr(), tensor.nbytes, self.size)
        self._run("all_gather", span(tensor), take, deadline, tensor.dtype)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], deadline: float) -> None:
        self._run("all_to_all", _spans(inputs), _spans(outputs), deadline, inputs[self.rank].dtype)

    def all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor, deadline: float) -> None:
        nbytes = tensor.nbytes // self.size
        give, take = (_pieces(each.data_ptr(), nbytes, self.size) for each in (tensor, output))
        self._run("all_to_all", give, take, deadline, tensor.dtype)

    def gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor] | None, dst: int, deadline: float) -> None:
        self._run("gather", span(tensor), _spans(outputs or ()), deadline, tensor.dtype, root=dst)

    def scatter(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int, deadline: float) -> None:
        self._run("scatter", _spans(inputs or ()), span(tensor), deadline, tensor.dtype, root=src)

    def barrier(self, deadline: float) -> None:
        self._run("barrier", (), (), deadline)

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
        self._board.leave(
            ABORTED, (error.reason if isinstance(error, Revoked) else str(error)).encode(errors="replace")
        )
        self._board.fail(error)  # after the note: the caller of a failed op may reuse memory that others read

    def rest(self) -> None:
        self._board.stop_spinning()

    def announce(self, word: bytes, why: HoldfastError) -> bool:
        if len(word) > NOTE_BYTES:
            return False
        # first: a rank that hears of it aborts, and that would end this rank's op with less than this rank knows
        self._board.error = self._board.error or why
        return self._board.leave(REPLACED, word)

    @property
    def announced(self) -> bytes | None:
        return self._board.announced()

    def close(self) -> None:
        self._board.leave(CLOSED, b"closed")
        self._board.release()
        self._release()


def _spans(tensors: Sequence[torch.Tensor]) -> Spans:
    return tuple(number for tensor in tensors for number in span(tensor))


def _pieces(address: int, nbytes: int, count: int) -> Spans:
    """Adjacent pieces of `nbytes` bytes each."""
    return tuple(number for i in range(count) for number in (address + i * nbytes, nbytes))
