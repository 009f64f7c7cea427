"""Several weak verifiers as one reward: the probability that an answer is right, given their votes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.rl.rewards.errors import RewardFailed
from holdfast.rl.rewards.reward import JudgedAnswer, Reward, Score, score_each
from holdfast.rl.rewards.weak_verifiers import VerifierWeights, estimate


@dataclass(frozen=True, slots=True)
class Verifier:
    """A reward that votes for an answer if its score is at least `threshold`."""

    reward: Reward
    threshold: float = 0.5


class WeakVerifierEnsemble:
    """The probability that an answer is right, given the verifiers' votes, which are the parts of the score.

    The weights are fixed: an answer's reward does not depend on the answers before it. A verifier that fails makes the
    ensemble fail for that answer.
    """

    def __init__(
        self, verifiers: Sequence[Verifier], weights: VerifierWeights, name: str = "ensemble", timeout: float = 60.0
    ) -> None:
        if len(verifiers) != len(weights.hits):
            raise ValueError(f"{len(verifiers)} verifiers, and weights for {len(weights.hits)}")
        self.name, self.weights = name, weights
        self._verifiers, self._timeout = tuple(verifiers), timeout

    @classmethod
    async def calibrated(
        cls,
        verifiers: Sequence[Verifier],
        answers: Sequence[JudgedAnswer],
        name: str = "ensemble",
        timeout: float = 60.0,
    ) -> WeakVerifierEnsemble:
        """An ensemble with weights from the votes on `answers`, which need no labels.

        Answers for which a verifier fails are left out. Raises `NotIdentifiable`.
        """
        rows = await _votes(verifiers, answers, timeout)
        return cls(verifiers, estimate([each for each in rows if not isinstance(each, RewardFailed)]), name, timeout)

    async def score(self, answers: Sequence[JudgedAnswer]) -> Sequence[Score]:
        """Probabilities. Raises `RewardFailed` of the first verifier that failed."""
        scores = []
        for votes in await _votes(self._verifiers, answers, self._timeout):
            if isinstance(votes, RewardFailed):
                raise RewardFailed(self.name, votes.number, str(votes)) from votes
            parts = {each.reward.name: float(vote) for each, vote in zip(self._verifiers, votes, strict=True)}
            scores.append(Score(self.weights.probability(votes), parts))
        return scores


async def _votes(
    verifiers: Sequence[Verifier], answers: Sequence[JudgedAnswer], timeout: float
) -> list[list[bool] | RewardFailed]:
    """A row of votes for each answer, or the failure of a verifier."""
    columns = await asyncio.gather(*(score_each(each.reward, answers, timeout) for each in verifiers))
    rows: list[list[bool] | RewardFailed] = []
    for row in zip(*columns, strict=True):
        failed = next((each for each in row if isinstance(each, RewardFailed)), None)
        votes = [
            isinstance(score, Score) and score.value >= each.threshold
            for each, score in zip(verifiers, row, strict=True)
        ]
        rows.append(votes if failed is None else failed)
    return rows
