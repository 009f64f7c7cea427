"""Shrinks a failing schedule, as long as the same invariant breaks.

It deletes, weakens and retimes events, and switches options off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import asdict, replace

from holdfast.harness.simulate.core.faults import (
    AtPoint,
    Fault,
    KillHost,
    KillProcess,
    KillRack,
    KillShare,
    PartitionHosts,
)
from holdfast.harness.simulate.core.schedule import JobLayout, NetworkModel, Schedule

TRIES = 400
GRID = (1.0, 0.5, 0.1, 0.05, 0.01, 0.001)
"""Times are rounded to multiples of the coarsest of these that still fails."""

Fails = Callable[[Schedule], bool]


class Shrinker:
    """Tries smaller schedules by calling `fails`, at most `tries` times."""

    def __init__(self, fails: Fails, tries: int = TRIES) -> None:
        self._fails, self.left = fails, tries

    def shrink(self, schedule: Schedule) -> Schedule:
        """The smallest schedule found that still fails, as `schedule` does."""
        while True:
            smaller = self._pass(schedule)
            if smaller == schedule or self.left <= 0:
                return smaller
            schedule = smaller

    def _pass(self, schedule: Schedule) -> Schedule:
        for step in (_deletions, _simpler_options, _weaker, _sooner):
            schedule = self._descend(schedule, step)
        return schedule

    def _descend(self, schedule: Schedule, step: Callable[[Schedule], Iterator[Schedule]]) -> Schedule:
        """Repeatedly take the first proposal that still fails."""
        found = True
        while found and self.left > 0:
            found = False
            for proposal in step(schedule):
                if self.left <= 0:
                    break
                self.left -= 1
                if self._fails(proposal):
                    schedule, found = proposal, True
                    break
        return schedule


def shrink(schedule: Schedule, fails: Fails, tries: int = TRIES) -> Schedule:
    """The smallest schedule found in `tries` tries for which `fails` holds, as it does for `schedule`."""
    return Shrinker(fails, tries).shrink(schedule)


def _made(schedule: Schedule, **changes: Any) -> Iterator[Schedule]:
    """The changed schedule, or None if it is invalid."""
    try:
        changed = replace(schedule, **changes)
    except ValueError:
        return
    if changed != schedule:
        yield changed


def _deletions(schedule: Schedule) -> Iterator[Schedule]:
    faults = schedule.faults
    size = len(faults) // 2
    while size >= 1:
        for first in range(0, len(faults), size):
            yield from _made(schedule, faults=faults[:first] + faults[first + size :])
        size //= 2


def _simpler_options(schedule: Schedule) -> Iterator[Schedule]:
    for name, value in asdict(NetworkModel()).items():
        if getattr(schedule.network, name) != value:
            yield from _made(schedule, network=replace(schedule.network, **{name: value}))
    layout, plain = schedule.layout, JobLayout()
    for name in ("form", "mesh", "compute"):
        if getattr(layout, name) != getattr(plain, name):
            yield from _made(schedule, layout=replace(layout, **{name: getattr(plain, name)}))
    for name, least in (("spares", 0), ("min_size", 1), ("steps", 1), ("ranks", layout.hosts)):
        value = getattr(layout, name)
        for fewer in dict.fromkeys((least, (least + value) // 2, value - 1)):
            if least <= fewer < value:
                yield from _laid_out(schedule, **{name: fewer})


def _laid_out(schedule: Schedule, **changes: int) -> Iterator[Schedule]:
    try:
        layout = replace(schedule.layout, **changes)
    except ValueError:
        return
    yield from _made(schedule, layout=layout)


def _weaker(schedule: Schedule) -> Iterator[Schedule]:
    for index, fault in enumerate(schedule.faults):
        for weak in _weaker_faults(fault, schedule.layout):
            yield from _made(schedule, faults=(*schedule.faults[:index], weak, *schedule.faults[index + 1 :]))


def _weaker_faults(fault: Fault, layout: JobLayout) -> Iterator[Fault]:
    match fault:
        case KillShare(at=at, share=share):
            if share > 1 / layout.hosts:
                yield KillShare(at=at, share=share / 2)
            yield KillHost(at=at, host=0)
        case KillRack(at=at, rack=rack):
            yield from (KillHost(at=at, host=h) for h in range(layout.hosts) if layout.rack_of(h) == rack)
        case KillHost(at=at, host=host):
            yield from (KillProcess(at=at, process=p) for p in range(layout.ranks) if layout.host_of(p) == host)
        case PartitionHosts(hosts=hosts) if len(hosts) > 1:
            yield from (replace(fault, hosts=(host,)) for host in hosts)
        case AtPoint(nth=nth) if nth > 1:
            yield replace(fault, nth=nth // 2)
    for name in ("seconds", "delay", "share"):
        value = getattr(fault, name, 0.0)
        if name != "share" and value > 0.02:
            yield from (replace(fault, **{name: round(value * part, 3)}) for part in (0.5, 0.8))


def _sooner(schedule: Schedule) -> Iterator[Schedule]:
    for index, fault in enumerate(schedule.faults):
        for grid in GRID:
            at = round(round(fault.at / grid) * grid, 4)
            if at == fault.at:
                break
            moved = replace(fault, at=at)
            yield from _made(schedule, faults=(*schedule.faults[:index], moved, *schedule.faults[index + 1 :]))
