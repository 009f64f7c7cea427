"""Reproduces a known bug: finds the first seed that shows it, and the smallest schedule that still does."""

from __future__ import annotations

from functools import partial

import msgspec

from holdfast.harness.simulate.core.schedule import Schedule
from holdfast.harness.simulate.known_bugs.known_bug import KnownBug
from holdfast.harness.simulate.search.draw import draw
from holdfast.harness.simulate.search.run import simulate
from holdfast.harness.simulate.search.shrink import shrink


class Sighting(msgspec.Struct, frozen=True):
    """The result of the search for a bug. `seeds` were tried; `checker` is the invariant that it broke, "" if none.

    `real`: without the bug neither the schedule of the seed nor the shrunk one breaks an invariant. `schedule` is the
    shrunk one, with `shrunk` events instead of `events`.
    """

    name: str
    bug: str
    origin: str
    seeds: int
    checker: str = ""
    message: str = ""
    real: bool = False
    events: int = 0
    shrunk: int = 0
    schedule: Schedule | None = None

    @property
    def found(self) -> bool:
        return bool(self.checker)


def reproduce(bug: KnownBug, seeds: int, tries: int = 120, first: int = 0) -> Sighting:
    """Find the first of `seeds` seeds with a schedule that shows a bug; shrink that in at most `tries` runs."""
    for tried, seed in enumerate(range(first, first + seeds), start=1):
        schedule = draw(seed)
        with bug.inject():
            violation = simulate(schedule).violation
        if violation is None:
            continue
        real = simulate(schedule).violation is None
        small = shrink(schedule, partial(_shows, bug, violation.invariant), tries)
        return Sighting(
            bug.name,
            bug.bug,
            bug.origin,
            tried,
            violation.invariant,
            violation.message,
            real and simulate(small).violation is None,
            len(schedule.faults),
            len(small.faults),
            small,
        )
    return Sighting(bug.name, bug.bug, bug.origin, seeds)


def _shows(bug: KnownBug, invariant: str, schedule: Schedule) -> bool:
    """Whether the schedule breaks the invariant with the bug, and nothing without it."""
    with bug.inject():
        violation = simulate(schedule).violation
    return violation is not None and violation.invariant == invariant and simulate(schedule).violation is None
