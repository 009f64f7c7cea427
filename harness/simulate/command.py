"""The `holdfast simulate` command: options, and exit status."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from holdfast.harness.command_line import check_file, in_one_line, with_options


@dataclass(frozen=True)
class SimulateOptions:
    """The options of `holdfast simulate`."""

    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="How many ranks the job has; by default 8, and with swarm what a seed draws."),
    ] = None
    hosts: Annotated[int | None, typer.Option(min=1, help="On how many hosts; by default 8 ranks are on one.")] = None
    scenario: Annotated[str, typer.Option(help="What befalls it: a name, or swarm for all kinds of faults.")] = "swarm"
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal runs, bit for bit.")] = 0
    seeds: Annotated[int, typer.Option(min=1, help="With swarm: try so many seeds, from --seed on.")] = 1
    schedule: Annotated[Path | None, typer.Option(help="Replay a schedule from a TOML or JSON file instead.")] = None
    bug: Annotated[str | None, typer.Option(help="Put a known bug into the code first.")] = None
    shrink: Annotated[bool, typer.Option("--shrink", help="Make a failing schedule as small as it gets.")] = False
    out: Annotated[Path, typer.Option(help="Where --shrink writes the schedule; the story is put beside it.")] = Path(
        "failing.json"
    )
    museum: Annotated[bool, typer.Option("--museum", help="Look for each known bug.")] = False
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Simulate faults, inject them into real processes too, and compare the times."),
    ] = False
    repeats: Annotated[int, typer.Option(min=1, help="With --compare: so many real faults a case.")] = 2
    trace: Annotated[Path | None, typer.Option(help="Write one line for each event to this file.")] = None
    json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False


@with_options(SimulateOptions)
def simulate(options: SimulateOptions) -> None:
    """Run a job in virtual time, break it in every way, and check every invariant after every event.

    [bold]Examples[/bold]

        holdfast simulate --seeds 500

        holdfast simulate --ranks 1000 --seeds 3

        holdfast simulate --ranks 100000 --hosts 12500 --scenario rack-loss --seed 7

        holdfast simulate --bug "one accuser is enough" --seeds 1000 --shrink --out found.json

        holdfast simulate --schedule found.json --trace trace.txt

        holdfast simulate --museum

        holdfast simulate --compare --ranks 64

    The membership core, the detectors and the commit protocol are the classes that run in production; clocks, network,
    register and kernel are simulated. With more than 256 ranks membership alone is simulated. Times are results of the
    protocol in simulated time, not of a machine.

    --compare says how near they come to those of a machine. It measures here what a message, a call of the register, an
    op, a new communicator and the end of a process take, gives that to the simulator, and simulates a kill, a stop and
    the loss of a host (network namespaces: needs root) for 4 and 16 ranks, or --ranks. Then it does the same to real
    processes. The table has the times from the fault to the next view and to the next commit, and the errors.

    Scenarios: quiet, crash, host-loss, rack-loss, tenth-loss, first-host-loss, host-loss-register-away, cut-off, swarm.

    Exit status: 0 if every invariant held (with --museum: if every bug was found); 1 if not; 2 for what cannot be run.
    """
    from holdfast.harness.simulate import show

    check_file(options.trace, "--trace")
    if options.shrink:
        check_file(options.out, "--out")
        check_file(options.out.with_suffix(".txt"), "--out")
    try:
        with (
            in_one_line("holdfast simulate", ValueError, OSError),
            nullcontext() if options.trace is None else options.trace.open("w", encoding="utf-8") as lines,
        ):
            status = show.run(options, None if lines is None else lines.write)
    except KeyboardInterrupt:
        typer.echo("holdfast simulate: interrupted", err=True)
        status = 130
    sys.stdout.flush()
    raise typer.Exit(status)
