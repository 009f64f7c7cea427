"""The `holdfast chaos` commands. Nothing heavy is imported before one of them runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.harness.command_line import CommandGroup, check_folder, check_modules, in_one_line, writing

if TYPE_CHECKING:
    from holdfast.harness.chaos.outcome.record import ChaosReport, ChaosRun

app = CommandGroup(
    help="Break a job on real processes, and see how it recovers.",
    epilog="Start with: holdfast chaos list, then holdfast chaos run kill-rank. All keys: docs/reference/scenarios.md.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]


@app.command(name="list")
def list_scenarios(json: Json = False) -> None:
    """List the scenarios that come with holdfast, and the fault types that there are.

    [bold]Examples[/bold]

        holdfast chaos list

        holdfast chaos list --json | jq -r '.scenarios[].name'
    """
    from holdfast.ft.console.console import console, print_json
    from holdfast.harness.chaos.fault_type import fault_types
    from holdfast.harness.chaos.outcome.show import listing
    from holdfast.harness.chaos.scenario import find_scenario, scenario_names, scenario_path

    scenarios = [find_scenario(name) for name in scenario_names()]
    if json:
        print_json(
            {
                "scenarios": [
                    {
                        "name": each.name,
                        "title": each.title,
                        "summary": each.summary.strip(),
                        "workload": type(each.workload).__struct_config__.tag,
                        "backend": each.job.backend,
                        "faults": [fault.type for fault in each.faults],
                        "file": str(scenario_path(each.name)),
                    }
                    for each in scenarios
                ],
                "faults": {
                    name: {"summary": kind.summary, "keys": list(kind.__struct_encode_fields__)}
                    for name, kind in sorted(fault_types().items())
                },
            }
        )
        return
    out = console()
    for table in listing(scenarios, fault_types()):
        out.print(table)


@app.command()
def show(
    scenario: Annotated[str, typer.Argument(help="A scenario's name or file.")],
    seed: Annotated[int, typer.Option(min=0, help="The schedule of this seed.")] = 0,
) -> None:
    """Print a scenario's file and the schedule that a seed gives it. Nothing is run.

    [bold]Examples[/bold]

        holdfast chaos show kill-rank --seed 7 > mine.toml
    """
    from holdfast.harness.chaos.scenario import find_scenario, scenario_path, schedule, text_of

    with in_one_line("holdfast chaos", ValueError):
        path = scenario_path(scenario)
        loaded = find_scenario(scenario)
        planned = schedule(loaded, seed, seconds=None if loaded.minutes is None else 60 * loaded.minutes)
    typer.echo(text_of(path).rstrip())
    typer.echo(f"\n# With --seed {seed}:")
    for each in planned:
        lasts = "" if each.lasts is None else f", for {each.lasts:g} s"
        typer.echo(f"#   {each.number}. {each.when.words()}: {each.what.words()}{lasts}")


@app.command()
def run(
    scenarios: Annotated[list[str], typer.Argument(help="Names (`holdfast chaos list`) or TOML files.")],
    seed: Annotated[
        int, typer.Option(min=0, help="Decides all that is left to chance. Equal seeds, equal faults.")
    ] = 0,
    report: Annotated[Path, typer.Option(help="Folder for report.html and run.json.")] = Path("report"),
    json: Json = False,
    minutes: Annotated[
        float | None, typer.Option(min=0.05, help="How long a run with faults is, instead of what the scenario says.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--reference/--no-reference", help="Also run without faults, for goodput and equal bits.")
    ] = True,
) -> None:
    """Run scenarios on real processes of this machine, break them, and check every invariant.

    [bold]Examples[/bold]

        holdfast chaos run kill-rank

        holdfast chaos run scenarios/*.toml --seed 7 --report nightly

        holdfast chaos run soak --minutes 5

        holdfast chaos run my-training.toml --json | jq '.runs[].percentiles.resumed'

    Each is run twice: without faults, for the final state and the speed, and with the faults that the seed gives. The
    folder gets report.html (one file, works offline) and run.json.

    Exit status: 0 only if every run came out as its scenario expects; 1 if not; 2 if one could not be run; 74 if the
    report could not be written; 130 if interrupted. A run that fails prints the command that repeats it.
    """
    from holdfast.ft.console.console import print_json
    from holdfast.ft.processes.zygote_start import start_early

    check_modules("report", "the report", "jinja2", "matplotlib")
    check_folder(report, "--report", "report.html", "run.json")
    start_early()
    try:
        with in_one_line("holdfast chaos", ValueError, OSError):
            made, refused = _run(scenarios, seed, minutes, compare, quiet=json)
    except KeyboardInterrupt:
        typer.echo("holdfast chaos: interrupted; all processes are ended", err=True)
        raise typer.Exit(130) from None
    for line in refused:
        typer.echo(f"holdfast chaos: {line}", err=True)
    if not made.runs:
        raise typer.Exit(2)
    if json:
        print_json(_summary(made))
    else:
        _tell(made)
    with writing("holdfast chaos"):
        from holdfast.harness.chaos.outcome.show import write_folder

        write_folder(made, report)
    typer.echo(f"report: {report / 'report.html'}", err=json)
    raise typer.Exit(2 if refused else 0 if made.passed else 1)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A run.json, or a folder that has one.")],
    after: Annotated[Path, typer.Argument(help="Another.")],
    report: Annotated[Path | None, typer.Option(help="Folder for compare.html.")] = None,
    json: Json = False,
) -> None:
    """Set two runs side by side: outcomes, percentiles of detection, rebuild and resume, goodput.

    [bold]Examples[/bold]

        holdfast chaos run kill-rank --report before; holdfast chaos run kill-rank --report after

        holdfast chaos compare before after --report comparison

    Exit status: 0 if both have a scenario in common, whatever became of it.
    """
    from holdfast.ft.console.console import console, print_json
    from holdfast.harness.chaos.outcome.record import compared, load_report
    from holdfast.harness.chaos.outcome.show import comparison

    if report is not None:
        check_modules("report", "--report", "jinja2", "matplotlib")
    check_folder(report, "--report", "compare.html")
    with in_one_line("holdfast chaos", OSError):
        reports = load_report(before), load_report(after)
    old, new = ({run.name: run for run in each.runs} for each in reports)
    both = [name for name in new if name in old]
    if not both:
        typer.echo(f"holdfast chaos: no scenario is in both: {', '.join(old)} and {', '.join(new)}", err=True)
        raise typer.Exit(2)
    rows = {name: compared(old[name], new[name]) for name in both}
    if json:
        print_json(rows)
    else:
        out = console()
        for name in both:
            out.print(comparison(new[name].title, (_label(before), _label(after)), rows[name]))
    if report is not None:
        from holdfast.harness.chaos.outcome.show import write_comparison

        with writing("holdfast chaos"):
            write_comparison(*reports, (_label(before), _label(after)), report / "compare.html")
        typer.echo(f"report: {report / 'compare.html'}", err=json)


def _label(path: Path) -> str:
    return path.parent.name if path.name == "run.json" else path.name or str(path)


def _run(
    names: list[str], seed: int, minutes: float | None, compare: bool, *, quiet: bool
) -> tuple[ChaosReport, list[str]]:
    """Run the scenarios; returns the runs, and why others could not be run. Raises `BadScenario` before the first."""
    import msgspec

    from holdfast.comms.errors import HoldfastError
    from holdfast.ft.console.console import console
    from holdfast.harness.chaos.outcome.record import ChaosReport
    from holdfast.harness.chaos.outcome.show import ScenarioView
    from holdfast.harness.chaos.run.scenario_run import RunCallbacks
    from holdfast.harness.chaos.run.scenario_runner import ScenarioRunner
    from holdfast.harness.chaos.scenario import find_scenario, scenario_path, text_of

    loaded = [(name, find_scenario(name)) for name in names]
    ids = _ids([scenario.name for _, scenario in loaded], [scenario_path(name) for name in names])
    runs: list[ChaosRun] = []
    refused: list[str] = []
    with ScenarioView(console(stderr=True), console(quiet=quiet)) as view:
        runner = ScenarioRunner(RunCallbacks(watch=view.step, narrate=view.note))
        for (name, scenario), own in zip(loaded, ids, strict=True):
            view.begin_scenario(scenario, compare)
            try:
                made = runner.run(
                    scenario,
                    seed,
                    source=text_of(scenario_path(name)),
                    minutes=minutes,
                    compare=compare,
                    repeat=_repeat(name, seed, minutes, compare),
                )
            except (HoldfastError, ValueError, RuntimeError, OSError) as error:
                refused.append(f"{name} could not be run: {error}")
                view.fail_scenario(str(error))
                continue
            view.end_scenario(made.report)
            runs.append(msgspec.structs.replace(made.report, name=own))
    return ChaosReport.of(*runs), refused


def _ids(names: list[str], paths: list[Path]) -> list[str]:
    """The names of the runs in one report: those of the scenarios, with the folder where several have one name."""
    found: list[str] = []
    for name, path in zip(names, paths, strict=True):
        folder = re.sub(r"[^a-z0-9-]+", "-", path.resolve().parent.name.lower()).strip("-")
        own = name if names.count(name) == 1 else f"{folder}-{name}".strip("-")
        found.append(own if own not in found else f"{own}-{len(found) + 1}")
    return found


def _repeat(name: str, seed: int, minutes: float | None, compare: bool) -> str:
    more = [] if minutes is None else ["--minutes", f"{minutes:g}"]
    return shlex.join(
        ["holdfast", "chaos", "run", name, "--seed", str(seed), *more, *([] if compare else ["--no-reference"])]
    )


def _tell(made: ChaosReport) -> None:
    from holdfast.ft.console.console import console
    from holdfast.harness.chaos.outcome.show import results

    out = console()
    for thing in results(made):
        out.print(thing)
    for each in made.runs:
        if not each.passed:
            typer.echo(f"repeat: {each.repeat}")


def _summary(made: ChaosReport) -> dict[str, Any]:
    """The output of `--json`: the report without the data of pictures."""
    import msgspec

    pictures = ("spans", "progress", "lives", "output", "source", "learning", "episodes")
    runs = []
    for each in made.runs:
        plain = msgspec.to_builtins(each)
        runs.append({**{k: v for k, v in plain.items() if k not in pictures}, "goodput": each.goodput})
    return {"passed": made.passed, "version": made.version, "machine": made.machine, "runs": runs}
