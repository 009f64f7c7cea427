"""Show chaos runs: pages for one run, many, or two reports side by side, and the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.ft.console.console import FoldingTable, panel, styled
from holdfast.ft.console.units import coarse_seconds, counted
from holdfast.harness.chaos.fault_type import FaultType
from holdfast.harness.chaos.outcome.checks import OF_RESULTS, WEIGHTS
from holdfast.harness.chaos.outcome.measure import STAGES
from holdfast.harness.chaos.outcome.record import ChaosReport, ChaosRun, ComparedFigure, HostLoss, compared
from holdfast.harness.chaos.scenario import Scenario
from holdfast.harness.report.charts import OUTAGE, draw_progress, draw_strip
from holdfast.harness.report.model import Figure, RunReport
from holdfast.harness.report.render import RunPictures, draw_learning, draw_run, environment
from holdfast.harness.training.live_view import LiveView
from holdfast.harness.training.report import write_episodes

# Pages ----------------------------------------------------------------------------------------------------------------


SCENES = 6
"""The most recoveries that a page shows call by call."""

_ORDER = ("driver", "rank", "spare", "trainer", "generator", "environment", "publisher", "holder", "reader")


@dataclass(frozen=True, slots=True)
class Section:
    """One run on the page: what any run's page has, and what chaos adds."""

    run: ChaosRun
    report: RunReport
    pictures: RunPictures
    learning: dict[str, Any]
    progress: str
    stood_still: bool
    strip: str
    episodes: str


def write_folder(report: ChaosReport, folder: Path) -> None:
    """Make the folder, and write report.html, run.json and the pages of episodes into it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_bytes(msgspec.json.encode(report))
    write_report(report, folder / "report.html")


def write_report(report: ChaosReport, path: Path) -> None:
    """Write the page of a report to `path`, and the episodes of its runs beside it. The folder must exist."""
    from markupsafe import Markup

    sections = [_section(run, Markup) for run in report.runs]
    page = environment().get_template("chaos.html.j2").render(report=report, sections=sections)
    path.write_text(page + "\n", encoding="utf-8")
    for run in report.runs:
        if run.episodes:
            write_episodes(path.with_name(_episodes(run)), f"Episodes: {run.title}", list(run.episodes))


def write_comparison(before: ChaosReport, after: ChaosReport, names: tuple[str, str], path: Path) -> None:
    """Write the page that sets two reports side by side to `path`, in a folder that this makes."""
    from markupsafe import Markup

    old, new = ({run.name: run for run in report.runs} for report in (before, after))
    both = [(old[name], new[name]) for name in new if name in old]
    pictures = [
        tuple(Markup(draw_progress(run.progress, run.injected, longest, _rate(run))) for run in pair)
        for pair in both
        for longest in [max(run.seconds for run in pair)]
    ]
    rows: list[tuple[ChaosRun, ChaosRun, list[ComparedFigure]]] = [(a, b, compared(a, b)) for a, b in both]
    page = (
        environment()
        .get_template("chaos_compare.html.j2")
        .render(rows=rows, pictures=pictures, names=names, before=before, after=after, outage=OUTAGE)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page + "\n", encoding="utf-8")


def report_of(run: ChaosRun) -> RunReport:
    """What the page of any run has of this one."""
    lanes = sorted(run.lives, key=lambda life: _ORDER.index(life.role) if life.role in _ORDER else 99)
    return RunReport(
        title=run.title,
        good=run.passed,
        outcome=_in_words(run),
        summary=run.summary,
        when=f"{datetime.fromisoformat(run.began):%d %B %Y, %H:%M %Z}".strip().lstrip("0"),
        seconds=run.seconds,
        figures=figures_of(run),
        learning=run.learning,
        lanes=tuple(lanes),
        spans=run.spans,
        faults=run.injected,
        configuration=(("workload", run.workload), *run.configuration.items()),
        repeat=(run.repeat,),
        seed=run.seed,
    )


def _section(run: ChaosRun, markup: Any) -> Section:
    report = report_of(run)
    rows: dict[str, list[tuple[float, str]]] = {}
    for fault in run.strikes:
        recovered = any(stage.name == "detected" for stage in fault.stages)
        for stage in fault.stages:
            rows.setdefault(stage.name if recovered else "next step", []).append((stage.seconds, fault.words))
    progress = draw_progress(run.progress, report.faults, run.seconds, _rate(run))
    return Section(
        run=run,
        report=report,
        pictures=draw_run(report, SCENES),
        learning={} if run.learning is None else draw_learning(run.learning, report.faults, run.seconds),
        progress=markup(progress),
        stood_still=OUTAGE in progress,
        strip=markup(draw_strip(rows)) if rows else "",
        episodes=_episodes(run) if run.episodes else "",
    )


def _episodes(run: ChaosRun) -> str:
    """The name of the page of a run's episodes."""
    return f"{run.name}-episodes.html"


