"""The flight recorder: writes each op of a process to a file that others can read after its death.

The file is a shared mapping, so its content survives a SIGKILL. An op costs two `pack_into`, two clock readings and a
dictionary lookup. The path of an op takes no lock, does not wait and does not raise.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import msgspec
import torch

from holdfast.comms.errors import Mismatch, OpTimeout, PeerFailed, Revoked, valid_text
from holdfast.comms.ops import OPS, POINT_TO_POINT, OpTensors
from holdfast.comms.system.environment import flag
from holdfast.comms.system.files import map_file
from holdfast.comms.transport.liveness import this_process
from holdfast.ft.events import StepBegun
from holdfast.ft.telemetry import flight
from holdfast.ft.telemetry.event_log import DIRECTORY
from holdfast.ft.telemetry.flight import SUFFIX, OpStatus, RecordingState, Signature

SWITCH = "HOLDFAST_RECORD"
"""The environment variable that turns the recorder off ("0")."""

CAPACITY = 2048
TEXT_BYTES = 64 * 1024

_log = logging.getLogger("holdfast.ft")
_encode = msgspec.msgpack.Encoder().encode
_begin = flight.BEGUN.pack_into
_end = flight.ENDED.pack_into
_detail = flight.DETAILS.pack_into
_STATUSES: tuple[tuple[type[BaseException], int], ...] = (
    (PeerFailed, OpStatus.PEER_FAILED),
    (Revoked, OpStatus.REVOKED),
    (OpTimeout, OpStatus.TIMED_OUT),
    (Mismatch, OpStatus.MISMATCH),
)


class FlightRecorder:
    """One process's recording. Any thread may make journals; each journal records one op at a time.

    Ops are recorded with the current `step`. `now` is the clock, which tests replace.
    """

    def __init__(
        self,
        path: Path,
        identity: str,
        job: str,
        *,
        capacity: int = CAPACITY,
        text_bytes: int = TEXT_BYTES,
        now: Callable[[], float] = time.monotonic,
        process: tuple[str, int, int] | None = None,
    ) -> None:
        """Make the file, owner-only, and allocate its space. Raises OSError if it exists or the disk is full."""
        if capacity & (capacity - 1) or not 0 < capacity <= 1 << 20:
            raise ValueError(f"capacity={capacity} must be a power of 2, at most 2**20")
        self.path = path
        self.step = -1
        self._now, self._capacity, self._text_bytes = now, capacity, text_bytes
        size = flight.file_bytes(capacity, text_bytes)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)  # a hole would be a SIGBUS later, if the disk is full then
            self._memory = map_file(fd, size)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)
        ring = range(flight.ring_at(text_bytes), size, flight.ENTRY_BYTES)
        self._next = zip(itertools.count(1), itertools.cycle(ring)).__next__
        """Returns the number of the next op and the offset of its entry; one call, so that it is atomic."""
        self._lock = threading.Lock()
        self._texts: dict[Hashable, int] = {}
        self._for_bare = max(text_bytes // 32, 64)
        """Bytes of texts that are left to signatures without arguments."""
        self._text_count = self._text_used = 0
        self._communicators = itertools.count(1)
        self._state = RecordingState.OPEN
        self._write_static(identity, job, process)

    def _write_static(self, identity: str, job: str, process: tuple[str, int, int] | None) -> None:
        if process is None:
            me = this_process()
            process = (me.host, me.pid, me.started)
        host, pid, started = process
        self._say()
        static = flight.STATIC.pack(
            flight.MAGIC,
            flight.VERSION,
            flight.ENTRY_BYTES,
            self._capacity,
            self._text_bytes,
            flight.COMMUNICATORS,
            pid,
            started,
            self._now(),
            time.time(),
            _clip(host, 128),
            _clip(identity, 64),
            _clip(job, 128),
        )
        flight.CRC.pack_into(self._memory, flight.STATIC.size, zlib.crc32(static))
        self._memory[: len(static)] = static

    def _say(self, ended: float = 0.0, note: bytes = b"") -> None:
        flight.LIVE.pack_into(
            self._memory,
            flight.LIVE_AT,
            self.step,
            self._text_used,
            self._state,
            ended,
            len(note),
            0,
        )

    def at_step(self, event: StepBegun) -> None:
        """Record ops as ops of the step that has begun from now on."""
        if event.step != self.step:
            self.step = event.step
            self._say()

    def journal(self, name: str, epoch: int, rank: int, size: int, backend: str) -> FlightJournal:
        """A journal for a new communicator."""
        number = next(self._communicators)
        at = flight.COMMUNICATORS_AT + (number - 1) % flight.COMMUNICATORS * flight.COMMUNICATOR_BYTES
        text = _clip(name, 80)
        packed = flight.COMMUNICATOR.pack(number, epoch, rank, size, len(text), text, _clip(backend, 16), number)
        self._memory[at : at + len(packed)] = packed
        return FlightJournal(self, number & 0xFFFF)

    def close(self, error: str | None = None) -> None:
        """Mark the recording closed, in order or by `error`. The file stays for readers. Idempotent."""
        if self._state != RecordingState.OPEN:
            return
        note = valid_text(error or "").encode()[: flight.NOTE_BYTES]
        self._memory[flight.NOTE_AT : flight.NOTE_AT + len(note)] = note
        self._state = RecordingState.CLOSED if error is None else RecordingState.FAILED
        self._say(self._now(), note)

    def __enter__(self) -> FlightRecorder:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close(None if error is None else f"{type(error).__name__}: {error}")

    # What the journals use: the mapping lives as long as any of them -----------------------------------------------

    def describe(self, op: str, about: OpTensors, detail: Hashable, peer: int, key: Hashable) -> int:
        """The number of the text with an op's signature, its complement for point to point; writes a text if needed."""
        with self._lock:
            if (known := self._texts.get(key)) is not None:
                return known
            tensors = about if isinstance(about, tuple) else () if about is None else (about,)
            signature = Signature(
                op,
                str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
                tuple(tuple(tensor.shape) for tensor in tensors),
                _words(detail),
                peer,
            )
            number = self._add(signature, keep=self._for_bare) or self._bare(op)
            signed = ~number if op in POINT_TO_POINT else number
            if len(self._texts) < 2 * flight.MAX_TEXTS:
                self._texts[key] = signed
            return signed

    def _bare(self, op: str) -> int:
        """The number of an op's signature without arguments, for calls whose arguments find no room."""
        if (op,) not in self._texts:
            self._texts[op,] = self._add(Signature(op), keep=0)
        return self._texts[op,]

    def _add(self, signature: Signature, keep: int) -> int:
        """Write a text; returns its number, or 0 if there is no room beside `keep` bytes and as many texts."""
        text = _encode(signature)
        end = self._text_used + flight.TEXT_HEAD.size + len(text)
        full = end > self._text_bytes - keep or self._text_count >= flight.MAX_TEXTS - min(keep, len(OPS))
        if len(text) > flight.MAX_TEXT_BYTES or full:
            return 0
        at = flight.TEXTS_AT + self._text_used
        flight.TEXT_HEAD.pack_into(self._memory, at, len(text), 0, zlib.crc32(text))
        self._memory[at + flight.TEXT_HEAD.size : flight.TEXTS_AT + end] = text
        self._text_used = end
        self._text_count += 1
        self._say()
        return self._text_count


