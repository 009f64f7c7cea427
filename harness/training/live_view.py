"""Shows runs while they run: a progress bar or plain lines, and notable events."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from holdfast.ft.console.units import coarse_seconds, counted, reward_text
from holdfast.rl.run.run_events import (
    EpisodeFailed,
    Evaluated,
    Event,
    ProcessLost,
    ProcessStarted,
    RunResumed,
    StepTrained,
)

WINDOW = 25
"""Batches over which reward and speed are averaged."""

_LINE_SECONDS = 3.0
_BAD = (ProcessLost, EpisodeFailed)


class LiveView:
    """Shows runs while they run: a bar on a terminal, elsewhere a line every few seconds; and notable events.

    It is an observer of a run of `steps` steps of reinforcement learning; other runs call `step`. A context manager;
    `quiet` shows nothing.

    Each line has the seconds since this view, or its phase, began, by one clock: events come late from other processes,
    and those of a resumed run count from the run's first start.
    """

    def __init__(self, console: Console, steps: int = 0, *, quiet: bool = False) -> None:
        self._began = time.monotonic()
        self._console, self._steps, self._quiet = console, steps, quiet
        self._recent: deque[StepTrained] = deque(maxlen=WINDOW)
        self._held_out: float | None = None
        self._phase, self._done, self._next = "", 0, 0.0
        self._wide = console.width >= 100
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        if console.is_terminal and not quiet:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}", markup=False),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            if steps:
                self._task = self._progress.add_task("steps", total=steps, figures="")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        elif self._recent:
            self._print(self.figures())

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepTrained):
            self._recent.append(event)
            self.step("", event.version, self._steps)
        elif isinstance(event, Evaluated):
            self._held_out = event.reward
        if text := _words(event):
            self._print(text, "red" if isinstance(event, _BAD) else "")

    @property
    def done(self) -> int:
        """The steps that were committed, as far as this has seen them."""
        return self._done

    def step(self, phase: str, done: int, total: int) -> None:
        """Show that so many steps of a phase are committed. A new phase has a bar and a clock of its own."""
        if phase != self._phase:
            self.end_phase()
            self._phase, self._began, self._next = phase, time.monotonic(), 0.0
            if self._progress is not None:
                self._task = self._progress.add_task(phase, total=total or None, figures="")
        self._done = done
        if self._progress is not None and self._task is not None:
            figures = self.figures(self._wide)
            self._progress.update(self._task, completed=done, total=total or None, figures=figures)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_SECONDS
            parts = (phase, f"step {done} of {total}" if total else counted(done, "step"), self.figures())
            self._print(": ".join(filter(None, parts)))

    def end_phase(self) -> None:
        """Show that a phase is over."""
        if self._phase and self._progress is None:
            self._print(f"{self._phase}: {counted(self._done, 'step')}")
        if self._progress is not None and self._task is not None:
            self._progress.remove_task(self._task)
        self._phase, self._task = "", None

    def begin(self, text: str) -> None:
        """Show a line before the first event."""
        self._print(text)

    def note(self, text: str, is_fault: bool = True) -> None:
        """Show a line that is no event of this run: a fault, or what the job's ranks did about it."""
        self._print(text, "bold red" if is_fault else "")

    def figures(self, wide: bool = True) -> str:
        """Reward, held-out reward, speed and, if there is room for it, staleness, in words."""
        steps = self._recent
        parts = []
        if steps:
            parts.append(f"reward {sum(each.reward for each in steps) / len(steps):.2f}")
        if self._held_out is not None:
            parts.append(f"held-out {reward_text(self._held_out)}")
        if len(steps) > 1 and steps[-1].time > steps[0].time:
            trained = sum(each.updates for each in steps) - steps[0].updates
            parts.append(f"{trained / (steps[-1].time - steps[0].time):.1f} steps/s")
        behind = [versions for each in steps for versions in each.staleness]
        if wide and any(behind):
            parts.append(f"staleness {sum(behind) / len(behind):.1f}")
        return ", ".join(parts)

    def _print(self, text: str, style: str = "") -> None:
        if not self._quiet:
            line = Text(f"{time.monotonic() - self._began:8.2f} s  {text}", style=style)
            self._console.print(line, soft_wrap=True)


def _words(event: Event) -> str:
    match event:
        case ProcessStarted(role=role, replaces=replaces) if role != "driver":
            place = f" in place of {replaces} (pid {event.pid})" if replaces else ""
            return f"{event.name}: ready after {coarse_seconds(event.seconds)}{place}"
        case ProcessLost():
            return f"{event.name}: lost, {event.how}"
        case EpisodeFailed(again=True):
            return f"an episode of prompt {event.prompt} goes on in another environment: {event.reason}"
        case EpisodeFailed():
            return f"an episode of prompt {event.prompt} failed: {event.reason}"
        case Evaluated():
            said = "none" if event.reward is None else reward_text(event.reward)
            failed = f"; {event.failed} of {event.judged + event.failed} not judged" if event.failed else ""
            return f"version {event.version}: held-out reward {said}{', the best' if event.best else ''}{failed}"
        case RunResumed():
            before = f"the run had lasted {coarse_seconds(event.time)}"
            return f"resumed after {counted(event.step, 'step')}; times count from this start, {before} before it"
        case _:
            return ""
