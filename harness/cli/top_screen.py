"""Renders the state of a job, or of a run of reinforcement learning, for a terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from holdfast.ft.console.console import FoldingTable
from holdfast.ft.console.units import coarse_seconds, counted
from holdfast.ft.diagnosis.jobs import JobState, LastFault, ProcessRow
from holdfast.rl.run.run_directory import RunStatus

_STATES = {
    "running": "green",
    "spare": "cyan",
    "done": "dim",
    "stopped": "bold yellow",
    "killed": "bold red",
    "elsewhere": "blue",
}
_PHASES = {"running": "bold green", "forming": "yellow", "finished": "bold cyan", "failed": "bold red"}
LONG = 1.0
"""Seconds in one op after which it is shown as long."""


def render(job: JobState) -> RenderableType:
    """The whole screen."""
    head = Text.assemble(
        (job.name or "?", "bold"),
        "  ",
        (job.phase, _PHASES.get(job.phase, "")),
        f"  epoch {job.epoch}  {counted(job.members, 'member')}",
        f"  {job.backend}" * bool(job.backend),
        (f"  waits for {job.needed} more", "bold yellow") if job.needed else "",
        ("  step ", "dim"),
        (str(job.step) if job.step >= 0 else "-", "bold"),
        (f"  {job.steps_per_second:.1f} steps/s", "bold") if job.steps_per_second else "",
    )
    return Panel(
        Group(head, Text(), _table(job.rows), Text(), _fault(job)), title=Text("holdfast top"), title_align="left"
    )


def _table(rows: tuple[ProcessRow, ...]) -> Table:
    rank, pid, step, rate, since = (Column(name, justify="right") for name in ("rank", "pid", "step", "steps/s", "for"))
    columns = (rank, pid, Column("state", max_width=24), step, rate, Column("op", ratio=1), since, "waits for")
    table = FoldingTable(*columns, box=None, expand=True, pad_edge=False, header_style="dim")
    for row in rows:
        long = row.inside and row.seconds >= LONG and row.state == "running"
        table.add_row(
            "-" if row.rank is None else str(row.rank),
            str(row.pid or "-"),
            Text(row.state, _STATES.get(row.state, "yellow" if row.state.startswith("waits") else "red")),
            str(row.step) if row.step >= 0 else "-",
            f"{row.steps_per_second:.1f}" if row.steps_per_second else "-",
            Text(row.op if row.inside else f"after {row.op}" if row.op else "", "" if row.inside else "dim"),
            Text(coarse_seconds(row.seconds) if row.seconds else "", "bold yellow" if long else "dim"),
            ", ".join(map(str, row.waits_for)),
        )
    return table


def _fault(job: JobState) -> Text:
    fault = job.last_fault
    if fault is None:
        return Text("no faults", "dim")
    how_many = f" of {job.faults}" if job.faults > 1 else ""
    return Text.assemble(
        (f"last fault{how_many}", "bold"),
        f"  {coarse_seconds(fault.ago)} ago, in epoch {fault.epoch}: {fault.reason}\n",
        _recovery(fault),
    )


def _recovery(fault: LastFault) -> Text:
    if fault.recovery is None:
        return Text("not recovered", "bold red")
    words = Text.assemble(("recovered", "green"), f" in {coarse_seconds(fault.recovery)}")
    if fault.resume is not None:
        words.append(f", next step committed after {coarse_seconds(fault.resume)}")
    return words


_HEALTH = {"ready": "green", "starting": "yellow", "lost": "bold red"}
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
    pid, *counts = (Column(name, justify="right") for name in ("pid", "load", "version", "restarts"))
    columns = ("process", pid, "state", *counts)
    table = FoldingTable(*columns, box=None, expand=True, pad_edge=False, header_style="dim")
    for name, each in sorted(status.trainers.items(), key=lambda item: (item[1].rank is None, item[1].rank)):
        role = Text("spare", "cyan") if each.rank is None else Text(f"rank {each.rank}, epoch {each.epoch}", "green")
        role = _gone(status) if each.pid in status.gone else role
        behind = "" if each.newest_batch is None else str(max(0, each.newest_batch + 1 - each.committed))
        table.add_row(name, str(each.pid), role, behind, str(each.committed), "")
    for service in status.services:
        for replica in service.replicas:
            table.add_row(
                replica.name,
                str(replica.pid or "-"),
                _gone(status) if replica.pid in status.gone else Text(replica.health, _HEALTH[replica.health]),
                str(replica.load),
                str(service.version) if replica.ready and service.version is not None else "-",
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
