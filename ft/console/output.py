"""Reads the output of processes: line by line, or its end."""

from __future__ import annotations

import os
import re
from pathlib import Path

LONGEST_LINE = 1 << 16
"""Bytes after which a line without an end is shown."""

_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
"""A carriage return ends a line too, as progress bars use it; at the end of the data it may be half of CR LF."""


class LineSplitter:
    """Splits the bytes that a process writes into lines, chunk by chunk."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        *whole, self._rest = _LINE_END.split(self._rest + data)
        while len(self._rest) > LONGEST_LINE:
            whole.append(self._rest[:LONGEST_LINE])
            self._rest = self._rest[LONGEST_LINE:]
        return [line.decode(errors="replace") for line in whole]

    def end(self) -> list[str]:
        """The last line, if it has no line end."""
        rest, self._rest = self._rest.removesuffix(b"\r"), b""
        return [rest.decode(errors="replace")] if rest else []


def tail(output: Path, limit: int = 4000) -> str:
    """The end of a process's output, `limit` bytes at most; empty if there is none."""
    try:
        with output.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
