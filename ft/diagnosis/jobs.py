"""Locates a job's files, and reads its current state from its register, flight recordings and event logs."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.comms.errors import HoldfastError
from holdfast.comms.system.files import url_of
from holdfast.ft.console.units import counted
from holdfast.ft.diagnosis.evidence import ProcessState, life, read_recordings
from holdfast.ft.event_lines import EventTail
from holdfast.ft.events import (
    CommunicatorBuilt,
    EpochRevoked,
    Event,
    SpareWaits,
    StepCommitted,
    StepsFinished,
    ViewInstalled,
)
from holdfast.ft.membership.view import View
from holdfast.ft.node.register import CELL, Register
from holdfast.ft.telemetry.flight import OpRecord, OpStatus, Recording, RecordingState, find

REGISTER = "register.sqlite"
_PLACES = ("holdfast-*", "job-*")
"""Name patterns of running jobs' folders: in the folder for temporary files, and inside those (`LocalCluster`'s)."""


class NoSuchJob(HoldfastError):
    """There are no files of this job."""


@dataclass(frozen=True, slots=True)
class JobFiles:
    """The folder with a job's event logs and flight recordings, and its register ("" if there is none)."""

    logs: Path
    register: str

    def view(self) -> View | None:
        """The newest view in the register; None if there is none or it is unreadable."""
        if not self.register:
            return None
        try:
            with self._register() as register:
                return register.read()
        except (HoldfastError, ValueError):
            return None

    def _register(self) -> Register:
        """A missing one is not made: the job may be removing its folder."""
        if not self.register.startswith("sqlite:"):
            return Register.open(self.register)
        from holdfast.ft.registers.sqlite import SqliteCell

        return Register(SqliteCell(self.register, CELL, make=False))


def locate(job: str, register: str = "") -> JobFiles:
    """The files of the job in a folder, or of the newest job of that name on this machine. Raises `NoSuchJob`."""
    path = Path(job)
    if path.is_dir():
        return _in_folder(path.absolute(), register)
    names = []
    for folder in _candidates():
        try:
            files = _in_folder(folder, register)
        except (OSError, NoSuchJob):  # the job has ended meanwhile
            continue
        view = files.view()
        name = folder.name if view is None else view.job.name
        if job in (name, folder.name):
            return files
        names.append(name)
    raise NoSuchJob(
        f"there is no folder {job!r}, and no job of that name runs here (there are: {', '.join(names) or 'none'}); "
        "the files of a job that has ended are where `holdfast run --logs` put them"
    )


def _candidates() -> list[Path]:
    """The folders of this user's jobs on this machine, newest first."""
    own, inner = _PLACES
    found: list[tuple[float, Path]] = []
    for outer in Path(tempfile.gettempdir()).glob(own):
        with contextlib.suppress(OSError):  # jobs end, and their folders go, while we look
            jobs = [folder for folder in (outer, *outer.glob(inner)) if (folder / REGISTER).is_file()]
            looked = [(folder, folder.stat()) for folder in jobs]
            found += [(stat.st_mtime, folder) for folder, stat in looked if stat.st_uid == os.geteuid()]
    return [folder for _, folder in sorted(found, reverse=True)]


def _in_folder(folder: Path, register: str) -> JobFiles:
    logs = folder / "events" if (folder / "events").is_dir() else folder
    if not find(logs) and not list(logs.glob("*.jsonl")) and not (folder / REGISTER).is_file():
        raise NoSuchJob(f"{folder} holds neither flight recordings nor event logs (*.flight, *.jsonl)")
    if not register and (folder / REGISTER).is_file():
        register = url_of("sqlite", (folder / REGISTER).absolute())
    return JobFiles(logs, register)


WINDOW = 5.0
"""Seconds over which steps per second are counted."""
_LAST_OPS = 8


