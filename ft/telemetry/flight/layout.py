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

import struct

MAGIC = b"HFFLIGHT"
VERSION = 1

STATIC = struct.Struct("@8sIIIIIIQdd128s64s128s")
"""The static part: magic, version, bytes of an entry, capacity, bytes of texts, communicators, pid, started,
monotonic time, wall time, host, identity, job."""
CRC = struct.Struct("@I")

LIVE = struct.Struct("@qdIIdII")
"""The live part: step, when it began, text bytes that are valid, state, when it was closed, length of the note, 0."""
LIVE_AT = 512
NOTE_AT, NOTE_BYTES = 2048, 1024
HEADER_BYTES = 4096

OPEN, CLOSED, FAILED = 1, 2, 3
"""States: the process is recording; it left in order; it left by an error."""

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

INSIDE, DONE, PEER_FAILED, REVOKED, TIMED_OUT, MISMATCH, ERROR = range(7)
"""Statuses of an op."""

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
