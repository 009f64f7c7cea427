"""The file format of a flight recording, a ring of the last ops of one process, and its strict reader.

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

`read` refuses damaged files. A running process writes during the read, so the file is copied three times. An entry
counts if its last number is in the first copy, all of it in the second, and its first number in the third. That relies
on x86's order of stores; on other processors an entry that is being written may be shown wrongly. No decision depends
on such an entry.
"""

from __future__ import annotations

import enum
import math
import os
import stat
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from holdfast.comms.errors import UNDECODABLE, CorruptData
from holdfast.comms.ops import POINT_TO_POINT
from holdfast.comms.system.files import read_at
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


SUFFIX = ".flight"
MAX_BYTES = 256 << 20
_LAST = struct.Struct("@Q")
_signature = msgspec.msgpack.Decoder(Signature)


def find(directory: Path) -> list[Path]:
    """The recordings in a folder, by name."""
    return sorted(directory.glob(f"*{SUFFIX}"))


def read(path: Path, last: int | None = None) -> Recording:
    """The current content of a recording, with only the `last` ops if that is given.

    Raises `BadRecording` for a file that is not a whole recording of this version.
    """
    return decode(*_copies(path), path=path, last=last)


def _copies(path: Path) -> tuple[bytes, bytes, bytes]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise BadRecording(path, f"cannot be opened: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise BadRecording(path, "is not a regular file")
        if not TEXTS_AT < found.st_size <= MAX_BYTES:
            raise BadRecording(path, f"has {found.st_size} bytes, which no recording has")
        copies = [read_at(fd, found.st_size, 0) for _ in range(3)]
    except OSError as error:
        raise BadRecording(path, f"cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)
    if any(len(copy) != found.st_size for copy in copies):
        raise BadRecording(path, "is being cut short while it is read")
    return copies[0], copies[1], copies[2]


def decode(
    first: bytes, second: bytes, third: bytes, path: Path | str = "in memory", last: int | None = None
) -> Recording:
    """The recording in three copies of a file, made one after the other."""
    return _Decoder(first, second, third, path, last).recording()


class _Decoder:
    def __init__(self, first: bytes, second: bytes, third: bytes, path: Path | str, last: int | None) -> None:
        self._first, self._data, self._third, self._path, self._last = first, second, third, path, last

    def _require(self, true: bool, reason: str) -> None:
        if not true:
            raise BadRecording(self._path, reason)

    def _text(self, raw: bytes, what: str) -> str:
        try:
            return raw.rstrip(b"\0").decode()
        except UnicodeDecodeError:
            raise BadRecording(self._path, f"its {what} is not text") from None

    def _time(self, value: float, what: str) -> float:
        self._require(math.isfinite(value) and value >= 0, f"{what} is {value}, which is no time")
        return value

    def recording(self) -> Recording:
        data = self._data
        self._require(len(data) > TEXTS_AT, f"has {len(data)} bytes, too few")
        self._require(len(self._first) == len(data) == len(self._third), "changed its size while it was read")
        magic, version, *rest = STATIC.unpack_from(data)
        self._require(magic == MAGIC, "is not a flight recording")
        self._require(version == VERSION, f"is of version {version}; this holdfast reads {VERSION}")
        (crc,) = CRC.unpack_from(data, STATIC.size)
        self._require(crc == zlib.crc32(data[: STATIC.size]), "its header is damaged")
        entry, capacity, text_bytes, communicators, pid, started, opened, wall, host, identity, job = rest
        self._require(
            entry == ENTRY_BYTES
            and communicators == COMMUNICATORS
            and 0 < capacity <= 1 << 20
            and capacity & (capacity - 1) == 0
            and len(data) == file_bytes(capacity, text_bytes),
            "its parts do not add up to its size",
        )
        step, used, state, ended, note_bytes, _ = LIVE.unpack_from(data, LIVE_AT)
        self._require(state in tuple(RecordingState), f"has no state {state}")
        self._require(used <= text_bytes and note_bytes <= NOTE_BYTES, "its texts are longer than their room")
        note = data[NOTE_AT : NOTE_AT + note_bytes].decode(errors="replace")
        ops, torn = self._ops(capacity, text_bytes, self._signatures(used), self._communicators())
        return Recording(
            identity=self._text(identity, "identity"),
            job=self._text(job, "job"),
            process=Peer(self._text(host, "host"), pid, started),
            opened=self._time(opened, "its beginning"),
            wall=self._time(wall, "its date"),
            state=RecordingState(state),
            ended=self._time(ended, "its end"),
            note=note,
            step=step,
            ops=ops,
            torn=torn,
            capacity=capacity,
        )

    def _signatures(self, used: int) -> list[Signature]:
        found = [Signature("?")]
        at, end = TEXTS_AT, TEXTS_AT + used
        while at < end:
            self._require(end - at > TEXT_HEAD.size, "its texts break off")
            length, zero, crc = TEXT_HEAD.unpack_from(self._data, at)
            at += TEXT_HEAD.size
            text = self._data[at : at + length]
            self._require(
                zero == 0 and 0 < length <= MAX_TEXT_BYTES and at + length <= end and zlib.crc32(text) == crc,
                "one of its texts is damaged",
            )
            try:
                found.append(_signature.decode(text))
            except UNDECODABLE as error:
                raise BadRecording(self._path, f"one of its texts is no signature: {error}") from None
            at += length
        return found

    def _communicators(self) -> dict[int, CommunicatorRecord]:
        """The communicators by number modulo 65536, as entries refer to them."""
        found = {}
        for slot in range(COMMUNICATORS):
            at = COMMUNICATORS_AT + slot * COMMUNICATOR_BYTES
            number, epoch, rank, size, length, name, backend, again = COMMUNICATOR.unpack_from(self._data, at)
            if number == 0 or number != again:
                continue
            self._require(
                (number - 1) % COMMUNICATORS == slot and rank < size and length <= len(name),
                "one of its communicators is damaged",
            )
            found[number & 0xFFFF] = CommunicatorRecord(
                self._text(name[:length], "communicator's name"), epoch, rank, size, self._text(backend, "backend")
            )
        return found

    def _ops(
        self, capacity: int, text_bytes: int, signatures: list[Signature], communicators: dict[int, CommunicatorRecord]
    ) -> tuple[tuple[OpRecord, ...], int]:
        ops, torn = [], 0
        for slot in self._slots(capacity, ring_at(text_bytes)):
            at = ring_at(text_bytes) + slot * ENTRY_BYTES
            fields = BEGUN.unpack_from(self._data, at)
            number, entered, seq, ordinal, step, text, communicator, nbytes, again = fields
            if number == again == 0:
                continue
            (settled,) = _LAST.unpack_from(self._first, at + BEGUN.size - 8)
            (later,) = _LAST.unpack_from(self._third, at)
            if not number == again == settled == later:
                torn += 1
                continue
            self._require((number - 1) % capacity == slot, f"op {number} is in the wrong place")
            self._require(text < len(signatures) or len(signatures) == 1, f"op {number} has no text {text}")
            where = communicators.get(communicator)
            if where is None:
                continue  # of a communicator that was forgotten since: at least 256 came after it
            left, status, failed, waiting = self._end(at, number)
            ops.append(
                OpRecord(
                    number=number,
                    communicator=where,
                    signature=signatures[text] if text < len(signatures) else signatures[0],
                    seq=seq,
                    ordinal=ordinal,
                    step=step,
                    nbytes=nbytes,
                    entered=self._time(entered, f"the beginning of op {number}"),
                    left=left,
                    status=status,
                    waiting=waiting,
                    failed_ranks=failed,
                )
            )
        ops.sort(key=lambda op: op.number)
        return tuple(ops), torn

    def _slots(self, capacity: int, ring: int) -> Iterable[int]:
        """The slots to decode: all, or those of the last ops."""
        if self._last is None:
            return range(capacity)
        numbers = memoryview(self._data)[ring:].cast("Q")[:: ENTRY_BYTES // 8].tolist()
        newest = max(numbers)
        return [slot for slot, number in enumerate(numbers) if newest - self._last < number]

    def _end(self, at: int, number: int) -> tuple[float | None, OpStatus, tuple[int, ...], OpWait | None]:
        """When and how op `number` ended, the ranks that its error names, and its wait."""
        left, status, mark = ENDED.unpack_from(self._data, at + ENDED_AT)
        *_, settled = ENDED.unpack_from(self._first, at + ENDED_AT)
        ended = mark == settled == number
        if ended:
            self._require(OpStatus.INSIDE < status <= OpStatus.ERROR, f"op {number} has no status {status}")
            self._time(left, f"the end of op {number}")
        waiting: OpWait | None = None
        failed: tuple[int, ...] = ()
        details = DETAILS.unpack_from(self._data, at + DETAILS_AT)
        begun, since, rounds, takes, gives, kind, *ranks, again = details
        (last,) = _LAST.unpack_from(self._first, at + DETAILS_AT + DETAILS.size - 8)
        (first,) = _LAST.unpack_from(self._third, at + DETAILS_AT)
        if begun == again == last == first == number:
            self._require(takes + gives <= MAX_RANKS, f"op {number} waits for too many ranks")
            if kind == WAITS:
                since = self._time(since, f"the wait of op {number}")
                waiting = OpWait(since, rounds, tuple(ranks[:takes]), tuple(ranks[takes : takes + gives]))
            else:
                self._require(kind == FAILED_RANKS, f"op {number} has details of kind {kind}")
                failed = tuple(ranks[:takes])
        if not ended:
            return None, OpStatus.INSIDE, failed, waiting
        return left, OpStatus(status), failed, waiting
