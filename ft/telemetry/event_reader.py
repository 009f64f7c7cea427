"""Reads the event logs of a job: whole, strictly, or as they grow.

An unfinished last line is skipped: its process was killed while it wrote, or is writing it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from holdfast.comms.errors import CorruptData
from holdfast.ft.event_lines import decode_event
from holdfast.ft.events import Event


class EventTail:
    """The events of all logs in a folder, as they grow. `bad` is called once per file with a line that is no event."""

    def __init__(self, folder: Path, bad: Callable[[str], object] = lambda reason: None) -> None:
        self._folder, self._bad = folder, bad
        self._read: dict[Path, int] = {}
        self._lines: dict[Path, int] = {}
        self._told: set[Path] = set()

    def new(self) -> list[Event]:
        """The events since the last call, by their `time`."""
        try:
            paths = sorted(self._folder.glob("*.jsonl"))
        except OSError:  # the folder went with its job
            return []
        events = [event for path in paths for event in self.new_in(path)]
        return sorted(events, key=lambda event: event.time)

    def new_in(self, path: Path) -> list[Event]:
        """The events of one log since the last call, in the order of its lines."""
        at = self._read.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(at)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError as error:
            self._tell(path, f"event log {path}: {error.strerror}")
            return []
        self._read[path] = at + len(whole) + len(newline)
        first = self._lines.get(path, 0) + 1
        lines = whole.split(b"\n") if newline else []
        self._lines[path] = first - 1 + len(lines)
        events = []
        for number, line in enumerate(lines, start=first):
            try:
                events.append(decode_event(line))
            except CorruptData:
                if line:
                    self._tell(path, f"event log {path}: line {number} is no event of a job")
        return events

    def _tell(self, path: Path, reason: str) -> None:
        if path not in self._told:
            self._told.add(path)
            self._bad(reason)


def read_events(directory: Path, bad: Callable[[str], object] = lambda reason: None) -> list[Event]:
    """The events of all logs in `directory`, by their `time`; `bad` as in `EventTail`."""
    return EventTail(directory, bad).new()


def read_log(path: Path) -> list[Event]:
    """The events of one process. Raises `CorruptData` for a line that is no event."""
    return EventTail(path.parent, refuse).new_in(path)


def read_directory(directory: Path) -> list[Event]:
    """The merged events of every `*.jsonl` in `directory`. Raises `CorruptData` for a line that is no event."""
    return merge(read_log(path) for path in sorted(directory.glob("*.jsonl")))


def merge(logs: Iterable[Iterable[Event]]) -> list[Event]:
    """All events by time; events of one process keep their order."""
    return sorted((event for log in logs for event in log), key=lambda event: event.time)


def refuse(reason: str) -> NoReturn:
    """What a reader calls that raises `CorruptData` at the first line that is no event."""
    raise CorruptData(reason)
