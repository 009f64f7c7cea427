"""Renders chaos runs: a page for one run or many, and a page that sets two reports side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from holdfast.ft.console.units import coarse_seconds, counted
from holdfast.harness.chaos.outcome.checks import OF_RESULTS, WEIGHTS
from holdfast.harness.chaos.outcome.compare import ComparedFigure, compared
from holdfast.harness.chaos.outcome.record import ChaosReport, ChaosRun, HostLoss
from holdfast.harness.report.charts import OUTAGE, draw_progress, draw_strip
from holdfast.harness.report.model import Figure, RunReport
from holdfast.harness.report.render import RunPictures, draw_learning, draw_run, environment
from holdfast.harness.training import episodes_page

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
    """Write report.html, run.json and the pages of episodes into an existing folder."""
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
            episodes_page.write(path.with_name(_episodes(run)), f"Episodes: {run.title}", list(run.episodes))


def write_comparison(before: ChaosReport, after: ChaosReport, names: tuple[str, str], path: Path) -> None:
    """Write the page that sets two reports side by side to `path`."""
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