class FlightJournal:
    """Writes the ops of one communicator to the recording.

    `enter` and `leave` (see `holdfast.comms.ops.Journal`) are closures, because they run for every op and closure
    cells are faster than attributes.
    """

    __slots__ = ("_memory", "_now", "_place", "_waiting", "enter", "leave")

    def __init__(self, recorder: FlightRecorder, communicator: int) -> None:
        self._memory, self._now = recorder._memory, recorder._now
        self._waiting: tuple[object, ...] = ()
        self.enter, self.leave, self._place = self._closures(recorder, communicator)

    def _closures(
        self, recorder: FlightRecorder, communicator: int
    ) -> tuple[
        Callable[[str, int, int, OpTensors, Hashable, int], None],
        Callable[[BaseException | None], None],
        Callable[[], tuple[int, int]],
    ]:
        """`enter`, `leave`, and a function that returns the offset and number of the op entered last."""
        memory = recorder._memory
        now, following, texts, describe = recorder._now, recorder._next, recorder._texts, recorder.describe
        begin, end, fail = _begin, _end, self._fail
        others: dict[tuple[str, int], int] = {}
        at = number = collectives = 0

        def enter(op: str, seq: int, nbytes: int, about: OpTensors, detail: Hashable, peer: int) -> None:
            nonlocal at, number, collectives
            key: Hashable
            if about is None:
                key = (op, detail, peer)
            elif type(about) is tuple:
                key = (op, *[(tensor.dtype, tensor.shape) for tensor in about], detail, peer)
            else:
                key = (op, about.dtype, about.shape, detail, peer)  # type: ignore[union-attr]
            try:
                text = texts[key]
            except KeyError:
                text = describe(op, about, detail, peer, key)
            if text >= 0:
                ordinal = collectives = collectives + 1
            else:
                text, line = ~text, (op, peer)
                ordinal = others[line] = others.get(line, 0) + 1
            number, at = following()
            begin(memory, at, number, now(), seq, ordinal, recorder.step, text, communicator, nbytes, number)

        def leave(error: BaseException | None) -> None:
            if error is None:
                end(memory, at + 56, now(), 1, number)
            else:
                fail(error)

        return enter, leave, lambda: (at, number)

    def waits(self, ranks: Sequence[int], gives: Sequence[int] = (), rounds: int = 0) -> None:
        """See `holdfast.comms.ops.Journal`."""
        at, number = self._place()
        told = (number, tuple(ranks), tuple(gives), rounds)
        if told != self._waiting and number:
            self._waiting = told
            self._note(at, number, flight.WAITS, ranks, gives, rounds)

    def _fail(self, error: BaseException) -> None:
        at, number = self._place()
        ranks: tuple[int, ...] = ()
        if isinstance(error, PeerFailed):
            ranks = error.ranks
        elif isinstance(error, OpTimeout) and self._waiting[:1] != (number,):
            ranks = error.missing_ranks  # if the op's wait is recorded, that says more
        if ranks:
            self._note(at, number, flight.FAILED_RANKS, ranks, (), 0)
        status = next((status for kind, status in _STATUSES if isinstance(error, kind)), OpStatus.ERROR)
        _end(self._memory, at + flight.ENDED_AT, self._now(), status, number)

    def _note(self, at: int, number: int, kind: int, takes: Sequence[int], gives: Sequence[int], rounds: int) -> None:
        takes = takes[: flight.MAX_RANKS]
        gives = gives[: flight.MAX_RANKS - len(takes)]
        ranks = [*takes, *gives, *[0] * (flight.MAX_RANKS - len(takes) - len(gives))]
        at += flight.DETAILS_AT
        _detail(self._memory, at, 0, 0.0, 0, 0, 0, 0, *[0] * flight.MAX_RANKS, 0)
        _detail(self._memory, at, number, self._now(), rounds, len(takes), len(gives), kind, *ranks, number)


def _words(detail: Hashable) -> str:
    if detail is None or detail == "":
        return ""
    if isinstance(detail, tuple):
        return ", ".join(filter(None, map(_words, detail)))
    return str(detail).removeprefix("torch.") if isinstance(detail, torch.dtype) else str(detail)


@functools.lru_cache(maxsize=64)
def _clip(text: str, limit: int) -> bytes:
    """A text in UTF-8, cut to at most `limit` bytes between characters."""
    return text.encode()[:limit].decode(errors="ignore").encode()


def open_recorder(identity: str, job: str) -> FlightRecorder | None:
    """The recorder of a process of a job, beside its event log; None without HOLDFAST_LOG_DIR or if turned off.

    If the file cannot be made, logs a warning and returns None: the job runs without a recording.
    """
    directory = os.environ.get(DIRECTORY)
    if not directory or not flag(SWITCH, default=True):
        return None
    path = Path(directory) / f"{identity}{SUFFIX}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return FlightRecorder(path, identity, job)
    except OSError as error:
        _log.warning("%s records no ops: %s cannot be made: %s", identity, path, error)
        return None
