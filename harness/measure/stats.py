"""Statistics of timings: percentiles, ratios by pairs, and Student's t for intervals."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np


class Timing(msgspec.Struct, frozen=True):
    """Statistics of one way of timing, in microseconds an op.

    `samples` counts the timings, `block` the ops in each.
    """

    p50: float
    p99: float
    min: float
    samples: int
    block: int

    @staticmethod
    def of(seconds: Sequence[float], block: int) -> Timing:
        """The statistics of timings of `block` ops that took `seconds` each."""
        each = np.asarray(seconds, dtype=np.float64) * (1e6 / block)
        return Timing(
            p50=float(np.percentile(each, 50)),
            p99=float(np.percentile(each, 99)),
            min=float(each.min()),
            samples=len(each),
            block=block,
        )


class Spread(msgspec.Struct, frozen=True):
    """Statistics in milliseconds."""

    median: float
    p90: float
    p99: float
    max: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        p50, p90, p99, most = np.percentile(list(values), [50, 90, 99, 100])
        return Spread(float(p50), float(p90), float(p99), float(most))


class Pairwise(NamedTuple):
    """How many times as fast: the median, the least and the most over rounds."""

    median: float
    least: float
    most: float


def pairwise(ours: Sequence[float], theirs: Sequence[float]) -> Pairwise:
    """How many times as fast ours was, by rounds: a slow round counts for both."""
    ratios = [their / our for our, their in zip(ours, theirs, strict=False)]
    return Pairwise(statistics.median(ratios), min(ratios), max(ratios))


def paired_ratio(quads: Sequence[tuple[float, float, float, float]]) -> float:
    """The log ratio of B to A, from groups of times A, B, B, A.

    It is the mean of the middle half of the groups.
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
