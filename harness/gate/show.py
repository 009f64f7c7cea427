"""Shows the gate's results: as a table in the terminal, and as Markdown for a pull request."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from holdfast.ft.console.console import FoldingTable, styled
from holdfast.ft.console.units import counted
from holdfast.harness.bench.output.show import show_time
from holdfast.harness.gate.calibrate import Calibration
from holdfast.harness.gate.decide import DecisionRule
from holdfast.harness.gate.gate import GateReport, WorkloadResult

_MARK = {
    "does not run": "❌ does not run",
    "slower": "❌ slower",
    "faster": "🚀 faster",
    "same": "✅ same",
    "unsure": "❔ unsure",
}
_STYLE = {"does not run": "bold red", "slower": "bold red", "faster": "green", "same": "default", "unsure": "yellow"}


def _change(finding: WorkloadResult) -> str:
    """The slowdown and its interval, as percent."""
    if not finding.clusters:
        return ""
    return f"{finding.slowdown:+.1%} ({finding.low:+.1%} to {finding.high:+.1%})"


def promise(rule: DecisionRule) -> str:
    """The error rates of the rule, in words."""
    return (
        f"a slowdown is called one if the whole interval lies above {rule.margin:.0%}; all workloads together call "
        f"equal code slower with a chance of at most {rule.alarm:.0%}, and overlook {rule.effect:.0%} with one of "
        f"about {rule.miss:.1%} each; `holdfast gate --calibrate` measures both"
    )


def show(report: GateReport, out: Console) -> None:
    """Print the report."""
    out.print(f"base: {report.base}\nhead: {report.head}")
    if report.pins:
        differ = styled("pinned versions differ", "yellow")
        out.print(differ + f", both sides ran with what is installed: {', '.join(report.pins)}")
    table = FoldingTable(
        title=f"CPU time an op, {report.seconds:.0f} s; other processes used {report.others:.2f} CPUs meanwhile",
        title_justify="left",
        caption=promise(report.rule),
        caption_justify="left",
    )
    for name in ("workload", "base", "head", "slower by", "pairs", "verdict"):
        table.add_column(name, justify="right" if name in ("base", "head", "pairs") else "left")
    for each in report.findings:
        verdict = each.verdict if not each.why else f"{each.verdict}: {each.why}"
        table.add_row(
            Text.assemble(each.workload, "\n", styled(each.what, "dim")),
            show_time(each.base_us),
            show_time(each.head_us),
            _change(each),
            str(each.clusters),
            styled(verdict, _STYLE.get(each.verdict, "yellow")),
        )
    out.print(table)


def _headline(report: GateReport) -> str:
    """The outcome in a line, including workloads that could not be compared."""
    parts = [
        f"❌ {what}: {', '.join(finding.workload for finding in findings)}"
        for what, findings in (("Does not run", report.broken), ("Slower", report.slower))
        if findings
    ]
    if not parts:
        parts.append("❔ Nothing was compared" if report.status else "✅ No slowdown found")
    if report.undecided:
        parts.append(f"❔ {len(report.undecided)} undecided")
    return ", ".join(parts)


def markdown(report: GateReport) -> str:
    """The report as a comment for a pull request."""
    lines = [
        f"### {_headline(report)}",
        "",
        f"`{report.base}` → `{report.head}`",
        "",
        "| workload | base | head | slower by | verdict |",
        "|---|---:|---:|---|---|",
    ]
    for each in report.findings:
        verdict = _MARK.get(each.verdict, f"❔ {each.verdict}") + f": {each.why}" * bool(each.why)
        lines.append(
            f"| **{each.workload}**: {each.what} | {show_time(each.base_us)} | {show_time(each.head_us)} "
            f"| {_change(each)} | {verdict} |"
        )
    lines += ["", f"CPU time an op, interleaved and paired; {promise(report.rule)}."]
    if report.pins:
        lines += ["", f"Pinned versions differ, both sides ran with what is installed: {', '.join(report.pins)}."]
    return "\n".join(lines)


def show_calibration(found: Calibration, out: Console) -> None:
    """Print how often the gate was right."""
    table = FoldingTable(
        title=(
            f"{found.commit}, both sides: {counted(found.trials, 'trial')} of {found.workloads} workloads, "
            f"{found.seconds:.0f} s; "
            f"other processes used {found.others:.2f} CPUs meanwhile"
        ),
        title_justify="left",
        caption=(
            f"{found.alarms} of {found.trials} runs on equal code called some workload slower "
            f"({found.alarms / found.trials:.1%}); {found.injected:.0%} put in was found in {found.power:.1%}"
        ),
        caption_justify="left",
    )
    for name in ("workload", "put in", "slower", "faster", "same", "unsure", "estimated", "pairs"):
        table.add_column(name, justify="left" if name == "workload" else "right")
    for rate in found.rates:
        table.add_row(
            "" if rate.injected else rate.workload,
            f"{rate.injected:.0%}",
            *(f"{count}" for count in (rate.slower, rate.faster, rate.same, rate.unsure)),
            f"{rate.mean:+.2%} ± {rate.spread:.2%}",
            f"{rate.clusters:.1f}",
        )
    out.print(table)


def calibration_markdown(found: Calibration) -> str:
    """How often the gate was right, as Markdown."""
    lines = [
        f"{counted(found.trials, 'trial')} of each kind at `{found.commit}`, of {found.workloads} workloads at once, "
        f"in "
        f"{found.seconds / 60:.0f} minutes, while other processes used {found.others:.2f} CPUs. Equal code was called "
        f"slower in {found.alarms} of {found.trials} runs; {found.injected:.0%} put in was found in {found.power:.1%}.",
        "",
        "| workload | put in | slower | faster | same | unsure | estimated, ± standard deviation | pairs |",
        "|---|---:|---:|---:|---:|---:|---|---:|",
    ]
    lines += [
        f"| {rate.workload} | {rate.injected:.0%} | {rate.slower} | {rate.faster} | {rate.same} | {rate.unsure} "
        f"| {rate.mean:+.2%} ± {rate.spread:.2%} | {rate.clusters:.1f} |"
        for rate in found.rates
    ]
    return "\n".join(lines)
