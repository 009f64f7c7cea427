"""Shows the findings of blame: the suspects as a table, and the evidence behind them."""

from __future__ import annotations

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.text import Text

from holdfast.ft.console.console import FoldingTable
from holdfast.ft.console.units import counted
from holdfast.ft.diagnosis.evidence import JobEvidence
from holdfast.ft.diagnosis.finding import MEANING, Finding

_COLOURS = {"crash": "bold red", "hang": "red", "cut": "magenta", "mismatch": "yellow", "slow": "cyan", "stuck": "dim"}


def render(evidence: JobEvidence, findings: list[Finding], limit: int) -> RenderableType:
    """The surest `limit` suspects."""
    lines: list[RenderableType] = []
    if findings:
        table = FoldingTable(expand=True, show_lines=len(findings) > 1)
        table.add_column("suspect")
        table.add_column("what")
        table.add_column("sure", justify="right")
        table.add_column("evidence", ratio=1)
        for finding in findings[:limit]:
            link = f"rank {finding.rank} → {finding.to}" if finding.to is not None else f"rank {finding.rank}"
            who = Text.assemble((link, "bold"), (f"\nepoch {finding.epoch}", "dim"))
            if finding.pid:
                who.append(f"\npid {finding.pid}", "dim")
            words = Text.assemble((MEANING[finding.kind], "italic"), "\n", finding.evidence)
            table.add_row(who, Text(finding.kind, _COLOURS[finding.kind]), f"{finding.score:.0%}", words)
        lines.append(table)
    else:
        lines.append(
            Text("Nobody is to blame: no op failed, none hangs, and no rank keeps the others waiting.", "green")
        )
    ops = sum(len(recording.ops) for recording in evidence.recordings)
    torn = sum(recording.torn for recording in evidence.recordings)
    counts = ((len(evidence.recordings), "recording"), (ops, "op"), (len(evidence.events), "event"))
    basis = ", ".join(counted(count, noun) for count, noun in counts)
    lines.append(Text(basis + (f", {counted(torn, 'op')} torn" if torn else ""), "dim"))
    lines += [Text(f"not read: {reason}", "yellow") for reason in evidence.bad]
    return Lines(*lines)
