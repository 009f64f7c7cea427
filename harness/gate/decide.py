"""The gate's test: paired, robust against outliers, sequential, with a margin.

A *cluster* is one fresh pair of processes. In it the two sides take turns, A B B A, so that drift cancels; each such
group of four gives one log ratio, and the cluster counts by the mean of their middle half, so that a disturbed slice
does no harm. The clusters are independent of each other, even in properties that a process keeps for life (such as the
placement of its pages), so Student's t over clusters gives a valid interval.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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


def paired_ratio(quads: Sequence[tuple[float, float, float, float]]) -> float:
    """The log ratio of a cluster of groups: the mean over their middle half.

    A group is four times, in the order A, B, B, A.
    """
    ratios = sorted(math.log(b1 * b2 / (a1 * a2)) / 2 for a1, b1, b2, a2 in quads)
    outside = len(ratios) // 4
    return statistics.fmean(ratios[outside : len(ratios) - outside])


def t_cdf(t: float, degrees: int) -> float:
    """Student's distribution for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    theta = math.atan(abs(t) / math.sqrt(degrees))
    sine, cosine = math.sin(theta), math.cos(theta)
    term = total = 1.0 if degrees % 2 == 0 else cosine
    if degrees == 1:
        area = 2 * theta / math.pi
    else:
        for k in range(2 if degrees % 2 == 0 else 3, degrees, 2):
            term *= (k - 1) / k * cosine * cosine
            total += term
        area = sine * total if degrees % 2 == 0 else 2 / math.pi * (theta + sine * total)
    return 0.5 + math.copysign(area, t) / 2


@functools.cache
def t_quantile(probability: float, degrees: int) -> float:
    """The inverse of `t_cdf`, for probabilities of at least a half."""
    low, high = 0.0, 1.0
    while t_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, degrees) < probability else (low, middle)
    return high


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
