"""Several weak verifiers as one reward: the probability that an answer is right, given their votes.

How good each verifier is comes from the votes alone: weak supervision by the method of moments.

Weaver (Saad-Falcon et al. 2025, arXiv:2506.18203) weighs weak verifiers this way. With x_i the vote of verifier i,
p the share of right answers and d_i = P(x_i = 1 | right) - P(x_i = 1 | wrong), votes that are independent given the
truth have (Jaffe, Nadler and Kluger 2015, arXiv:1407.7644), for different i, j, k:

    cov(x_i, x_j)           = p (1 - p) d_i d_j
    third moment (i, j, k)  = p (1 - p) (1 - 2p) d_i d_j d_k

The first is a matrix of rank one off its diagonal, which gives a_i = sqrt(p (1 - p)) d_i; with these, the second gives
p, so no labels and no class balance are needed. Pairs with a covariance far above the fit are dependent: they are
left out of both, and verifiers that are linked by such pairs share one voice.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.rl.rewards.errors import NotIdentifiable, RewardFailed
from holdfast.rl.rewards.reward import JudgedAnswer, Reward, Score, score_each

Matrix = NDArray[np.float64]

_LEAST_ANSWERS = 50
_LEAST_SKILL = 0.05
"""Verifiers with a smaller correlation with the truth are dropped, as are those that always vote alike."""
_DEPENDENT = 0.12
"""The correlation beyond the fit from which on two verifiers count as dependent; at least 4 standard errors."""


class VerifierWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Estimates from votes: the log-odds that a vote of each verifier adds.

    A vote of 1 and one of 0 add different log-odds; a verifier that was dropped adds 0. `right` is the share of right
    answers, `hits` and `false_alarms` P(1 | right) and P(1 | wrong) of each verifier.
    """

    right: float
    hits: tuple[float, ...]
    false_alarms: tuple[float, ...]
    for_one: tuple[float, ...]
    for_zero: tuple[float, ...]
    dropped: tuple[int, ...]

    def probability(self, votes: Sequence[bool]) -> float:
        """How probable it is that an answer with these votes is right."""
        odds = math.log(self.right / (1.0 - self.right))
        odds += math.fsum(
            one if vote else zero for vote, one, zero in zip(votes, self.for_one, self.for_zero, strict=True)
        )
        return 1.0 / (1.0 + math.exp(-max(-500.0, min(500.0, odds))))


def estimate(votes: Sequence[Sequence[bool]]) -> VerifierWeights:
    """The weights from a row of votes for each answer. Raises `NotIdentifiable`."""
    table = np.asarray(votes, dtype=np.float64)
    if table.ndim != 2 or len(table) < _LEAST_ANSWERS:
        raise NotIdentifiable(f"there are votes on {len(table)} answers, and the least is {_LEAST_ANSWERS}")
    rates = table.mean(0)
    floor = 5.0 / len(table)
    kept = [each for each in range(table.shape[1]) if floor < rates[each] < 1.0 - floor]
    while True:
        if len(kept) < 3:
            raise NotIdentifiable(f"{len(kept)} of {table.shape[1]} verifiers tell right from wrong")
        centred = table[:, kept] - rates[kept]
        covariance = centred.T @ centred / len(table)
        apart, skills = _rank_one(covariance, len(table))
        strength = skills / np.sqrt(np.diag(covariance))
        if strength.min() >= _LEAST_SKILL:
            break
        del kept[int(strength.argmin())]
    right = _right_share(centred, skills, apart)
    return _weights(table.shape[1], kept, rates[kept], skills / math.sqrt(right * (1.0 - right)), right, apart)


