"""The content of a flight recording, decoded: frozen data types."""

from __future__ import annotations

import enum
from pathlib import Path

import msgspec

from holdfast.comms.errors import CorruptData
from holdfast.comms.journal import POINT_TO_POINT
from holdfast.comms.transport.base import Peer
from holdfast.ft.telemetry.flight import layout


class BadRecording(CorruptData):
    """A file that is no flight recording, is incomplete, or has another version."""

    def __init__(self, path: Path | str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"flight recording {path}: {reason}")


class OpStatus(enum.IntEnum):
    """Whether an op is running, done or failed, and by which error."""

    INSIDE = layout.INSIDE
    DONE = layout.DONE
    PEER_FAILED = layout.PEER_FAILED
    REVOKED = layout.REVOKED
    TIMED_OUT = layout.TIMED_OUT
    MISMATCH = layout.MISMATCH
    ERROR = layout.ERROR


class RecordingState(enum.IntEnum):
    """Whether a recording is open or closed. If it is `OPEN` and its process is gone, the process was killed."""

    OPEN = layout.OPEN
    CLOSED = layout.CLOSED
    FAILED = layout.FAILED


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
    the entries that were being written. `step` began at `step_began` (0: no step has begun).
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
    step_began: float
    ops: tuple[OpRecord, ...]
    torn: int
    capacity: int
