"""What launchers report: ranks that failed, and how; ranks that are missing, and where they are."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.comms.transport.liveness import read_proc_stat
from holdfast.ft.events import Event, ViewInstalled
from holdfast.ft.launch.launcher import how_it_ended
from holdfast.ft.telemetry import event_log

LATE_SECONDS = 30.0
"""After so many seconds without all ranks a launcher says which are missing."""

_STATES = {b"R": "runs", b"D": "waits for a disk", b"T": "is stopped", b"t": "is stopped by a debugger"}

_TRACEBACK = "Traceback (most recent call last):"
_MOST_TEXT = 200


class LastErrorLine:
    """Finds the line of a process's output that says why it ended: of its last traceback, or the last line."""

    def __init__(self) -> None:
        self._last = self._error = ""
        self._inside = False

    def hear(self, line: str) -> None:
        """Take in a line that the process has written."""
        if line.strip() and not line.startswith(event_log.PREFIX):
            self._last = line
        if line.startswith(_TRACEBACK):
            self._inside = True
        elif self._inside and line[:1].strip():
            self._error, self._inside = line, False

    def __str__(self) -> str:
        return (self._error or self._last).strip()[:_MOST_TEXT]


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """A process that ended with an error. `rank` is its last rank; None for a spare."""

    rank: int | None
    pid: int
    code: int
    words: str


def last_ranks(events: Iterable[Event]) -> dict[int, int]:
    """The last rank of each process that had a rank, by pid."""
    installed = (event for event in events if isinstance(event, ViewInstalled))
    return {event.pid: event.rank for event in installed if event.rank is not None}


def table(failures: Sequence[ProcessFailure]) -> list[str]:
    """The lines of the table of failures; no lines without failures."""
    if not failures:
        return []
    rows = [("rank", "pid", "exit", "last error line")]
    for each in sorted(failures, key=lambda failure: (failure.rank is None, failure.rank, failure.pid)):
        rank = "spare" if each.rank is None else str(each.rank)
        rows.append((rank, str(each.pid), how_it_ended(each.code), each.words or "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, (*widths, 0), strict=True)) for row in rows]


def whereabouts(pid: int) -> str:
    """What a process of this host does now, in words: for one that is late."""
    try:
        fields = read_proc_stat(pid)
    except OSError:
        return "cannot be looked at"
    if not fields or fields[0] in (b"Z", b"X"):
        return "has ended"
    ticks = os.sysconf("SC_CLK_TCK")
    used = (int(fields[11]) + int(fields[12])) / ticks
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / ticks
    state = _STATES.get(fields[0]) or f"sleeps{_kernel_function(pid)}"
    return f"{state}, {used:.1f} s of processor time in {age:.0f} s, {_imported(pid)}"


def _kernel_function(pid: int) -> str:
    """The function of the kernel in which a process sleeps, if this process may know it."""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    return f" in {name}" if name.strip("0") else ""


def _imported(pid: int) -> str:
    """Whether a process has come as far as the import of torch."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return "its memory cannot be read"
    return "torch is imported" if "libtorch_python" in maps else "torch is not imported yet"