class ProcessRow(msgspec.Struct, frozen=True):
    """One process. `rank` is None for a process without one. `op` is its current op, or its last if not `inside`.

    `seconds` have passed since it entered or left the op. `waits_for` are ranks of the op's communicator.
    """

    rank: int | None
    process: str
    pid: int
    state: str
    step: int
    steps_per_second: float
    op: str
    inside: bool
    seconds: float
    waits_for: tuple[int, ...] = ()


class LastFault(msgspec.Struct, frozen=True):
    """The last revocation: seconds `ago`, the reason, and the seconds to the next communicator and commit."""

    ago: float
    epoch: int
    reason: str
    recovery: float | None
    resume: float | None


class JobState(msgspec.Struct, frozen=True):
    """A job at one moment. `faults` counts revoked epochs; `needed` is the number of members that it waits for."""

    name: str
    phase: str
    epoch: int
    members: int
    backend: str
    step: int
    steps_per_second: float
    faults: int
    last_fault: LastFault | None
    rows: tuple[ProcessRow, ...]
    needed: int = 0


class Watcher:
    """Watches one job: each `look` returns its state at that moment."""

    def __init__(self, files: JobFiles) -> None:
        self._files = files
        self._tail = EventTail(files.logs)
        self._commits: dict[str, deque[float]] = {}
        self._steps: dict[str, int] = {}
        self._installed: ViewInstalled | None = None
        self._spares: set[str] = set()
        self._pids: dict[str, int] = {}
        self._revoked: dict[int, tuple[float, str]] = {}
        self._rebuilt: dict[int, float] = {}
        self._resumed: dict[int, float] = {}
        self._finished = False

    def look(self) -> JobState:
        """The current state of the job."""
        for event in self._tail.new():
            self._hear(event)
        view = self._files.view()
        found = {each.identity: (each, alive) for each, alive in read_recordings(self._files.logs, last=_LAST_OPS)}
        now = time.monotonic()
        finished = self._finished if view is None else view.phase == "finished"
        faults = self._faults(finished)
        members, needed = self._members(view), _needed(view)
        others = sorted(set(found) | self._spares - set(members))
        rows = [self._row(rank, member, found.get(member), now) for rank, member in enumerate(members)]
        rows += [
            self._row(None, each, found.get(each), now)
            for each in others
            if each not in members and each in found and self._is_left(*found[each])
        ]
        if needed:
            rows = [_waiting(row, needed) for row in rows]
        return JobState(
            name=view.job.name if view is not None else next((r.job for r, _ in found.values()), ""),
            phase=view.phase if view is not None else "finished" if finished else "unknown",
            epoch=view.epoch if view is not None else 0 if self._installed is None else self._installed.epoch,
            members=len(members),
            backend=view.job.backend if view is not None else self._backend(r for r, _ in found.values()),
            step=max(self._steps.values(), default=-1),
            steps_per_second=max((row.steps_per_second for row in rows), default=0.0),
            faults=len(faults),
            last_fault=self._fault(max(faults), now) if faults else None,
            rows=tuple(rows),
            needed=needed,
        )

    # What the logs say --------------------------------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        process, at = event.process, event.time
        self._pids[process] = event.pid
        match event:
            case ViewInstalled(epoch=epoch):
                if self._installed is None or epoch >= self._installed.epoch:
                    self._installed = event
                self._spares.discard(process)
            case SpareWaits():
                self._spares.add(process)
            case StepCommitted(step=step, epoch=epoch):
                times = self._commits.setdefault(process, deque())
                times.append(at)
                while times and times[0] < at - WINDOW:
                    times.popleft()
                self._steps[process] = step
                self._resumed.setdefault(epoch, at)
            case EpochRevoked(epoch=epoch, reason=reason):
                self._revoked.setdefault(epoch, (at, reason))
            case CommunicatorBuilt(epoch=epoch):
                self._rebuilt[epoch] = max(at, self._rebuilt.get(epoch, 0.0))
            case StepsFinished():
                self._finished = True

    def _members(self, view: View | None) -> list[str]:
        """The members' names in rank order."""
        if view is not None and view.phase != "forming":
            return [member.id for member in view.members]
        return [] if self._installed is None else list(self._installed.members)

    def _faults(self, finished: bool) -> list[int]:
        """The revoked epochs, without the last one of a finished job, which was its end."""
        last = max(self._rebuilt, default=0)
        return [epoch for epoch in self._revoked if epoch < last or not finished]

    def _fault(self, epoch: int, now: float) -> LastFault:
        at, reason = self._revoked[epoch]
        rebuilt = [when for later, when in self._rebuilt.items() if later > epoch]
        resumed = [when for later, when in self._resumed.items() if later > epoch]
        return LastFault(
            ago=now - at,
            epoch=epoch,
            reason=reason,
            recovery=min(rebuilt) - at if rebuilt else None,
            resume=min(resumed) - at if resumed else None,
        )

    def _rate(self, process: str, now: float, running: bool) -> float:
        """Steps a second over the last `WINDOW` seconds; for an ended process, over those before its end."""
        times = self._commits.get(process)
        if not times:
            return 0.0
        recent = [at for at in times if at >= now - WINDOW] if running else list(times)
        return (len(recent) - 1) / (recent[-1] - recent[0]) if len(recent) > 1 and recent[-1] > recent[0] else 0.0

    # What the recordings say --------------------------------------------------------------------------------------

    @staticmethod
    def _backend(recordings: Iterable[Recording]) -> str:
        return next((op.communicator.backend for r in recordings for op in r.ops), "")

    @staticmethod
    def _is_left(recording: Recording, alive: ProcessState) -> bool:
        """Whether a process without a rank is alive, as a spare."""
        return recording.state is RecordingState.OPEN and alive in (ProcessState.RUNNING, ProcessState.STOPPED)

    def _row(
        self, rank: int | None, process: str, found: tuple[Recording, ProcessState] | None, now: float
    ) -> ProcessRow:
        if found is None:
            step = self._steps.get(process, -1)
            return ProcessRow(rank, process, self._pids.get(process, 0), "no recording", step, 0.0, "", False, 0.0)
        recording, alive = found
        running = alive in (ProcessState.RUNNING, ProcessState.STOPPED)
        op = recording.ops[-1] if recording.ops else None
        return ProcessRow(
            rank=rank,
            process=process,
            pid=recording.process.pid,
            state=_state(recording, alive, rank),
            step=max(recording.step, self._steps.get(process, -1)),
            steps_per_second=self._rate(process, now, running),
            op="" if op is None else str(op.signature),
            inside=op is not None and op.status is OpStatus.INSIDE,
            seconds=_since(op, recording, now if running else None),
            waits_for=() if op is None or op.waiting is None or op.left is not None else op.waiting.takes,
        )


