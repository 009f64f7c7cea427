"""The trace of a simulated run: a line for each event, and one hash of all lines.

Two runs of one schedule are equal if their hashes are.
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash

LINES_AT_ONCE = 1000

TraceWriter = Callable[[str], object]


class Trace:
    """Hashes lines, and passes each to `writer` if there is one. Keeps only the hash."""

    def __init__(self, writer: TraceWriter | None) -> None:
        self._writer = writer
        self._hash = xxhash.xxh3_128()
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        self._lines.append(line)
        if len(self._lines) >= LINES_AT_ONCE:
            self._hash_lines()
        if self._writer is not None:
            self._writer(line)

    def hash(self) -> str:
        """The hash of all lines so far."""
        self._hash_lines()
        return self._hash.hexdigest()

    def _hash_lines(self) -> None:
        self._hash.update("".join(self._lines).encode())
        self._lines.clear()
