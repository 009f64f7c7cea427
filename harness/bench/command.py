"""`holdfast bench OP`: the commands. Nothing heavy is imported until one of them runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.ft.console.command_line import CommandGroup, with_options
from holdfast.ft.console.units import counted
from holdfast.harness.bench.collectives.definitions import DTYPES, OPERATIONS, parse_counts, parse_size, parse_sizes
from holdfast.harness.bench.store.command import store

if TYPE_CHECKING:
    from holdfast.harness.bench.collectives.run import BenchPlan
    from holdfast.harness.bench.recovery.recovery import RecoveryPlan

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
    iterations: Annotated[int | None, typer.Option("--iters", min=1, help="Ops a turn, instead of by time.")] = None
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
    against: Annotated[Path | None, typer.Option(help="Compare with this stored run (JSON).")] = None

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
            iterations=self.iterations,
            fresh=self.fresh,
            command=shlex.join(["holdfast", *sys.argv[1:]]),
        )


def _bench(ops: tuple[str, ...], options: OpsOptions) -> None:
    from holdfast.ft.console.console import console, styled, working
    from holdfast.ft.console.outputs import check_file, check_folder, check_modules, writing
    from holdfast.harness.bench.collectives.run import expected_seconds, run
    from holdfast.harness.bench.output import page, results, show
    from holdfast.harness.report.plot import check_plot

    try:
        then = results.load(options.against) if options.against is not None else None
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
    compared = results.compare(bench, then) if then is not None else ()
    if then is not None and not options.json:
        show.show_compared(compared, results.differing(bench, then), out)
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
            notes.print(f"report: {page.write(bench, options.report, compared)}")
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


@app.command("imports")
def imports(
    processes: Annotated[int, typer.Option(min=1, help="Fresh processes to import in.")] = 11,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what importing holdfast.comms costs beyond importing torch.

    [bold]Examples[/bold]

        holdfast bench imports --processes 31
    """
    from holdfast.ft.console.console import print_json
    from holdfast.harness.bench.overhead.imports import measure

    cost = measure(processes)
    if json:
        print_json(cost)
    else:
        typer.echo(
            f"import holdfast.comms after torch: {cost.extra:.1f} ms (median of {cost.processes} processes, "
            f"{cost.extra_min:.1f} to {cost.extra_max:.1f}); import torch: {cost.torch:.0f} ms"
        )


@dataclass(frozen=True)
class ExpertsOptions:
    """The options of `holdfast bench experts`."""

    contestants: Annotated[
        str, typer.Option(help="What to measure, in turns: switch:BACKEND and all_to_all:BACKEND, with commas.")
    ] = "switch:shm,switch:gloo,all_to_all:shm,all_to_all:gloo,all_to_all:mpi"
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=2, help="Ranks.")] = 3
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a rank in a step.")] = 256
    hidden: Annotated[int, typer.Option(min=1, help="Floats of a token.")] = 1024
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 5
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 20
    kills: Annotated[int, typer.Option(min=0, help="Then kill a rank so often, at random.")] = 20
    kill_backend: Annotated[str, typer.Option(help="The backend of the kills.")] = "shm"
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


@app.command("experts")
@with_options(ExpertsOptions)
def experts(options: ExpertsOptions) -> None:
    """Measure an exchange for experts that outlives a rank beside all_to_all_single; then kill ranks in it.

    [bold]Examples[/bold]

        holdfast bench experts --kills 200
    """
    from holdfast.comms.errors import HoldfastError
    from holdfast.ft.console.console import console, print_json, working
    from holdfast.harness.bench.experts import ExpertLoad, run, show

    names = [name.strip() for name in options.contestants.split(",") if name.strip()]
    load = ExpertLoad(options.tokens, options.hidden, 4 * options.ranks)
    try:
        with working(console(stderr=True), f"{counted(len(names), 'contestant')}, in turns") as progress:
            bench = run(
                names, options.ranks, load, options.rounds, options.steps, options.kills, options.kill_backend, progress
            )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except HoldfastError as error:
        raise _failed("experts", error) from error
    if options.json:
        print_json(bench)
        return
    show(bench, console())


