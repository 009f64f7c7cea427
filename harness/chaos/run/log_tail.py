"""Follows the event logs of all processes of a running job."""

from __future__ import annotations

from pathlib import Path

from holdfast.ft.event_lines import decode_event
from holdfast.ft.events import Event


class LogTail:
    """The logs (`*.jsonl`) of one directory, and the read position in each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}

    def new(self) -> list[Event]:
        """The events since the last call, in the order of time. Incomplete lines are left for later.

        Raises `CorruptData` for a line that is not an event.
        """
        events: list[Event] = []
        for path in self._directory.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(complete)
            events += [decode_event(line) for line in complete.splitlines() if line]
        return sorted(events, key=lambda event: event.time)
