"""The units of work of a run: which are open, leased or done. Pure: no clock, no I/O.

The units of a dead worker go back to the queue, and that worker gets no other unit, though a call of it may still wait
for one. A unit is a pure function of its name and of the weights of its version, so any worker may do it, even twice:
the first result counts.
"""

from __future__ import annotations

import heapq
from typing import Literal

import msgspec

from holdfast.rl.learning.recipe import Recipe

Kind = Literal["generate", "evaluate"]


class Unit(msgspec.Struct, frozen=True, order=True):
    """A unit of work with the weights of `version`; units sort in the order in which they should be done.

    `generate`: unit `number` of `step`. `evaluate`: greedy answers to the held-out prompts; `step` is `version`.
    """

    version: int
    step: int
    number: int
    kind: Kind


class UnitLease(msgspec.Struct, frozen=True):
    """A unit that a worker has since `since` (seconds on the caller's clock)."""

    unit: Unit
    worker: str
    since: float


class Ledger:
    """Opens the units of a run as versions are published, leases them out and takes them back."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._published = -1
        self._queue: list[Unit] = []
        self._leases: dict[Unit, UnitLease] = {}
        self._open: set[Unit] = set()
        self._gone: set[str] = set()

    @property
    def published(self) -> int:
        """The newest version that is known to be published; -1 before the first."""
        return self._published

    @property
    def open(self) -> frozenset[Unit]:
        """Units that are not done yet, leased or not."""
        return frozenset(self._open)

    @property
    def leases(self) -> tuple[UnitLease, ...]:
        """The leases of all workers."""
        return tuple(self._leases.values())

    def publish(self, version: int) -> tuple[Unit, ...]:
        """Open and return the units that need versions up to `version`, which are published now."""
        recipe, new = self._recipe, range(self._published + 1, version + 1)
        opened = [
            Unit(needed, step, number, "generate")
            for needed in new
            for step in recipe.steps_with(needed)
            for number in range(recipe.units)
        ]
        opened += [Unit(judged, judged, 0, "evaluate") for judged in new if recipe.evaluates(judged)]
        self._published = max(self._published, version)
        for unit in opened:
            self._open.add(unit)
            heapq.heappush(self._queue, unit)
        return tuple(sorted(opened))

    def lease(self, worker: str, now: float) -> Unit | None:
        """Lease the next free unit to `worker`; None if there is none now, or the worker is gone."""
        if worker in self._gone:
            return None
        while self._queue:
            unit = heapq.heappop(self._queue)
            if unit in self._open and unit not in self._leases:
                self._leases[unit] = UnitLease(unit, worker, now)
                return unit
        return None

    def complete(self, unit: Unit) -> bool:
        """Mark a unit done, by any worker. False if it was done before, or never opened."""
        if unit not in self._open:
            return False
        self._open.remove(unit)
        self._leases.pop(unit, None)
        return True

    def release(self, worker: str) -> tuple[Unit, ...]:
        """Put the units of a worker that is gone back in the queue; returns them."""
        self._gone.add(worker)
        units = tuple(sorted(lease.unit for lease in self._leases.values() if lease.worker == worker))
        for unit in units:
            del self._leases[unit]
            heapq.heappush(self._queue, unit)
        return units

    def overdue(self, before: float) -> tuple[UnitLease, ...]:
        """Leases that began before `before`."""
        return tuple(lease for lease in self._leases.values() if lease.since < before)