@app.command("hosts")
def hosts(
    backend: Annotated[str, typer.Option(help="The transport between hosts: gloo or ucx.")] = "gloo",
    number: Annotated[int, typer.Option("--hosts", min=2, max=16, help="Hosts, as network namespaces.")] = 3,
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Ranks on each host.")] = 2,
    sizes: Annotated[str, typer.Option(help="Bytes of float32, as 1M,16M.")] = "1M,4M,16M",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each at each size.")] = 10,
    in_turns: Annotated[bool, typer.Option("--in-turns", help="Give ranks to the hosts in turns.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure hierarchical collectives beside flat ones between hosts, in turns in one run. Needs root.

    [bold]Examples[/bold]

        holdfast bench hosts --backend gloo --hosts 3 -n 2 --sizes 1M,16M --in-turns
    """
    from holdfast.comms.errors import HoldfastError
    from holdfast.ft.console.console import console, print_json, working
    from holdfast.harness.bench.overhead.hosts import run, show

    try:
        parsed = parse_sizes(sizes)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        with working(console(stderr=True), f"{counted(number, 'host')}, in turns") as progress:
            bench = run(backend, parsed, number, ranks, rounds, in_turns, progress)
    except HoldfastError as error:
        raise _failed("hosts", error) from error
    if json:
        print_json(bench)
        return
    show(bench, console())


@dataclass(frozen=True)
class RecoveryOptions:
    """The options of `holdfast bench recovery`."""

    ranks: Annotated[int, typer.Option("-n", "--ranks", min=2, help="Ranks of the job.")] = 4
    kills: Annotated[int, typer.Option(min=1, help="How often to kill.")] = 50
    backend: Annotated[str, typer.Option(help="A backend whose ranks are processes.")] = "shm"
    spares: Annotated[int, typer.Option(min=0, help="Hot spares to promote; 0: go on with one rank less.")] = 0
    together: Annotated[int, typer.Option(min=1, help="How many ranks to kill at once.")] = 1
    proposer: Annotated[
        bool, typer.Option("--proposer", help="Then kill the rank that proposes the next epoch, too, before it tells.")
    ] = False
    stopped: Annotated[
        bool, typer.Option("--stop", help="Stop ranks (SIGSTOP), do not kill them: they are found by their silence.")
    ] = False
    size: Annotated[str, typer.Option(help="Bytes of the all_reduce.")] = "64K"
    seed: Annotated[int, typer.Option(help="Chooses who is killed, and when.")] = 0
    peers: Annotated[bool, typer.Option("--peers", help="Then the same with Open MPI's ULFM (shrink and go on).")] = (
        False
    )
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False

    def plan(self) -> RecoveryPlan:
        """What to measure. Raises ValueError for options that cannot be met."""
        from holdfast.harness.bench.recovery.recovery import RecoveryPlan

        return RecoveryPlan(
            self.backend,
            self.ranks,
            self.kills,
            self.spares,
            parse_size(self.size),
            self.seed,
            self.together,
            self.proposer,
            self.stopped,
        )


@app.command("recovery")
@with_options(RecoveryOptions)
def recovery(options: RecoveryOptions) -> None:
    """Measure the time from a SIGKILL inside an all_reduce to the survivors' next correct one.

    [bold]Examples[/bold]

        holdfast bench recovery -n 4 --spares 1 --kills 20

        holdfast bench recovery -n 4 --stop --kills 10

        holdfast bench recovery -n 4 --kills 30 --peers
    """
    from holdfast.comms.errors import HoldfastError
    from holdfast.ft.console.console import console, print_json, working
    from holdfast.harness.bench.drivers.mpi_programs import OPENMPI, missing
    from holdfast.harness.bench.output import show
    from holdfast.harness.bench.recovery import peer as recovery_peer
    from holdfast.harness.bench.recovery.recovery import run

    if options.peers and (reason := missing(OPENMPI)) is not None:
        raise typer.BadParameter(f"--peers: {reason}")
    if options.peers and options.stopped:
        raise typer.BadParameter("--peers with --stop: ULFM's recovery is measured from ranks that are killed")

    try:
        plan = options.plan()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    notes, out = console(stderr=True), console()
    begin = f"{counted(plan.kills, 'kill')} of ranks over {plan.backend}, about a second each"
    try:
        with working(notes, begin, every=2.0) as progress:
            bench = run(plan, progress)
            peer = (
                recovery_peer.run(plan.ranks, plan.kills, plan.nbytes, plan.seed, progress) if options.peers else None
            )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except HoldfastError as error:
        raise _failed("recovery", error) from error
    if options.json:
        print_json({"holdfast": bench, "peer": peer} if options.peers else bench)
        return
    show.show_recovery(bench, out)
    if peer is not None:
        spread = peer.total
        out.print(
            f"{peer.library}, {counted(peer.ranks, 'rank')}, {counted(len(peer.kills), 'kill')}: "
            f"median {spread.median:.2f} ms, p90 {spread.p90:.2f}, p99 {spread.p99:.2f}, max {spread.max:.2f}; "
            f"{counted(peer.hung, 'job')} "
            f"did not come back; others used {peer.others:.2f} CPUs"
        )


@app.command("overhead")
def overhead(
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=2, help="Ranks.")] = 2,
    backend: Annotated[str, typer.Option(help="A backend whose ranks are processes.")] = "shm",
    size: Annotated[str, typer.Option(help="Bytes of the all_reduce.")] = "8",
    rounds: Annotated[int, typer.Option(min=4, help="Turns of each variant.")] = 40,
    work: Annotated[float, typer.Option(min=0.1, help="Milliseconds of work in a step.")] = 20.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what is paid while nothing fails: by the flight recorder and metrics per op, by ft.Session per step.

    [bold]Examples[/bold]

        holdfast bench overhead --backend gloo --rounds 20
    """
    from holdfast.comms.errors import HoldfastError
    from holdfast.ft.console.console import console, print_json
    from holdfast.harness.bench.overhead.overhead import run, show

    try:
        nbytes = parse_size(size)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        cost = run(backend, ranks, nbytes, rounds, work, lambda text: typer.echo(text, err=True))
    except HoldfastError as error:
        raise _failed("overhead", error) from error
    if json:
        print_json(cost)
    else:
        show(cost, console())


@app.command("layer")
def layer(
    backend: Annotated[str, typer.Argument(help="gloo, mpi or nccl: a backend over a library that others made.")],
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=2, help="Ranks; of nccl always one.")] = 2,
    sizes: Annotated[str, typer.Option(help="Bytes of the all_reduce.")] = "8,1M,16M",
    rounds: Annotated[int, typer.Option(min=4, help="Turns of each way to call it.")] = 60,
    stand_in: Annotated[
        bool,
        typer.Option("--stand-in", help="For nccl: a group of torch that does nothing, in the place of NCCL."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what holdfast adds to a call of another library, in the same processes, in turn with calling it directly.

    [bold]Examples[/bold]

        holdfast bench layer gloo

        holdfast bench layer mpi --sizes 8 --rounds 200

        holdfast bench layer nccl --stand-in --sizes 8
    """
    from holdfast.comms.errors import HoldfastError
    from holdfast.ft.console.console import console, print_json
    from holdfast.harness.bench.drivers.layered import STAND_IN
    from holdfast.harness.bench.overhead.layer import run, show

    if stand_in and backend != "nccl":
        raise typer.BadParameter(f"--stand-in: {backend} needs none", param_hint="--stand-in")
    try:
        parsed = parse_sizes(sizes)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        cost = run(STAND_IN if stand_in else backend, parsed, ranks, rounds, lambda text: typer.echo(text, err=True))
    except HoldfastError as error:
        raise _failed("layer", error) from error
    if json:
        print_json(cost)
    else:
        show(cost, console())
