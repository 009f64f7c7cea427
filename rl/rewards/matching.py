"""Rewards that compare an answer's text: with the reference, or with a regular expression."""

from __future__ import annotations

import re
from collections.abc import Sequence

from holdfast.rl.rewards.reward import JudgedAnswer, Score


class ExactMatch:
    """1 for an answer that is the prompt's reference, without white space around it; else 0.

    With `extract`, the answer is the first group of that regular expression's last match.
    """

    name = "exact"

    def __init__(self, extract: str = "") -> None:
        self._extract = re.compile(extract, re.DOTALL) if extract else None
        if self._extract is not None and self._extract.groups != 1:
            raise ValueError(f"extract={extract!r} must have one group, which is the answer")
        self.bounded = self._extract is None  # the time of a regular expression may grow exponentially with the text

    async def score(self, answers: Sequence[JudgedAnswer]) -> Sequence[Score]:
        """1 or 0 for each answer."""
        if self._extract is None:
            return [Score(float(each.text.strip() == each.prompt.answer.strip())) for each in answers]
        return [Score(float(_last(self._extract, each.text) == each.prompt.answer.strip())) for each in answers]


def _last(extract: re.Pattern[str], text: str) -> str | None:
    found = extract.findall(text)
    return found[-1].strip() if found else None


class FormatMatch:
    """1 for an answer that a regular expression matches as a whole; else 0."""

    name = "format"

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern, re.DOTALL)

    async def score(self, answers: Sequence[JudgedAnswer]) -> Sequence[Score]:
        """1 or 0 for each answer."""
        return [Score(float(self._pattern.fullmatch(each.text) is not None)) for each in answers]
