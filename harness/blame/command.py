"""`holdfast blame`: the command."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from typing import Annotated

import typer


def blame(
    job: Annotated[str, typer.Argument(metavar="JOB_OR_DIR", help="A job's name, or a folder with its files.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the suspects as JSON.")] = False,
    perfetto: Annotated[
        Path | None, typer.Option(help="Also write a trace of all ranks here, to open in ui.perfetto.dev.")
    ] = None,
    torch_trace: Annotated[
        Path | None, typer.Option(help="Also write a folder here, one file a rank, for torch's `torchfrtrace`.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many suspects to show.")] = 5,
    score: Annotated[
        int, typer.Option(min=0, help="Instead: ask N generated cases of each kind, and say how often it is right.")
    ] = 0,
    injected: Annotated[
        int, typer.Option(min=0, help="With --score, or alone: also N cases of each fault in real processes.")
    ] = 0,
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

        holdfast blame --score 200            # is it right? 200 cases of each kind, with a known culprit

    `holdfast run --logs logs/` keeps the files of a job that has ended.

    Exit status: 0, also if no rank is to blame; 1 if there is nothing to
    read, the trace cannot be written, or --score is below 99%.
    """
    if score or injected:
        _score(score, injected, json)
        return
    if not job:
        raise typer.BadParameter("name a job or a folder", param_hint="JOB_OR_DIR")
    from holdfast.comms.errors import HoldfastError
    from holdfast.ft.console.console import console, print_json
    from holdfast.ft.diagnosis.analyse import analyse
    from holdfast.ft.diagnosis.gathering import gather
    from holdfast.ft.diagnosis.jobs import locate

    try:
        evidence = gather(locate(job).logs, time.monotonic())
    except HoldfastError as error:
        typer.echo(f"holdfast blame: {error}", err=True)
        raise typer.Exit(1) from error
    found = analyse(evidence)
    if json:
        print_json({"suspects": found[:limit], "not_read": evidence.bad})
    else:
        from holdfast.harness.blame.show import render

        console().print(render(evidence, found, limit))
    try:
        if perfetto is not None:
            from holdfast.ft.diagnosis.perfetto import trace

            perfetto.write_text(json_module.dumps(trace(evidence)))
        if torch_trace is not None:
            from holdfast.ft.diagnosis.torch_trace import write_dumps

            write_dumps(evidence, torch_trace)
    except OSError as error:
        typer.echo(f"holdfast blame: the trace cannot be written: {error}", err=True)
        raise typer.Exit(1) from error
    if not evidence.recordings and not json:
        typer.echo("holdfast blame: no recording could be read; was HOLDFAST_LOG_DIR set in the job?", err=True)
        raise typer.Exit(1)


def _score(generated: int, injected: int, json: bool) -> None:
    from holdfast.ft.console.console import print_json
    from holdfast.harness.blame.score.run import run

    result = run(generated, injected, lambda text: typer.echo(text, err=True))
    if json:
        print_json(result)
    else:
        typer.echo(result.table())
    if not result.passed:
        raise typer.Exit(1)
