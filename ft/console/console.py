"""Consoles and tables of the `holdfast` command, which show all text unchanged.

rich by default reads `[words in brackets]` as markup, cuts cells that do not fit, and fails on characters that the
stream cannot encode. Consoles and tables from here do not; use `rich.text.Text` for styles.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from holdfast.ft.console.output import replace_unencodable, visible

PIPED_WIDTH = 140
"""The width, in columns, of output that does not go to a terminal."""


class _PlainConsole(Console):
    """A console to which a string is text, without markup, emoji codes or control characters."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # `guarded` handles it; rich would exit with 1, which is a result

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console on stdout or stderr. Characters that the stream cannot encode are replaced."""
    stream = sys.stderr if stderr else sys.stdout
    replace_unencodable(stream)
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return _PlainConsole(stderr=stderr, quiet=quiet, width=width, markup=False, emoji=False, highlight=False)


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


@contextmanager
def working(out: Console, text: str, *, every: float = 0.0) -> Iterator[Callable[[str], None]]:
    """Show the progress of a long command; yields the function to call with each new text.

    A terminal has one line that changes. Elsewhere each text is a line, at most one per `every` seconds.
    """
    if out.is_terminal:
        with out.status(styled(text, "")) as status:
            yield lambda said: status.update(styled(said, ""))
        return
    shown = -every

    def show(said: str) -> None:
        nonlocal shown
        if time.monotonic() - shown >= every:
            shown = time.monotonic()
            out.print(said, soft_wrap=True)

    show(text)
    yield show


class FoldingTable(Table):
    """A table that loses no text on a narrow terminal.

    Text cells fold; right-justified cells (numbers with units) stay whole. If the longest words do not fit side by
    side, columns named in `drop` are left out, in that order, and the caption names them. Where that is not enough,
    each row becomes lines of `column: value`.
    """

    def __init__(self, *headers: Any, drop: Sequence[str] = (), **options: Any) -> None:
        self._drop = tuple(drop)
        super().__init__(*headers, **options)

    def add_column(self, *arguments: Any, **options: Any) -> None:
        super().add_column(*arguments, **{**options, "overflow": "fold"})

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for count in range(len(self._drop) + 1):
            narrower = self._without(self._drop[:count], console)
            if (room := narrower._room(console, options)) >= 0:
                yield from narrower._fitted(console, options, room)
                return
        yield from self._records(console)

    def _without(self, names: Sequence[str], console: Console) -> FoldingTable:
        """This table without the columns of these names."""
        if not names:
            return self
        smaller = copy.copy(self)
        smaller.columns = [each for each in self.columns if _text_of(each.header, console).plain not in names]
        smaller.caption = Text.assemble(
            *((_text_of(self.caption, console), "\n") if self.caption else ()),
            f"not shown at this width: {', '.join(names)}",
        )
        return smaller

    def _widths(self, console: Console, options: ConsoleOptions) -> tuple[list[int], list[int]]:
        """The widths of each column's longest word, or number, and of its longest line."""
        wide = options.update(max_width=10_000)
        for column in self.columns:
            column.overflow, column.no_wrap, column.width = "fold", False, None
        words = [max(_needed(console, wide, column)) for column in self.columns]
        lines = [max(_width(console, wide, cell).maximum for cell in (c.header, *c.cells)) for c in self.columns]
        return words, lines

    def _room(self, console: Console, options: ConsoleOptions) -> int:
        """How many columns of the terminal are left beside the longest words; negative if they do not fit."""
        words, lines = self._widths(console, options)
        frame = super().__rich_measure__(console, options.update(max_width=10_000)).maximum - sum(lines)
        return options.max_width - frame - sum(words)

    def _fitted(self, console: Console, options: ConsoleOptions, room: int) -> RenderResult:
        words, lines = self._widths(console, options)
        wanted = sum(lines) - sum(words)
        if wanted > room:  # rich would narrow the widest columns first, below their longest words
            for column, word, line in zip(self.columns, words, lines, strict=True):
                column.width = word + room * (line - word) // wanted
        yield from super().__rich_console__(console, options)

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


def _width(console: Console, options: ConsoleOptions, cell: object) -> Measurement:
    """The widths of a cell's longest word and of its longest line."""
    return Measurement.get(console, options, _text_of(cell, console))


def _text_of(cell: object, console: Console) -> Text:
    return cell if isinstance(cell, Text) else console.render_str(str(cell))


def _needed(console: Console, options: ConsoleOptions, column: Column) -> Iterator[int]:
    """The width that each cell of a column needs: of its longest word, or of a number with its unit."""
    yield _width(console, options, column.header).minimum
    for cell in column.cells:
        width = _width(console, options, cell)
        yield width.maximum if column.justify == "right" else width.minimum
