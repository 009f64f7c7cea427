"""Collectives for ranks that can read each other's memory: every op is publish, meet, read, part.

A rank publishes where its inputs lie (or copies them into its slot, when they are small), raises its flag, and reads
what it needs from the others once their flags are up. Nobody waits for a message to be pushed, and large payloads move
once, from the tensor where they are to the tensor where they belong. Large all_reduces go another way: see `staging`.

Cost for n ranks: one meeting when inputs are small; when they are not, each rank reads what the op's definition makes
it read, once, and there is a second meeting, so that inputs may be changed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from holdfast.comms.algorithms import arithmetic
from holdfast.comms.algorithms.board import ABORTED, CLOSED, Board
from holdfast.comms.algorithms.channels import Channels
from holdfast.comms.algorithms.pairwise import keep_own
from holdfast.comms.algorithms.publication import Publications
from holdfast.comms.algorithms.staging import Staging
from holdfast.comms.errors import HoldfastError, Mismatch, Revoked
from holdfast.comms.ops import ReduceOp
from holdfast.comms.tensors import unpack
from holdfast.comms.transport import Transport


class DirectTransport(Transport):
    """A transport over a `Board` and a way to read a peer's memory, which a backend supplies."""

    def __init__(self, board: Board) -> None:
        self.rank, self.size = board.rank, board.size
        self._board = board
        self._ops = Publications(board, self._read_memory)
        self._channels = Channels(board, self._read_memory)
        self._staging = Staging(board)
        self._slot_blocks: dict[tuple[int, torch.dtype, int], list[arithmetic.Block]] = {}

    def start(self, deadline: float) -> None:
        """Return once every rank has the board mapped. On failure everything is released."""
        try:
            self._ops.start(deadline)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _read_memory(self, rank: int, address: int, into: int, nbytes: int) -> None:
        """Copy `nbytes` bytes at `address` of rank's process to `into` of this one. Raises PeerFailed."""

    @abstractmethod
    def _release(self) -> None:
        """Let go of what the backend holds beside the board."""

    # -- reductions

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, deadline: float) -> None:
        given = arithmetic.before(tensor, op)
        inline = self._ops.publish("all_reduce", [given], deadline, of=tensor, reduction=op.name, same_count=True)
        self._ops.meet_all("all_reduce", deadline)
        if inline:
            if self.size == 1:
                unpack(given, tensor)
            elif tensor.numel():
                self._reduce_slots(tensor, op)
            self._ops.finish("all_reduce", deadline, wait=False)
        else:
            if given is not tensor:
                tensor.copy_(given)
            self._staging.all_reduce(given.view(-1), tensor.view(-1), op, deadline, self._ops.number)
            self._ops.finish("all_reduce", deadline, wait=False)
        arithmetic.after(tensor, op, self.size)

    def _reduce_slots(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Small: everybody reduces everybody's slot, in rank order, so that all get equal bits."""
        parity, dtype, count = self._ops.number & 1, tensor.dtype, tensor.numel()
        key = (parity, dtype, count)
        blocks = self._slot_blocks.get(key)
        if blocks is None:
            if len(self._slot_blocks) > 256:
                self._slot_blocks.clear()
            board = self._board
            blocks = [arithmetic.block_at(board.bytes, board.slot(r, parity), dtype, count) for r in range(self.size)]
            self._slot_blocks[key] = blocks
        out = arithmetic.block_of(tensor)
        combine = arithmetic.combiner(dtype, op)
        with arithmetic.silent():
            combine(blocks[0], blocks[1], out)
            for block in blocks[2:]:
                combine(out, block, out)

    def reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp, deadline: float) -> None:
        given = arithmetic.before(tensor, op)
        inline = self._ops.publish("reduce", [given], deadline, of=tensor, root=dst, reduction=op.name, same_count=True)
        if self.rank == dst:
            self._ops.meet_all("reduce", deadline)
            if given is not tensor:
                tensor.copy_(given)
            self._reduce_inputs(0, tensor, op)
        else:
            self._ops.meet(dst, "reduce", deadline)
        self._ops.finish("reduce", deadline, wait=not inline and self.rank != dst)
        if self.rank == dst:
            arithmetic.after(tensor, op, self.size)

    def _reduce_inputs(self, index: int, target: torch.Tensor, op: ReduceOp) -> None:
        """target = target op input `index` of every other rank."""
        ops, sources = self._ops, []
        for r in ops.around():
            if ops.nbytes(r, index) != target.nbytes:
                raise Mismatch(
                    f"rank {r} gives {ops.nbytes(r, index)} bytes to a reduction of {target.nbytes} on rank "
                    f"{self.rank} in op {ops.number}; both sides must pass the same sizes"
                )
            sources.append((r, ops.address(r, index)))
        if target.numel():
            self._ops.reduce_from(sources, target, op)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, deadline: float
    ) -> None:
        given = [arithmetic.before(tensor, op) for tensor in inputs]
        inline = self._ops.publish("reduce_scatter", given, deadline, of=output, reduction=op.name)
        self._ops.meet_all("reduce_scatter", deadline)
        result = output
        if not inline and output.untyped_storage().data_ptr() == inputs[0].untyped_storage().data_ptr():
            result = torch.empty_like(output)
        result.view(-1).copy_(given[self.rank].view(-1))
        self._reduce_inputs(self.rank, result, op)
        self._ops.finish("reduce_scatter", deadline, wait=not inline)
        if result is not output:
            output.copy_(result)
        arithmetic.after(output, op, self.size)

    # -- moves

    def broadcast(self, tensor: torch.Tensor, src: int, deadline: float) -> None:
        given = [tensor] if self.rank == src else []
        inline = self._ops.publish("broadcast", given, deadline, of=tensor, root=src, same_count=True)
        if self.rank == src:
            self._ops.finish("broadcast", deadline, wait=not inline)
        else:
            self._ops.meet(src, "broadcast", deadline)
            self._ops.fetch(src, 0, tensor)
            self._ops.finish("broadcast", deadline, wait=False)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, deadline: float) -> None:
        inline = self._ops.publish("all_gather", [tensor], deadline, of=tensor)
        keep_own(outputs[self.rank], tensor)
        for r in self._ops.around():
            self._ops.meet(r, "all_gather", deadline)
            self._ops.fetch(r, 0, outputs[r])
        self._ops.finish("all_gather", deadline, wait=not inline)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], deadline: float) -> None:
        inline = self._ops.publish("all_to_all", inputs, deadline, of=inputs[self.rank])
        keep_own(outputs[self.rank], inputs[self.rank])
        for r in self._ops.around():
            self._ops.meet(r, "all_to_all", deadline)
            self._ops.fetch(r, self.rank, outputs[r])
        self._ops.finish("all_to_all", deadline, wait=not inline)

    def gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor] | None, dst: int, deadline: float) -> None:
        inline = self._ops.publish("gather", [tensor], deadline, of=tensor, root=dst)
        if outputs is not None:
            keep_own(outputs[dst], tensor)
            for r in self._ops.around():
                self._ops.meet(r, "gather", deadline)
                self._ops.fetch(r, 0, outputs[r])
            self._ops.finish("gather", deadline, wait=False)
        else:
            self._ops.meet(dst, "gather", deadline)
            self._ops.finish("gather", deadline, wait=False)
            if not inline:
                self._board.wait_for(dst, 4 * self._ops.number + 3, deadline, "gather", self._ops.number)

    def scatter(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int, deadline: float) -> None:
        inline = self._ops.publish("scatter", inputs or [], deadline, of=tensor, root=src)
        if inputs is not None:
            keep_own(tensor, inputs[src])
            self._ops.finish("scatter", deadline, wait=not inline)
        else:
            self._ops.meet(src, "scatter", deadline)
            self._ops.fetch(src, self.rank, tensor)
            self._ops.finish("scatter", deadline, wait=False)

    def barrier(self, deadline: float) -> None:
        self._ops.publish("barrier", [], deadline)
        self._ops.meet_all("barrier", deadline)
        self._ops.finish("barrier", deadline, wait=False)

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
        self._board.fail(error)
        self._board.leave(ABORTED, error.reason if isinstance(error, Revoked) else str(error))

    def close(self) -> None:
        self._board.leave(CLOSED, "closed")
        self._slot_blocks.clear()
        self._board.release()
        self._release()
