"""How often, and how soon, a process that died is started again on this host."""

from __future__ import annotations

FIRST_SECONDS, MOST_SECONDS = 0.5, 30.0
STABLE_SECONDS = 60.0
"""A process that lived for so long has not failed because it was started too soon."""


class RestartBudget:
    """`limit` restarts for all processes of a host, each after twice the delay of the one before."""

    def __init__(self, limit: int) -> None:
        self.left = limit
        self._delay = FIRST_SECONDS

    def take(self, lived: float) -> float | None:
        """Seconds until a process that lived for `lived` seconds is started again; None if none is left."""
        if self.left < 1:
            return None
        self.left -= 1
        delay = FIRST_SECONDS if lived >= STABLE_SECONDS else self._delay
        self._delay = min(2 * delay, MOST_SECONDS)
        return delay
