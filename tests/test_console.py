"""What the command prints: others' text as it is, on any terminal, in any encoding (`harness/console.py`)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.harness.output import LONGEST_LINE, LineSplitter
from holdfast.harness.visible import visible, visible_but_colours

# -- control characters


def test_escape_sequences_are_shown_and_not_obeyed() -> None:
    assert visible("\x1b[2Jgone\x1b]0;title\x07") == "\\x1b[2Jgone\\x1b]0;title\\x07"


def test_marks_that_reorder_text_are_shown() -> None:
    assert visible("exe.\u202egpj") == "exe.\\u202egpj"


def test_colours_may_pass_and_nothing_else() -> None:
    assert visible_but_colours("\x1b[31mred\x1b[0m\x1b[2J") == "\x1b[31mred\x1b[0m\\x1b[2J"


@pytest.mark.parametrize("conceal", ["\x1b[8m", "\x1b[1;8m", "\x1b[08m"])
def test_a_colour_that_conceals_text_does_not_pass(conceal: str) -> None:
    assert "\x1b" not in visible_but_colours(f"{conceal}hidden")


def test_a_colour_of_many_is_not_taken_for_one_that_conceals() -> None:
    assert visible_but_colours("\x1b[38;5;8mgrey") == "\x1b[38;5;8mgrey"


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    assert not [c for c in visible(text) if (ord(c) < 32 and c not in "\t\n") or 0x7F <= ord(c) < 0xA0]


# -- lines of ranks


def test_a_progress_bar_comes_out_as_lines() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"10%\r20%\r") == ["10%"]
    assert splitter.feed(b"30%\ndone\r\n") == ["20%", "30%", "done"]
    assert splitter.end() == []


def test_a_line_without_an_end_is_shown_at_the_end() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"no newline") == []
    assert splitter.end() == ["no newline"]


def test_a_line_that_never_ends_is_not_kept_for_ever() -> None:
    splitter = LineSplitter()
    shown = splitter.feed(b"x" * (3 * LONGEST_LINE))
    assert len(shown) == 2
    assert len(splitter.end()[0]) == LONGEST_LINE


@given(st.lists(st.sampled_from(["a", "\r", "\n", "\r\n", "é", "\x00"])), st.data())
def test_where_the_bytes_are_cut_does_not_matter(pieces: list[str], data: st.DataObject) -> None:
    whole = "".join(pieces).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    splitter, at_once = LineSplitter(), LineSplitter()
    lines = []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        lines += splitter.feed(whole[start:end])
    assert lines + splitter.end() == at_once.feed(whole) + at_once.end()
