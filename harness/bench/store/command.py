"""The command `holdfast bench store`."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from holdfast.harness.bench.collectives.definitions import parse_size
from holdfast.harness.command_line import with_options

PEERS = "torchstore,memcpy,safetensors,dcp"


@dataclass(frozen=True)
class StoreOptions:
    """The options of `holdfast bench store`."""

    peers: Annotated[str, typer.Option(help=f"Other ways to run interleaved, of {PEERS}; all for all of them.")] = ""
    workloads: Annotated[str, typer.Option(help="Only these workloads, as model,small.")] = ""
    device: Annotated[
        str, typer.Option(help="Where the tensors are: cpu, or cuda, which has workloads of its own.")
    ] = "cpu"
    size: Annotated[str, typer.Option(help="Bytes of the large states.")] = "512M"
    starts: Annotated[int, typer.Option(min=1, help="How often all processes are started anew.")] = 2
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each after the first three of a start.")] = 7
    threads: Annotated[
        int | None, typer.Option(min=1, show_default="as many as CPUs", help="Threads of torch in each process.")
    ] = None
    torchstore_source: Annotated[
        Path | None,
        typer.Option(envvar="HOLDFAST_TORCHSTORE", help="A checkout of torchstore's main branch; make store-peers."),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


@with_options(StoreOptions)
def store(options: StoreOptions) -> None:
    """Measure the weight store, beside other ways to hand weights from process to process.

    [bold]Examples[/bold]

        holdfast bench store --peers memcpy,safetensors --size 64M

        holdfast bench store --peers all --torchstore-source ../torchstore --json

        holdfast bench store --workloads killed,served

        holdfast bench store --device cuda --size 1G

    A publisher, holders and readers are processes of their own. Each version differs from the one before, targets are
    overwritten before each get, and every byte that was got is compared by digest.

    Exit status: 0 only if every tensor was right and holdfast took part in every workload; 1 if not; 2 for bad options.
    """
    from holdfast.comms.errors import Unsupported
    from holdfast.ft.console.console import console, styled, working
    from holdfast.harness.bench.store import drivers, show
    from holdfast.harness.bench.store.run import StorePlan, run
    from holdfast.harness.bench.store.workloads import check_device, known_on

    try:
        check_device(options.device)
        workloads, peers = known_on(options.device)
        plan = StorePlan(
            workloads=_named("workloads", options.workloads, workloads, "all"),
            peers=_named("peers", options.peers, peers, "" if options.device == "cpu" else "all"),
            size=parse_size(options.size),
            starts=options.starts,
            rounds=options.rounds,
            threads=options.threads or os.cpu_count() or 1,
            torchstore_source=options.torchstore_source,
            command=shlex.join(["holdfast", *sys.argv[1:]]),
        )
        notes = console(stderr=True)
        with working(notes, plan.command, every=2.0) as progress:
            bench = run(plan, progress)
    except (ValueError, Unsupported) as error:
        raise typer.BadParameter(str(error)) from error
    if options.json:
        typer.echo(bench.json())
    else:
        show.show(bench, console())
    broken = [failure for failure in bench.failures if failure.contestant == drivers.HOLDFAST]
    if bench.wrong or broken:
        notes.print(
            styled("not all is well", "bold red") + f": {bench.wrong} wrong tensors, {len(broken)} failures of holdfast"
        )
    raise typer.Exit(1 if bench.wrong or broken else 0)


def _named(option: str, text: str, known: list[str] | tuple[str, ...], unsaid: str) -> tuple[str, ...]:
    """The names in a list that an option gives, in the known order. Raises ValueError for unknown ones."""
    wanted = {name.strip() for name in (text or unsaid).split(",")} - {""}
    if wanted == {"all"}:
        return tuple(known)
    if unknown := sorted(wanted - set(known)):
        raise ValueError(f"unknown {option} {', '.join(unknown)}; known: {', '.join(known)}")
    return tuple(name for name in known if name in wanted)
