"""Measures how long a surviving rank waits for its next committed step while others die or join."""

from __future__ import annotations

from collections import deque
from statistics import median

from holdfast.ft.events import RecoveryEnded
from holdfast.ft.membership.view import View

_USUAL = 64


class RecoveryTimes:
    """The longest time between two commits of one process across a change of view."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._view: View | None = None
        self._longest = 0.0
        self._usual: deque[float] = deque(maxlen=_USUAL)

    def commit(self, now: float, view: View, step: int, normal: bool) -> RecoveryEnded | None:
        """Note a commit of `step` at `now` (seconds) in `view`: a `normal` one, or one that a rebuild found out.

        For the first normal commit of a view after an earlier view, returns the event: the longest time between two
        commits since that view (`seconds`), the time that a step takes (`usual`, the median), and how many members
        `joined` and `left`. Otherwise None.
        """
        last, before = self._last, self._view
        self._last = now
        if last is None or before is None:
            self._view = view
            return None
        if before.epoch == view.epoch:
            self._usual.append(now - last)
            return None
        self._longest = max(self._longest, now - last)
        if not normal:
            return None
        seconds, self._longest, self._view = self._longest, 0.0, view
        joined = sum(before.rank_of(member.id) is None for member in view.members)
        usual = median(self._usual) if self._usual else None
        left = len(view.left_since(before))
        return RecoveryEnded(step=step, epoch=view.epoch, seconds=seconds, usual=usual, joined=joined, left=left)
