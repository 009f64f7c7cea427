"""The `holdfast demo` command: the scenario `rl-demo`, shown while it runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from holdfast.harness.chaos.judge.record import ChaosRun
    from holdfast.harness.chaos.scenario.scenario import Scenario

SCENARIO = "rl-demo"

ENOUGH_STEPS = 600
"""Runs with fewer steps are too short to judge whether they have learned."""


def demo(
    steps: Annotated[
        int | None, typer.Option(min=8, help="Training steps; without it, enough to learn the task.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides the weights, the data, the samples and the faults.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")] = False,
    report: Annotated[Path, typer.Option(help="Folder for report.html, the episodes and run.json.")] = Path("report"),
) -> None:
    """Train a tiny Llama by reinforcement on this machine, kill parts of the job, and watch it recover.

    [bold]Examples[/bold]

        holdfast demo

        holdfast demo --seed 7 --report seven

        holdfast demo --steps 60 --json

    A driver, two trainers and a spare, two generators, two holders of weights and two servers of an environment, all
    separate processes on Monarch, learn sums of three digits (7+8+5= is 20). SIGKILL takes a trainer in the middle of
    an all_reduce, a generator between two tokens, a server in which a part of the episodes is played, and a holder of
    weights; SIGSTOP stops another server and another generator. It is the scenario rl-demo: the same faults, checks
    and report as holdfast chaos run rl-demo has.

    Exit status: 0 only if held-out exact match is over 85% at the end, no step, prompt or version of the weights was
    lost, and every invariant held; 1 if not; 2 if the run could not be done; 130 if interrupted.
    """
    from holdfast.comms.errors import HoldfastError
    from holdfast.ft.console.outputs import check_folder, check_modules

    check_modules("rl", "the demo", "transformers", "monarch")
    check_modules("report", "the report", "jinja2")
    check_folder(report, "--report", "report.html", "run.json")
    try:
        status = _demo(steps, seed, json, report)
    except (HoldfastError, ValueError) as error:
        typer.echo(f"holdfast demo: {error}", err=True)
        status = 2
    except KeyboardInterrupt:
        typer.echo("holdfast demo: interrupted; all processes are ended", err=True)
        status = 130
    raise typer.Exit(status)


def _demo(steps: int | None, seed: int, json: bool, folder: Path) -> int:
    from importlib.metadata import version

    from holdfast.ft.console.console import console, print_json
    from holdfast.ft.console.outputs import writing
    from holdfast.harness.chaos.judge.page import write_folder
    from holdfast.harness.chaos.judge.record import ChaosReport
    from holdfast.harness.chaos.run.scenario_runner import ScenarioRunner
    from holdfast.harness.chaos.scenario import library
    from holdfast.harness.chaos.scenario.scenario import text_of
    from holdfast.harness.chaos.show import machine, whole_run
    from holdfast.harness.training.live_view import LiveView

    scenario = _scenario(steps, seed)
    total = scenario.workload.steps or 0
    more = [] if steps is None else ["--steps", str(steps)]
    repeat = shlex.join(["holdfast", "demo", "--seed", str(seed), *more])
    out = console(quiet=json)
    with LiveView(out, total, quiet=json) as view:
        runner = ScenarioRunner(observe=view, announce=view.note)
        source = text_of(library.path_of(SCENARIO))
        run = runner.run(scenario, seed, source=source, compare=False, repeat=repeat).run
    if json:
        print_json(as_object(run))
    else:
        for each in whole_run(run):
            out.print(each)
        if total < ENOUGH_STEPS:
            out.print("too short a run to judge whether it has learned")
    with writing("holdfast demo"):
        write_folder(ChaosReport(version=version("holdfast"), machine=machine(), runs=(run,)), folder)
    typer.echo(f"report: {folder / 'report.html'}", err=json)
    return 0 if run.passed else 1


def _scenario(steps: int | None, seed: int) -> Scenario:
    import msgspec

    from holdfast.harness.chaos.scenario import library
    from holdfast.harness.chaos.scenario.workload import ReinforcementLearning

    scenario = library.find(SCENARIO)
    assert isinstance(scenario.workload, ReinforcementLearning)
    changed: dict[str, Any] = {"seed": seed} if steps is None else {"seed": seed, "steps": steps}
    workload = msgspec.structs.replace(scenario.workload, run={**scenario.workload.run, **changed})
    expect = scenario.expect
    if workload.steps < ENOUGH_STEPS:
        expect = msgspec.structs.replace(expect, held_out=0.0)
    return msgspec.structs.replace(scenario, workload=workload, expect=expect)


def as_object(run: ChaosRun) -> dict[str, Any]:
    """The run as an object for JSON; times in seconds."""
    held_out = () if run.learning is None else run.learning.curve.evaluations
    return {
        "passed": run.passed,
        "failures": list(run.failures),
        "held_out": {"first": held_out[0].value, "last": held_out[-1].value} if held_out else {},
        "steps": run.speed.steps,
        "seconds": run.seconds,
        "digest": run.digest,
        "seed": run.seed,
        "faults": [
            {
                "fault": each.words,
                "when": each.when,
                "process": ", ".join(each.victims),
                "step": each.step,
                "time": each.time,
                "recovery": {stage.name: stage.seconds for stage in each.stages},
            }
            for each in run.strikes
        ],
        "looked": {finding.invariant: finding.looked for finding in run.findings},
        "violations": [
            f"{violation.invariant}: {violation.process}: {violation.message}"
            for finding in run.findings
            for violation in finding.violations
        ],
    }
