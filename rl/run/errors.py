"""Errors of a run."""

from __future__ import annotations

from holdfast.comms.errors import HoldfastError


class RunFailed(HoldfastError):
    """The run cannot go on; what it has committed is kept, and a new driver may resume it."""
