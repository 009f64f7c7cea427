"""Publish inputs and take those of the others: the steps of every direct collective.

A rank *publishes* an op (its signature, and the sizes of its inputs), *waits* until the others have published it (and
compares signatures), *takes* what it needs, and *finishes*. Small inputs are copied into the rank's slot of the board,
so that it need not wait until the others have taken them; larger ones go through the stage (see `staging`).

Each op has a number k and two phases: 4k+1 "my inputs are published" and 4k+3 "I have taken all I need". Slots and
tables have two parities, so op k+2 waits until all have finished op k before it writes.
"""

from __future__ import annotations

import torch

from holdfast.comms import arithmetic
from holdfast.comms.algorithms.shared_memory.board import FLAG, Board
from holdfast.comms.algorithms.shared_memory.signature import describe, signature
from holdfast.comms.errors import Mismatch
from holdfast.comms.ops import ReduceOp

Spans = tuple[int, ...]
"""Memory of this process: the address and size in bytes of each piece, flat."""

_Key = tuple[str, torch.dtype | None, int, str, int]
"""The identity of an op: its name, dtype, root, reduction and count."""

STARTED = 3
"""The phase of a rank after op 0, which connects."""

_EARLY, _NOT_MET, _DONE_AT_ONCE = -1, 2, 4
_LATE, _ALIKE, _DONE = -2, -1, -1