def _rank_one(covariance: Matrix, answers: int) -> tuple[NDArray[np.bool_], Matrix]:
    """Pairs that are independent given the truth, and a with a_i a_j near the covariance of each of these pairs.

    Of several explanations, the one with the fewest dependent pairs counts: one may trust a block of copies, and take
    the good verifiers, which agree with each other, for dependent.
    """
    others = ~np.eye(len(covariance), dtype=bool)
    scale = np.sqrt(np.diag(covariance))
    correlation = covariance / np.outer(scale, scale)
    limit = max(_DEPENDENT, 4.0 / math.sqrt(answers))

    def misfit(fit: Matrix) -> float:
        return float(np.minimum(np.abs(correlation - np.outer(fit, fit)), limit)[others].sum())

    best, best_pairs = _least_squares(correlation, others, np.linalg.eigh(correlation)[1][:, -1]), others
    for start in range(len(correlation)):
        fit = _least_deviations(correlation, start)
        apart = others & (correlation - np.outer(fit, fit) < limit)
        if apart.sum(1).min() >= 2:
            fit = _least_squares(correlation, apart, fit)
            if misfit(fit) < misfit(best):
                best, best_pairs = fit, apart
    return best_pairs, (best if best.sum() >= 0 else -best) * scale


def _least_squares(correlation: Matrix, apart: NDArray[np.bool_], fit: Matrix) -> Matrix:
    """The least squares fit of a_i a_j to the pairs in `apart`, near `fit`, by damped alternating updates."""
    used = np.where(apart, correlation, 0.0)
    for _ in range(200):
        fit = 0.5 * fit + 0.5 * (used @ fit) / np.maximum(apart @ (fit * fit), 1e-12)
    return fit


def _least_deviations(correlation: Matrix, start: int) -> Matrix:
    """A local minimum of the absolute deviations of a_i a_j, near the explanation that trusts verifier `start`."""
    fit: Matrix = correlation[start].copy()
    fit[start] = 0.0
    fit[start] = max(float(np.abs(fit).max()), 1e-6)
    fit /= math.sqrt(float(fit[start]))
    for _ in range(30):
        for one in range(len(fit)):
            used = (np.arange(len(fit)) != one) & (np.abs(fit) > 1e-9)
            if used.any():
                fit[one] = _weighted_median(correlation[one, used] / fit[used], np.abs(fit[used]))
    return fit


def _weighted_median(values: Matrix, weights: Matrix) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][int(np.searchsorted(reached, reached[-1] / 2.0))])


def _right_share(centred: Matrix, skills: Matrix, apart: NDArray[np.bool_]) -> float:
    """The share of right answers, by the third moments of verifiers that are independent in pairs."""
    over = under = 0.0
    for one, two, three in itertools.combinations(range(len(skills)), 3):
        if apart[one, two] and apart[one, three] and apart[two, three]:
            moment = float((centred[:, one] * centred[:, two] * centred[:, three]).mean())
            product = float(skills[one] * skills[two] * skills[three])
            over, under = over + moment * product, under + product * product
    skew = over / under if under > 0 else 0.0
    return min(0.95, max(0.05, 0.5 * (1.0 - skew / math.sqrt(skew * skew + 4.0))))


def _weights(
    many: int, kept: Sequence[int], rates: Matrix, gaps: Matrix, right: float, apart: NDArray[np.bool_]
) -> VerifierWeights:
    hits, alarms, ones, zeros = ([0.5] * many, [0.5] * many, [0.0] * many, [0.0] * many)
    voices = _linked(apart)
    for place, verifier in enumerate(kept):
        alarm = float(rates[place] - right * gaps[place])
        hit = min(0.99, max(0.01, alarm + float(gaps[place])))
        alarm = min(0.99, max(0.01, alarm))
        hits[verifier], alarms[verifier] = hit, alarm
        ones[verifier] = math.log(hit / alarm) / voices[place]
        zeros[verifier] = math.log((1.0 - hit) / (1.0 - alarm)) / voices[place]
    return VerifierWeights(
        right=right,
        hits=tuple(hits),
        false_alarms=tuple(alarms),
        for_one=tuple(ones),
        for_zero=tuple(zeros),
        dropped=tuple(each for each in range(many) if each not in kept),
    )


def _linked(apart: NDArray[np.bool_]) -> list[int]:
    """For each verifier, how many are linked with it by dependent pairs, itself included."""
    near = (~apart).astype(np.int64)
    reached = np.linalg.matrix_power(near, len(near)) > 0
    return [int(row.sum()) for row in reached]


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
