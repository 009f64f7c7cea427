"""A penalty for long answers."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.rl.rewards.reward import JudgedAnswer, Score


class LengthPenalty:
    """0 up to `most - margin` tokens, falling to -1 at `most`: DAPO's soft overlong punishment (2503.14476, eq. 13)."""

    name = "length"
    bounded = True

    def __init__(self, most: int, margin: int) -> None:
        if not 0 < margin <= most:
            raise ValueError(f"margin={margin} must be from 1 to most={most}")
        self._most, self._margin = most, margin

    async def score(self, answers: Sequence[JudgedAnswer]) -> Sequence[Score]:
        """From -1 to 0 for each answer."""
        free = self._most - self._margin
        return [Score(-min(1.0, max(0, each.length - free) / self._margin)) for each in answers]
