"""Point to point over a board: each ordered pair of ranks has a channel of eight entries.

A sender fills a free entry with (tag, size, address), and the payload itself when it is small. The receiver takes the
oldest entry with the tag it wants, reads the payload, and marks the entry taken. Small sends return at once; larger
ones when the receiver has read, or once the sender has aborted: then nobody receives the message. Sends and receives of
a batch progress together, so their order cannot deadlock.

A receiver that has found a message of its tag scans all entries a second time, and takes the oldest of that scan:
docs/internals/decisions/channel-order.md proves that this keeps the order. tests/comms/ops/test_shared_memory.py runs
this code through every order of loads that the memory model allows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from holdfast.comms.algorithms.shared_memory.board import (
    ADDRESS,
    CHANNEL_ENTRIES,
    DTYPE,
    INLINE_BYTES,
    NBYTES,
    SENT,
    TAG,
    TAKEN,
    Board,
)
from holdfast.comms.errors import HoldfastError, Mismatch
from holdfast.comms.tensors.packing import DTYPE_CODE, DTYPES

Message = tuple[torch.Tensor, int, int]
"""(tensor, peer, tag)"""

_REFUSED = 1 << 63
_TAG_BITS = (1 << 64) - 1


class Channels:
    """This rank's ends of all channels of a board. `read_memory(rank, address, into, nbytes)` moves large payloads."""

    def __init__(self, board: Board, read_memory: Callable[[int, int, int, int], None]) -> None:
        self._board = board
        self._read_memory = read_memory
        self._sent = [0] * board.size
        self._ops = 0

    def run(self, sends: Sequence[Message], recvs: Sequence[Message], deadline: float, op: str) -> None:
        """Carry out all of `sends` and `recvs`. Messages between one pair keep their order, tag by tag."""
        board = self._board
        board.check()
        self._ops += 1
        to_post, to_take = list(sends), list(recvs)
        unread: list[tuple[int, int, int]] = []

        def progress() -> bool:
            full: set[int] = set()
            still_to_post = []
            for message in to_post:
                dst = message[1]
                posted = None if dst in full else self._post(message)
                if posted is None:
                    full.add(dst)
                    still_to_post.append(message)
                elif message[0].nbytes > INLINE_BYTES:
                    unread.append((dst, *posted))
            to_post[:] = still_to_post
            empty: set[tuple[int, int]] = set()
            still_to_take = []
            for message in to_take:
                line = (message[1], message[2])
                if line in empty or not self._take(message):
                    empty.add(line)
                    still_to_take.append(message)
            to_take[:] = still_to_take
            unread[:] = [waiting for waiting in unread if not self._was_taken(*waiting)]
            return not (to_post or to_take or unread)

        def missing() -> list[int]:
            progress()
            return sorted({m[1] for m in [*to_post, *to_take]} | {w[0] for w in unread})

        if not progress():
            board.wait_until(progress, missing, deadline, op, self._ops)

    def _post(self, message: Message) -> tuple[int, int] | None:
        """Put a message into a free entry; None if all are in use."""
        tensor, dst, tag = message
        board, words = self._board, self._board.words
        for slot in range(CHANNEL_ENTRIES):
            entry = board.entry(board.rank, dst, slot)
            taken = words[entry + TAKEN]
            if words[entry + SENT] == taken & ~_REFUSED:
                break
        else:
            return None
        nbytes = tensor.nbytes
        words[entry + TAG] = tag & _TAG_BITS
        words[entry + NBYTES] = nbytes
        words[entry + DTYPE] = DTYPE_CODE[tensor.dtype]
        if nbytes > INLINE_BYTES:
            words[entry + ADDRESS] = tensor.data_ptr()
        elif nbytes:
            ctypes.memmove(board.base + 8 * (entry + 8), tensor.data_ptr(), nbytes)
        self._sent[dst] += 1
        number = self._sent[dst]
        words[entry + SENT] = number
        board.native.wake(dst)
        return entry, number

    def _take(self, message: Message) -> bool:
        """Receive the oldest waiting message of the tag; False if there is none yet."""
        tensor, src, tag = message
        board, words = self._board, self._board.words
        found = self._scan(src, tag, whole=False) and self._scan(src, tag)
        if found is None:
            return False
        number, entry = found
        nbytes, dtype = words[entry + NBYTES], words[entry + DTYPE]
        if nbytes != tensor.nbytes or dtype != DTYPE_CODE[tensor.dtype]:
            words[entry + TAKEN] = number | _REFUSED
            board.native.wake(src)
            raise Mismatch(
                f"rank {src} sent {nbytes} bytes of {DTYPES[dtype]} under tag {tag}, rank {board.rank} receives "
                f"{tensor.nbytes} of {tensor.dtype}; both sides must pass the same shape and dtype"
            )
        if nbytes > INLINE_BYTES:
            self._read(src, words[entry + ADDRESS], tensor.data_ptr(), nbytes)
        elif nbytes:
            ctypes.memmove(tensor.data_ptr(), board.base + 8 * (entry + 8), nbytes)
        words[entry + TAKEN] = number
        board.native.wake(src)
        return True

    def _read(self, src: int, address: int, into: int, nbytes: int) -> None:
        """Read the payload of a large message where it lies.

        A sender that gives up aborts the board before its caller may use that memory again: what is read before and
        after a look at its state is the message.
        """
        self._board.check_source(src)
        try:
            self._read_memory(src, address, into, nbytes)
        except HoldfastError:
            self._board.check_source(src)
            raise
        self._board.check_source(src)

    def _scan(self, src: int, tag: int, whole: bool = True) -> tuple[int, int] | None:
        """The number and entry of the oldest message of the tag; the first one found unless `whole`."""
        board, words = self._board, self._board.words
        oldest: tuple[int, int] | None = None
        for slot in range(CHANNEL_ENTRIES):
            entry = board.entry(src, board.rank, slot)
            number = words[entry + SENT]
            waiting = number != words[entry + TAKEN] & ~_REFUSED
            if waiting and words[entry + TAG] == tag & _TAG_BITS and (oldest is None or number < oldest[0]):
                oldest = number, entry
                if not whole:
                    break
        return oldest

    def _was_taken(self, dst: int, entry: int, number: int) -> bool:
        taken = self._board.words[entry + TAKEN]
        if taken == number | _REFUSED:
            raise Mismatch(f"rank {dst} refused the message: it expects another size or dtype")
        return taken >= number and not taken & _REFUSED
