"""The table that `holdfast run` prints at the end of a failed job: which ranks failed, and how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.ft.launch.exit_status import how_it_ended

_TRACEBACK = "Traceback (most recent call last):"
_MOST_TEXT = 200


class LastErrorLine:
    """Finds the line of a process's output that says why it ended: of its last traceback, or the last line."""

    def __init__(self) -> None:
        self._last = self._error = ""
        self._inside = False

    def hear(self, line: str) -> None:
        """Take in a line that the process has written."""
        if line.strip():
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


def last_ranks(events: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """The last rank of each process that had a rank, by pid."""
    return {
        event["pid"]: event["rank"] for event in events if event["kind"] == "installed" and event["rank"] is not None
    }


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
