"""The plan of a demo run, made before anything starts."""

from __future__ import annotations

from typing import Self

import msgspec

from holdfast.comms.errors import BackendUnavailable
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import Unavailable
from holdfast.harness.demo.record import Victim
from holdfast.rl.crew import INSIDE_GENERATION, INSIDE_REDUCTION, Crew, Fault
from holdfast.rl.learning.recipe import Recipe

ENOUGH_STEPS = 300
"""Runs with fewer steps are too short to judge whether they have learned."""

TIMEOUT = 900.0
"""Seconds after which a run has failed, however slow the machine."""


def check_backend(name: str) -> None:
    """Raise `BackendUnavailable` for a backend that cannot run here, or cannot connect processes."""
    backend = registry().backend(name)
    if launcher := backend.info.capabilities.launcher:
        why = f"{launcher} starts all its processes together, and the demo starts new ones in place of those it kills"
        raise BackendUnavailable(name, why, "use shm, gloo or ucx")
    if isinstance(backend.status, Unavailable):
        raise BackendUnavailable(name, backend.status.reason, backend.status.install_hint)
    if backend.info.connect is None or backend.info.capabilities.one_process:
        raise BackendUnavailable(name, "it cannot connect processes", "use shm, gloo or ucx")


class PlannedKill(msgspec.Struct, frozen=True):
    """One fault: the victim, and the step in which to kill it."""

    victim: Victim
    step: int


class DemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Without `kills` it has no faults."""

    recipe: Recipe
    backend: str
    crew: Crew = Crew()
    kills: tuple[PlannedKill, ...] = ()
    timeout: float = TIMEOUT

    def with_faults(self) -> Self:
        """This plan, with one fault of each kind: after about a quarter, a half and three quarters of the steps."""
        last = self.recipe.steps - 1
        return msgspec.structs.replace(
            self,
            kills=(
                PlannedKill("trainer", round(0.25 * last)),
                PlannedKill("generator", round(0.5 * last)),
                PlannedKill("holder", round(0.75 * last)),
            ),
        )

    def kill(self, victim: Victim) -> PlannedKill | None:
        """The planned kill of this victim."""
        return next((kill for kill in self.kills if kill.victim == victim), None)

    @property
    def points(self) -> tuple[Fault, ...]:
        """The points at which workers must wait to be killed."""
        where = {"trainer": INSIDE_REDUCTION, "generator": INSIDE_GENERATION}
        return tuple((where[each.victim], each.step) for each in self.kills if each.victim in where)

    @property
    def too_short(self) -> bool:
        """Whether the run is too short to judge whether it has learned."""
        return self.recipe.steps < ENOUGH_STEPS
