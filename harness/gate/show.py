"""Shows the gate's results: as a table in the terminal, and as Markdown for a pull request."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from holdfast.ft.console.console import styled
from holdfast.harness.gate.decide import DecisionRule
from holdfast.harness.gate.gate import GateReport, WorkloadResult
from holdfast.harness.measure.show import figures, others, show_time

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
    """The error rates of the rule, in words. `tests/support/programs/gate_calibration.py` measures them."""
    return (
        f"a slowdown is called one if the whole interval lies above {rule.margin:.0%}; all workloads together call "
        f"equal code slower with a chance of at most {rule.alarm:.0%}, and overlook {rule.effect:.0%} with one of "
        f"about {rule.miss:.1%} each"
    )


def show(report: GateReport, out: Console) -> None:
    """Print the report."""
    out.print(f"base: {report.base}\nhead: {report.head}")
    if report.pins:
        differ = styled("pinned versions differ", "yellow")
        out.print(differ + f", both sides ran with what is installed: {', '.join(report.pins)}")
    table = figures(
        f"CPU time an op, {report.seconds:.0f} s; {others(report.others)}",
        ("workload", "base", "head", "slower by", "pairs", "verdict"),
        names=("workload", "slower by", "verdict"),
        caption=promise(report.rule),
    )
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
