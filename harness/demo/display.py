"""Shows a run in progress: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Protocol

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from holdfast.harness.demo.plan import DemoPlan
from holdfast.harness.demo.record import LogLine
from holdfast.harness.demo.recorder import RunRecorder

SHOWN_NOTES = 12
WINDOW = 25
"""Steps over which reward and speed are averaged."""

_LINE_SECONDS = 3.0
_REDRAW_SECONDS = 0.2
_BAD = ("killed", "is gone", "detected")


class Display(Protocol):
    """Shows a run. `refresh` is called often, and must limit its own cost."""

    def refresh(self, recorder: RunRecorder) -> None: ...

    def close(self, recorder: RunRecorder) -> None: ...


class Silent:
    """Shows nothing: for `--json`."""

    def refresh(self, recorder: RunRecorder) -> None:
        """Nothing to do."""

    def close(self, recorder: RunRecorder) -> None:
        """Nothing to do."""


class PlainLines:
    """Prints a line for each notable event, and every few seconds one with the progress."""

    def __init__(self, console: Console, plan: DemoPlan) -> None:
        self._console, self._plan = console, plan
        self._notes, self._next = 0, 0.0

    def refresh(self, recorder: RunRecorder) -> None:
        """Print the new lines."""
        for note in recorder.notes[self._notes :]:
            self._console.print(Text(f"{note.time:7.2f} s  {note.process}: {note.text}"), soft_wrap=True)
        self._notes = len(recorder.notes)
        now = time.monotonic()
        if now >= self._next and recorder.steps:
            self._next = now + _LINE_SECONDS
            self._progress(recorder)

    def close(self, recorder: RunRecorder) -> None:
        """Print the remaining lines."""
        self.refresh(recorder)
        self._progress(recorder)

    def _progress(self, recorder: RunRecorder) -> None:
        figures = ", ".join(f"{name} {value}" for name, value in figures_of(recorder, self._plan))
        self._console.print(Text(f"{time.monotonic() - recorder.began:7.2f} s  {figures}"), soft_wrap=True)


class LivePanel:
    """A panel that is redrawn in place."""

    def __init__(self, console: Console, plan: DemoPlan) -> None:
        self._plan = plan
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()
        self._next = 0.0

    def refresh(self, recorder: RunRecorder) -> None:
        """Redraw if the last drawing is old enough."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _REDRAW_SECONDS
            self._live.update(self._draw(recorder), refresh=True)

    def close(self, recorder: RunRecorder) -> None:
        """Leave the last notes on the screen."""
        self._live.stop()
        for note in sorted(recorder.notes, key=lambda note: note.time):
            self._live.console.print(note_line(note))

    def _draw(self, recorder: RunRecorder) -> RenderableType:
        done, total = len(recorder.steps), self._plan.recipe.steps
        figures = Table.grid(padding=(0, 2))
        shown = figures_of(recorder, self._plan)
        for _ in shown:
            figures.add_column(justify="center")
        figures.add_row(*(Text(value, "bold") for _, value in shown))
        figures.add_row(*(Text(name, "dim") for name, _ in shown))
        notes = [note_line(note) for note in recorder.notes[-SHOWN_NOTES:]]
        title = Text(f"holdfast demo · {self._plan.backend} · {time.monotonic() - recorder.began:.0f} s")
        return Panel(Group(figures, Bar(total, 0, done, color="green"), Text(), *notes), title=title)


def figures_of(recorder: RunRecorder, plan: DemoPlan) -> list[tuple[str, str]]:
    """The state of the run as pairs (name, value)."""
    last = recorder.steps[-WINDOW:]
    spent = last[-1].time - last[0].time if len(last) > 1 else 0.0
    speed = sum(step.tokens for step in last[1:]) / spent if spent > 0 else 0.0
    reward = f"{sum(step.reward for step in last) / len(last):.3f}" if last else "-"
    held_out = f"{recorder.evaluations[-1].exact_match:.1%}" if recorder.evaluations else "-"
    alive = [life for life in recorder.lives.values() if life.ended is None]
    trainers = sum(life.role == "trainer" for life in alive)
    ranks = min(trainers, last[-1].ranks) if last else 0
    return [
        ("step", f"{len(recorder.steps)}/{plan.recipe.steps}"),
        ("reward", reward),
        ("held out", held_out),
        ("epoch", str(last[-1].epoch) if last else "-"),
        ("ranks alive", f"{ranks} + {max(0, trainers - ranks)} spare"),
        ("processes", str(len(alive))),
        ("weights", f"v{recorder.version}" if recorder.version >= 0 else "-"),
        ("tokens/s", f"{speed:,.0f}"),
    ]


def note_line(note: LogLine) -> Text:
    """A line of the log, coloured."""
    style = "red" if any(word in note.text for word in _BAD) else "green"
    return Text.assemble((f"{note.time:7.2f} s  ", "dim"), (note.process, "cyan"), ": ", (note.text, style))


def display_for(console: Console, plan: DemoPlan) -> Display:
    """The display that suits the output of `console`."""
    return LivePanel(console, plan) if console.is_terminal else PlainLines(console, plan)
