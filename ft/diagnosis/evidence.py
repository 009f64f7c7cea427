"""The evidence about a job: recordings by communicator and rank, the state of their processes, events."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import start_time, this_host
from holdfast.ft.events import Event
from holdfast.ft.telemetry.flight import OpRecord, OpStatus, Recording, RecordingState


class ProcessState(enum.Enum):
    """The current state of a process, by the kernel."""

    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"
    """The process is on another host, or is from before this boot."""


def life(process: Peer) -> ProcessState:
    """The current state of a process."""
    if process.host != this_host():
        return ProcessState.UNKNOWN
    try:
        if start_time(process.pid) != process.started:
            return ProcessState.GONE
        stat = Path(f"/proc/{process.pid}/stat").read_bytes()
    except (ProcessLookupError, OSError):
        return ProcessState.GONE
    state = stat[stat.rindex(b")") + 2 :][:1]
    return ProcessState.STOPPED if state in b"Tt" else ProcessState.GONE if state in b"ZX" else ProcessState.RUNNING


@dataclass(frozen=True)
class Track:
    """One rank's ops on one communicator, in order.

    `offset` are the seconds to add to its times to get those of the first host."""

    rank: int
    recording: Recording
    life: ProcessState
    ops: tuple[OpRecord, ...]
    offset: float = 0.0

    @cached_property
    def collectives(self) -> Mapping[int, OpRecord]:
        """The collectives by ordinal."""
        return {op.ordinal: op for op in self.ops if op.signature.collective}

    @property
    def last(self) -> OpRecord:
        return self.ops[-1]

    @property
    def was_killed(self) -> bool:
        """Whether its process is gone without having left the job, and its last op was on this communicator."""
        return (
            self.life is ProcessState.GONE
            and self.recording.state is RecordingState.OPEN
            and self.recording.ops[-1].number == self.last.number
        )

    def entered(self, op: OpRecord) -> float:
        return op.entered + self.offset

    def left(self, op: OpRecord) -> float:
        """The time at which the rank left `op`; infinite while it is inside."""
        return float("inf") if op.left is None else op.left + self.offset


@dataclass(frozen=True)
class RankGroup:
    """The recorded ranks of one communicator in one epoch."""

    name: str
    epoch: int
    size: int
    tracks: Mapping[int, Track]

    @cached_property
    def furthest(self) -> int:
        """The highest ordinal of a collective that any rank has entered."""
        return max((ordinal for track in self.tracks.values() for ordinal in track.collectives), default=0)

    @cached_property
    def blocked(self) -> Mapping[int, OpRecord]:
        """By rank, its last op, if it is inside it or the op failed."""
        return {r: t.last for r, t in self.tracks.items() if t.last.status is not OpStatus.DONE}

    @property
    def where(self) -> str:
        return f"{self.name!r} (epoch {self.epoch})"


@dataclass(frozen=True)
class JobEvidence:
    """All evidence about a job. `lives` are the states of processes by identity; `bad` says which files are unreadable.

    `now` is the current time of this host, on the clock of the first host."""

    recordings: tuple[Recording, ...]
    lives: Mapping[str, ProcessState]
    events: Sequence[Event]
    now: float
    bad: tuple[str, ...] = ()
    offsets: Mapping[str, float] = field(default_factory=dict)
    """By host, the seconds to add to its times to get those of the first host."""

    @cached_property
    def last_known(self) -> float:
        """The time of the latest evidence, on the clock of the first host."""
        offset = {r.identity: self.offsets.get(r.process.host, 0.0) for r in self.recordings}
        moments = [(r.identity, moment) for r in self.recordings for moment in (r.ended, r.opened, *_moments(r))]
        moments += [(event.process, event.time) for event in self.events]
        return max((moment + offset.get(identity, 0.0) for identity, moment in moments), default=self.now)

    def left(self, track: Track, op: OpRecord) -> float:
        """The time at which a rank left an op. For one inside: now, or `last_known` if its process is not running."""
        if op.left is not None:
            return max(track.left(op), track.entered(op))
        lives = track.life in (ProcessState.RUNNING, ProcessState.STOPPED)
        return max(self.now if lives else self.last_known, track.entered(op))

    @cached_property
    def groups(self) -> tuple[RankGroup, ...]:
        """The communicators of all epochs, oldest epoch first."""
        tracks: dict[tuple[str, int], dict[int, Track]] = {}
        sizes: dict[tuple[str, int], int] = {}
        for recording in self.recordings:
            ops: dict[tuple[str, int, int], list[OpRecord]] = {}
            for op in recording.ops:
                where = op.communicator
                ops.setdefault((where.name, where.epoch, where.rank), []).append(op)
                sizes[where.name, where.epoch] = where.size
            for (name, epoch, rank), mine in ops.items():
                offset = self.offsets.get(recording.process.host, 0.0)
                track = Track(rank, recording, self.lives[recording.identity], tuple(mine), offset)
                tracks.setdefault((name, epoch), {})[rank] = track
        keys = sorted(tracks, key=lambda key: (key[1], key[0]))
        return tuple(RankGroup(*key, sizes[key], dict(sorted(tracks[key].items()))) for key in keys)


def _moments(recording: Recording) -> Iterator[float]:
    for op in recording.ops:
        yield op.entered if op.left is None else op.left
