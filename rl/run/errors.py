"""Errors of a run."""

from __future__ import annotations

from holdfast.comms.errors import HoldfastError
from holdfast.ft.console.units import counted


class StepsDone(HoldfastError):
    """A run has been trained for more steps than it shall have: `done` of `steps`."""

    def __init__(self, done: int, steps: int) -> None:
        self.done, self.steps = done, steps
        super().__init__(
            f"the run has {counted(done, 'step')} already, and steps = {steps}: raise it to go on, or begin a new run "
            "in another directory"
        )


class RunFailed(HoldfastError):
    """The run cannot go on; what it has committed is kept, and a new driver may resume it."""
