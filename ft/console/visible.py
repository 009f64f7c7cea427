"""Text of others on our streams: control characters are shown, not obeyed; what cannot be encoded is replaced.

A rank, a commit's subject or a file name may hold escape sequences that move the cursor, rewrite what was printed
before, or set the title of the window. Only colours may pass, and only to a terminal.
"""

from __future__ import annotations

import io
import re
from typing import TextIO

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""All but tab and newline; with the C1 controls, which some terminals obey, and the marks that reorder text."""

_COLOUR = re.compile("\x1b\\[[0-9;:]*m")
_PARAMETERS_HIDDEN = re.compile(r"(?:^|[;:])0*8(?:[;:]|$)")
"""SGR 8 conceals the text after it."""


def visible(text: str) -> str:
    """`text` with every control character but tab and newline written out: ESC as \\x1b."""
    return _CONTROL.sub(_written_out, text)


def visible_but_colours(text: str) -> str:
    """The same, but colour sequences (SGR) stay as they are, unless they conceal text."""
    pieces, end = [], 0
    for found in _COLOUR.finditer(text):
        hides = "38" not in found[0] and "48" not in found[0] and _PARAMETERS_HIDDEN.search(found[0][2:-1])
        pieces += [visible(text[end : found.start()]), visible(found[0]) if hides else found[0]]
        end = found.end()
    return "".join([*pieces, visible(text[end:])])


def replace_unencodable(stream: TextIO) -> None:
    """Let `stream` print a question mark for what its encoding lacks, where it would raise UnicodeEncodeError."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="replace")


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
