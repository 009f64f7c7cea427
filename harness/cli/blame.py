"""`holdfast blame`: the command, and the suspects and their evidence as a table."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.harness.command_line import in_one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from holdfast.ft.diagnosis.evidence import Finding, JobEvidence


def blame(
    job: Annotated[str, typer.Argument(metavar="JOB_OR_DIR", help="A job's name, or a folder with its files.")],
    json: Annotated[bool, typer.Option("--json", help="Print the suspects as JSON.")] = False,
    perfetto: Annotated[
        Path | None, typer.Option(help="Also write a trace of all ranks here, to open in ui.perfetto.dev.")
    ] = None,
    torch_trace: Annotated[
        Path | None, typer.Option(help="Also write a folder here, one file a rank, for torch's `torchfrtrace`.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many suspects to show.")] = 5,
) -> None:
    """Find the rank to blame: it died, hangs, is slow, was cut off, or called something else than the others.

    Reads the flight recordings that every process of a job keeps
    beside its event log: the last ops, when each was entered and left,
    and which ranks it waited for. Works while the job runs and hangs, and after
    it was killed.

    [bold]Examples[/bold]

        holdfast blame job                    # a job that runs here, by name

        holdfast blame logs/ --perfetto trace.json

        holdfast blame logs/ --torch-trace fr && torchfrtrace fr    # what torch's own analyser says

        holdfast blame logs/ --json | jq '.suspects[0].evidence'

    `holdfast run --logs logs/` keeps the files of a job that has ended.

    Exit status: 0, also if no rank is to blame; 1 if there is nothing to
    read, or the trace cannot be written.
    """
    from holdfast.ft.console.console import console, print_json
    from holdfast.ft.diagnosis.analyse import analyse
    from holdfast.ft.diagnosis.evidence import gather
    from holdfast.ft.diagnosis.jobs import locate

    with in_one_line("holdfast blame", status=1):
        evidence = gather(locate(job).logs, time.monotonic())
    found = analyse(evidence)
    if json:
        print_json({"suspects": found[:limit], "not_read": evidence.bad})
    else:
        console().print(render(evidence, found, limit))
    with in_one_line("holdfast blame: the trace cannot be written", OSError, status=1):
        if perfetto is not None:
            from holdfast.ft.diagnosis.traces import trace

            perfetto.write_text(json_module.dumps(trace(evidence)))
        if torch_trace is not None:
            from holdfast.ft.diagnosis.traces import write_dumps

            write_dumps(evidence, torch_trace)
    if not evidence.recordings and not json:
        typer.echo("holdfast blame: no recording could be read; was HOLDFAST_LOG_DIR set in the job?", err=True)
        raise typer.Exit(1)


_COLOURS = {"crash": "bold red", "hang": "red", "cut": "magenta", "mismatch": "yellow", "slow": "cyan", "stuck": "dim"}


def render(evidence: JobEvidence, findings: list[Finding], limit: int) -> RenderableType:
    """The surest `limit` suspects."""
    from rich.console import Group
    from rich.table import Column
    from rich.text import Text

    from holdfast.ft.console.console import FoldingTable
    from holdfast.ft.console.units import counted
    from holdfast.ft.diagnosis.evidence import MEANING

    lines: list[RenderableType] = []
    if findings:
        columns = ("suspect", "what", Column("sure", justify="right"), Column("evidence", ratio=1))
        table = FoldingTable(*columns, expand=True, show_lines=len(findings) > 1)
        for finding in findings[:limit]:
            link = f"rank {finding.rank} → {finding.to}" if finding.to is not None else f"rank {finding.rank}"
            who = Text.assemble((link, "bold"), (f"\nepoch {finding.epoch}", "dim"))
            if finding.pid:
                who.append(f"\npid {finding.pid}", "dim")
            words = Text.assemble((MEANING[finding.kind], "italic"), "\n", finding.evidence)
            table.add_row(who, Text(finding.kind, _COLOURS[finding.kind]), f"{finding.score:.0%}", words)
        lines.append(table)
    else:
        lines.append(
            Text("Nobody is to blame: no op failed, none hangs, and no rank keeps the others waiting.", "green")
        )
    ops = sum(len(recording.ops) for recording in evidence.recordings)
    torn = sum(recording.torn for recording in evidence.recordings)
    counts = ((len(evidence.recordings), "recording"), (ops, "op"), (len(evidence.events), "event"))
    basis = ", ".join(counted(count, noun) for count, noun in counts)
    lines.append(Text(basis + (f", {counted(torn, 'op')} torn" if torn else ""), "dim"))
    lines += [Text(f"not read: {reason}", "yellow") for reason in evidence.bad]
    return Group(*lines)
