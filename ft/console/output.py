"""The output of processes, read line by line, and foreign text made safe to print.

The output of a rank, a commit's subject or a file name may hold escape sequences that move the cursor, rewrite earlier
output, or set the window's title. Only colours may pass, and only to a terminal.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import TextIO

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, the C1 controls that some terminals obey, and bidirectional marks."""

_COLOUR = re.compile("\x1b\\[[0-9;:]*m")
_PARAMETERS_HIDDEN = re.compile(r"(?:^|[;:])0*8(?:[;:]|$)")
"""SGR 8 conceals the text after it."""


def visible(text: str) -> str:
    """`text` with every control character but tab and newline written out: ESC as \\x1b."""
    return _CONTROL.sub(_written_out, text)


def visible_but_colours(text: str) -> str:
    """As `visible`, but colour sequences (SGR) stay, unless they conceal text."""
    pieces, end = [], 0
    for found in _COLOUR.finditer(text):
        hides = "38" not in found[0] and "48" not in found[0] and _PARAMETERS_HIDDEN.search(found[0][2:-1])
        pieces += [visible(text[end : found.start()]), visible(found[0]) if hides else found[0]]
        end = found.end()
    return "".join([*pieces, visible(text[end:])])


def replace_unencodable(stream: TextIO) -> None:
    """Make `stream` print a question mark for characters that its encoding lacks, instead of an error."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="replace")


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


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
