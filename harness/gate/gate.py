"""A run of the gate: measures clusters of pairs until every workload is decided, and reports the verdicts."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from holdfast.harness.gate.decide import DecisionRule, Estimate, Verdict, decide
from holdfast.harness.gate.pairs import CannotRun, PairLauncher, slices
from holdfast.harness.gate.sides import Side, differing_pins
from holdfast.harness.gate.workloads import WORKLOADS, GateWorkload
from holdfast.harness.measure.noise import Noise
from holdfast.harness.measure.stats import paired_ratio

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
    def undecided(self) -> tuple[WorkloadResult, ...]:
        return tuple(finding for finding in self.findings if finding.verdict == "unsure")

    @property
    def status(self) -> int:
        """The exit status: 2 if HEAD fails or nothing was compared, 1 if it is slower, or else 0."""
        if self.broken or not any(finding.clusters for finding in self.findings):
            return 2
        return 1 if self.slower else 0


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
