"""`FailuresInARow`: what ends a run whose groups all fail."""

from __future__ import annotations

from holdfast.ft.console.units import counted
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data.episode import Group
from holdfast.rl.data.replay_buffer import FailedGroup
from holdfast.rl.run.errors import RunFailed


class FailuresInARow:
    """Counts groups of `source` that failed one after another. Raises `RunFailed` for more than a batch of them."""

    def __init__(self, source: str, config: RunConfig) -> None:
        self._source, self._most, self._failed = source, max(8, config.algorithm.groups), 0

    def count(self, group: Group | FailedGroup) -> None:
        """Count a group that is over; one that did not fail begins the count anew."""
        if not isinstance(group, FailedGroup):
            self._failed = 0
            return
        self._failed += 1
        if self._failed > self._most:
            raise RunFailed(
                f"{self._source} failed in {counted(self._failed, 'group')} one after another, "
                f"the last time: {group.reasons[0]}; see to it, and resume the run"
            )
