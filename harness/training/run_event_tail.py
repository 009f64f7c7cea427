"""Follows the events of a run while its driver writes them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.rl.run.run_events import Event

_decode = msgspec.json.Decoder(Event).decode


class RunEventTail:
    """The events in a file, which need not be there yet, and the read position in it."""

    def __init__(self, file: Path) -> None:
        self._file, self._read = file, 0

    def new(self) -> list[Event]:
        """The events since the last call. An incomplete line is left for later."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._read)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._read += len(whole) + len(newline)
        return [_decode(line) for line in whole.splitlines()]
