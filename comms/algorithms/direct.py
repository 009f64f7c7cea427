"""Collectives for ranks that can read each other's memory: every op is publish, meet, read, part.

A rank publishes where its inputs lie (or copies them into its slot, when they are small), raises its flag, and reads
what it needs from the others once their flags are up. Nobody waits for a message to be pushed, and large payloads move
once, from the tensor where they are to the tensor where they belong.

Cost, for n ranks and b bytes a rank, with copies at B bytes/s: all_reduce is a reduce-scatter and an all-gather by
direct reads, 2 b (n-1)/n / B and three meetings (the bandwidth-optimal volume of Rabenseifner, "Optimization of
Collective Reduction Operations", 2004, without his log n rounds); small payloads take one meeting.

Each op has a number k and two phases: 4k+1 "my inputs are published" and 4k+3 "I have read all I need". Slots and
tables have two parities, so op k+2 waits until all have finished op k before it writes.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from holdfast.comms.algorithms import arithmetic
from holdfast.comms.algorithms.board import ABORTED, CLOSED, PROGRESS, SLOT_BYTES, Board
from holdfast.comms.algorithms.channels import Channels
from holdfast.comms.algorithms.pairwise import keep_own
from holdfast.comms.errors import HoldfastError, Mismatch
from holdfast.comms.ops import ReduceOp
from holdfast.comms.tensors import DTYPES, unpack
from holdfast.comms.transport import Transport

SCRATCH_BYTES = 512 * 1024
"""A working block: small enough to stay in a core's own cache between being read and being added."""
COPY_BYTES = 4 * 1024 * 1024
"""The most that is copied without looking whether the op was aborted: well under a millisecond of work."""
SEGMENT_BYTES = 4 * 1024 * 1024
"""What all ranks reduce together before they read each other's results: a fraction of the shared cache."""
_MOST_SEGMENTS = 1 << 20
_INLINE = 1 << 63
_MAPPED = 3

_OPS = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
]
_REDUCTIONS = ("", "sum", "product", "min", "max", "avg", "band", "bor", "bxor", "premul_sum")
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(DTYPES)}


def _signature(op: str, tensor: torch.Tensor | None, root: int, reduction: str, count: int) -> int:
    """What must agree between ranks, packed into one word: op 4 bits, reduction 4, dtype 7, root 12, count 36."""
    dtype = _DTYPE_CODE[tensor.dtype] if tensor is not None else 0
    return (
        1 + _OPS.index(op)
        | _REDUCTIONS.index(reduction) << 4
        | dtype << 8
        | (root & 0xFFF) << 15
        | (count & 0xFFFFFFFFF) << 27
    )


def _words(signature: int) -> str:
    """A signature, for people."""
    op = _OPS[(signature & 15) - 1] if 0 < signature & 15 <= len(_OPS) else "nothing"
    details = [
        str(DTYPES[signature >> 8 & 127]),
        f"{signature >> 27} elements",
        f"root {signature >> 15 & 0xFFF}",
    ]
    if reduction := _REDUCTIONS[signature >> 4 & 15]:
        details.append(reduction)
    return f"{op}({', '.join(details)})"


