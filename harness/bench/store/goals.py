"""What the store is to reach, as data, and whether a run reached it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from holdfast.ft.console.units import format_bytes, format_seconds
from holdfast.harness.bench.store.results import GoalResult, StoreRatio, StoreRow

Measure = Literal["speed", "seconds", "early", "share", "times", "more", "memory"]


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound of one figure of holdfast.

    `measure` says of what: "speed", at least so many times that of the contestant `beside`; at most so many "seconds";
    the second and third turn ("early") at most so many times the later ones; at most such a "share", or so many
    "times", of the figure `beside`, or so many seconds "more"; at most so many bytes of private "memory".
    """

    figure: str
    measure: Measure
    bound: float
    beside: str = ""

    @property
    def words(self) -> str:
        match self.measure:
            case "speed":
                return f"at least {self.bound:g}x the speed of {self.beside}"
            case "seconds":
                return f"at most {format_seconds(self.bound)}"
            case "early":
                return f"the second and third turn at most {self.bound:g}x the later ones"
            case "share":
                return f"at most {self.bound:.0%} of {self.beside}"
            case "times":
                return f"at most {self.bound:.3g}x {self.beside}"
            case "memory":
                return f"at most {format_bytes(int(self.bound))} of memory"
            case "more":
                return f"at most {format_seconds(self.bound)} more than {self.beside}"


def check(
    workload: str,
    goal: Goal,
    rows: Mapping[tuple[str, str], StoreRow],
    ratios: Mapping[tuple[str, str, str], StoreRatio],
) -> GoalResult | None:
    """Whether a goal was reached; None if it was not measured.

    `rows` are those of holdfast by workload and figure, `ratios` by workload, figure and peer.
    """
    row = rows.get((workload, goal.figure))
    if row is None:
        return None
    seconds = row.timing.p50 / 1e6
    if goal.measure == "speed":
        ratio = ratios.get((workload, goal.figure, goal.beside))
        if ratio is None:
            return None
        reached, met = f"{ratio.median:.3g}x", ratio.median >= goal.bound
    elif goal.measure == "seconds":
        reached, met = format_seconds(seconds), seconds <= goal.bound
    elif goal.measure == "memory":
        if row.memory is None:
            return None
        reached, met = format_bytes(row.memory), row.memory <= goal.bound
    elif goal.measure == "early":
        times = max((each for each in row.early[1:] if each is not None), default=0.0) / row.timing.p50
        reached, met = f"{times:.3g}x", times <= goal.bound
    else:
        other = rows.get((workload, goal.beside))
        if other is None:
            return None
        base = other.timing.p50 / 1e6
        if goal.measure == "more":
            more = max(0.0, seconds - base)
            reached, met = format_seconds(more), more <= goal.bound
        else:
            share = seconds / base
            reached, met = f"{share:.1%}" if goal.measure == "share" else f"{share:.3g}x", share <= goal.bound
    return GoalResult(workload, goal.figure, goal.words, reached, met)
