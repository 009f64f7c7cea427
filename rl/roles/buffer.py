"""The replay buffer: generated samples, kept until the step that trains on them is committed.

A step that is repeated after a failure takes the same samples again. Samples staler than the recipe's bound are
refused. Pure: no clock, no I/O.
"""

from __future__ import annotations

from holdfast.comms.errors import HoldfastError, Mismatch
from holdfast.rl.learning.recipe import Recipe
from holdfast.rl.units import Unit


class StaleUnit(HoldfastError):
    """Samples that were generated with other weights than their step requires."""


class ReplayBuffer:
    """Samples (encoded) by step and unit."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._units: dict[int, dict[int, bytes]] = {}
        self._committed = 0

    @property
    def committed(self) -> int:
        """The number of committed steps, whose samples are dropped."""
        return self._committed

    def __len__(self) -> int:
        """The number of kept units."""
        return sum(map(len, self._units.values()))

    def put(self, unit: Unit, samples: bytes) -> bool:
        """Keep the samples of a `generate` unit. False, with no change, if they are kept or their step is committed.

        Raises `StaleUnit` for a version that is not the one fixed for the step, `Mismatch` if other samples of this
        unit are kept: units must be reproducible.
        """
        if not 0 <= unit.step < self._recipe.steps or not 0 <= unit.number < self._recipe.units:
            raise ValueError(f"no unit {unit.number} of step {unit.step} in this run")
        if unit.version != self._recipe.version(unit.step):
            raise StaleUnit(
                f"unit {unit.number} of step {unit.step} was generated with weights version {unit.version}, but must "
                f"be with {self._recipe.version(unit.step)}"
            )
        if unit.step < self._committed:
            return False
        units = self._units.setdefault(unit.step, {})
        if unit.number in units:
            if units[unit.number] != samples:
                raise Mismatch(
                    f"unit {unit.number} of step {unit.step} was generated twice with different samples: generation "
                    "depends on more than (seed, step, unit, weights)"
                )
            return False
        units[unit.number] = samples
        return True

    def take(self, step: int, numbers: tuple[int, ...]) -> tuple[bytes, ...] | None:
        """The samples of these units of a step; None while one is missing. Repeatable until the step is committed.

        Raises ValueError for a step that is committed already.
        """
        if step < self._committed:
            raise ValueError(f"step {step} is committed; the buffer is at step {self._committed}")
        units = self._units.get(step, {})
        if any(number not in units for number in numbers):
            return None
        return tuple(units[number] for number in numbers)

    def commit(self, steps: int) -> None:
        """Drop the samples of the first `steps` steps, which are committed."""
        for step in range(self._committed, steps):
            self._units.pop(step, None)
        self._committed = max(self._committed, steps)
