"""Large all_reduce through shared memory: a pipeline of blocks that never leave the cache.

Each rank owns a part of the tensor. Block by block, every rank copies its input to each part into its stage; the owner
adds them up and stages the result; the others copy it from there. So a byte is copied four times, but each time from a
cache that both cores share, and without the kernel, whose reads of another process's memory must pin it page by page:
that takes twice as long. A rank may be `STAGE_DEPTH` blocks ahead of another, so that ranks rarely wait.

n ranks, b bytes: each rank copies 3 b (n-1)/n bytes and adds b (n-1)/n; about b (n-1) / (n B) meetings with blocks of
B bytes. The pipeline is that of R. Graham et al., "MPI Support for Multi-core Architectures: Optimized Shared Memory
Collectives" (2008).
"""

from __future__ import annotations

import ctypes
import itertools

import torch

from holdfast.comms.algorithms import arithmetic
from holdfast.comms.algorithms.board import GIVEN, REDUCED, STAGE_DEPTH, TAKEN_BLOCKS, Board
from holdfast.comms.algorithms.exchange import bounds
from holdfast.comms.ops import ReduceOp

_LEAST_BLOCK_BYTES = 32 * 1024


class Staging:
    """The stage of one communicator."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._done = 0

    def all_reduce(self, given: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, deadline: float, number: int) -> None:
        """Reduce the flat tensors `given` of all ranks into the flat tensors `tensor` (they may be one)."""
        board, rank, size = self._board, self._board.rank, self._board.size
        edges = bounds(tensor.numel(), size)
        longest = max(stop - start for start, stop in itertools.pairwise(edges))
        itemsize = tensor.element_size()
        block = min(board.layout.stage_block, max(_LEAST_BLOCK_BYTES, longest * itemsize // STAGE_DEPTH)) // itemsize
        if tensor.dtype not in arithmetic.NUMPY:
            block = min(block, arithmetic.TORCH_BLOCK_ELEMENTS)
        steps = -(-longest // block)
        others = [(rank + i) % size for i in range(1, size)]
        combine = arithmetic.combiner(tensor.dtype, op)
        result = arithmetic.block_of(tensor)
        source, target = given.data_ptr(), tensor.data_ptr()
        base = self._done

        def span(owner: int, step: int) -> tuple[int, int]:
            """Where block `step` of a part begins, and how many elements it has."""
            start = edges[owner] + step * block
            return start, max(0, min(block, edges[owner + 1] - start))

        def wait(owner: int, value: int, flag: int) -> None:
            board.wait_for(owner, value, deadline, "all_reduce", number, flag)

        def give(step: int) -> None:
            for owner in others:
                wait(owner, base + step + 1 - STAGE_DEPTH, REDUCED)
                start, count = span(owner, step)
                if count:
                    into = board.base + board.staged(rank, owner, step)
                    ctypes.memmove(into, source + start * itemsize, count * itemsize)
            board.raise_flag(base + step + 1, GIVEN)

        def reduce(step: int) -> None:
            start, count = span(rank, step)
            mine = result[start : start + count]
            for other in others:
                wait(other, base + step + 1, GIVEN)
                wait(other, base + step + 1 - STAGE_DEPTH, TAKEN_BLOCKS)
                if count:
                    theirs = arithmetic.block_at(board.bytes, board.staged(other, rank, step), tensor.dtype, count)
                    combine(mine, theirs, mine)
            if count:
                into = board.base + board.staged(rank, rank, step)
                ctypes.memmove(into, target + start * itemsize, count * itemsize)
            board.raise_flag(base + step + 1, REDUCED)

        def take(step: int) -> None:
            for owner in others:
                wait(owner, base + step + 1, REDUCED)
                start, count = span(owner, step)
                if count:
                    ctypes.memmove(
                        target + start * itemsize, board.base + board.staged(owner, owner, step), count * itemsize
                    )
            board.raise_flag(base + step + 1, TAKEN_BLOCKS)

        with arithmetic.silent():
            for step in range(steps + 2):
                board.check()
                if step < steps:
                    give(step)
                if 0 <= step - 1 < steps:
                    reduce(step - 1)
                if step >= 2:
                    take(step - 2)
        self._done += steps
