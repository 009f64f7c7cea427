"""The `holdfast demo` command: options, output, and exit status."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_REPORT = Path("report")


def demo(
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps; without it, enough to learn the task.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal final weights, with faults or without.")] = 0,
    backend: Annotated[str, typer.Option(help="What the trainers reduce gradients over: shm, gloo or ucx.")] = "shm",
    faults: Annotated[bool, typer.Option(help="Kill a trainer, a generator and a weight holder on the way.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")] = False,
    report: Annotated[Path, typer.Option(help="Folder for report.html and run.json.")] = DEFAULT_REPORT,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run again without faults, and compare the final weights bit by bit.")
    ] = False,
) -> None:
    """Train a tiny Llama by reinforcement on this machine, kill parts of the job, and watch it recover.

    [bold]Examples[/bold]

        holdfast demo

        holdfast demo --no-faults --backend gloo --seed 7

        holdfast demo --steps 40 --verify --json

    Two trainer ranks and a spare, two generators and two weight holders, all separate processes, learn sums of three
    digits (7+8+5= is 20). SIGKILL takes a trainer in the middle of an all_reduce, a generator in the middle of a
    generation, and the process that holds the newest weights. Nothing is restarted but what was killed.

    Exit status: 0 only if the held-out exact match truly rose, no step and no version of the weights was lost, and
    every invariant held; 1 if not; 2 if the run could not be done; 130 if interrupted.
    """
    began = time.monotonic()
    from holdfast.comms.errors import HoldfastError
    from holdfast.ft.console.outputs import check_folder, check_modules

    check_modules("rl", "the demo", "transformers")
    check_modules("report", "the report", "jinja2")
    check_folder(report, "--report", "report.html", "run.json")
    try:
        status = _demo(began, steps, seed, backend, faults, json, report, verify)
    except (HoldfastError, ValueError) as error:
        typer.echo(f"holdfast demo: {error}", err=True)
        status = 2
    except KeyboardInterrupt:
        typer.echo("holdfast demo: interrupted; all processes are ended", err=True)
        status = 130
    raise typer.Exit(status)


def _demo(
    began: float, steps: int | None, seed: int, backend: str, faults: bool, json: bool, report: Path, verify: bool
) -> int:
    import msgspec

    from holdfast.ft.console.console import console, print_json
    from holdfast.ft.console.outputs import writing
    from holdfast.harness.demo.display import Silent, display_for
    from holdfast.harness.demo.page import report_of
    from holdfast.harness.demo.plan import DemoPlan, check_backend
    from holdfast.harness.demo.record import DemoRun
    from holdfast.harness.demo.run import DemoRunner, RunSetup
    from holdfast.harness.demo.summary import as_object, show
    from holdfast.harness.demo.verdict import verified
    from holdfast.harness.report import write
    from holdfast.rl.learning.recipe import Recipe

    check_backend(backend)
    recipe = Recipe(seed=seed) if steps is None else Recipe(seed=seed, steps=steps)
    plan = DemoPlan(recipe=recipe, backend=backend)
    out = console()

    def run_once(plan: DemoPlan, since: float) -> DemoRun:
        with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as directory:
            setup = RunSetup.prepare(plan, Path(directory), since)
            return DemoRunner(plan, setup, Silent() if json else display_for(out, plan)).run()

    run = run_once(plan.with_faults() if faults else plan, began)
    if verify:
        if not json:
            out.print("Again, without faults, to compare the final weights:")
        run = verified(run, run_once(plan, time.monotonic()))
    if json:
        print_json(as_object(run))
    else:
        show(run, out)
    with writing("holdfast demo"):
        (report / "run.json").write_bytes(msgspec.json.encode(run))
        write(report_of(run), report / "report.html")
    typer.echo(f"report: {report / 'report.html'}", err=json)
    return 0 if run.outcome.passed else 1
