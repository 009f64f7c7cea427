"""The board: memory that all ranks of a communicator map, with flags for waiting and slots for small payloads.

Each rank writes only its own row, except for the futex word and the TAKEN words of its channels. So aligned eight-byte
loads and stores suffice, except for the futex word, which is incremented atomically. Loads acquire and stores release
(`_native.Words`, and `comms/native/board/board.h`): a rank that reads a word sees all that its writer wrote before.

A row, in 8-byte words, with the hot words on cache lines of their own:

    0   flag        the phase that this rank has reached; only ever grows
    1   given       the number of input blocks that this rank has staged, over all ops; only ever grows
    2   reduced     the number of result blocks that it has staged
    3   taken       the number of the others' result blocks that it has taken
    4   near        1 if its last reads were from near cores (see core_locality.h)
    5   in_place    a bit for each class of large op for which it prefers to read inputs in place (see copy_mode.h)
    6   unstaged    1 + the blocks of all earlier ops, if the others may read its inputs in place in this op
    8   asleep      1 while this rank sleeps
    16  futex       in the first row: the word on which all ranks sleep, incremented to wake some of them
    24  state       ALIVE, CLOSED, ABORTED or REPLACED
    25  note        length of the text that says why, or what follows
    26  epoch       1 + the epoch for which this rank has made its row ready; before that the row may hold anything
    27  connect_payload    4 numbers for the other ranks, set on entering
    128 probe       changes with each staged op; far from all other words, since processors prefetch neighbours
    256 line        16 x (op, signature, nbytes, 40 bytes): an op with one tiny input, or none
    384 table       16 x (signature, then (place, nbytes) of its input for each rank)
    ..  places      address of its input for each rank, if they read in place
    ..  note text, point-to-point channels, 2 slots (one a parity), the stage (see pipeline.h)

A wait has three stages, compiled and without the GIL: spin, yield to other processes, sleep until another rank wakes
this one. After 2 ms of sleep the wait returns to Python, which checks the deadline and the peers.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from holdfast.comms import _native
from holdfast.comms.errors import HoldfastError, OpTimeout, PeerFailed, Revoked
from holdfast.comms.plugins.hints import Hint
from holdfast.comms.system.waiting import yield_cpu
from holdfast.comms.transport.base import Context

LINE = 8
FLAG, GIVEN, REDUCED, TAKEN_BLOCKS, NEAR, IN_PLACE_BITS, UNSTAGED, ASLEEP, FUTEX = 0, 1, 2, 3, 4, 5, 6, 8, 16
STATE, NOTE, EPOCH, CONNECT_PAYLOAD = 24, 25, 26, 27
TABLE = 384
RUN_AHEAD = 16
"""Tiny ops that a rank may be ahead of another."""
CONNECT_PAYLOAD_WORDS = 4
ALIVE, CLOSED, ABORTED, REPLACED = 0, 1, 2, 3
NOTE_BYTES = 2048
SLOT_BYTES = 128 * 1024
STAGE_BLOCK_BYTES = 256 * 1024
STAGE_DEPTH = 4
"""The blocks that one rank may be ahead of another in a staged op."""

CHANNEL_ENTRIES = 8
INLINE_BYTES = 1024
ENTRY_WORDS = 8 + INLINE_BYTES // 8
SENT, TAG, NBYTES, ADDRESS, DTYPE, TAKEN = 0, 1, 2, 3, 4, 5

_NOT_READY = 1
_ALL_BITS = (1 << 64) - 1
_SPINS, _CROWDED_SPINS = 10_000, 100
"""Checks before the first yield: with more ranks than cores, the others need the processor."""
_YIELDS, _CROWDED_YIELDS = 400, 40
_SLEEP_SECONDS = 0.002
"""The time of one sleep (`SLEEP_NANOSECONDS` of native/board/board.h), and the longest time of yields.

