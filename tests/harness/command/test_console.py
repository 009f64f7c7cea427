"""What the command prints: others' text as it is, on any terminal, in any encoding (`ft/console/console.py`)."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ft.console.console import FoldingTable, console, panel, print_json, styled, working
from holdfast.ft.console.output import LONGEST_LINE, LineSplitter, visible, visible_but_colours
from holdfast.ft.console.units import coarse_seconds, format_seconds
from holdfast.harness.chaos.outcome.record import ComparedFigure
from holdfast.harness.chaos.outcome.show import comparison

# -- control characters


def test_what_a_terminal_would_obey_is_shown() -> None:
    """Escape sequences, and marks that reorder text."""
    assert visible("\x1b[2Jgone\x1b]0;title\x07") == "\\x1b[2Jgone\\x1b]0;title\\x07"
    assert visible("exe.\u202egpj") == "exe.\\u202egpj"


def test_colours_may_pass_and_nothing_else_nor_one_that_conceals_text() -> None:
    for colour in ("\x1b[31m", "\x1b[0m", "\x1b[38;5;8m"):
        assert visible_but_colours(f"{colour}text\x1b[2J") == f"{colour}text\\x1b[2J"
    for conceal in ("\x1b[8m", "\x1b[1;8m", "\x1b[08m"):
        assert "\x1b" not in visible_but_colours(f"{conceal}hidden")


@given(st.text())
def test_no_control_sequence_of_a_terminal_is_left(text: str) -> None:
    assert not [c for c in visible(text) if (ord(c) < 32 and c not in "\t\n") or 0x7F <= ord(c) < 0xA0]


# -- lines of ranks


def test_a_line_without_an_end_is_shown_at_the_end_and_takes_bounded_memory() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"no newline") == []
    assert splitter.end() == ["no newline"]
    assert len(splitter.feed(b"x" * (3 * LONGEST_LINE))) == 2
    assert len(splitter.end()[0]) == LONGEST_LINE


@given(st.lists(st.sampled_from(["a", "\r", "\n", "\r\n", "é", "\x00"])), st.data())
def test_output_comes_out_as_lines_wherever_it_is_cut(pieces: list[str], data: st.DataObject) -> None:
    whole = "".join(pieces).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    splitter, lines = LineSplitter(), list[str]()
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        lines += splitter.feed(whole[start:end])
    assert lines + splitter.end() == whole.decode().removesuffix("\r").splitlines()


# -- text of others in tables, titles and frames


@contextlib.contextmanager
def screen(encoding: str = "utf-8") -> Iterator[Callable[[], str]]:
    """A stdout of some encoding, and a function that tells what was printed."""
    stream = io.TextIOWrapper(buffer := io.BytesIO(), encoding, write_through=True)
    with contextlib.redirect_stdout(stream):
        yield lambda: buffer.getvalue().decode(stream.encoding)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def everything_that_shows(text: str) -> None:
    """Print `text` in every way in which commands print."""
    out = console()
    out.print(text)
    out.print(styled(text, "bold red"))
    out.print(panel(text, title=text, style="red"))
    table = FoldingTable(text, "column", title=text, caption=text)
    table.add_row(text, styled(text, "dim"))
    out.print(table)
    with working(out, text) as show:
        show(text)
    out.print(comparison(text, (text, text), [ComparedFigure(text, text, text, text, "equal")]))


@given(st.text())
def test_any_text_can_be_shown_in_any_encoding(text: str) -> None:
    for encoding in ("utf-8", "ascii", "latin-1"):
        with screen(encoding) as printed:
            everything_that_shows(text)
            print_json({"text": text})
        assert printed()


@pytest.mark.parametrize("text", ["[/dev/shm]", "[bold]x", ":smile:", "[link=x]y[/link]", "\\[red]"])
def test_brackets_and_colons_come_out_as_they_are(text: str) -> None:
    with screen() as printed:
        everything_that_shows(text)
    assert printed().count(text) >= 12


def test_characters_that_cannot_be_encoded_are_replaced() -> None:
    with screen("ascii") as printed:
        everything_that_shows("caf\u00e9")
        print_json({"word": "caf\u00e9"})
    assert "caf?" in printed()
    assert "caf\\u00e9" in printed()


@pytest.mark.parametrize("columns", [20, 30, 40, 60, 80])
def test_a_narrow_terminal_cuts_no_number_and_no_unit(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    table = FoldingTable("size", "library", "p50", "p99", "min", "busbw GB/s", title="all_reduce, 2 ranks")
    table.add_row("64 MiB", "shm", "1234.5 us", "12345.6 us", "1200.0 us", "123.456")
    table.add_row("8 B", "torch-gloo", "35.5 us", "45.6 us", "30.0 us", "0.001")
    with screen() as printed:
        console().print(table)
    for value in ("1234.5 us", "12345.6 us", "35.5 us", "123.456", "torch-gloo", "0.001"):
        assert all(word in printed() for word in value.split()), f"{value} in {printed()}"
    assert "\u2026" not in printed()
    assert max(map(len, printed().splitlines())) <= columns
    if columns == 30:
        assert "p99: 12345.6 us" in printed().splitlines(), "where nothing fits rows become lines"


def test_piped_output_has_a_line_for_each_finished_item() -> None:
    with screen() as printed, working(console(), "bench: about 20 s") as show:
        show("8 bytes")
        show("64 bytes")
    assert printed().splitlines() == ["bench: about 20 s", "8 bytes", "64 bytes"]


@pytest.mark.parametrize(
    ("show", "seconds", "shown"),
    [
        *((format_seconds, 6.12e-7, "0.612 us"), (format_seconds, 0.0123, "12.3 ms"), (format_seconds, 0.99999, "1 s")),
        *((format_seconds, 125, "2 min 5 s"), (format_seconds, 9000, "2.5 h")),
        *((coarse_seconds, 0, "0 ms"), (coarse_seconds, 0.00091, "0.91 ms"), (coarse_seconds, 0.0421, "42 ms")),
        *((coarse_seconds, 0.372, "372 ms"), (coarse_seconds, 1.25, "1.25 s"), (coarse_seconds, 125, "2 min 5 s")),
    ],
)
def test_seconds_have_a_unit_and_three_figures_or_fewer(
    show: Callable[[float], str], seconds: float, shown: str
) -> None:
    assert show(seconds) == shown
