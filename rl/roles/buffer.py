"""The replay buffer: what generators made, kept until the step that trains on it is committed.

A step that is done again after a failure takes the same samples again. Nothing staler than the recipe's bound ever
comes in. Pure: no clock, no I/O.
"""

from __future__ import annotations

from holdfast.comms.errors import HoldfastError, Mismatch
from holdfast.rl.learning.recipe import Recipe
from holdfast.rl.units import Unit


class StaleUnit(HoldfastError):
    """Samples of other weights than those that their step must be generated with."""


class ReplayBuffer:
    """Samples (encoded) by step and unit."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._units: dict[int, dict[int, bytes]] = {}
        self._committed = 0

    @property
    def committed(self) -> int:
        """Steps that are committed: their samples are gone."""
        return self._committed

    def __len__(self) -> int:
        """The units that are kept."""
        return sum(map(len, self._units.values()))

    def put(self, unit: Unit, samples: bytes) -> bool:
        """Keep the samples of a `generate` unit. False, and nothing changes, if they are not needed: they are there,
        or their step is committed.

        Raises `StaleUnit` for a version that is not the one fixed for the step, `Mismatch` if other samples of this
        unit are there: units must be reproducible.
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
        """The samples of these units of a step, again and again until it is committed; None while one is missing.

        ValueError for a step that is committed already.
        """
        if step < self._committed:
            raise ValueError(f"step {step} is committed; the buffer is at step {self._committed}")
        units = self._units.get(step, {})
        if any(number not in units for number in numbers):
            return None
        return tuple(units[number] for number in numbers)

    def commit(self, steps: int) -> None:
        """The first `steps` steps are committed: let go of their samples."""
        for step in range(self._committed, steps):
            self._units.pop(step, None)
        self._committed = max(self._committed, steps)
