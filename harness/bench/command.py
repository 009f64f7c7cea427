"""`holdfast bench OP`: the commands. Nothing heavy is imported until one of them runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.ft.console.units import counted
from holdfast.harness.bench.collectives.definitions import DTYPES, OPERATIONS, parse_counts, parse_sizes
from holdfast.harness.bench.recovery_plan import RecoveryPlan
from holdfast.harness.bench.store.command import store
from holdfast.harness.command_line import CommandGroup, check_file, check_folder, check_modules, with_options, writing

if TYPE_CHECKING:
    from holdfast.harness.bench.collectives.run import BenchPlan

app = CommandGroup(
    name="bench",
    help="Measure our backends, beside other libraries in the same run, with every result checked.",
    no_args_is_help=True,
)


def _failed(command: str, error: Exception) -> typer.Exit:
    """Print why nothing was measured, and exit with status 1."""
    typer.echo(f"holdfast bench {command}: {error}", err=True)
    return typer.Exit(1)


def _contestants(
    op: str, backends: str, peers: bool, only: str | None, bound: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All contestants, and those of them that are ours."""
    from holdfast.harness.bench.collectives.contestants import MEMCPY, PEERS
    from holdfast.harness.bench.collectives.ranks import HOLDFAST

    if op == "copy":
        return (MEMCPY,), (MEMCPY,)
    ours = tuple(f"{HOLDFAST}{name.strip()}" for name in backends.split(",") if name.strip())
    chosen = tuple(name.strip() for name in only.split(",")) if only else PEERS if peers else ()
    unknown = set(chosen) - set(PEERS)
    if unknown:
        raise ValueError(f"unknown peers {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}")
    return ours + chosen + ((MEMCPY,) if bound else ()), ours


@dataclass(frozen=True)
class OpsOptions:
    """The options of the commands that measure ops."""

    backends: Annotated[str, typer.Option(help="Our backends, as shm,gloo.")] = "shm"
    ranks: Annotated[str, typer.Option("-n", "--ranks", help="Numbers of ranks, as 2,4, or 2:8 for a sweep.")] = "2"
    sizes: Annotated[str, typer.Option(help="8,4K,1M or first:last or first:last:factor (8 unless given).")] = "8:64M"
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "float32"
    peers: Annotated[bool, typer.Option("--peers", help="Run other libraries interleaved, and print ratios.")] = False
    only: Annotated[str | None, typer.Option("--peer", help="Only these of them, as torch-gloo,openmpi.")] = None
    bound: Annotated[bool, typer.Option("--bound", help="Copy as many bytes in turn: what memory allows.")] = False
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each library at each size.")] = 5
    seconds: Annotated[float, typer.Option(min=0.01, help="Timing of each library at each size, in all.")] = 1.0
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Write inputs anew before each op, as programs do; in the time taken.")
    ] = False
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
    plot: Annotated[Path | None, typer.Option(help="Write a plot, with the roofline, to this file (.png, .svg).")] = (
        None
    )
    report: Annotated[
        Path | None, typer.Option(help="Write report.html and bench.json to this folder; has the roofline.")
    ] = None

    def plan(self, ops: tuple[str, ...]) -> BenchPlan:
        """What to measure. Raises ValueError for options that cannot be met."""
        from holdfast.harness.bench.collectives.run import BenchPlan

        drawn = self.plot is not None or self.report is not None
        everyone, ours = _contestants(ops[0], self.backends, self.peers, self.only, self.bound or drawn)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one that all libraries here reduce: {', '.join(DTYPES)}")
        for op in ops if self.fresh else ():
            if OPERATIONS[op].kind not in ("collective", "point to point"):
                raise ValueError(f"--fresh is for ops on the tensors of all ranks, and {op} is not one")
        return BenchPlan(
            operations=ops,
            contestants=everyone,
            ours=ours,
            ranks=parse_counts(self.ranks, 1 if ops[0] == "copy" else 2),
            sizes=parse_sizes(self.sizes),
            dtype=self.dtype,
            rounds=self.rounds,
            seconds=self.seconds,
            fresh=self.fresh,
            command=shlex.join(["holdfast", *sys.argv[1:]]),
        )


