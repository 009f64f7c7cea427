"""Follows the event logs of a job: each look reads only what was added since the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class EventTail:
    """The JSON lines of all logs in a folder, as they come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def new(self) -> list[dict[str, Any]]:
        """The events since the last call, by time. A line that is not finished comes when it is."""
        events: list[dict[str, Any]] = []
        try:
            paths = sorted(self._folder.glob("*.jsonl"))
        except OSError:  # the folder went with its job
            return []
        for path in paths:
            at = self._read.get(path, 0)
            try:
                with path.open("rb") as file:
                    file.seek(at)
                    whole, newline, _ = file.read().rpartition(b"\n")
            except OSError:
                continue
            self._read[path] = at + len(whole) + len(newline)
            events += filter(None, map(_event, whole.splitlines()))
        return sorted(events, key=lambda event: float(event["time"]))


def _event(line: bytes) -> dict[str, Any] | None:
    """The event in a line; None for what is none."""
    try:
        event = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    usable = isinstance(event.get("time"), float | int) and isinstance(event.get("kind"), str)
    return event if usable else None
