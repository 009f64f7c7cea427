"""The consoles of the `holdfast` command: text is shown as it is, whatever is in it, wherever it goes.

rich reads `[words in brackets]` as markup unless told otherwise, cuts cells that do not fit, and fails on characters
that the stream cannot encode. Consoles and tables from here do none of that; styles are given by `rich.text.Text`.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import msgspec
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from holdfast.harness.visible import visible

PIPED_WIDTH = 140
"""Columns of output that goes to no terminal."""


class _PlainConsole(Console):
    """A console to which a string is text, without markup, emoji codes or control characters."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console on stdout or stderr. Characters that the stream cannot encode are replaced."""
    stream = sys.stderr if stderr else sys.stdout
    replace_unencodable(stream)
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return _PlainConsole(stderr=stderr, quiet=quiet, width=width, markup=False, emoji=False, highlight=False)


def replace_unencodable(*streams: TextIO) -> None:
    """Let streams print a question mark for what their encoding lacks, where they would raise UnicodeEncodeError."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def print_json(thing: Any) -> None:
    """Print data as JSON in ASCII, which every stream can encode."""
    plain = json.loads(msgspec.json.encode(thing))
    sys.stdout.write(json.dumps(plain, indent=2) + "\n")


def styled(text: object, style: str) -> Text:
    """`text` in a style, whatever brackets it contains."""
    return Text(visible(str(text)), style)


def panel(text: str, *, title: str, style: str) -> Panel:
    """A frame around text. A plain string as title would be read as markup."""
    return Panel(Text(visible(text)), title=Text(visible(title)), style=style)


class FoldingTable(Table):
    """A table that loses nothing on a narrow terminal.

    Cells fold. Where not even the longest words fit side by side, each row is shown as lines of `column: value`.
    """

    def add_column(self, *arguments: Any, **options: Any) -> None:
        super().add_column(*arguments, **{**options, "overflow": "fold", "no_wrap": False})

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for column in self.columns:
            column.overflow, column.no_wrap = "fold", False
        # Measured without the limit of the terminal, the minimum is the width of the longest words side by side.
        needed = Measurement.get(console, options.update(max_width=10_000), self).minimum
        if needed <= options.max_width:
            yield from super().__rich_console__(console, options)
        else:
            yield from self._records(console)

    def _records(self, console: Console) -> Iterator[Text]:
        if self.title:
            yield _text_of(self.title, console)
        for row in zip(*(column.cells for column in self.columns), strict=True):
            for column, cell in zip(self.columns, row, strict=True):
                name, value = _text_of(column.header, console), _text_of(cell, console)
                if value.plain:
                    yield Text.assemble(name, ": " if name.plain else "", value, overflow="fold")
            yield Text()
        if self.caption:
            yield _text_of(self.caption, console)


def _text_of(cell: object, console: Console) -> Text:
    return cell if isinstance(cell, Text) else console.render_str(str(cell))