def _in_words(run: ChaosRun) -> str:
    if not run.passed:
        return "not as expected"
    outcome = "held" if run.expected == "held" else "broken, as expected"
    return f"{outcome}; results unchecked" if run.unchecked else outcome


def _rate(run: ChaosRun) -> float | None:
    return run.reference.rate if run.reference is not None else None


def figures_of(run: ChaosRun) -> tuple[Figure, ...]:
    """The key figures of a run."""
    found = []
    if run.learning is not None and (held_out := run.learning.curve.evaluations):
        before, after = held_out[0].value, held_out[-1].value
        found.append(Figure("Held-out reward", f"{before:.1%} → {after:.1%}", "greedy, before and after", "good"))
    found.append(Figure("Steps committed", f"{run.speed.steps:,}", f"{run.speed.rate:,.1f} a second"))
    if run.goodput is not None:
        found.append(Figure("Goodput", f"{run.goodput:.1%}", "of the steps a second without faults"))
    injected = len(run.injected)
    found.append(Figure("Faults", f"{injected}", counted(run.rebuilds, "rebuild")))
    for name, note in (("detected", "from the fault"), ("rebuilt", "from the fault"), ("resumed", "to the next step")):
        if name in run.percentiles:
            of = run.percentiles[name]
            median = "" if of.count == 1 else f"median of {of.count}, "
            found.append(Figure(name.capitalize(), coarse_seconds(of.p50), f"{median}{note}"))
    found += [figure for loss in run.host_losses for figure in _figures_of(loss)]
    found += _final_state(run)
    broken = sum(len(finding.violations) for finding in run.findings)
    looked = sum(finding.looked for finding in run.findings)
    idle = sum(not finding.looked and not finding.violations for finding in run.findings)
    note = f"{counted(looked, 'event')} checked" + (f"; {counted(idle, 'invariant')} not checked" if idle else "")
    found.append(Figure("Violations", f"{broken}", note, "bad" if broken else "good"))
    return tuple(found)


def _final_state(run: ChaosRun) -> Iterator[Figure]:
    """What the comparison of the ranks' results came to."""
    if run.unchecked:
        yield Figure("Final state", "not checked", run.unchecked)
        return
    for finding in run.findings:
        if finding.invariant in OF_RESULTS:
            whose = "a run without faults" if finding.invariant == WEIGHTS else "all ranks"
            if finding.violations:
                yield Figure("Final state", "other bits", f"compared with {whose}", "bad")
            else:
                yield Figure("Final state", "equal bits", f"compared with {whose}", "good")


def _figures_of(loss: HostLoss) -> Iterator[Figure]:
    """How long the loss of a host kept the trainers, the generators and the copies of the weights."""

    def figure(what: str, seconds: float | None, note: str) -> Figure:
        if seconds is None:
            return Figure(f"Host lost to {what}", "never", note, "bad")
        return Figure(f"Host lost to {what}", coarse_seconds(seconds), note)

    yield figure("next step", loss.step, "committed in a new epoch")
    elsewhere = f"{counted(loss.calls, 'call')} of the lost host answered elsewhere"
    last = "" if loss.calls_answered is None else f", the last after {coarse_seconds(loss.calls_answered)}"
    yield figure("next answered call", loss.answer, elsewhere + last)
    yield figure("all copies", loss.copies, "each version of the weights has its copies again")


# The terminal ---------------------------------------------------------------------------------------------------------


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
