"""`holdfast bench OP`: the commands. Nothing heavy is imported until one of them runs."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.ft.console.units import counted
from holdfast.harness.bench.operations import DTYPES, OPERATIONS, parse_counts, parse_size, parse_sizes
from holdfast.harness.command_line import (
    CommandGroup,
    check_file,
    check_folder,
    check_modules,
    in_one_line,
    names_in,
    with_options,
    writing,
)

if TYPE_CHECKING:
    from holdfast.harness.bench.run import BenchPlan

app = CommandGroup(
    name="bench",
    help="Measure our backends, beside other libraries in the same run, with every result checked.",
    no_args_is_help=True,
)


def _contestants(
    op: str, backends: str, peers: bool, only: str | None, bound: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All contestants, and those of them that are ours."""
    from holdfast.harness.bench.contestants import PEERS
    from holdfast.harness.bench.drivers import HOLDFAST, MEMCPY

    if op == "copy":
        return (MEMCPY,), (MEMCPY,)
    ours = tuple(f"{HOLDFAST}{name}" for name in names_in("--backends", backends, "shm,gloo"))
    chosen = names_in("--peer", only, ",".join(PEERS)) if only is not None else PEERS if peers else ()
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
        from holdfast.harness.bench.run import BenchPlan

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
    from holdfast.harness.bench import report
    from holdfast.harness.bench.run import expected_seconds, run
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
        report.show(bench, out)
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
                report.plot(bench, options.plot)
                notes.print(f"plot: {options.plot}")
            except ValueError as error:
                notes.print(f"no plot: {error}")
        if options.report is not None:
            notes.print(f"report: {report.write(bench, options.report)}")
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


# The recovery ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecoveryPlan:
    """Kill ranks chosen at random, `kills` times, `together` of them at once. Raises ValueError if none would be left.

    With `proposer` also the one that proposes the next epoch, as soon as the register has it. With `spares` a job takes
    one for each rank that is killed, and as many kills; without, each kill is of a new job, which goes on with one rank
    less.
    """

    backend: Annotated[str, typer.Option(help="A backend whose ranks are processes.")] = "shm"
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=2, help="Ranks of the job.")] = 4
    kills: Annotated[int, typer.Option(min=1, help="How often to kill.")] = 50
    spares: Annotated[int, typer.Option(min=0, help="Hot spares to promote; 0: go on with one rank less.")] = 0
    size: Annotated[str, typer.Option(help="Bytes of the all_reduce.")] = "64K"
    seed: Annotated[int, typer.Option(help="Chooses who is killed, and when.")] = 0
    together: Annotated[int, typer.Option(min=1, help="How many ranks to kill at once.")] = 1
    proposer: Annotated[
        bool, typer.Option("--proposer", help="Then kill the rank that proposes the next epoch, too, before it tells.")
    ] = False
    stopped: Annotated[
        bool, typer.Option("--stop", help="Stop ranks (SIGSTOP), do not kill them: they are found by their silence.")
    ] = False
    device: Annotated[str, typer.Option(help="Where the tensors are: cpu, or a GPU that all ranks share.")] = "cpu"

    def __post_init__(self) -> None:
        if not 0 < self.together <= self.lost < self.ranks:
            raise ValueError(f"{self.lost} of {self.ranks} ranks cannot die and somebody recover")
        if self.proposer and self.spares:
            raise ValueError("a job whose proposer dies is used once: ask for no spares")
        parse_size(self.size)

    @property
    def nbytes(self) -> int:
        """The bytes of the all_reduce."""
        return parse_size(self.size)

    @property
    def lost(self) -> int:
        """How many ranks a job loses at a time."""
        return self.together + self.proposer


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
    from holdfast.ft.console.console import console, print_json, working
    from holdfast.harness.bench.recovery import run, show_recovery

    notes, out = console(stderr=True), console()
    begin = f"{counted(options.kills, 'kill')} of ranks over {options.backend}, about a second each"
    with in_one_line("holdfast bench recovery", TimeoutError, status=1):
        try:
            with working(notes, begin, every=2.0) as progress:
                bench = run(options, progress)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    if options.json:
        print_json(bench)
    else:
        show_recovery(bench, out)


# The store ------------------------------------------------------------------------------------------------------------


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


@app.command("store")
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
    from holdfast.harness.bench.store.drivers import HOLDFAST
    from holdfast.harness.bench.store.run import StorePlan, run, show
    from holdfast.harness.bench.store.workloads import check_device, known_on

    try:
        check_device(options.device)
        workloads, peers = known_on(options.device)
        plan = StorePlan(
            workloads=_named("--workloads", options.workloads, workloads, "all"),
            peers=_named("--peers", options.peers, peers, "" if options.device == "cpu" else "all"),
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
        show(bench, console())
    broken = [failure for failure in bench.failures if failure.contestant == HOLDFAST]
    if bench.wrong or broken:
        notes.print(
            styled("not all is well", "bold red") + f": {bench.wrong} wrong tensors, {len(broken)} failures of holdfast"
        )
    raise typer.Exit(1 if bench.wrong or broken else 0)


def _named(option: str, text: str, known: list[str] | tuple[str, ...], unsaid: str) -> tuple[str, ...]:
    """The names in the list of an option, in the known order. Raises ValueError for unknown ones, and for none."""
    given = text or unsaid
    wanted = {*names_in(option, given, ",".join(known))} if given else set()
    if wanted == {"all"}:
        return tuple(known)
    if unknown := sorted(wanted - set(known)):
        raise ValueError(f"unknown {option.strip('-')} {', '.join(unknown)}; known: {', '.join(known)}")
    return tuple(name for name in known if name in wanted)