Each yield takes as long as other processes compute.
"""


HINTS = (
    Hint(
        "spins",
        int,
        "checks of a waiting rank before it first yields its processor: more answer sooner, fewer leave it to others",
        least=0,
        most=10_000_000,
    ),
    Hint(
        "yields",
        int,
        "checks of a waiting rank, each with a yield, before it sleeps; it yields for 2 ms at most",
        least=0,
        most=10_000_000,
    ),
)


@dataclass(frozen=True, slots=True)
class BoardLayout:
    """Where the parts of a row are, in words from its start. A table and a row are in words, sizes in bytes."""

    size: int
    table_words: int
    places: int
    note_text: int
    channels: int
    slots: int
    stage: int
    stage_block: int
    row_words: int
    nbytes: int


@cache
def layout_of(size: int) -> BoardLayout:
    """The layout of every board of `size` ranks. More ranks have smaller blocks: the stage stays in a shared cache."""
    table_words = _round_up(1 + 2 * size, LINE)
    places = TABLE + RUN_AHEAD * table_words
    note_text = places + _round_up(size, LINE)
    channels = note_text + NOTE_BYTES // 8
    slots = _round_up(channels + size * CHANNEL_ENTRIES * ENTRY_WORDS, 512)
    stage = slots + 2 * SLOT_BYTES // 8
    stage_block = max(STAGE_BLOCK_BYTES // max(1, size - 1) // 4096, 8) * 4096
    row_words = stage + STAGE_DEPTH * size * stage_block // 8
    nbytes = size * row_words * 8
    return BoardLayout(size, table_words, places, note_text, channels, slots, stage, stage_block, row_words, nbytes)


def _round_up(value: int, unit: int) -> int:
    return (value + unit - 1) // unit * unit


class Board:
    """One rank's view of the board in `memory`.

    `memory` is a writable buffer of `layout_of(rows).nbytes` bytes, of which `context` uses one row a rank, by default
    all. `dead` returns the ranks of processes that are known to be gone; it is called only while waiting. The context's
    peers let this process read their memory, its hints are those of `HINTS`, and its journal is told of long waits.
    `error` is what `fail` was given, if anything.
    """

    def __init__(
        self,
        memory: Any,
        context: Context,
        dead: Callable[[], Sequence[int]],
        rows: int | None = None,
    ) -> None:
        self.layout = layout = layout_of(context.size if rows is None else rows)
        self._journal, hints = context.journal, context.hints
        self.rank, self.size, self.epoch = rank, size, epoch = context.rank, context.size, context.epoch
        self.bytes = memoryview(memory).cast("B")
        self.words, self.numbers = _native.Words(memory), self.bytes.cast("q")
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.rows = [r * layout.row_words for r in range(size)]
        self._mine = self.rows[rank]
        self._others = [r for r in range(size) if r != rank]
        self._dead = dead
        self.error: HoldfastError | None = None
        crowded = size > (len(os.sched_getaffinity(0)) or 1)
        spins: int = hints.get("spins", _CROWDED_SPINS if crowded else _SPINS)
        self._yields: int = hints.get("yields", _CROWDED_YIELDS if crowded else _YIELDS)
        self.native = _native.Board(
            memory,
            rank,
            size,
            epoch,
            row=8 * layout.row_words,
            table=8 * layout.table_words,
            places=8 * layout.places,
            slots=8 * layout.slots,
            slot=SLOT_BYTES,
            stage=8 * layout.stage,
            block=layout.stage_block,
            depth=STAGE_DEPTH,
            spins=spins,
            yields=self._yields,
            pids=tuple(peer.pid for peer in context.peers),
        )

    # -- this rank's words

    def enter(self, flag: int, connect_payload: Sequence[int]) -> None:
        """Make this rank's row ready, with its first flag at `flag`, and tell the others.

        `connect_payload` is up to `CONNECT_PAYLOAD_WORDS` whole numbers.
        """
        words, mine = self.words, self._mine
        if words[mine + EPOCH]:
            ready = words[mine + EPOCH]
            self.bytes[8 * mine : 8 * (mine + self.layout.slots)] = bytes(8 * self.layout.slots)
            words[mine + EPOCH] = ready
        words[mine + FLAG] = flag
        for place, number in enumerate(connect_payload, mine + CONNECT_PAYLOAD):
            self.numbers[place] = number
        self.native.raise_flag(self.epoch + 1, EPOCH)

    def withdraw(self) -> None:
        """Undo `enter`: wrong slot. Peers with the same wrong guess withdraw too."""
        self.words[self._mine + EPOCH] = _NOT_READY

    def wait_entered(self, deadline: float) -> None:
        """Wait until every rank's row is ready. Raises `Revoked` if one is for a later epoch.

        Sleeps at once: the other ranks need the processor to get here.
        """
        words, ready = self.words, self.epoch + 1
        self._sleep_for(self._others, ready, deadline, "connect", 0, EPOCH)
        for row in self.rows:
            if words[row + EPOCH] != ready:
                raise Revoked(self.epoch, "a later epoch has begun")

    def connect_payload(self, rank: int) -> tuple[int, ...]:
        """The numbers that `rank` passed to `enter`, padded with zeros."""
        start = self.rows[rank] + CONNECT_PAYLOAD
        return tuple(self.numbers[start : start + CONNECT_PAYLOAD_WORDS])

    def leave(self, state: int, note: bytes) -> bool:
        """Tell the others that this rank has closed, aborted or been replaced, with a note.

        The note says why, or what follows this board. Only the first call counts; returns whether this was it.
        """
        start = 8 * (self._mine + self.layout.note_text)
        first = self.words[self._mine + STATE] == ALIVE and self.words[self._mine + EPOCH] == self.epoch + 1
        if first:
            text = note[:NOTE_BYTES]
            self.bytes[start : start + len(text)] = text
            self.words[self._mine + NOTE] = len(text)
            self.native.raise_flag(state, STATE)
        self.native.wake_all()
        return first

    def stop_spinning(self, phase: int | None = None) -> None:
        """Do not yield in waits for phases before `phase` (default: all, this one included); sleep instead. From any
        thread.

        A process that is no rank may hold the processor, such as a dead one while the kernel frees its memory. Yielding
        to it takes until the next timer tick, up to 4 ms; a sleeping rank is woken at once.
        """
        self.native.stop_spinning(_ALL_BITS if phase is None else phase)

    def fail(self, error: HoldfastError) -> None:
        """End this rank's wait, and all later ones, with `error`. From any thread."""
        if self.error is None:
            self.error = error
        self.native.stop()
        self.native.wake_all()

    # -- waits

    def wait_flag(self, rank: int, value: int, deadline: float, op: str, seq: int, flag: int = FLAG) -> None:
        """Wait until `rank` (the size of the board: every other rank) has raised a flag to `value`.

        The caller has polled without success.
        """
        self._sleep_for(self._others if rank == self.size else [rank], value, deadline, op, seq, flag)

    def wait_until(
        self,
        ready: Callable[[], bool],
        missing: Callable[[], Sequence[int]],
        deadline: float,
        op: str,
        seq: int,
    ) -> None:
        """Wait until `ready()`: yield for 2 ms at most, then sleep. `missing` names the ranks that are waited for.

        `missing` looks anew, as `ready` does: a rank may do its part and leave just before. Raises what `fail` was
        given, `PeerFailed` when a missing rank is gone or has left, or `OpTimeout`.
        """
        until = time.monotonic() + _SLEEP_SECONDS
        for _ in range(self._yields):
            if ready():
                return
            self.check()
            if time.monotonic() >= until:
                break
            yield_cpu()
        self._sleep_until(ready, missing, deadline, op, seq)

    def _sleep_for(self, ranks: Sequence[int], value: int, deadline: float, op: str, seq: int, flag: int) -> None:
        """Wait until these ranks have raised a flag to `value`."""
        words, rows = self.words, self.rows

        def missing() -> list[int]:
            return [rank for rank in ranks if words[rows[rank] + flag] < value]

        self._sleep_until(lambda: not missing(), missing, deadline, op, seq)

    def _sleep_until(
        self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]], deadline: float, op: str, seq: int
    ) -> None:
        began = time.monotonic()
        while not self.native.sleep_until(ready):
            self.check()
            self.check_peers(missing)
            now = time.monotonic()
            if now >= deadline and (late := missing()):
                raise OpTimeout(op, seq, now - began, late)

    def check(self) -> None:
        """Raise what `fail` was given, if anything."""
        if self.error is not None:
            raise self.error.again()

    def check_waiting(self) -> None:
        """As `check`. Raises also if another rank has aborted."""
        self.check()
        if self.native.is_over():
            self.check_peers(lambda: self._others)

    def check_source(self, rank: int) -> None:
        """Raise if `rank` has aborted: memory that it let others read may be in use for something else."""
        row = self.rows[rank]
        if self.native.is_over() and self._has_left(row) and self.words[row + STATE] >= ABORTED:
            self.check_peers(lambda: [rank])

    def check_peers(self, missing: Callable[[], Sequence[int]]) -> None:
        """Raise if a rank that is waited for can never come, or if any rank aborted."""
        left = [rank for rank in self._others if self._has_left(self.rows[rank])]
        announcer = self._announcer()  # after it: who announces in between is not taken for one that has just left
        if announcer is not None:
            raise Revoked(self.epoch, f"rank {announcer} has announced what follows")
        if self._journal is not None:
            self._journal.waits(missing())
        gone = tuple(rank for rank in self._dead() if rank not in left)
        late = missing()  # after the two: what a rank did before it left is there
        if not late:
            return
        if gone:
            raise PeerFailed(gone, "the kernel says that the process is gone")
        for rank in left:
            state = self.words[self.rows[rank] + STATE]
            if state == ABORTED or rank in late:
                why = self._note(rank).decode(errors="replace")
                if state == ABORTED:
                    raise Revoked(self.epoch, f"rank {rank} aborted: {why}")
                raise PeerFailed((rank,), f"it left the communicator: {why}")

    def _has_left(self, row: int) -> bool:
        """Whether the rank has left this epoch."""
        return self._is_ready(row) and self.words[row + STATE] != ALIVE

    def _is_ready(self, row: int) -> bool:
        """Whether a row is ready for this epoch. To be asked first: until then, its words are of an earlier epoch."""
        return self.words[row + EPOCH] == self.epoch + 1

    def announced(self) -> bytes | None:
        """The note of a rank that was replaced: what follows this board; None if there is none."""
        announcer = self._announcer()
        return None if announcer is None else self._note(announcer)

    def _announcer(self) -> int | None:
        for rank in self._others:
            row = self.rows[rank]
            if self._is_ready(row) and self.words[row + STATE] == REPLACED:
                return rank
        return None

    def _note(self, rank: int) -> bytes:
        start = 8 * (self.rows[rank] + self.layout.note_text)
        length = min(self.words[self.rows[rank] + NOTE], NOTE_BYTES)
        return bytes(self.bytes[start : start + length])

    # -- layout

    def table(self, rank: int, op: int) -> int:
        """Word index of a rank's table for an op: the signature, then (place, nbytes) for each rank."""
        return self.rows[rank] + TABLE + op % RUN_AHEAD * self.layout.table_words

    def entry(self, src: int, dst: int, number: int) -> int:
        """Word index of entry `number` of the channel from `src` to `dst`."""
        index = dst * CHANNEL_ENTRIES + number
        return self.rows[src] + self.layout.channels + index * ENTRY_WORDS

    def release(self) -> None:
        """Release the memory. The board must not be used afterwards."""
        self.native.release()
        self.words.release()
        self.numbers.release()
        self.bytes.release()
