"""Large collectives through shared memory, as a pipeline of blocks.

Every rank copies what it gives into its stage, block by block; the others copy it from there, or reduce it into theirs.
Each byte is copied twice, without the kernel; the first copy bypasses the caches unless the others are near. Or the
others read the inputs in place: the kernel copies each byte once, but has to find and pin its pages. Ranks time their
ops to find the faster mode (`comms/native/board/copy_mode.h`). A rank may be `STAGE_DEPTH` blocks ahead of another, so
ranks rarely wait. The loop itself is compiled (`comms/native/board/pipeline.h`); a usual op comes here only if it has
to wait for long.

n ranks, b bytes: an all_reduce, of which each rank owns a part, copies 3 b (n-1)/n bytes a rank (2 where inputs are
read in place) and adds b (n-1)/n; with blocks of B bytes, ranks meet about b (n-1) / (n B) times. The pipeline is that
of R. Graham et al., "MPI Support for Multi-core Architectures: Optimized Shared Memory Collectives" (2008); the single
copy is D. Buntinas et al., "Cache-Efficient, Intranode, Large-Message MPI Communication with MPICH2-Nemesis" (2009).

Before an op begins, every rank must know that all others have begun it: then no stage holds data of the op before.
"""

from __future__ import annotations

import itertools
from typing import NoReturn

import torch

from holdfast.comms import arithmetic
from holdfast.comms.algorithms.message_passing.exchange import bounds
from holdfast.comms.algorithms.shared_memory.board import Board
from holdfast.comms.algorithms.shared_memory.publication import Spans
from holdfast.comms.ops import ReduceOp
from holdfast.comms.system.local_causes import unreadable_memory

_NO_REDUCTION = -1
_UNREADABLE = -1


class Staging:
    """The stage of one communicator."""

    def __init__(self, board: Board, backend: str) -> None:
        self._board, self._backend = board, backend

    def all_reduce(self, given: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, deadline: float, number: int) -> None:
        """Reduce contiguous tensors `given` of all ranks into `tensor` of all ranks (they may be one)."""
        edges = bounds(tensor.numel(), self._board.size)
        size = tensor.element_size()
        parts = [((stop - start) * size, start * size) for start, stop in itertools.pairwise(edges)]
        source, target = given.data_ptr(), tensor.data_ptr()
        give = tuple(number for nbytes, start in parts for number in (source + start, nbytes))
        take = tuple(number for nbytes, start in parts for number in (target + start, nbytes))
        kind = arithmetic.kind(tensor.dtype, op)
        self._run("all_reduce", give, take, max(parts)[0], deadline, number, kind=kind, reduces_all=True)

    def reduce(
        self, op: str, give: Spans, output: tuple[int, int], kind: int, longest: int, deadline: float, number: int
    ) -> None:
        """Reduce what all ranks `give` to a rank into its `output` (address, size; size 0: it gets nothing).

        `longest` is the size of the longest piece that any rank gives to another.
        """
        rank = self._board.rank
        take, own = (0, 0) * rank + output, give[2 * rank]
        self._run(op, give, take, longest, deadline, number, kind=kind, own=own)

    def move(self, op: str, give: Spans, take: Spans, longest: int, deadline: float, number: int) -> None:
        """Copy piece d of what rank s gives to piece s of what rank d takes, unless s = d."""
        self._run(op, give, take, longest, deadline, number)

    def share(self, op: str, give: Spans, take: Spans, longest: int, deadline: float, number: int) -> None:
        """Copy the one piece that a rank s gives, if any, to piece s of what all others take."""
        self._run(op, (0, 0) * self._board.rank + give, take, longest, deadline, number, shared=True)

    def _run(
        self,
        op: str,
        give: Spans,
        take: Spans,
        longest: int,
        deadline: float,
        number: int,
        *,
        kind: int = _NO_REDUCTION,
        reduces_all: bool = False,
        shared: bool = False,
        own: int = 0,
    ) -> None:
        board = self._board
        board.check()
        board.native.begin(number, longest, kind, reduces_all, shared, give, take, own)
        while (stuck := board.native.run()) is not None:
            board.check()
            rank, value, flag = stuck
            if flag == _UNREADABLE:
                self._give_up(rank, value)
            board.wait_for(rank, value, deadline, op, number, flag)

    def _give_up(self, rank: int, number: int) -> NoReturn:
        """Raise: the inputs that `rank` exposed cannot be read."""
        self._board.check_peers(lambda: [rank])
        raise unreadable_memory(self._backend, rank, number)
