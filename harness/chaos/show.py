"""The terminal output of `holdfast chaos`: lists, a progress bar, results, comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.ft.console.console import FoldingTable, panel, styled
from holdfast.ft.console.units import coarse_seconds
from holdfast.harness.chaos.outcome.compare import ComparedFigure
from holdfast.harness.chaos.outcome.measure import STAGES
from holdfast.harness.chaos.outcome.page import figures_of
from holdfast.harness.chaos.outcome.record import ChaosReport, ChaosRun
from holdfast.harness.chaos.scenario.fault_type import FaultType
from holdfast.harness.chaos.scenario.scenario import Scenario
from holdfast.harness.training.live_view import LiveView


def listing(scenarios: Sequence[Scenario], kinds: Mapping[str, type[FaultType]]) -> Iterator[RenderableType]:
    """The tables of `holdfast chaos list`."""
    columns = ("scenario", "workload", "backend", "faults", "what it is")
    table = FoldingTable(*columns, title="scenarios", title_justify="left")
    for each in scenarios:
        faults = ", ".join(dict.fromkeys(fault.type for fault in each.faults))
        kind = type(each.workload).__struct_config__.tag
        backend = each.job.backend if each.workload.family == "session" else ""
        table.add_row(each.name, str(kind), backend, faults, each.title)
    yield table
    faults_table = FoldingTable(
        "fault", "what it is", "keys besides type, at and lasts", title="fault types", title_justify="left"
    )
    for name, kind_ in sorted(kinds.items()):
        faults_table.add_row(name, kind_.summary, ", ".join(kind_.__struct_encode_fields__))
    yield faults_table


class ScenarioView(LiveView):
    """Shows scenarios while they run: phases and notes go to `notes`, titles and outcomes to `console`."""

    def __init__(self, notes: Console, console: Console) -> None:
        super().__init__(notes)
        self._notes, self._out = notes, console

    def begin_scenario(self, scenario: Scenario, compare: bool) -> None:
        """Show that a scenario begins."""
        self._out.print(styled(scenario.title, "bold"))
        if not self._notes.is_terminal:
            runs = "two runs" if compare else "one run"
            self._notes.print(f"  {scenario.name}: {runs} of at most {scenario.limit:.0f} s, most take a few seconds")

    def end_scenario(self, run: ChaosRun) -> None:
        """Show that a scenario is over."""
        style, word = ("green", "as expected") if run.passed else ("bold red", "NOT as expected")
        self._end(f"{word}, {run.seconds:.1f} s", style)

    def fail_scenario(self, why: str) -> None:
        """Show that a scenario could not be run."""
        self._end(f"could not be run: {why.splitlines()[0]}", "bold red")

    def _end(self, words: str, style: str) -> None:
        self.end_phase()
        self._out.print(styled(f"  {words}", style))


def results(report: ChaosReport) -> Iterator[RenderableType]:
    """The table of all runs, and the failures of each."""
    table = FoldingTable(
        "", "scenario", "faults", "detected", "rebuilt", "resumed", "goodput", "violations", title_justify="left"
    )
    for run in report.runs:
        stages = [
            coarse_seconds(run.percentiles[name].p50) if name in run.percentiles else "-"
            for name in ("detected", "rebuilt", "resumed")
        ]
        goodput = "-" if run.goodput is None else f"{run.goodput:.0%}"
        broken = sum(len(finding.violations) for finding in run.findings)
        mark = Text("✓", "green") if run.passed else Text("✗", "bold red")
        table.add_row(mark, run.name, str(len(run.injected)), *stages, goodput, str(broken))
    yield table
    for run in report.runs:
        if run.passed and run.unchecked:
            yield Text(f"{run.name}: results of the ranks not checked: {run.unchecked}")
        if not run.passed:
            yield panel("\n".join(run.failures), title=f"{run.name}: not as expected", style="bold red")


def whole_run(run: ChaosRun) -> Iterator[RenderableType]:
    """The figures of one run, what each fault cost, and whether it came out as expected."""
    table = FoldingTable(show_header=False, box=None, padding=(0, 2))
    for figure in figures_of(run):
        table.add_row(figure.label.lower(), styled(figure.value, "bold"), figure.note)
    yield table
    faults = FoldingTable("fault", "process", "step", *STAGES)
    for each in run.strikes:
        took = {stage.name: coarse_seconds(stage.seconds) for stage in each.stages}
        where = f"{each.words}, {each.when}"
        faults.add_row(where, ", ".join(each.victims), str(each.step), *(took.get(name, "-") for name in STAGES))
    yield faults
    if run.passed:
        yield panel(_held(run), title="passed", style="bold green")
    else:
        yield panel("\n".join(run.failures), title="failed", style="bold red")


def _held(run: ChaosRun) -> str:
    """What a run that passed has shown, and what it has not."""
    idle = [finding.invariant for finding in run.findings if not finding.looked]
    lines = ["every invariant that was checked held, nothing was lost"]
    lines += [f"not checked, as no event was about it: {', '.join(idle)}"] if idle else []
    lines += [f"results of the ranks not checked: {run.unchecked}"] if run.unchecked else []
    return "\n".join(lines)


def comparison(title: str, names: tuple[str, str], rows: Sequence[ComparedFigure]) -> Table:
    """The table that sets two runs side by side."""
    table = FoldingTable("", *names, "change", "", title=title, title_justify="left")
    styles = {"better": "green", "worse": "red", "equal": "dim", "": ""}
    for row in rows:
        table.add_row(row.name, row.before, row.after, row.change, Text(row.direction, styles[row.direction]))
    return table
