"""Shows how many bytes of a long command are done, once it takes longer than two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from holdfast.ft.console.console import console
from holdfast.ft.console.units import format_bytes

PATIENCE = 2.0
"""Seconds until the bar appears, and between two lines where there is no terminal."""


@contextmanager
def byte_progress(verb: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows the bytes done and to do.

    It draws a bar on a terminal, and prints a line now and then elsewhere.
    """
    out = console(stderr=True)
    shown = time.monotonic()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    bar = Progress(*columns, TimeRemainingColumn(), console=out, transient=True)
    task = bar.add_task(verb, total=None)
    with ExitStack() as open_bar:

        def progress(done: int, total: int) -> None:
            nonlocal shown
            if time.monotonic() - shown < PATIENCE and not bar.live.is_started:
                return
            if not out.is_terminal:
                shown = time.monotonic()
                out.print(f"{verb}: {format_bytes(done)} of {format_bytes(total)}", soft_wrap=True)
                return
            if not bar.live.is_started:
                open_bar.enter_context(bar)
            bar.update(task, completed=done, total=total)

        yield progress
