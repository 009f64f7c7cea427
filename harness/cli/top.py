"""`holdfast top`: the command."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.harness.command_line import in_one_line

if TYPE_CHECKING:
    from rich.console import RenderableType


def top(
    job: Annotated[
        str, typer.Argument(metavar="JOB_OR_DIR", help="A job's name, or a folder with its files, or that of a run.")
    ],
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print it once, as JSON.")] = False,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 0.5,
    register: Annotated[str, typer.Option(help="The job's register, if it is not in its folder: etcd://...")] = "",
) -> None:
    """Watch a job: epoch, members, what each rank is in and for how long, steps a second, the last fault.

    Reads the register, the flight recordings and the event logs of the
    job, and changes nothing: it may be started and ended at any time,
    and shows how things were when the job is gone. Ctrl-C ends it.

    [bold]Examples[/bold]

        holdfast run -n 4 --spares 1 train.py &

        holdfast top job

        holdfast top logs/ --once             # of a job that has ended

        holdfast top run                      # the folder of `holdfast rl train`: its trainers and services

        holdfast top job --json | jq '.rows[] | select(.inside and .seconds > 1)'

    Exit status: 1 if there is no such job.
    """
    from holdfast.ft.console.console import console, print_json

    with in_one_line("holdfast top", status=1):
        look, render = _views(job, register)
        first = look()
    if json:
        print_json(first)
        return
    from rich.live import Live

    out = console()
    if once:
        out.print(render(first))
        return
    try:
        with Live(render(first), console=out, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(render(look()), refresh=True)
    except KeyboardInterrupt:
        out.print(render(look()))


def _views(job: str, register: str) -> tuple[Callable[[], Any], Callable[[Any], RenderableType]]:
    """An observer of a job, or of the run of reinforcement learning in a folder; and its drawing."""
    from holdfast.rl.run.run_directory import RunDirectory, read_status

    status = RunDirectory(Path(job)).status_file
    if status.is_file():
        from holdfast.harness.cli.top_screen import render_run

        return lambda: read_status(status), lambda seen: render_run(Path(job), seen)
    from holdfast.ft.diagnosis.jobs import Watcher, locate
    from holdfast.harness.cli.top_screen import render

    watcher = Watcher(locate(job, register))
    return watcher.look, render