class DirectTransport(Transport):
    """A transport over a `Board` and a way to read a peer's memory, which a backend supplies."""

    def __init__(self, board: Board) -> None:
        self.rank, self.size = board.rank, board.size
        self._board = board
        self._op = 0
        self._all_finished = 0
        self._scratch = np.empty(SCRATCH_BYTES, np.uint8)
        self._scratch_at = self._scratch.ctypes.data
        self._slot_blocks: dict[tuple[int, torch.dtype, int], list[arithmetic.Block]] = {}
        self._scratch_blocks: dict[torch.dtype, arithmetic.Block] = {}
        self._signatures: dict[tuple[Any, ...], int] = {}
        self._channels = Channels(board, self._read_memory)

    def start(self, deadline: float) -> None:
        """Op 0: return once every rank has the board mapped. On failure everything is released."""
        try:
            self._board.raise_flag(_MAPPED)
            self._board.wait_all(_MAPPED, deadline, "connect", 0)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _read_memory(self, rank: int, address: int, into: int, nbytes: int) -> None:
        """Copy `nbytes` bytes at `address` of rank's process to `into` of this one. Raises PeerFailed."""

    @abstractmethod
    def _release(self) -> None:
        """Let go of what the backend holds beside the board."""

    # -- the parts that every op is made of

    def _publish(
        self,
        op: str,
        inputs: Sequence[torch.Tensor],
        deadline: float,
        *,
        of: torch.Tensor | None = None,
        root: int = 0,
        reduction: str = "",
        same_count: bool = False,
    ) -> bool:
        """Start an op: say what it is and where `inputs` lie. True if they are inline, and may be let go of."""
        board, words = self._board, self._board.words
        board.check()
        self._op += 1
        parity = self._op & 1
        finished = 4 * (self._op - 2) + 3
        if self._op > 2 and self._all_finished < finished:
            board.wait_all(finished, deadline, op, self._op)
            self._all_finished = finished
        key = (
            op,
            of.dtype if of is not None else None,
            root,
            reduction,
            of.numel() if of is not None and same_count else 0,
        )
        signature = self._signatures.get(key)
        if signature is None:
            signature = _signature(op, of, root, reduction, key[4])
            self._signatures[key] = signature
        table = board.table(self.rank, parity)
        words[table] = signature
        total = 0
        for tensor in inputs:
            total += tensor.nbytes
        inline = total <= SLOT_BYTES
        offset = board.slot(self.rank, parity)
        for index, tensor in enumerate(inputs):
            nbytes = tensor.nbytes
            entry = table + 1 + 2 * index
            if inline:
                if nbytes:
                    ctypes.memmove(board.base + offset, tensor.data_ptr(), nbytes)
                words[entry] = offset | _INLINE
                offset += nbytes
            else:
                words[entry] = tensor.data_ptr()
            words[entry + 1] = nbytes
        board.raise_flag(4 * self._op + 1)
        return inline

    def _meet(self, rank: int, op: str, deadline: float) -> int:
        """Wait until `rank` has published this op too, and check that it is the same; the index of its table."""
        self._board.wait_for(rank, 4 * self._op + 1, deadline, op, self._op)
        return self._checked_table(rank)

    def _meet_all(self, op: str, deadline: float) -> None:
        self._board.wait_all(4 * self._op + 1, deadline, op, self._op)
        for rank in range(self.size):
            self._checked_table(rank)

    def _checked_table(self, rank: int) -> int:
        board, parity = self._board, self._op & 1
        table = board.table(rank, parity)
        theirs = board.words[table]
        mine = board.words[board.table(self.rank, parity)]
        if theirs != mine:
            raise Mismatch(
                f"rank {rank} called {_words(theirs)} as op {self._op}, rank {self.rank} {_words(mine)}; "
                "every rank must issue the same ops, in the same order, with the same shapes and dtypes"
            )
        return table

    def _finish(self, op: str, deadline: float, *, wait: bool) -> None:
        """Say that this rank has read all it needs; `wait` until the others have, when they read its tensors."""
        done = 4 * self._op + 3
        self._board.raise_flag(done)
        if wait:
            self._board.wait_all(done, deadline, op, self._op)
            self._all_finished = done

    def _fetch(self, rank: int, table: int, index: int, into: torch.Tensor) -> None:
        """Copy input `index` of `rank` into a tensor of the same size."""
        words, nbytes = self._board.words, into.nbytes
        theirs = words[table + 2 + 2 * index]
        if theirs != nbytes:
            raise Mismatch(
                f"rank {rank} gives {theirs} bytes to rank {self.rank} in op {self._op}, which expects {nbytes}; "
                "the sizes that both sides pass must agree"
            )
        if nbytes:
            self._copy(rank, words[table + 1 + 2 * index], into.data_ptr(), nbytes)

    def _copy(self, rank: int, address: int, into: int, nbytes: int) -> None:
        if address & _INLINE:
            ctypes.memmove(into, self._board.base + (address ^ _INLINE), nbytes)
            return
        for start in range(0, nbytes, COPY_BYTES):
            self._board.check()
            self._read_memory(rank, address + start, into + start, min(COPY_BYTES, nbytes - start))

    def _reduce_from(
        self,
        sources: Sequence[tuple[int, int]],
        target: torch.Tensor,
        op: ReduceOp,
    ) -> None:
        """target = target op every (rank, address) source, a cache-sized block at a time."""
        combine = arithmetic.combiner(target.dtype, op)
        block = arithmetic.block_of(target)
        itemsize = target.dtype.itemsize
        step = arithmetic.block_elements(target.dtype, SCRATCH_BYTES)
        scratch = self._scratch_blocks.get(target.dtype)
        if scratch is None:
            scratch = arithmetic.block_at(self._scratch, 0, target.dtype, SCRATCH_BYTES // itemsize)
            self._scratch_blocks[target.dtype] = scratch
        count = target.numel()
        for start in range(0, count, step):
            self._board.check()
            length = min(step, count - start)
            mine = block[start : start + length]
            for rank, address in sources:
                if address & _INLINE:
                    offset = (address ^ _INLINE) + start * itemsize
                    theirs = arithmetic.block_at(self._board.bytes, offset, target.dtype, length)
                else:
                    self._read_memory(rank, address + start * itemsize, self._scratch_at, length * itemsize)
                    theirs = scratch[:length]
                with arithmetic.silent():
                    combine(mine, theirs, mine)

    def _around(self) -> list[int]:
        """The other ranks, starting after this one, so that not all read from the same rank at once."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def _run(self, body: Callable[[], None]) -> None:
        """Run an op's body; if it fails on this rank, the others learn it at once."""
        try:
            body()
        except HoldfastError as error:
            self._board.leave(ABORTED, str(error))
            raise

    # -- reductions

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, deadline: float) -> None:
        self._run(lambda: self._all_reduce(tensor, op, deadline))

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp, deadline: float) -> None:
        given = arithmetic.before(tensor, op)
        inline = self._publish("all_reduce", [given], deadline, of=tensor, reduction=op.name, same_count=True)
        self._meet_all("all_reduce", deadline)
        if inline:
            if self.size == 1:
                unpack(given, tensor)
            elif tensor.numel():
                self._reduce_slots(tensor, op)
            self._finish("all_reduce", deadline, wait=False)
        else:
            if given is not tensor:
                tensor.copy_(given)
            self._reduce_segments(given, tensor, op, deadline)
        arithmetic.after(tensor, op, self.size)

    def _reduce_slots(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Small: everybody reduces everybody's slot, in rank order, so that all get equal bits."""
        parity, dtype, count = self._op & 1, tensor.dtype, tensor.numel()
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

    def _reduce_segments(self, given: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, deadline: float) -> None:
        """Large: in every segment each rank reduces the part it owns, reading the others' inputs where they lie;
        then it reads the parts that the others own. Segments are small enough that what one rank has just reduced is
        still in the shared cache when the others read it, and a rank reduces the next one before it reads, so that
        ranks rarely wait for each other.

        `given` are the inputs, at the addresses in the tables; results come into `tensor`, which each rank announces
        in the second entry of its table (it is the same, but for premul_sum).
        """
        board, words, seq = self._board, self._board.words, self._op
        tables = [board.table(r, seq & 1) for r in range(self.size)]
        words[tables[self.rank] + 3] = tensor.data_ptr()
        flat = tensor.view(-1)
        segments = _segments(flat.numel(), tensor.dtype.itemsize, self.size)
        base = seq * _MOST_SEGMENTS
        around = self._around()
        for number in range(len(segments) + 1):
            if number < len(segments):
                start, stop = segments[number][self.rank], segments[number][self.rank + 1]
                first = start * tensor.dtype.itemsize
                self._reduce_from([(r, words[tables[r] + 1] + first) for r in around], flat[start:stop], op)
                board.raise_flag(base + number + 1, PROGRESS)
            if number > 0:
                bounds = [bound * tensor.dtype.itemsize for bound in segments[number - 1]]
                for r in around:
                    board.wait_for(r, base + number, deadline, "all_reduce", seq, PROGRESS)
                    start, nbytes = bounds[r], bounds[r + 1] - bounds[r]
                    if nbytes:
                        self._copy(r, words[tables[r] + 3] + start, tensor.data_ptr() + start, nbytes)
        self._finish("all_reduce", deadline, wait=True)

    def reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp, deadline: float) -> None:
        self._run(lambda: self._reduce(tensor, dst, op, deadline))

    def _reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp, deadline: float) -> None:
        given = arithmetic.before(tensor, op)
        inline = self._publish("reduce", [given], deadline, of=tensor, root=dst, reduction=op.name, same_count=True)
        if self.rank == dst:
            self._meet_all("reduce", deadline)
            if given is not tensor:
                tensor.copy_(given)
            self._reduce_inputs(0, tensor, op)
        else:
            self._meet(dst, "reduce", deadline)
        self._finish("reduce", deadline, wait=not inline and self.rank != dst)
        if self.rank == dst:
            arithmetic.after(tensor, op, self.size)

    def _reduce_inputs(self, index: int, target: torch.Tensor, op: ReduceOp) -> None:
        """target = target op input `index` of every other rank."""
        words = self._board.words
        sources = []
        for r in self._around():
            table = self._board.table(r, self._op & 1)
            if words[table + 2 + 2 * index] != target.nbytes:
                raise Mismatch(
                    f"rank {r} gives {words[table + 2 + 2 * index]} bytes to a reduction of {target.nbytes} on "
                    f"rank {self.rank} in op {self._op}; both sides must pass the same sizes"
                )
            sources.append((r, words[table + 1 + 2 * index]))
        if target.numel():
            self._reduce_from(sources, target, op)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, deadline: float
    ) -> None:
        self._run(lambda: self._reduce_scatter(output, inputs, op, deadline))

    def _reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, deadline: float
    ) -> None:
        given = [arithmetic.before(tensor, op) for tensor in inputs]
        inline = self._publish("reduce_scatter", given, deadline, of=output, reduction=op.name)
        self._meet_all("reduce_scatter", deadline)
        result = output
        if not inline and output.untyped_storage().data_ptr() == inputs[0].untyped_storage().data_ptr():
            result = torch.empty_like(output)
        result.copy_(given[self.rank])
        self._reduce_inputs(self.rank, result, op)
        self._finish("reduce_scatter", deadline, wait=not inline)
        if result is not output:
            output.copy_(result)
        arithmetic.after(output, op, self.size)

    # -- moves

    def broadcast(self, tensor: torch.Tensor, src: int, deadline: float) -> None:
        self._run(lambda: self._broadcast(tensor, src, deadline))

    def _broadcast(self, tensor: torch.Tensor, src: int, deadline: float) -> None:
        given = [tensor] if self.rank == src else []
        inline = self._publish("broadcast", given, deadline, of=tensor, root=src, same_count=True)
        if self.rank == src:
            self._finish("broadcast", deadline, wait=not inline)
        else:
            self._fetch(src, self._meet(src, "broadcast", deadline), 0, tensor)
            self._finish("broadcast", deadline, wait=False)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, deadline: float) -> None:
        self._run(lambda: self._all_gather(outputs, tensor, deadline))

    def _all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, deadline: float) -> None:
        inline = self._publish("all_gather", [tensor], deadline, of=tensor)
        keep_own(outputs[self.rank], tensor)
        for r in self._around():
            self._fetch(r, self._meet(r, "all_gather", deadline), 0, outputs[r])
        self._finish("all_gather", deadline, wait=not inline)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], deadline: float) -> None:
        self._run(lambda: self._all_to_all(outputs, inputs, deadline))

    def _all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], deadline: float) -> None:
        inline = self._publish("all_to_all", inputs, deadline, of=inputs[self.rank])
        keep_own(outputs[self.rank], inputs[self.rank])
        for r in self._around():
            self._fetch(r, self._meet(r, "all_to_all", deadline), self.rank, outputs[r])
        self._finish("all_to_all", deadline, wait=not inline)

    def gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor] | None, dst: int, deadline: float) -> None:
        self._run(lambda: self._gather(tensor, outputs, dst, deadline))

    def _gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor] | None, dst: int, deadline: float) -> None:
        inline = self._publish("gather", [tensor], deadline, of=tensor, root=dst)
        if outputs is not None:
            keep_own(outputs[dst], tensor)
            for r in self._around():
                self._fetch(r, self._meet(r, "gather", deadline), 0, outputs[r])
            self._finish("gather", deadline, wait=False)
        else:
            self._meet(dst, "gather", deadline)
            self._finish("gather", deadline, wait=False)
            if not inline:
                self._board.wait_for(dst, 4 * self._op + 3, deadline, "gather", self._op)

    def scatter(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int, deadline: float) -> None:
        self._run(lambda: self._scatter(tensor, inputs, src, deadline))

    def _scatter(self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int, deadline: float) -> None:
        inline = self._publish("scatter", inputs or [], deadline, of=tensor, root=src)
        if inputs is not None:
            keep_own(tensor, inputs[src])
            self._finish("scatter", deadline, wait=not inline)
        else:
            self._fetch(src, self._meet(src, "scatter", deadline), self.rank, tensor)
            self._finish("scatter", deadline, wait=False)

    def barrier(self, deadline: float) -> None:
        self._run(lambda: self._barrier(deadline))

    def _barrier(self, deadline: float) -> None:
        self._publish("barrier", [], deadline)
        self._meet_all("barrier", deadline)
        self._finish("barrier", deadline, wait=False)

    # -- point to point

    def send(self, tensor: torch.Tensor, dst: int, tag: int, deadline: float) -> None:
        self._run(lambda: self._channels.run([(tensor, dst, tag)], [], deadline, "send"))

    def recv(self, tensor: torch.Tensor, src: int, tag: int, deadline: float) -> None:
        self._run(lambda: self._channels.run([], [(tensor, src, tag)], deadline, "recv"))

    def batch_send_recv(
        self,
        sends: Sequence[tuple[torch.Tensor, int, int]],
        recvs: Sequence[tuple[torch.Tensor, int, int]],
        deadline: float,
    ) -> None:
        self._run(lambda: self._channels.run(sends, recvs, deadline, "batch_send_recv"))

    # -- the end

    def abort(self, error: HoldfastError) -> None:
        self._board.fail(error)
        self._board.leave(ABORTED, str(error))

    def close(self) -> None:
        self._board.leave(CLOSED, "closed")
        self._slot_blocks.clear()
        self._board.release()
        self._release()


def _segments(count: int, itemsize: int, size: int) -> list[list[int]]:
    """`count` elements in segments, each given as the size + 1 bounds of the parts that the ranks own."""
    length = max(SEGMENT_BYTES // itemsize, -(-count // (_MOST_SEGMENTS - 1)))
    result = []
    for start in range(0, count, length):
        here = min(length, count - start)
        part = -(-here // size // 16) * 16
        result.append([start + min(r * part, here) for r in range(size)] + [start + here])
    return result
