"""Reads flight recordings of running and dead processes, and refuses damaged files.

A running process writes during the read, so the file is copied three times. An entry counts if its last number is in
the first copy, all of it in the second, and its first number in the third. That relies on x86's order of stores; on
other processors an entry that is being written may be shown wrongly. No decision depends on such an entry.
"""

from __future__ import annotations

import math
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from holdfast.comms.system.file_io import read_at
from holdfast.comms.transport.base import Peer
from holdfast.ft.telemetry.flight import layout
from holdfast.ft.telemetry.flight.layout import (
    BadRecording,
    CommunicatorRecord,
    OpRecord,
    OpStatus,
    OpWait,
    Recording,
    RecordingState,
    Signature,
)
from holdfast.ft.telemetry.flight.recorder import SUFFIX

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


def read_all(
    directory: Path, bad: Callable[[str], object] = lambda reason: None, last: int | None = None
) -> list[Recording]:
    """The recordings in a folder, by name; `bad` is called with the reason for each file that is none."""
    found = []
    for path in find(directory):
        try:
            found.append(read(path, last))
        except BadRecording as error:
            bad(str(error))
    return found


def _copies(path: Path) -> tuple[bytes, bytes, bytes]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise BadRecording(path, f"cannot be opened: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise BadRecording(path, "is not a regular file")
        if not layout.TEXTS_AT < found.st_size <= MAX_BYTES:
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
        self._require(len(data) > layout.TEXTS_AT, f"has {len(data)} bytes, too few")
        self._require(len(self._first) == len(data) == len(self._third), "changed its size while it was read")
        magic, version, *rest = layout.STATIC.unpack_from(data)
        self._require(magic == layout.MAGIC, "is not a flight recording")
        self._require(version == layout.VERSION, f"is of version {version}; this holdfast reads {layout.VERSION}")
        (crc,) = layout.CRC.unpack_from(data, layout.STATIC.size)
        self._require(crc == zlib.crc32(data[: layout.STATIC.size]), "its header is damaged")
        entry, capacity, text_bytes, communicators, pid, started, opened, wall, host, identity, job = rest
        self._require(
            entry == layout.ENTRY_BYTES
            and communicators == layout.COMMUNICATORS
            and 0 < capacity <= 1 << 20
            and capacity & (capacity - 1) == 0
            and len(data) == layout.file_bytes(capacity, text_bytes),
            "its parts do not add up to its size",
        )
        step, used, state, ended, note_bytes, _ = layout.LIVE.unpack_from(data, layout.LIVE_AT)
        self._require(state in tuple(RecordingState), f"has no state {state}")
        self._require(used <= text_bytes and note_bytes <= layout.NOTE_BYTES, "its texts are longer than their room")
        note = data[layout.NOTE_AT : layout.NOTE_AT + note_bytes].decode(errors="replace")
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
        at, end = layout.TEXTS_AT, layout.TEXTS_AT + used
        while at < end:
            self._require(end - at > layout.TEXT_HEAD.size, "its texts break off")
            length, zero, crc = layout.TEXT_HEAD.unpack_from(self._data, at)
            at += layout.TEXT_HEAD.size
            text = self._data[at : at + length]
            self._require(
                zero == 0 and 0 < length <= layout.MAX_TEXT_BYTES and at + length <= end and zlib.crc32(text) == crc,
                "one of its texts is damaged",
            )
            try:
                found.append(_signature.decode(text))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise BadRecording(self._path, f"one of its texts is no signature: {error}") from None
            at += length
        return found

    def _communicators(self) -> dict[int, CommunicatorRecord]:
        """The communicators by number modulo 65536, as entries refer to them."""
        found = {}
        for slot in range(layout.COMMUNICATORS):
            at = layout.COMMUNICATORS_AT + slot * layout.COMMUNICATOR_BYTES
            number, epoch, rank, size, length, name, backend, again = layout.COMMUNICATOR.unpack_from(self._data, at)
            if number == 0 or number != again:
                continue
            self._require(
                (number - 1) % layout.COMMUNICATORS == slot and rank < size and length <= len(name),
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
        for slot in self._slots(capacity, layout.ring_at(text_bytes)):
            at = layout.ring_at(text_bytes) + slot * layout.ENTRY_BYTES
            fields = layout.BEGUN.unpack_from(self._data, at)
            number, entered, seq, ordinal, step, text, communicator, nbytes, again = fields
            if number == again == 0:
                continue
            (settled,) = _LAST.unpack_from(self._first, at + layout.BEGUN.size - 8)
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
        numbers = memoryview(self._data)[ring:].cast("Q")[:: layout.ENTRY_BYTES // 8].tolist()
        newest = max(numbers)
        return [slot for slot, number in enumerate(numbers) if newest - self._last < number]

    def _end(self, at: int, number: int) -> tuple[float | None, OpStatus, tuple[int, ...], OpWait | None]:
        """When and how op `number` ended, the ranks that its error names, and its wait."""
        left, status, mark = layout.ENDED.unpack_from(self._data, at + layout.ENDED_AT)
        *_, settled = layout.ENDED.unpack_from(self._first, at + layout.ENDED_AT)
        ended = mark == settled == number
        if ended:
            self._require(OpStatus.INSIDE < status <= OpStatus.ERROR, f"op {number} has no status {status}")
            self._time(left, f"the end of op {number}")
        waiting: OpWait | None = None
        failed: tuple[int, ...] = ()
        details = layout.DETAILS.unpack_from(self._data, at + layout.DETAILS_AT)
        begun, since, rounds, takes, gives, kind, *ranks, again = details
        (last,) = _LAST.unpack_from(self._first, at + layout.DETAILS_AT + layout.DETAILS.size - 8)
        (first,) = _LAST.unpack_from(self._third, at + layout.DETAILS_AT)
        if begun == again == last == first == number:
            self._require(takes + gives <= layout.MAX_RANKS, f"op {number} waits for too many ranks")
            if kind == layout.WAITS:
                since = self._time(since, f"the wait of op {number}")
                waiting = OpWait(since, rounds, tuple(ranks[:takes]), tuple(ranks[takes : takes + gives]))
            else:
                self._require(kind == layout.FAILED_RANKS, f"op {number} has details of kind {kind}")
                failed = tuple(ranks[:takes])
        if not ended:
            return None, OpStatus.INSIDE, failed, waiting
        return left, OpStatus(status), failed, waiting
