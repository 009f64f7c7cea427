"""How a rank shows its inputs to the others and reads theirs: what every direct collective is made of.

A rank *publishes* an op (what it is, and where its inputs lie), *meets* the others (waits for theirs, and compares),
*fetches* or reduces what it needs, and *finishes*. Small inputs are copied into the rank's slot of the board, so that
it need not wait for the others to have read them.

Each op has a number k and two phases: 4k+1 "my inputs are published" and 4k+3 "I have read all I need". Slots and
tables have two parities, so op k+2 waits until all have finished op k before it writes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch

from holdfast.comms.algorithms import arithmetic
from holdfast.comms.algorithms.board import SLOT_BYTES, Board
from holdfast.comms.algorithms.signature import in_words, signature
from holdfast.comms.errors import Mismatch
from holdfast.comms.ops import ReduceOp

SCRATCH_BYTES = 256 * 1024
"""A working block: small enough to stay in a core's own cache between being read and being added."""
COPY_BYTES = 4 * 1024 * 1024
"""The most that is copied without looking whether the op was aborted: well under a millisecond of work."""
_INLINE = 1 << 63
_MAPPED = 3


class Publications:
    """The published ops of one communicator. `number` is that of the newest.

    `read(rank, address, into, nbytes)` copies from the memory of a rank's process to this one's.
    """

    def __init__(self, board: Board, read: Callable[[int, int, int, int], None]) -> None:
        self.rank, self.size = board.rank, board.size
        self.number = 0
        self._board, self._read = board, read
        self._all_finished = 0
        self._scratch = np.empty(SCRATCH_BYTES, np.uint8)
        self._scratch_at = self._scratch.ctypes.data
        self._scratch_blocks: dict[torch.dtype, arithmetic.Block] = {}
        self._signatures: dict[tuple[str, torch.dtype | None, int, str, int], int] = {}

    def start(self, deadline: float) -> None:
        """Op 0: return once every rank has the board mapped."""
        self._board.raise_flag(_MAPPED)
        self._board.wait_all(_MAPPED, deadline, "connect", 0)

    def address(self, rank: int, index: int) -> int:
        """Where input `index` of `rank` in this op lies: for `copy` and `reduce_from`."""
        return self._board.words[self._board.table(rank, self.number & 1) + 1 + 2 * index]

    def nbytes(self, rank: int, index: int) -> int:
        """The size of input `index` of `rank` in this op."""
        return self._board.words[self._board.table(rank, self.number & 1) + 2 + 2 * index]

    def announce(self, index: int, address: int) -> None:
        """Say where something else of this rank's lies, as if it were input `index`."""
        self._board.words[self._board.table(self.rank, self.number & 1) + 1 + 2 * index] = address

    def publish(
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
        self.number += 1
        parity = self.number & 1
        finished = 4 * (self.number - 2) + 3
        if self.number > 2 and self._all_finished < finished:
            board.wait_all(finished, deadline, op, self.number)
            self._all_finished = finished
        key = (
            op,
            None if of is None else of.dtype,
            root,
            reduction,
            of.numel() if of is not None and same_count else 0,
        )
        packed = self._signatures.get(key)
        if packed is None:
            packed = self._signatures[key] = signature(*key)
        table = board.table(self.rank, parity)
        words[table] = packed
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
        board.raise_flag(4 * self.number + 1)
        return inline

    def meet(self, rank: int, op: str, deadline: float) -> None:
        """Wait until `rank` has published this op too. Raises `Mismatch` if it is another."""
        self._board.wait_for(rank, 4 * self.number + 1, deadline, op, self.number)
        self._compare(rank)

    def meet_all(self, op: str, deadline: float) -> None:
        """`meet` every rank."""
        self._board.wait_all(4 * self.number + 1, deadline, op, self.number)
        for rank in range(self.size):
            self._compare(rank)

    def _compare(self, rank: int) -> None:
        board, parity = self._board, self.number & 1
        theirs = board.words[board.table(rank, parity)]
        mine = board.words[board.table(self.rank, parity)]
        if theirs != mine:
            raise Mismatch(
                f"rank {rank} called {in_words(theirs)} as op {self.number}, rank {self.rank} {in_words(mine)}; "
                "every rank must issue the same ops, in the same order, with the same shapes and dtypes"
            )

    def finish(self, op: str, deadline: float, *, wait: bool) -> None:
        """Say that this rank has read all it needs; `wait` until the others have, when they read its tensors."""
        done = 4 * self.number + 3
        self._board.raise_flag(done)
        if wait:
            self._board.wait_all(done, deadline, op, self.number)
            self._all_finished = done

    def fetch(self, rank: int, index: int, into: torch.Tensor) -> None:
        """Copy input `index` of `rank` into a tensor of the same size."""
        nbytes = self.nbytes(rank, index)
        if nbytes != into.nbytes:
            raise Mismatch(
                f"rank {rank} gives {nbytes} bytes to rank {self.rank} in op {self.number}, which expects "
                f"{into.nbytes}; the sizes that both sides pass must agree"
            )
        if nbytes:
            self.copy(rank, self.address(rank, index), into.data_ptr(), nbytes)

    def copy(self, rank: int, address: int, into: int, nbytes: int) -> None:
        """Copy `nbytes` from `address` of a rank to `into` here."""
        if address & _INLINE:
            ctypes.memmove(into, self._board.base + (address ^ _INLINE), nbytes)
            return
        for start in range(0, nbytes, COPY_BYTES):
            self._board.check()
            self._read(rank, address + start, into + start, min(COPY_BYTES, nbytes - start))

    def reduce_from(
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
                    self._read(rank, address + start * itemsize, self._scratch_at, length * itemsize)
                    theirs = scratch[:length]
                with arithmetic.silent():
                    combine(mine, theirs, mine)

    def around(self) -> list[int]:
        """The other ranks, starting after this one, so that not all read from the same rank at once."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]
