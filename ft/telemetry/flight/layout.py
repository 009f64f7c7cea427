"""The file format of a flight recording: a ring of the last ops of one process.

The process writes it through a shared mapping. Readers may read it at any moment, also after a SIGKILL. Numbers are in
the byte order of the machine (the version field shows it) and naturally aligned.

    0        static    the process, and the sizes of the parts; ends with its CRC-32
    512      live      open or closed, the step, how much of the texts is valid
    2048     note      why it was closed
    4096     communicators: COMMUNICATORS slots, the last ones that were made, by number modulo COMMUNICATORS
    ..       texts     the signatures of ops, each text once: (length, CRC-32, msgpack), end to end
    ..       ring      `capacity` entries, op n (1, 2, ...) in slot (n - 1) % capacity

An entry has three parts. The first is written when an op begins (number first and last), the second when it ends
(number last), the third only when the op waits for long or fails (number first and last). If the numbers at both ends
differ, the part was being written, and readers skip it.
"""

from __future__ import annotations

import enum
import struct
from pathlib import Path

import msgspec

from holdfast.comms.errors import CorruptData
from holdfast.comms.journal import POINT_TO_POINT
from holdfast.comms.transport.base import Peer

MAGIC = b"HFFLIGHT"
VERSION = 1

STATIC = struct.Struct("@8sIIIIIIQdd128s64s128s")
"""The static part: magic, version, bytes of an entry, capacity, bytes of texts, communicators, pid, started,
monotonic time, wall time, host, identity, job."""
CRC = struct.Struct("@I")

LIVE = struct.Struct("@q8xIIdII")
"""The live part: step, text bytes that are valid, state, when it was closed, length of the note, 0."""
LIVE_AT = 512
NOTE_AT, NOTE_BYTES = 2048, 1024
HEADER_BYTES = 4096


class RecordingState(enum.IntEnum):
    """Whether a recording is open, or its process left in order or by an error.

    If it is `OPEN` and its process is gone, the process was killed.
    """

    OPEN = 1
    CLOSED = 2
    FAILED = 3


COMMUNICATORS = 256
COMMUNICATOR = struct.Struct("@QIIIB3x80s16sQ")
"""A communicator: number, epoch, rank, size, length of the name, name, backend, number again."""
COMMUNICATOR_BYTES = 128
COMMUNICATORS_AT = HEADER_BYTES

TEXTS_AT = COMMUNICATORS_AT + COMMUNICATORS * COMMUNICATOR_BYTES
TEXT_HEAD = struct.Struct("@HHI")
"""Before each text: length, 0, CRC-32."""
MAX_TEXTS = 4096
MAX_TEXT_BYTES = 2048

ENTRY_BYTES = 160
BEGUN = struct.Struct("@QdQQiHHQQ")
"""An op that began: number, time, seq, ordinal, step, text, communicator (modulo 65536), bytes, number again."""
ENDED = struct.Struct("@dI4xQ")
"""An op that ended: time, status, number."""
ENDED_AT = 56
DETAILS = struct.Struct("@QdIBBH16HQ")
"""Details of an op: number, since when, rounds, how many takes, how many gives, kind, ranks, number again."""
DETAILS_AT = 80
MAX_RANKS = 16
WAITS, FAILED_RANKS = 1, 2
"""Kinds of details: the ranks that the op waits for; the ranks that its error names."""


class OpStatus(enum.IntEnum):
    """Whether an op is running, done or failed, and by which error."""

    INSIDE = 0
    DONE = 1
    PEER_FAILED = 2
    REVOKED = 3
    TIMED_OUT = 4
    MISMATCH = 5
    ERROR = 6


assert BEGUN.size == ENDED_AT
assert ENDED_AT + ENDED.size == DETAILS_AT
assert DETAILS_AT + DETAILS.size <= ENTRY_BYTES, DETAILS.size
assert COMMUNICATOR.size <= COMMUNICATOR_BYTES
assert STATIC.size + CRC.size <= LIVE_AT
assert LIVE_AT + LIVE.size <= NOTE_AT


def file_bytes(capacity: int, text_bytes: int) -> int:
    """The size of a recording's file."""
    return TEXTS_AT + text_bytes + capacity * ENTRY_BYTES


def ring_at(text_bytes: int) -> int:
    """The byte offset of the ring."""
    return TEXTS_AT + text_bytes


class BadRecording(CorruptData):
    """A file that is no flight recording, is incomplete, or has another version."""

    def __init__(self, path: Path | str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"flight recording {path}: {reason}")


class Signature(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The arguments of an op on which all ranks must agree.

    `dtype` is "" and `shapes` is empty where ranks need not agree. `detail` is a reduction or a tag, `peer` the root or
    the other side (-1: none).
    """

    op: str
    dtype: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    detail: str = ""
    peer: int = -1

    @property
    def collective(self) -> bool:
        return self.op not in POINT_TO_POINT

    def __str__(self) -> str:
        words = [self.dtype, ", ".join(str(list(shape)) for shape in self.shapes), self.detail]
        if self.peer >= 0 and not self.detail.endswith((f"from {self.peer}", f"to {self.peer}")):
            words.append(f"{_DIRECTION.get(self.op, 'root')} {self.peer}")
        return f"{self.op}({', '.join(filter(None, words))})"


_DIRECTION = {"send": "to", "recv": "from"}


class CommunicatorRecord(msgspec.Struct, frozen=True):
    """A communicator that the process was in, as `rank` of `size`."""

    name: str
    epoch: int
    rank: int
    size: int
    backend: str


class OpWait(msgspec.Struct, frozen=True):
    """The wait of an op since time `since`: for ranks `takes` to send or arrive, for ranks `gives` to receive.

    `rounds` is the number of message rounds done. Of more than 16 ranks only the first are recorded.
    """

    since: float
    rounds: int
    takes: tuple[int, ...]
    gives: tuple[int, ...]


class OpRecord(msgspec.Struct, frozen=True):
    """One op. Times are `time.monotonic()` seconds of its host; `left` is None while the op runs.

    `number` counts all ops of the process, `seq` the ops of its communicator. `ordinal` counts the collectives of the
    communicator, or the sends to (receives from) that peer; it pairs ops of different ranks.
    """

    number: int
    communicator: CommunicatorRecord
    signature: Signature
    seq: int
    ordinal: int
    step: int
    nbytes: int
    entered: float
    left: float | None
    status: OpStatus
    waiting: OpWait | None = None
    failed_ranks: tuple[int, ...] = ()


class Recording(msgspec.Struct, frozen=True):
    """The recording of one process: its last ops, oldest first, and its state.

    `opened` is when the recording began on the clock of the ops, `wall` the same in seconds since 1970. `torn` counts
    the entries that were being written.
    """

    identity: str
    job: str
    process: Peer
    opened: float
    wall: float
    state: RecordingState
    ended: float
    note: str
    step: int
    ops: tuple[OpRecord, ...]
    torn: int
    capacity: int
