"""A run of the gate: measures clusters of pairs until every workload is decided, and reports the verdicts.

The test is paired, robust against outliers, sequential, with a margin. A *cluster* is one fresh pair of processes. In
it the two sides take turns, A B B A, so that drift cancels; each such group of four gives one log ratio, and the
cluster counts by the mean of their middle half, so that a disturbed slice does no harm. The clusters are independent of
each other, even in properties that a process keeps for life (such as the placement of its pages), so Student's t over
clusters gives a valid interval.

"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec
from rich.console import Console
from rich.text import Text

from holdfast.ft.console.console import styled
from holdfast.harness.gate.pairs import CannotRun, PairLauncher, slices
from holdfast.harness.gate.sides import Side, differing_pins
from holdfast.harness.gate.workloads import WORKLOADS, GateWorkload
from holdfast.harness.measure.results import Noise, figures, others, show_time
from holdfast.harness.measure.stats import paired_ratio, t_quantile

# The decision ---------------------------------------------------------------------------------------------------------


LOOKS = 8
"""As many looks that are independent overlook as often as those after each cluster, which have most clusters in common.

Measured with normally distributed clusters: `miss` is kept at any noise; with 6 it is not.
"""

Verdict = Literal["slower", "faster", "same", "unsure"]


@dataclass(frozen=True, slots=True)
class DecisionRule:
    """The rule that calls a workload slower.

    `alarm` is the chance, over all workloads together, to call equal code slower; `miss` that to call code the same
    that is slower by `effect`. A slowdown within `margin` is never an alarm. After `first` clusters, and after each
    further one up to `most`, the test is made.
    """

    effect: float = 0.05
    margin: float = 0.01
    alarm: float = 0.01
    miss: float = 0.005
    first: int = 6
    most: int = 40


@dataclass(frozen=True, slots=True)
class Estimate:
    """A slowdown as a share (0.05: 5% slower), its interval, and the number of clusters."""

    slowdown: float
    low: float
    high: float
    clusters: int


def decide(ratios: Sequence[float], rule: DecisionRule, workloads: int) -> tuple[Verdict, Estimate]:
    """The decision that the log ratios of the clusters so far allow, among `workloads` workloads.

    "slower": the interval at level `alarm / workloads` lies above the margin. "same": the one-sided interval at level
    `miss / LOOKS` lies below the effect. "unsure": neither yet.
    """
    count = len(ratios)
    mean = statistics.fmean(ratios)
    if count < 2:
        return "unsure", Estimate(math.expm1(mean), -1.0, math.inf, count)
    error = statistics.stdev(ratios) / math.sqrt(count)
    sure = t_quantile(1 - rule.alarm / workloads, count - 1) * error
    likely = t_quantile(1 - rule.miss / LOOKS, count - 1) * error
    estimate = Estimate(math.expm1(mean), math.expm1(mean - sure), math.expm1(mean + sure), count)
    if count < rule.first:
        return "unsure", estimate
    if estimate.low > rule.margin:
        return "slower", estimate
    if estimate.high < -rule.margin:
        return "faster", estimate
    if math.expm1(mean + likely) < rule.effect:
        return "same", estimate
    return "unsure", estimate


# The run --------------------------------------------------------------------------------------------------------------


GROUPS = 12
"""Groups of turns in a cluster, for each rank of the workload: ranks that wait for each other are noisier."""

Progress = Callable[[str], None]


class WorkloadResult(msgspec.Struct, frozen=True):
    """One workload: CPU microseconds of an op on either side (medians), the slowdown of HEAD, and the verdict.

    `low` and `high` bound the slowdown at the gate's level. `why` says why a workload could not be compared.
    """

    workload: str
    what: str
    base_us: float
    head_us: float
    slowdown: float
    low: float
    high: float
    clusters: int
    verdict: Verdict | str
    why: str = ""


class GateReport(msgspec.Struct, frozen=True):
    """A whole run. `others` is how many CPUs other processes used meanwhile.

    `pins` are the pinned versions that differ between the sides, though both ran with the installed ones.
    """

    base: str
    head: str
    findings: tuple[WorkloadResult, ...]
    rule: DecisionRule
    seconds: float
    others: float
    pins: tuple[str, ...] = ()

    @property
    def slower(self) -> tuple[WorkloadResult, ...]:
        return tuple(finding for finding in self.findings if finding.verdict == "slower")

    @property
    def broken(self) -> tuple[WorkloadResult, ...]:
        """The workloads that BASE runs and HEAD does not."""
        return tuple(finding for finding in self.findings if finding.verdict == "does not run")

    @property
    def status(self) -> int:
        """The exit status: 2 if HEAD fails or nothing was compared, 1 if it is slower, 3 if it may be, or else 0."""
        if self.broken or not any(finding.clusters for finding in self.findings):
            return 2
        if self.slower:
            return 1
        may_be = any(finding.verdict == "unsure" and finding.high > self.rule.effect for finding in self.findings)
        return 3 if may_be else 0


@dataclass(slots=True)
class ComparisonState:
    """The state of one comparison of one workload: the ratios of its clusters, and the decision so far.

    `extra` is a share of work that the head does beyond the base's: 0.05 makes it 5% slower.
    """

    workload: GateWorkload
    extra: float = 0.0
    ratios: list[float] = field(default_factory=list)
    base: list[float] = field(default_factory=list)
    head: list[float] = field(default_factory=list)
    verdict: Verdict = "unsure"
    why: str = ""
    broken: bool = False
    estimate: Estimate = field(default_factory=lambda: Estimate(0.0, -1.0, math.inf, 0))

    @property
    def open(self) -> bool:
        return self.verdict == "unsure" and not self.why

    def add(self, base: Sequence[tuple[float, float]], head: Sequence[tuple[float, float]]) -> None:
        """Add the turns of one cluster."""
        quads = [(a1, b1, b2, a2) for (a1, a2), (b1, b2) in zip(base, head, strict=True)]
        self.ratios.append(paired_ratio(quads))
        self.base += [1e6 * each / self.workload.ops for pair in base for each in pair]
        self.head += [1e6 * each / self.workload.ops for pair in head for each in pair]

    def judge(self, rule: DecisionRule, workloads: int) -> None:
        self.verdict, self.estimate = decide(self.ratios, rule, workloads)

    def finding(self) -> WorkloadResult:
        base, head = (statistics.median(times) if times else math.nan for times in (self.base, self.head))
        given = self.estimate
        return WorkloadResult(
            self.workload.name, self.workload.what, base, head, given.slowdown, given.low, given.high, given.clusters,
            "does not run" if self.broken else "not compared" if self.why else self.verdict, self.why,
        )  # fmt: skip


def chosen(names: Sequence[str]) -> tuple[GateWorkload, ...]:
    """The workloads of these names; all if there are none. Raises ValueError for an unknown name."""
    known = {workload.name: workload for workload in WORKLOADS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no such workload: {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(known[name] for name in names) if names else WORKLOADS


def cluster(launcher: PairLauncher, sides: Sequence[Side], number: int, states: Sequence[ComparisonState]) -> None:
    """Run all undecided workloads on one fresh pair of processes.

    The side that is forked first, and the side with the first turn, change from cluster to cluster. A workload that
    ends the processes of a side ends the cluster: the others come in the next one.
    """
    order = ["base", "head"] if number % 2 == 0 else ["head", "base"]
    by_name = dict(zip(("base", "head"), sides, strict=True))
    with launcher.pair([by_name[name] for name in order]) as started:
        for state in states:
            if not state.open:
                continue
            running = dict(zip(order, started, strict=True))
            running["head"] = replace(running["head"], extra=state.extra)
            try:
                taken = slices(running, state.workload, GROUPS * state.workload.ranks)
            except CannotRun as error:
                state.why, state.broken = str(error), error.name == "head"
                if error.ended:
                    return
                continue
            state.add(taken["base"], taken["head"])


def compare(
    launcher: PairLauncher,
    sides: tuple[Side, Side],
    rule: DecisionRule,
    states: Sequence[ComparisonState],
    progress: Progress = lambda text: None,
) -> None:
    """Run clusters until every workload is decided, or there were `rule.most` of them."""
    workloads = len({state.workload.name for state in states})
    for number in range(rule.most):
        still = [state for state in states if state.open]
        if not still:
            break
        progress(f"pair {number + 1}: {', '.join(state.workload.name for state in still)}")
        cluster(launcher, sides, number, still)
        for state in still:
            if state.ratios and not state.why:
                state.judge(rule, workloads)


def run(
    sides: tuple[Side, Side], rule: DecisionRule, names: Sequence[str] = (), progress: Progress = lambda text: None
) -> GateReport:
    """Compare the two sides. Raises `SideFailed` if one does not run at all, ValueError for unknown names."""
    began, noise = time.monotonic(), Noise()
    states = tuple(ComparisonState(workload) for workload in chosen(names))
    with PairLauncher() as launcher:
        compare(launcher, sides, rule, states, progress)
    return GateReport(
        base=sides[0].title,
        head=sides[1].title,
        findings=tuple(state.finding() for state in states),
        rule=rule,
        seconds=time.monotonic() - began,
        others=noise.cpus(),
        pins=differing_pins(*sides),
    )


# The report -----------------------------------------------------------------------------------------------------------


_STYLE = {"does not run": "bold red", "slower": "bold red", "faster": "green", "same": "default", "unsure": "yellow"}


def _change(finding: WorkloadResult) -> str:
    """The slowdown and its interval, as percent."""
    if not finding.clusters:
        return ""
    return f"{finding.slowdown:+.1%} ({finding.low:+.1%} to {finding.high:+.1%})"


def promise(rule: DecisionRule) -> str:
    """The error rates of the rule, in words. `docs/experiments/gate_calibration.py` measures them."""
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
