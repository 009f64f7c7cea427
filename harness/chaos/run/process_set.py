"""The processes of a run, whatever their workload: by rank and role, from their start to their end."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.comms.errors import HoldfastError
from holdfast.ft import events
from holdfast.ft.console.output import tail
from holdfast.ft.diagnosis.evidence import ProcessState, read_recordings
from holdfast.ft.event_lines import EventTail, read_events, refuse
from holdfast.ft.processes.zygote_client import ForkedProcess
from holdfast.ft.telemetry import flight
from holdfast.harness.invariants import OPEN, Event
from holdfast.harness.measure.workers import HeldProcess
from holdfast.harness.report.model import Fate, ProcessRecord

EXITED_WELL = "exited with status 0"
ENDED_WITH_DRIVER = "ended with its driver"


class NoTargetProcess(HoldfastError):
    """A fault found no process that it applies to."""


def recorded_ops(directory: Path) -> list[Event]:
    """The ops of the flight recordings beside the event logs in a folder: those that ended, and those that are open.

    No log has them, since an op takes less time than a line. A recording has the last ones of its process; a process
    that was killed while it made its file has none. An op is `OPEN` if its process lives in it, or left without its
    end; one that a process was killed in is left out.
    """
    found = list[Event]()
    for recording, alive in read_recordings(directory):
        over: float | None = recording.ended
        if recording.state is flight.RecordingState.OPEN:
            over = None if alive is ProcessState.GONE else time.monotonic()
        for op in recording.ops:
            left = over if op.left is None else op.left
            if left is None:
                continue
            ended = events.OpEnded(
                op=op.signature.op,
                seq=op.seq,
                epoch=op.communicator.epoch,
                seconds=left - op.entered,
                error=_ERRORS.get(op.status, op.status.name.lower()),
            )
            found.append(events.stamped(ended, recording.identity, recording.process.pid, left))
    return found


_ERRORS = {flight.OpStatus.DONE: "", flight.OpStatus.INSIDE: OPEN}


@dataclass(frozen=True, slots=True)
class Victim:
    """A process by its name in the event logs. Users read `label`, if there is one; `rank` is the one it has now."""

    name: str
    process: ForkedProcess | HeldProcess
    rank: int | None = None
    label: str = ""

    def __str__(self) -> str:
        return self.label or self.name if self.rank is None else f"rank {self.rank} ({self.name})"


@dataclass(slots=True)
class RunProcess:
    """A process of a run while that lasts, with times on `time.monotonic()`; `record` is what remains of it.

    `ended` is 0 while it lives.
    """

    name: str
    role: str
    process: ForkedProcess | HeldProcess
    born: float
    ended: float = 0.0
    how: str = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended_well(self) -> bool:
        """Whether it still lives, or has ended as it should."""
        return not self.ended or self.how == EXITED_WELL

    def record(self, began: float, ended: float, role: str, struck: bool) -> ProcessRecord:
        """The process in seconds since the run `began`; it ended at `ended`, by a fault if it was `struck`."""
        fate: Fate = "finished" if self.ended_well else "killed" if struck else "lost"
        note = "" if self.ended_well else self.how
        return ProcessRecord(self.name, role, self.pid, max(0.0, self.born - began), ended - began, fate, note)

    @property
    def forked(self) -> ForkedProcess:
        """The process, for those that the zygote of this process forked."""
        assert isinstance(self.process, ForkedProcess)
        return self.process


@dataclass(slots=True)
class Results:
    """The results of processes by name, and the errors of others."""

    values: dict[str, Any] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    ranks: int = 0


class ProcessSet(ABC):
    """The processes of a run, by their current ranks and roles. The loop of the run drives them."""

    directory: Path
    """The folder of their files, with the register and the folder of event logs."""

    events_directory: Path

    def __init__(self) -> None:
        self.begun: list[RunProcess] = []
        self._log_tail: EventTail | None = None

    @property
    @abstractmethod
    def register_url(self) -> str:
        """The URL of their register."""

    @abstractmethod
    def find(self, name: int | str) -> list[Victim]:
        """The processes that hold a rank or a role now. Raises `NoTargetProcess`."""

    def join(self) -> None:
        """Start one more process. Raises NotImplementedError where that has no meaning."""
        raise NotImplementedError

    @abstractmethod
    def over(self, timeout: float) -> bool:
        """Whether the run is over; waits for up to `timeout` seconds for something to happen."""

    @abstractmethod
    def results(self) -> Results:
        """The results, once the run is over."""

    @abstractmethod
    def close(self) -> None:
        """End everything, and remove the files. Idempotent."""

    def new_events(self) -> list[Event]:
        """The events that the processes have logged since the last call, in the order of time."""
        if self._log_tail is None:
            self._log_tail = EventTail(self.events_directory, refuse)
        return self._log_tail.new()

    def jobs(self) -> list[list[Event]]:
        """All events, of each job for itself if the processes are those of several, one after the other."""
        return [read_events(self.events_directory, refuse)]

    def ops(self) -> list[list[Event]]:
        """The last ops of each process that ended, of each job as in `jobs`."""
        return [recorded_ops(self.events_directory)]

    def everybody(self) -> list[Victim]:
        """All living processes, in every role."""
        return [self._victim(each) for each in self.begun if each.process.alive()]

    def of_pid(self, pid: int) -> Victim | None:
        """The process with this id, if it is one of them."""
        return next((self._victim(each) for each in self.begun if each.process.pid == pid), None)

    def outputs(self) -> str:
        """The end of the output of each process."""
        forked = [(each.name, each.process) for each in self.begun if isinstance(each.process, ForkedProcess)]
        found = ((name, tail(process.output, 2000)) for name, process in forked)
        return "\n".join(f"[{name}] {text}" for name, text in found if text)

    def _victim(self, begun: RunProcess) -> Victim:
        return Victim(begun.name, begun.process)

    def _note_ends(self) -> list[RunProcess]:
        """The processes that have ended since the last call."""
        new = [each for each in self.begun if not each.ended and not each.process.alive()]
        for each in new:
            each.ended = time.monotonic()
            if isinstance(each.process, ForkedProcess):
                each.how = str(each.process.wait(5.0))
        return new
