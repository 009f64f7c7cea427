"""The gate's test: paired, robust against outliers, sequential, with a margin.

A *cluster* is one fresh pair of processes. In it the two sides take turns, A B B A, so that drift cancels; each such
group of four gives one log ratio, and the cluster counts by the mean of their middle half, so that a disturbed slice
does no harm. The clusters are independent of each other, even in properties that a process keeps for life (such as the
placement of its pages), so Student's t over clusters gives a valid interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.harness.measure.stats import t_quantile

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
    `miss` lies below the effect. "unsure": neither yet.
    """
    count = len(ratios)
    mean = statistics.fmean(ratios)
    if count < 2:
        return "unsure", Estimate(math.expm1(mean), -1.0, math.inf, count)
    error = statistics.stdev(ratios) / math.sqrt(count)
    sure = t_quantile(1 - rule.alarm / workloads, count - 1) * error
    likely = t_quantile(1 - rule.miss, count - 1) * error
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