def _needed(view: View | None) -> int:
    """The number of members that a job still needs to begin or to go on."""
    if view is None or view.phase not in ("forming", "running"):
        return 0
    alive = sum(life(member.peer) is not ProcessState.GONE for member in view.members)
    return max(0, (view.job.size if view.phase == "forming" else view.job.min_size) - alive)


def _waiting(row: ProcessRow, needed: int) -> ProcessRow:
    """`row` with the state of a process in a job that waits for `needed` members."""
    if row.state not in ("running", "spare"):
        return row
    return msgspec.structs.replace(row, state=f"waits for {counted(needed, 'member')}")


def _state(recording: Recording, alive: ProcessState, rank: int | None) -> str:
    match recording.state, alive:
        case RecordingState.CLOSED, _:
            return "done"
        case RecordingState.FAILED, _:
            return f"failed: {recording.note}"
        case _, ProcessState.GONE:
            return "killed"
        case _, ProcessState.STOPPED:
            return "stopped"
        case _, ProcessState.UNKNOWN:
            return "elsewhere"
    return "running" if rank is not None else "spare"


def _since(op: OpRecord | None, recording: Recording, now: float | None) -> float:
    """Seconds since the op was entered or left; 0.0 without an op or a running process."""
    if op is None or now is None:
        return 0.0
    return max(0.0, now - (op.entered if op.left is None else op.left))
