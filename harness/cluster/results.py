"""The outcome of a call on each rank, and the choice of the failure to raise when several ranks failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.comms.errors import PeerFailed, Revoked
from holdfast.ft.error_history import StepFailed


@dataclass(frozen=True, slots=True)
class RankResult:
    """The outcome of a call on one rank: its `value`, or the `error` to raise.

    `time` is that of the outcome (`time.monotonic()` seconds). `error` is a `RankFailed`, `RankDied` or `RunTimeout`.
    """

    rank: int
    time: float
    value: Any = None
    error: Exception | None = None

    @property
    def is_consequence(self) -> bool:
        """True if the error only says that another rank failed, or that we ended this one."""
        cause = None if self.error is None else self.error.__cause__
        return isinstance(cause, PeerFailed | Revoked | StepFailed)


def values(outcomes: Sequence[RankResult]) -> list[Any]:
    """The values in rank order; raises the first failure, causes before consequences."""
    failures = [outcome for outcome in outcomes if outcome.error is not None]
    if failures:
        first = min(failures, key=lambda outcome: (outcome.is_consequence, outcome.time))
        assert first.error is not None
        raise first.error
    return [outcome.value for outcome in outcomes]
