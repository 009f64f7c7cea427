"""Summarises a run: as a table for people, as an object for programs."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from holdfast.ft.console.console import FoldingTable, panel, styled
from holdfast.ft.console.units import counted
from holdfast.harness.demo.record import DemoFault, DemoRun

TITLES = {"trainer": "trainer rank killed", "generator": "generator killed", "holder": "weight holder killed"}


def show(run: DemoRun, console: Console) -> None:
    """Print the summary."""
    console.print(Group(_figures(run), *([_recoveries(run)] if run.blows else []), _verdict(run)))


def as_object(run: DemoRun) -> dict[str, Any]:
    """The summary as an object for JSON; times in seconds."""
    outcome = run.outcome
    return {
        "passed": outcome.passed,
        "failures": list(outcome.failures),
        "too_short_to_judge": outcome.too_short,
        "held_out": {"untrained": outcome.untrained, "before": outcome.before, "after": outcome.after},
        "reward": {"first": mean_reward(run, last=False), "last": mean_reward(run, last=True)},
        "steps": len(run.steps),
        "steps_lost": outcome.steps_lost,
        "versions_lost": outcome.versions_lost,
        "violations": [msgspec.to_builtins(violation) for finding in run.findings for violation in finding.violations],
        "looked": {finding.invariant: finding.looked for finding in run.findings},
        "faults": [
            {
                "victim": fault.victim,
                "process": fault.process,
                "where": fault.where,
                "step": fault.step,
                "time": fault.time,
                "recovery": {stage.name: stage.seconds for stage in fault.stages},
            }
            for fault in run.blows
        ],
        "digest": outcome.digest,
        "verified": outcome.verified,
        "backend": run.backend,
        "seed": run.recipe.seed,
        "seconds": run.seconds,
        "setup_seconds": run.setup_seconds,
        "step_seconds": run.step_seconds,
        "tokens_per_second": run.tokens_per_second,
    }


def mean_reward(run: DemoRun, *, last: bool, window: int = 25) -> float:
    """The mean reward of the first or last steps."""
    steps = run.steps[-window:] if last else run.steps[:window]
    return sum(step.reward for step in steps) / max(1, len(steps))


def _figures(run: DemoRun) -> Table:
    outcome = run.outcome
    table = FoldingTable(show_header=False, box=None, padding=(0, 2))
    table.add_row(
        "held-out exact match",
        styled(f"{outcome.before:.1%} -> {outcome.after:.1%}", "bold") + f" by reinforcement "
        f"({outcome.untrained:.1%} with random weights, before {run.recipe.warmup_steps} supervised steps)",
    )
    table.add_row("training reward", f"{mean_reward(run, last=False):.3f} -> {mean_reward(run, last=True):.3f}")
    table.add_row("committed steps", Text(f"{len(run.steps)}; lost: ") + styled(outcome.steps_lost, "bold"))
    table.add_row("weights versions", Text(f"{run.recipe.steps + 1}; lost: ") + styled(outcome.versions_lost, "bold"))
    looked = sum(finding.looked for finding in run.findings)
    violations = sum(len(finding.violations) for finding in run.findings)
    table.add_row(
        "invariants",
        Text(f"{len(run.findings)} checked over {counted(looked, 'event')}; violations: ") + styled(violations, "bold"),
    )
    table.add_row(
        "speed",
        f"{run.tokens_per_second:,.0f} tokens/s, {run.step_seconds * 1e3:.1f} ms a step, "
        f"{run.seconds:.1f} s in all after {run.setup_seconds:.1f} s of imports",
    )
    verified = {None: "", outcome.digest: "; equal to those of a run without faults"}
    table.add_row(
        "final weights", outcome.digest + verified.get(outcome.verified, f"; WITHOUT FAULTS {outcome.verified}")
    )
    return table


def _recoveries(run: DemoRun) -> Table:
    table = FoldingTable("fault", "where", "detected", "rebuilt or replaced", "made good")
    for fault in run.blows:
        table.add_row(f"{TITLES[fault.victim]} ({fault.process})", f"step {fault.step}, {fault.where}", *_stages(fault))
    return table


def _stages(fault: DemoFault) -> list[str]:
    cells = [f"{stage.seconds * 1e3:.1f} ms" for stage in fault.stages]
    if len(cells) == 3:
        cells[2] += f" ({fault.stages[2].name})"
    return cells + ["never"] * (3 - len(cells))


def _verdict(run: DemoRun) -> Panel:
    if not run.outcome.passed:
        return panel("\n".join(run.outcome.failures), title="failed", style="bold red")
    lost = "nothing was lost, every invariant held"
    if run.outcome.too_short:
        return panel(f"{lost}; too short a run to judge whether it has learned", title="passed", style="green")
    return panel(f"it learned, {lost}", title="passed", style="bold green")
