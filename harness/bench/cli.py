"""`holdfast bench OP`: the commands. Nothing heavy is imported until one of them runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from holdfast.harness.bench.definitions import DTYPES, OPERATIONS, parse_counts, parse_size, parse_sizes

app = typer.Typer(
    name="bench",
    help="Measure our backends, beside other libraries in the same run, with every result checked.",
    no_args_is_help=True,
)


def _contestants(
    op: str, backends: str, peers: bool, only: str | None, bound: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All that take part, and those of them that are ours."""
    from holdfast.harness.bench.contestants import MEMCPY, PEERS
    from holdfast.harness.bench.launch import HOLDFAST

    if op == "copy":
        return (MEMCPY,), (MEMCPY,)
    ours = tuple(f"{HOLDFAST}{name.strip()}" for name in backends.split(",") if name.strip())
    chosen = tuple(name.strip() for name in only.split(",")) if only else PEERS if peers else ()
    unknown = set(chosen) - set(PEERS)
    if unknown:
        raise ValueError(f"unknown peers {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}")
    return ours + chosen + ((MEMCPY,) if bound else ()), ours


def _bench(
    ops: tuple[str, ...],
    backends: str,
    ranks: str,
    sizes: str,
    dtype: str,
    peers: bool,
    only: str | None,
    bound: bool,
    rounds: int,
    seconds: float,
    iterations: int | None,
    json: bool,
    plot: Path | None,
) -> None:
    from holdfast.harness.bench import show
    from holdfast.harness.bench.rounds import Plan, run

    try:
        everyone, ours = _contestants(ops[0], backends, peers, only, bound)
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is not one that all libraries here reduce: {', '.join(DTYPES)}")
        plan = Plan(
            operations=ops,
            contestants=everyone,
            ours=ours,
            ranks=parse_counts(ranks, 1 if ops[0] == "copy" else 2),
            sizes=parse_sizes(sizes),
            dtype=dtype,
            rounds=rounds,
            seconds=seconds,
            iterations=iterations,
            command=shlex.join(["holdfast", *sys.argv[1:]]),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    notes = show.console(stderr=True)
    with notes.status("starting") as status:
        bench = run(plan, lambda text: status.update(text))
    if json:
        typer.echo(bench.json())
    else:
        show.show(bench, show.console())
    if plot is not None:
        show.plot(bench, plot)
        notes.print(f"plot: {plot}")
    broken = [failure for failure in bench.failures if failure.contestant in ours]
    left_out = [name for name in bench.skipped if name in ours]
    if bench.wrong or broken or left_out:
        notes.print(
            f"[bold red]not all is well[/]: {bench.wrong} wrong elements, {len(broken)} failures and "
            f"{len(left_out)} of our own backends left out"
        )
        raise typer.Exit(1)


def _command(ops: tuple[str, ...]) -> Callable[..., None]:
    def command(
        backends: Annotated[str, typer.Option(help="Our backends, as shm,gloo.")] = "shm",
        ranks: Annotated[str, typer.Option("-n", "--ranks", help="Numbers of ranks, as 2,4.")] = "2",
        sizes: Annotated[
            str, typer.Option(help="8,4K,1M or first:last or first:last:factor (8 unless given).")
        ] = "8:64M",
        dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "float32",
        peers: Annotated[
            bool, typer.Option("--peers", help="Run other libraries interleaved, and print ratios.")
        ] = False,
        only: Annotated[str | None, typer.Option("--peer", help="Only these of them, as torch-gloo,openmpi.")] = None,
        bound: Annotated[bool, typer.Option("--bound", help="Copy as many bytes in turn: what memory allows.")] = False,
        rounds: Annotated[int, typer.Option(min=1, help="Turns of each library at each size.")] = 5,
        seconds: Annotated[float, typer.Option(min=0.01, help="Timing of each library at each size, in all.")] = 1.0,
        iterations: Annotated[
            int | None, typer.Option("--iters", min=1, help="Ops a turn, instead of by time.")
        ] = None,
        json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
        plot: Annotated[Path | None, typer.Option(help="Write a plot to this file (.png, .svg).")] = None,
    ) -> None:
        _bench(ops, backends, ranks, sizes, dtype, peers, only, bound, rounds, seconds, iterations, json, plot)

    return command


for _operation in OPERATIONS.values():
    app.command(
        _operation.name,
        help="Copy memory without communicating: the machine's bound."
        if _operation.name == "copy"
        else f"Measure {_operation.name}.",
    )(_command((_operation.name,)))
app.command("all", help="Measure every op.")(_command(tuple(name for name in OPERATIONS if name != "copy")))


@app.command("imports")
def imports(
    processes: Annotated[int, typer.Option(min=1, help="Fresh processes to import in.")] = 11,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what importing holdfast.comms costs beyond importing torch."""
    import msgspec

    from holdfast.harness.bench.imports import measure

    cost = measure(processes)
    if json:
        typer.echo(msgspec.json.encode(cost).decode())
    else:
        typer.echo(
            f"import holdfast.comms after torch: {cost.extra:.1f} ms (median of {cost.processes} processes, "
            f"{cost.extra_min:.1f} to {cost.extra_max:.1f}); import torch: {cost.torch:.0f} ms"
        )


@app.command("recovery")
def recovery(
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=2, help="Ranks of the job.")] = 4,
    kills: Annotated[int, typer.Option(min=1, help="How many to kill, one at a time.")] = 50,
    backend: Annotated[str, typer.Option(help="A backend whose ranks are processes.")] = "shm",
    spares: Annotated[int, typer.Option(min=0, help="Hot spares to promote; 0: go on with one rank less.")] = 0,
    size: Annotated[str, typer.Option(help="Bytes of the all_reduce.")] = "64K",
    seed: Annotated[int, typer.Option(help="Chooses who is killed, and when.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the time from a SIGKILL inside an all_reduce to the survivors' next correct one."""
    import msgspec

    from holdfast.comms.errors import HoldfastError
    from holdfast.harness.bench import show
    from holdfast.harness.bench.recovery import run

    try:
        nbytes = parse_size(size)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    notes = show.console(stderr=True)
    try:
        with notes.status("starting") as status:
            bench = run(backend, ranks, kills, spares, nbytes, seed, lambda text: status.update(text))
    except HoldfastError as error:
        notes.print(f"[bold red]{type(error).__name__}[/]: {error}")
        raise typer.Exit(1) from error
    if json:
        typer.echo(msgspec.json.encode(bench).decode())
    else:
        show.show_recovery(bench, show.console())
