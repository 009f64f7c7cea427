"""Renders the processes of a run of reinforcement learning for a terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from holdfast.ft.console.console import FoldingTable
from holdfast.ft.console.units import coarse_seconds, counted
from holdfast.rl.run.run_status import RunStatus

_HEALTH = {"ready": "green", "starting": "yellow", "draining": "cyan", "lost": "bold red"}
OLD = 10.0
"""Seconds after which the driver of a run should have written its status again."""


def render_run(directory: Path, status: RunStatus) -> RenderableType:
    """The whole screen."""
    if status.ended:
        state = Text("ended", "bold cyan")
    elif status.driver in status.gone:
        state = Text(f"its driver (pid {status.driver}) has ended; holdfast rl resume {directory} goes on", "bold red")
    elif status.age > OLD:
        state = Text(f"its driver (pid {status.driver}) was last heard {coarse_seconds(status.age)} ago", "bold red")
    else:
        state = Text("running", "bold green")
    head = Text.assemble((str(directory), "bold"), "  ", state, ("  step ", "dim"), (str(status.step), "bold"))
    head.append(f" of {status.steps}")
    table = FoldingTable(box=None, expand=True, pad_edge=False, header_style="dim")
    for name in ("process", "pid", "state", "load", "version", "restarts"):
        table.add_column(name, justify="left" if name in ("process", "state") else "right")
    for each in sorted(status.trainers, key=lambda each: (each.rank is None, each.rank)):
        role = Text("spare", "cyan") if each.rank is None else Text(f"rank {each.rank}, epoch {each.epoch}", "green")
        role = _gone(status) if each.pid in status.gone else role
        behind = "" if each.newest_batch is None else str(max(0, each.newest_batch + 1 - each.committed))
        table.add_row(each.name, str(each.pid), role, behind, str(each.committed), "")
    for service in status.services:
        for replica in service.replicas:
            table.add_row(
                replica.name,
                ", ".join(map(str, replica.pids)) or "-",
                _gone(status) if {*replica.pids} & {*status.gone} else Text(replica.health, _HEALTH[replica.health]),
                str(replica.load),
                "-" if replica.version is None else str(replica.version),
                str(replica.restarts or ""),
            )
    lines = [
        Text.assemble(
            (service.name, "bold"),
            f"  {counted(service.calls, 'call')}, {service.queued} queued, {service.retried} tried elsewhere, "
            f"{service.overloaded} refused; ",
            (f"{counted(service.lost, 'replica')} lost", "yellow" if service.lost else "dim"),
            "" if service.version is None else f"; version {service.version}",
        )
        for service in status.services
    ]
    body = Group(head, Text(), table, Text(), *lines)
    return Panel(body, title=Text("holdfast top"), title_align="left")


def _gone(status: RunStatus) -> Text:
    """The state of a process that has ended."""
    return Text("ended", "dim" if status.ended else "bold red")