def _bench(ops: tuple[str, ...], options: OpsOptions) -> None:
    from holdfast.ft.console.console import console, styled, working
    from holdfast.harness.bench.collectives.run import expected_seconds, run
    from holdfast.harness.bench.output import page, show
    from holdfast.harness.report.plot import check_plot

    try:
        if options.plot is not None:
            check_plot(options.plot)
            check_file(options.plot, "--plot")
        if options.report is not None:
            check_modules("report", "--report", "jinja2", "matplotlib")
            check_folder(options.report, "--report", "report.html", "bench.json")
        plan = options.plan(ops)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    notes, out = console(stderr=True), console()
    begin = f"{plan.command}: about {expected_seconds(plan):.0f} s"
    with working(notes, begin) as progress:
        bench = run(plan, progress)
    if options.json:
        typer.echo(bench.json())
    else:
        show.show(bench, out)
    broken = [failure for failure in bench.failures if failure.contestant in plan.ours]
    left_out = {*bench.skipped, *(each.contestant for each in bench.unmeasured)} & {*plan.ours}
    if bench.wrong or broken or left_out:
        notes.print(
            styled("not all is well", "bold red") + f": {bench.wrong} wrong elements, {len(broken)} failures and "
            f"{len(left_out)} of our own backends left out"
        )
    with writing("holdfast bench"):
        if options.plot is not None:
            try:
                page.plot(bench, options.plot)
                notes.print(f"plot: {options.plot}")
            except ValueError as error:
                notes.print(f"no plot: {error}")
        if options.report is not None:
            notes.print(f"report: {page.write(bench, options.report)}")
    raise typer.Exit(1 if bench.wrong or broken or left_out else 0)


def _command(ops: tuple[str, ...]) -> Callable[..., None]:
    @with_options(OpsOptions)
    def command(options: OpsOptions) -> None:
        _bench(ops, options)

    return command


def _help(name: str, what: str) -> str:
    """The help text of a command that measures ops."""
    return f"""{what}

    [bold]Examples[/bold]

        holdfast bench {name} --backends shm,ucx -n 2,4 --sizes 8:1M

        holdfast bench {name} --peers --report report --seconds 0.2

    p50, p99 and min are of the slowest rank. algbw is the size by p50; busbw is algbw by a factor that makes it
    comparable with what the hardware moves, whatever the number of ranks (as nccl-tests define it).

    Exit status: 0 only if every result was right and all our own backends took part; 1 if not; 2 for bad options.
    """


for _operation in OPERATIONS.values():
    app.command(
        _operation.name,
        help=_help(
            _operation.name,
            "Copy memory without communicating: the machine's bound."
            if _operation.name == "copy"
            else f"Measure {_operation.name}. The size is that of: {_operation.size}. busbw is algbw x "
            f"{_operation.factor}.",
        ),
    )(_command((_operation.name,)))
app.command("all", help=_help("all", "Measure every op."))(_command(tuple(n for n in OPERATIONS if n != "copy")))
app.command("store")(store)


@dataclass(frozen=True)
class RecoveryOptions(RecoveryPlan):
    """The options of `holdfast bench recovery`."""

    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


@app.command("recovery")
@with_options(RecoveryOptions)
def recovery(options: RecoveryOptions) -> None:
    """Measure the time from a SIGKILL inside an all_reduce to the survivors' next correct one.

    [bold]Examples[/bold]

        holdfast bench recovery -n 4 --spares 1 --kills 20

        holdfast bench recovery -n 4 --stop --kills 10

        holdfast bench recovery -n 3 --backend nccl --device cuda:0 --kills 6
    """
    from holdfast.comms.errors import HoldfastError
    from holdfast.ft.console.console import console, print_json, working
    from holdfast.harness.bench.output import show
    from holdfast.harness.bench.recovery import run

    notes, out = console(stderr=True), console()
    begin = f"{counted(options.kills, 'kill')} of ranks over {options.backend}, about a second each"
    try:
        with working(notes, begin, every=2.0) as progress:
            bench = run(options, progress)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except (HoldfastError, TimeoutError) as error:
        raise _failed("recovery", error) from error
    if options.json:
        print_json(bench)
    else:
        show.show_recovery(bench, out)
