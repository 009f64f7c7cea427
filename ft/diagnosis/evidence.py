"""The evidence about a job, from its log folder: recordings by communicator and rank, the state of processes, events.

The clocks of its hosts are aligned: no rank leaves a synchronising op (`MEETINGS`) before all ranks have entered it. So
for each such op of ranks on hosts a and b: entered(a) <= left(b) + offset and entered(b) + offset <= left(a). Over many
ops the two bounds narrow the offset to within half of the shortest op; the middle is taken (as NTP does with its round
trips).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import structs

from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import is_gone, is_stopped, this_host
from holdfast.ft.event_lines import read_events
from holdfast.ft.events import Event
from holdfast.ft.telemetry.flight import BadRecording, OpRecord, OpStatus, Recording, RecordingState, find, read


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
    if is_gone(process):
        return ProcessState.GONE
    return ProcessState.STOPPED if is_stopped(process.pid) else ProcessState.RUNNING


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


MEETINGS = frozenset(
    [
        "all_reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "all_gather",
        "all_gather_single",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "sum_contributions",
    ]
)
"""Ops that no rank can leave before all ranks have entered."""


def read_recordings(
    directory: Path, bad: Callable[[str], object] = lambda reason: None, last: int | None = None
) -> list[tuple[Recording, ProcessState]]:
    """The recordings in a folder, by name, with the states of their processes; `bad` gets the reason of each bad file.

    A process that is gone was killed if its recording is `OPEN`: it is read after the process was seen to be gone.
    """
    found = []
    for path in find(directory):
        try:
            recording = read(path, last)
            state = life(recording.process)
            if state is ProcessState.GONE and recording.state is RecordingState.OPEN:
                recording = read(path, last)
        except BadRecording as error:
            bad(str(error))
        else:
            found.append((recording, state))
    return found


def gather(logs: Path, now: float) -> JobEvidence:
    """The evidence in a folder of recordings and event logs up to `now`, which is this host's monotonic time."""
    bad: list[str] = []
    found = read_recordings(logs, bad.append)
    events = read_events(logs, bad.append)
    lives = {recording.identity: state for recording, state in found}
    return assemble([recording for recording, _ in found], lives, events, now, bad)


def assemble(
    recordings: Iterable[Recording],
    lives: Mapping[str, ProcessState],
    events: Sequence[Event],
    now: float,
    bad: Iterable[str] = (),
) -> JobEvidence:
    """Evidence from its parts, with the hosts' clocks aligned.

    The files of a running job are read one after the other. A rank whose recording is read first would seem to be
    behind the others, and one whose log is read last to have ended before them: nothing counts that came after `now`.
    """
    found = JobEvidence(tuple(recordings), lives, events, now, tuple(bad))
    known = offsets(found.groups)
    if this_host() not in known:
        return replace(found, offsets=known)
    here = now + known[this_host()]
    until = {each.identity: here - known[each.process.host] for each in found.recordings if each.process.host in known}
    ended_since = {each.identity for each in found.recordings if each.ended > until.get(each.identity, math.inf)}
    return replace(
        found,
        recordings=tuple(_until(each, until.get(each.identity, math.inf)) for each in found.recordings),
        lives={who: ProcessState.RUNNING if who in ended_since else state for who, state in lives.items()},
        events=[event for event in events if event.time <= until.get(event.process, math.inf)],
        now=here,
        offsets=known,
    )


def _until(recording: Recording, moment: float) -> Recording:
    """What a recording said at a moment of its host's clock."""
    ops = [
        op
        if op.left is None or op.left <= moment
        else structs.replace(op, left=None, status=OpStatus.INSIDE, failed_ranks=())
        for op in recording.ops
        if op.entered <= moment
    ]
    if recording.ended > moment:
        recording = structs.replace(recording, state=RecordingState.OPEN, ended=0.0, note="")
    return structs.replace(recording, ops=tuple(ops))


def offsets(groups: Sequence[RankGroup]) -> Mapping[str, float]:
    """By host, the seconds to add to its times to get those of the first host.

    Hosts without a chain of common ops to the first host are left out."""
    bounds: dict[tuple[str, str], tuple[float, float]] = {}
    hosts: list[str] = []
    for group in groups:
        tracks = list(group.tracks.values())
        hosts += [track.recording.process.host for track in tracks]
        if len({track.recording.process.host for track in tracks}) > 1:
            for a in tracks:
                for b in tracks:
                    if a.recording.process.host != b.recording.process.host:
                        _narrow(bounds, a, b)
    ordered = list(dict.fromkeys(hosts))
    known: dict[str, float] = dict.fromkeys(ordered[:1], 0.0)
    todo = ordered[:1]
    while todo:
        here = todo.pop(0)
        for host in ordered:
            low, high = bounds.get((here, host), (-math.inf, math.inf))
            if host not in known and math.isfinite(low) and math.isfinite(high):
                known[host] = known[here] + (low + high) / 2
                todo.append(host)
    return known


def _narrow(bounds: dict[tuple[str, str], tuple[float, float]], a: Track, b: Track) -> None:
    """Narrow the bounds of the offset from the clock of `b`'s host to that of `a`'s, by their common ops."""
    key = (a.recording.process.host, b.recording.process.host)
    low, high = bounds.get(key, (-math.inf, math.inf))
    for ordinal in _met(a, b):
        mine, theirs = a.collectives[ordinal], b.collectives[ordinal]
        if mine.left is not None and theirs.left is not None:
            low = max(low, mine.entered - theirs.left)
            high = min(high, mine.left - theirs.entered)
    bounds[key] = (low, high)


def _met(a: Track, b: Track) -> Iterable[int]:
    for ordinal in a.collectives.keys() & b.collectives.keys():
        ops = a.collectives[ordinal], b.collectives[ordinal]
        if all(op.signature.op in MEETINGS and op.status == 1 for op in ops):
            yield ordinal


Kind = Literal["crash", "hang", "cut", "mismatch", "slow", "stuck"]

MEANING = {
    "crash": "it died inside the job",
    "hang": "it did not arrive where the others wait",
    "cut": "what it sends does not reach the other",
    "mismatch": "it called something else than the others",
    "slow": "the others wait for it, again and again",
    "stuck": "an op does not end, and nobody says for whom it waits",
}


class Finding(msgspec.Struct, frozen=True):
    """A suspect: `rank` in `communicator` and `epoch`; `to` is the other end if the suspect is a link.

    `score` is the certainty, from 0 to 1. `seconds` is the time that it has cost the other ranks so far.
    """

    kind: Kind
    rank: int
    score: float
    evidence: str
    communicator: str
    epoch: int
    process: str = ""
    pid: int = 0
    to: int | None = None
    seconds: float = 0.0


def of_track(
    kind: Kind,
    group: RankGroup,
    track: Track,
    score: float,
    evidence: str,
    *,
    to: int | None = None,
    seconds: float = 0.0,
) -> Finding:
    """The finding that suspects a recorded rank of a group."""
    who = track.recording
    return Finding(
        kind, track.rank, score, evidence, group.name, group.epoch, who.identity, who.process.pid, to, seconds
    )


def in_words(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