class Publications:
    """The published ops of one communicator."""

    def __init__(self, board: Board) -> None:
        self.rank, self.size = board.rank, board.size
        self._board, self._native = board, board.native
        self._signatures: dict[_Key, int] = {}
        self._next_number = board.native.next
        self._reductions: dict[tuple[str, torch.dtype, str, int], tuple[int, int]] = {}  # cached signature and kind

    @property
    def number(self) -> int:
        """The number of the newest op."""
        return self._native.number

    def publish(
        self,
        op: str,
        inputs: Spans,
        deadline: float,
        *,
        dtype: torch.dtype | None = None,
        root: int = 0,
        reduction: str = "",
        count: int = 0,
    ) -> bool:
        """Publish an op. True if its inputs were copied, so that the caller may reuse them.

        `dtype`, `root`, `reduction` and `count`, as far as they are given, must be the same on all ranks.
        """
        key = (op, dtype, root, reduction, count)
        number, signed = self._next(), self._signatures.get(key) or self._signed(key)
        while (outcome := self._native.publish(number, signed, inputs)) == _EARLY:
            self._wait_for_place(op, deadline)
        return outcome == 1

    def exchange(
        self,
        op: str,
        inputs: Spans,
        into: Spans,
        index: int,
        own: int,
        deadline: float,
        dtype: torch.dtype | None = None,
    ) -> bool:
        """Run a whole move: `publish`, `wait_all_published`, `collect` input `index`, `finish`.

        Also copies what this rank keeps from `own` to piece `rank` of `into`. False if inputs are too large for slots:
        then all but `collect` and `finish` is done.
        """
        key = (op, dtype, 0, "", 0)
        number, signed = self._next(), self._signatures.get(key) or self._signed(key)
        while (outcome := self._native.exchange(number, signed, inputs, into, index, own)) == _EARLY:
            self._wait_for_place(op, deadline)
        if outcome >= _DONE_AT_ONCE:
            return True
        if outcome & _NOT_MET:
            self.wait_all_published(op, deadline)
        if not self.collect(index, into):
            return False
        self.finish()
        return True

    def reduce(
        self,
        op: str,
        inputs: Spans,
        index: int,
        reduction: ReduceOp,
        into: tuple[int, int],
        deadline: float,
        dtype: torch.dtype,
        alike: bool = False,
    ) -> bool:
        """Run a whole reduction: `publish`, `wait_all_published`, `combine`, `finish`.

        False if inputs are too large for slots: then all but the last two is done. `alike` says that every rank reduces
        the same number of elements.
        """
        key = (op, dtype, reduction.name, into[1] if alike else 0)
        known = self._reductions.get(key)
        if known is None:
            count = into[1] // dtype.itemsize if alike else 0
            known = signature(op, dtype, 0, reduction.name, count), arithmetic.kind(dtype, reduction)
            self._reductions[key] = known
        signed, kind = known
        number = self._next()
        while (outcome := self._native.reduce(number, signed, inputs, index, kind, *into)) == _EARLY:
            self._wait_for_place(op, deadline)
        if outcome >= _DONE_AT_ONCE:
            return True
        if outcome & _NOT_MET:
            self.wait_all_published(op, deadline)
        if not self.collect(0, ()):
            return False
        self.combine(index, kind, *into)
        self.finish()
        return True

    def _next(self) -> int:
        """The number of the next op. Raises if the board has failed."""
        if self._board.error is not None:
            self._board.check()
        return self._next_number()

    def plan(
        self, op: str, tensor: torch.Tensor | None, root: int, reduction: ReduceOp | None
    ) -> tuple[int, int] | None:
        """The signature and kind of an op for a fast path; kind -1: nothing is reduced.

        None if the op takes more than one reduction of the inputs, or the reduction does not exist.
        """
        op = op.removesuffix("_single")
        if tensor is None:
            return signature(op, None, root, "", 0), -1
        count = tensor.numel() if op in ("all_reduce", "broadcast") else 0
        if reduction is None:
            return signature(op, tensor.dtype, root, "", count), -1
        if not isinstance(reduction, ReduceOp) or reduction.name in arithmetic.SCALED:
            return None
        kind = arithmetic.kind(tensor.dtype, reduction)
        return None if kind < 0 else (signature(op, tensor.dtype, root, reduction.name, count), kind)

    def _signed(self, key: _Key) -> int:
        """Compute and cache the signature of an op."""
        signed = self._signatures[key] = signature(*key)
        return signed

    def _wait_for_place(self, op: str, deadline: float) -> None:
        """Wait until all ranks have read what lies in the slot of the newest op."""
        self._board.wait_all(4 * (self.number - 2) + 3, deadline, op, self.number)

    def wait_published(self, rank: int, op: str, deadline: float) -> None:
        """Wait until `rank` has published this op too. Raises `Mismatch` if it published another one."""
        while (other := self._native.match(rank, self.number)) != _ALIKE:
            if other != _LATE:
                self._refuse(other)
            self._board.wait_for(rank, 4 * self.number + 1, deadline, op, self.number)

    def wait_all_published(self, op: str, deadline: float) -> None:
        """Run `wait_published` for every rank."""
        while (other := self._native.match_all(self.number)) != _ALIKE:
            if other != _LATE:
                self._refuse(other)
            self._board.wait_all(4 * self.number + 1, deadline, op, self.number)

    def _refuse(self, rank: int) -> None:
        board, parity, before = self._board, self.number & 1, self._native.roots_before
        theirs, mine = (describe(board.words[board.table(each, parity)], before) for each in (rank, self.rank))
        rule = "every rank must issue the same ops, in the same order, with the same roots, shapes and dtypes"
        if theirs == mine:
            raise Mismatch(
                f"rank {rank} and rank {self.rank} named different roots in an op before {mine}, op {self.number}, so "
                f"that they have different results; {rule}"
            )
        raise Mismatch(f"rank {rank} called {theirs} as op {self.number}, rank {self.rank} {mine}; {rule}")

    def copied(self, rank: int) -> bool:
        """Whether the slot of `rank` holds its inputs."""
        return self._native.input(rank, self.number, 0)[1]

    def nbytes(self, rank: int, index: int) -> int:
        """The size of input `index` of `rank`."""
        return self._native.input(rank, self.number, index)[0]

    def take(self, rank: int, index: int, into: int, nbytes: int) -> None:
        """Copy input `index` of `rank` from its slot to an address. Raises `Mismatch` if it has another size."""
        theirs = self._native.fetch(rank, self.number, index, into, nbytes)
        if theirs >= 0:
            self.refuse_size(rank, theirs, nbytes)

    def expect(self, rank: int, index: int, nbytes: int) -> None:
        """Raise `Mismatch` unless input `index` of `rank` has this size."""
        theirs = self.nbytes(rank, index)
        if theirs != nbytes:
            self.refuse_size(rank, theirs, nbytes)

    def collect(self, index: int, into: Spans) -> bool:
        """Copy input `index` of every other rank from its slot to piece `rank` of `into`, unless that is empty.

        False if slots do not hold all inputs; then nothing was copied. Raises `Mismatch` if a size differs.
        """
        rank = self._native.collect(self.number, index, into)
        if rank >= 0:
            self.refuse_size(rank, self.nbytes(rank, index), into[2 * rank + 1])
        return rank == _DONE

    def refuse_size(self, rank: int, theirs: int, mine: int) -> None:
        raise Mismatch(
            f"rank {rank} gives {theirs} bytes to rank {self.rank} in op {self.number}, which expects {mine}; "
            "the sizes that both sides pass must agree"
        )

    def combine(self, index: int, kind: int, into: int, nbytes: int) -> None:
        """Reduce input `index` of all ranks, from their slots and in rank order, to an address."""
        rank = self._native.combine(self.number, index, kind, into, nbytes)
        if rank >= 0:
            self.refuse_size(rank, self.nbytes(rank, index), nbytes)

    def finish(self) -> None:
        """Finish the op: this rank has taken all it needs."""
        self._native.raise_flag(4 * self.number + 3, FLAG)

    def other_ranks(self) -> list[int]:
        """The other ranks, starting after this one, so that not all ranks read from the same one at once."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]
