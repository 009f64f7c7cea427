"""Draws a schedule from a scenario and a seed: which fault hits which process, when. Equal seeds, equal schedules.

All random choices of a run are made here, in the order of the faults, each from a generator of its own: adding a fault
to a scenario does not change the choices for those before it.
"""

from __future__ import annotations

import hashlib
import random

import msgspec

from holdfast.harness.chaos.scenario.fault_type import FaultType
from holdfast.harness.chaos.scenario.scenario import At, Scenario


class Trigger(msgspec.Struct, frozen=True, kw_only=True):
    """The moment of a fault.

    At the commit of `step`, `seconds` after the job began to run, or when a process is at `point` (with the given step,
    rank and epoch, -1 for any, and not before the step `since`).
    """

    step: int | None = None
    seconds: float | None = None
    point: str | None = None
    in_step: int = -1
    since: int = -1
    rank: int = -1
    epoch: int = -1

    def words(self) -> str:
        """The moment in words."""
        if self.step is not None:
            return f"step {self.step}"
        if self.seconds is not None:
            return f"{self.seconds:.2f} s"
        narrowed = [f"{name} {value}" for name, value in self._narrowed() if value >= 0]
        return f"at {self.point}" + (f" ({', '.join(narrowed)})" if narrowed else "")

    def _narrowed(self) -> tuple[tuple[str, int], ...]:
        return (("step", self.in_step), ("from step", self.since), ("rank", self.rank), ("epoch", self.epoch))


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A fault with all random choices made. `number` counts from 1. `again`: it recurs as long as the run lasts."""

    number: int
    type: str
    when: Trigger
    what: FaultType
    lasts: float | None = None
    again: bool = False


def schedule(
    scenario: Scenario, seed: int, *, steps: int | None = None, seconds: float | None = None
) -> tuple[Planned, ...]:
    """Every fault of a run, in the order of the scenario, with recurring ones up to `seconds`.

    Shares of a run count in `steps` (default: the workload's). Raises ValueError for a fault that cannot be placed.
    """
    found: list[tuple[Trigger, FaultType, str, float | None, bool]] = []
    total = steps if steps is not None else scenario.workload.steps
    for index, fault in enumerate(scenario.faults):
        dice = random.Random(_seed(seed, scenario.name, index))
        at = fault.at
        if at.every is None:
            what = fault.what.drawn(dice, scenario)
            found.append((_trigger(at, dice, total), what, fault.type, fault.lasts, False))
            continue
        if seconds is None:
            raise ValueError("a fault that comes again and again needs a run of a known duration: give `minutes`")
        moment = at.every if at.start is None else at.start
        while moment < seconds:
            what = fault.what.drawn(dice, scenario)
            found.append((Trigger(seconds=round(moment, 6)), what, fault.type, fault.lasts, True))
            moment += at.every
    found.sort(key=lambda each: each[0].seconds if each[0].seconds is not None else -1.0)
    return tuple(
        Planned(number=number, type=kind, when=when, what=what, lasts=lasts, again=again)
        for number, (when, what, kind, lasts, again) in enumerate(found, start=1)
    )


def encoded(planned: tuple[Planned, ...]) -> bytes:
    """The schedule as JSON: equal schedules have equal bytes."""
    return msgspec.json.encode(planned, order="sorted")


def _trigger(at: At, dice: random.Random, total: int | None) -> Trigger:
    step = at.step
    if at.random is not None:
        if total is None:
            raise ValueError(
                "a random step needs to know how many steps there are: say so by `steps` in [workload], or steps="
            )
        low, high = (round(share * (total - 1)) for share in at.random)
        step = dice.randint(low, max(low, high))
    if at.point is not None:
        narrowed = {"in_step": at.in_step, "since": step, "rank": at.rank, "epoch": at.epoch}
        return Trigger(point=at.point, **{name: value for name, value in narrowed.items() if value is not None})
    return Trigger(step=step, seconds=at.seconds)


def _seed(seed: int, name: str, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}/{index}".encode(), digest_size=8).digest(), "big")
